"""A finished run's model, built as it was for training with what was learned put back: its numbers are those of training."""

from __future__ import annotations

from dataclasses import dataclass

from safetensors.numpy import load_file

from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.core.registry import ADAPTER
from anyqlora.data import tokenizer
from anyqlora.data.dataset import DataSplits, check_tokens, iterate_tokens
from anyqlora.data.examples import prompt_ids
from anyqlora.models.architectures import read_config
from anyqlora.models.hub import base_directory
from anyqlora.on_mlx.build import BuiltModel, build
from anyqlora.on_mlx.engine import load
from anyqlora.on_mlx.evaluate import evaluator
from anyqlora.on_mlx.generate import answers
from anyqlora.on_mlx.runtime import Runtime
from anyqlora.processes.group import SingleProcess
from anyqlora.reporting.console import ConsoleReporter
from anyqlora.runs.finished import EvalContext, FinishedRun
from anyqlora.training import evaluation


@dataclass
class FineTunedModel:
    """What answers and evaluates. `run` and `plan` say what it was and what it is here."""

    run: FinishedRun
    plan: object
    tokenizer: object
    built: BuiltModel

    def evaluate(self, rows: list) -> dict:
        """As at the end of the run: see evaluation.evaluate. Raises UsageError for tokens that the model does not have."""
        check_tokens(self.plan.config, self.tokenizer, iterate_tokens(rows))
        asked = EvalContext(
            self.plan.config, DataSplits([], rows, self.run.report, ""), self.tokenizer, ConsoleReporter(self.plan, 0)
        )
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


def load_finetuned(run: FinishedRun, plan) -> FineTunedModel:
    """The run's model as `plan` says. Raises UsageError for an adapter that does not fit the base."""
    if run.config.adapter == "pissa":
        raise NotSupported("a PiSSA adapter on MLX", cure="another --backend")
    config = plan.config
    words = tokenizer.load_tokenizer(str(run.folder), config.trust_remote_code, config.revision, offline=True)
    runtime = Runtime(plan)
    built = build(config, runtime)
    runtime.prepare(built, SingleProcess())
    if plan.adapter != "full":
        load(runtime, load_file(run.folder / ADAPTER), str(run.folder / ADAPTER))
    return FineTunedModel(run, plan, words, built)
