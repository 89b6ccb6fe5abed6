"""A finished run's model, opened by the framework that computes it here: it answers prompts and evaluates rows."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast, overload

from anyqlora.config.resolve import parse_value
from anyqlora.core import registry
from anyqlora.core.errors import UsageError
from anyqlora.data.chat_template import template_variables
from anyqlora.data.dataset import DataSplits, check_tokens, iterate_tokens
from anyqlora.data.examples import prompt_ids
from anyqlora.data.rows import Example
from anyqlora.planning.planner import RunPlan
from anyqlora.reporting.console import ConsoleReporter
from anyqlora.runs.finished import EvalContext, FinishedRun, plan_here

Prompt = str | list[dict[str, Any]]  # a text, or the messages of a conversation
COLDEST = 1e-4  # the lowest temperature but 0: far below, a logit divided by it is no float32 any more


class FineTunedModel(ABC):
    """A finished run's model on this machine, with what it has learned: quantized and computed as in training, so its
    numbers are too.

    run: what it was (`run.config`, `run.result`, `run.directory`). plan: what it is here (device, precision, quantizer,
    memory). tokenizer: the run's own, with its chat template. `anyqlora.load_finetuned` makes one.
    """

    def __init__(self, run: FinishedRun, plan: RunPlan, tokenizer: Any):
        self.run, self.plan, self.tokenizer = run, plan, tokenizer

    @overload
    def generate(
        self,
        prompts: Prompt,
        *,
        temperature: float = ...,
        max_new_tokens: int | None = ...,
        streamer: Any = ...,
    ) -> str: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        temperature: float = ...,
        max_new_tokens: int | None = ...,
        streamer: Any = ...,
    ) -> list[str]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        temperature: float = 0.0,
        max_new_tokens: int | None = None,
        streamer: Any = None,
    ) -> str | list[str]:
        """The answer to a prompt; of several prompts, given as a list, the list of their answers.

        A prompt is a text, which is put as the run's rows put theirs, or the messages of a conversation so far
        (`[{"role": "user", "content": "..."}]`) for the tokenizer's chat template. Temperature 0 takes the likeliest
        token each time, a higher one draws from all tokens, the same ones for the same `seed` of the run.
        `max_new_tokens` is the run's own where it is not given. `streamer` (as transformers' TextStreamer) is handed
        the tokens of one prompt as they come.

        Raises UsageError for a prompt that has tokens which the model does not have, that leaves no room for an answer,
        or that the rows' format or the chat template refuses.
        """
        if temperature and not temperature >= COLDEST:
            raise UsageError(f"temperature: {temperature:g} is neither 0 nor at least {COLDEST:g}")
        if max_new_tokens is None:
            max_new_tokens = self.plan.config.max_new_tokens
        most = cast(int, parse_value("max_new_tokens", max_new_tokens, "code"))
        is_one = isinstance(prompts, str) or any(isinstance(part, dict) for part in prompts)
        several = [cast(Prompt, prompts)] if is_one else cast("Sequence[Prompt]", prompts)
        ids = [self._ids(prompt) for prompt in several]
        self._check(ids, most)
        answers = self._answers(ids, max_new_tokens=most, temperature=temperature, streamer=streamer)
        return answers[0] if is_one else answers

    def evaluate(self, dataset: str = "") -> dict[str, Any]:
        """Loss (nats per trained token), perplexity, exact match (0 to 1) and samples on the rows of `dataset`, or on
        those that the run held out itself: then they are the numbers of its end.

        Raises UsageError for rows that cannot be read or have changed, and for a run that held none out.
        """
        return self.evaluate_examples(self.run.held_out(self.tokenizer, dataset, warnings.warn))

    def evaluate_examples(self, examples: Sequence[Example]) -> dict[str, Any]:
        """The same of rows that are tokens already. Raises UsageError for tokens that the model does not have."""
        check_tokens(self.plan.config, self.tokenizer, iterate_tokens(examples))
        data = DataSplits([], examples, self.run.report, "")
        return self._evaluator(EvalContext(self.plan.config, data, self.tokenizer, ConsoleReporter(self.plan, 0)))()

    def _ids(self, prompt: Prompt) -> list[int]:
        put = self.run.format_prompt(prompt) if isinstance(prompt, str) else prompt
        style = "plain" if isinstance(put, str) else "chat"
        return prompt_ids(self.tokenizer, put, style, template_variables(self.run.config))

    def _check(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        named = [
            (ids, f"question {number}" if len(prompts) > 1 else "the question") for number, ids in enumerate(prompts, 1)
        ]
        check_tokens(self.plan.config, self.tokenizer, named)
        room = self._room(max_new_tokens)
        for ids, where in named:
            if not room(ids):
                raise UsageError(
                    f"its {len(ids)} tokens fill the model's positions and leave no room for an answer",
                    where=where,
                    cure="a shorter one",
                )

    @abstractmethod
    def _room(self, max_new_tokens: int) -> Callable[[Sequence[int]], int]:
        """prompt -> the tokens that its answer may have."""

    @abstractmethod
    def _answers(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, streamer: Any
    ) -> list[str]:
        """The text that follows each prompt."""

    @abstractmethod
    def _evaluator(self, context: EvalContext) -> Callable[[], dict[str, Any]]:
        """() -> the evaluation of the context's evaluation rows."""


def load_finetuned(run: FinishedRun, changed: dict[str, Any]) -> FineTunedModel:
    """The run's model on this machine.

    `changed` settings (backend, model_name, max_new_tokens ...) take the place of the run's own.

    Raises UsageError for a base or a backend that is not here and for an adapter that does not fit the base.
    """
    plan = plan_here(run, changed)
    return registry.load(registry.MODEL_OPENERS[plan.framework])(run, plan)
