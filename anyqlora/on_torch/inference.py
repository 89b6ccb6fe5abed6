"""A finished run's model, built as it was for training with what was learned put back: its numbers are those of
training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from anyqlora.core import registry
from anyqlora.core.errors import UsageError
from anyqlora.core.registry import ADAPTER
from anyqlora.data import tokenizer
from anyqlora.data.end_tokens import learned_ends
from anyqlora.on_torch.assembly.build import build
from anyqlora.on_torch.device import set_deterministic
from anyqlora.on_torch.evaluate import evaluator
from anyqlora.on_torch.generate import answers, room_for_tokens
from anyqlora.on_torch.loss import Loss
from anyqlora.on_torch.runtime import Runtime
from anyqlora.planning.planner import RunPlan
from anyqlora.runs.finished import EvalContext, FinishedRun
from anyqlora.runs.opened import FineTunedModel


class TorchModel(FineTunedModel):
    """See FineTunedModel; `model` is the module that computes, with its adapter on it."""

    def __init__(self, run: FinishedRun, plan: RunPlan, tokenizer: Any, model: nn.Module, loss: Loss, runtime: Runtime):
        super().__init__(run, plan, tokenizer)
        self.model, self.loss, self.runtime = model, loss, runtime

    def _room(self, max_new_tokens: int) -> Callable[[Sequence[int]], int]:
        return room_for_tokens(self.model, max_new_tokens)

    def _answers(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, streamer: Any
    ) -> list[str]:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        torch.manual_seed(self.plan.config.seed)
        with self.runtime.autocast():
            return answers(
                self.model,
                self.tokenizer,
                prompts,
                max_new_tokens=max_new_tokens,
                ends=learned_ends(self.run.report),
                streamer=streamer,
                **sampling,
            )

    def _evaluator(self, context: EvalContext) -> Callable[[], dict[str, Any]]:
        return evaluator(context, self.model, self.loss, self.runtime)


def load_finetuned(run: FinishedRun, plan: RunPlan) -> TorchModel:
    """The run's model as `plan` says. Raises UsageError for an adapter that does not fit the base."""
    config = plan.config
    set_deterministic(config.deterministic)
    text_tokenizer = tokenizer.load_tokenizer(str(run.folder), config.trust_remote_code, config.revision, offline=True)
    runtime = Runtime(plan)
    built = build(config, runtime)
    runtime.memory.close()  # no step follows, for which pages would be kept
    model, *_ = runtime.prepare(built.model, built.trainable, lambda parameters: None)
    if not registry.adapter(plan.adapter).trains_base:
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
    return TorchModel(run, plan, text_tokenizer, model, built.loss, runtime)
