"""A finished run's model, built as it was for training with what was learned put back: its numbers are those of training."""

from __future__ import annotations

from dataclasses import dataclass

from safetensors.numpy import load_file

from .. import evaluation, tokenizer
from ..checkpoint import ADAPTER
from ..data import Data, check_tokens, tokens_of
from ..errors import NotBuilt, UsageError
from ..examples import prompt_ids
from ..finished import Asked, Finished
from ..hub import base_directory
from ..layouts import read_config
from ..log import Lines
from ..world import Alone
from .build import Built, build
from .evaluate import evaluator
from .generate import answers
from .runtime import Runtime
from .state import load


@dataclass
class Tuned:
    """What answers and evaluates. `run` and `plan` say what it was and what it is here."""

    run: Finished
    plan: object
    tokenizer: object
    built: Built

    def evaluate(self, rows: list) -> dict:
        """As at the end of the run: see evaluation.evaluate. Raises UsageError for tokens that the model does not have."""
        check_tokens(self.plan.config, self.tokenizer, tokens_of(rows))
        asked = Asked(self.plan.config, Data([], rows, self.run.report, ""), self.tokenizer, Lines(self.plan, 0))
        return evaluator(asked, self.built)()

    def answer(self, asked: list, *, temperature: float = 0.0, streamer=None) -> list[str]:
        """The answer to each question, as text or messages (Finished.asked makes them). Temperature 0 takes the likeliest token.

        Raises UsageError for a question that has tokens which the model does not have, or leaves no room for an answer.
        """
        style, config = {str: "plain", list: "chat"}, self.plan.config
        prompts = [prompt_ids(self.tokenizer, question, style[type(question)]) for question in asked]
        self._check(prompts)
        return answers(
            self.built.model,
            self.tokenizer,
            base_directory(config),
            prompts,
            max_new_tokens=config.max_new_tokens,
            ends=evaluation.learned_ends(self.run.report),
            temperature=temperature,
            seed=config.seed,
            streamer=streamer,
        )

    def _check(self, prompts: list[list[int]]) -> None:
        named = [
            (ids, f"question {number}" if len(prompts) > 1 else "the question") for number, ids in enumerate(prompts, 1)
        ]
        check_tokens(self.plan.config, self.tokenizer, named)
        fits = evaluation.room(read_config(base_directory(self.plan.config)), self.plan.config.max_new_tokens)
        for ids, where in named:
            if not fits(ids):
                raise UsageError(
                    f"its {len(ids)} tokens fill the model's positions and leave no room for an answer",
                    where=where,
                    cure="a shorter one",
                )


def opened(run: Finished, plan) -> Tuned:
    """The run's model as `plan` says. Raises UsageError for an adapter that does not fit the base."""
    if run.config.adapter == "pissa":
        raise NotBuilt("a PiSSA adapter on MLX", cure="another --backend")
    config = plan.config
    words = tokenizer.load(str(run.folder), config.trust_remote_code, config.revision, offline=True)
    runtime = Runtime(plan)
    built = build(config, runtime)
    runtime.prepare(built, Alone())
    if plan.adapter != "full":
        load(runtime, load_file(run.folder / ADAPTER), str(run.folder / ADAPTER))
    return Tuned(run, plan, words, built)
