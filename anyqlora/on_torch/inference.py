"""A finished run's model, built as it was for training with what was learned put back: its numbers are those of training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from torch import nn

from anyqlora.core.errors import UsageError
from anyqlora.core.registry import ADAPTER
from anyqlora.data import tokenizer
from anyqlora.data.dataset import DataSplits, check_tokens, iterate_tokens
from anyqlora.data.examples import prompt_ids
from anyqlora.on_torch.assembly.build import build
from anyqlora.on_torch.device import set_deterministic
from anyqlora.on_torch.evaluate import evaluator
from anyqlora.on_torch.generate import answers, room_for_tokens
from anyqlora.on_torch.runtime import Runtime
from anyqlora.reporting.console import ConsoleReporter
from anyqlora.runs.finished import EvalContext, FinishedRun, plan_here
from anyqlora.training.evaluation import learned_ends


@dataclass
class FineTunedModel:
    """What answers and evaluates. `run` and `plan` say what it was and what it is here."""

    run: FinishedRun
    plan: object
    tokenizer: object
    model: nn.Module
    runtime: Runtime

    def evaluate(self, rows: list) -> dict:
        """As at the end of the run: see evaluate.evaluate. Raises UsageError for tokens that the model does not have."""
        check_tokens(self.plan.config, self.tokenizer, iterate_tokens(rows))
        asked = EvalContext(
            self.plan.config, DataSplits([], rows, self.run.report, ""), self.tokenizer, ConsoleReporter(self.plan, 0)
        )
        return evaluator(asked, self.model, self.runtime)()

    def answer(self, asked: list, *, temperature: float = 0.0, **options) -> list[str]:
        """The answer to each question, as text or messages (Finished.asked makes them). Temperature 0 takes the likeliest token.

        Raises UsageError for a question that has tokens which the model does not have, or leaves no room for an answer.
        """
        style = {str: "plain", list: "chat"}
        prompts = [prompt_ids(self.tokenizer, question, style[type(question)]) for question in asked]
        self._check(prompts)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        torch.manual_seed(self.plan.config.seed)
        with self.runtime.autocast():
            return answers(
                self.model,
                self.tokenizer,
                prompts,
                max_new_tokens=self.plan.config.max_new_tokens,
                ends=learned_ends(self.run.report),
                **sampling,
                **options,
            )

    def _check(self, prompts: list[list[int]]) -> None:
        named = [
            (ids, f"question {number}" if len(prompts) > 1 else "the question") for number, ids in enumerate(prompts, 1)
        ]
        check_tokens(self.plan.config, self.tokenizer, named)
        fits = room_for_tokens(self.model, self.plan.config.max_new_tokens)
        for ids, where in named:
            if not fits(ids):
                raise UsageError(
                    f"its {len(ids)} tokens fill the model's positions and leave no room for an answer",
                    where=where,
                    cure="a shorter one",
                )


def load(run: FinishedRun, changed: dict) -> FineTunedModel:
    """The run's model on this machine. `changed` settings (backend, model_name, max_new_tokens ...) take the place of the run's own.

    Raises UsageError for a base or a backend that is not here and for an adapter that does not fit the base.
    """
    return load_finetuned(run, plan_here(run, changed))


def load_finetuned(run: FinishedRun, plan) -> FineTunedModel:
    """The run's model as `plan` says. Raises UsageError for an adapter that does not fit the base."""
    config = plan.config
    set_deterministic(config.deterministic)
    words = tokenizer.load_tokenizer(str(run.folder), config.trust_remote_code, config.revision, offline=True)
    runtime = Runtime(plan)
    built = build(config, runtime)
    runtime.memory.close()  # no step follows, for which pages would be kept
    model, *_ = runtime.prepare(built.model, built.trainable, lambda parameters: None)
    if plan.adapter != "full":
        saved = load_file(run.folder / ADAPTER)
        strange = sorted(saved.keys() ^ built.trainable.keys())
        if strange:
            raise UsageError(
                f"the adapter does not fit the base: {len(strange)} tensors are in one only, {strange[0]} is the first",
                where=str(run.folder / ADAPTER),
                cure="--model_name with the base that the run was trained on",
            )
        # PiSSA's file has what it started from appended to each tensor; the leading part was trained.
        runtime.strategy.load_trainable(
            {name: saved[name][tuple(map(slice, p.shape))] for name, p in built.trainable.items()}
        )
    return FineTunedModel(run, plan, words, model, runtime)
