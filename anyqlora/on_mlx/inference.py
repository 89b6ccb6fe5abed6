"""A finished run's model, built as it was for training with what was learned put back: its numbers are those of
training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from safetensors.numpy import load_file

from anyqlora.core import registry
from anyqlora.core.errors import NotSupported
from anyqlora.core.registry import ADAPTER
from anyqlora.data import tokenizer
from anyqlora.data.end_tokens import learned_ends
from anyqlora.models.architectures import read_config
from anyqlora.models.hub import base_directory
from anyqlora.on_mlx.build import BuiltModel, build
from anyqlora.on_mlx.engine import load
from anyqlora.on_mlx.evaluate import evaluator
from anyqlora.on_mlx.generate import answers
from anyqlora.on_mlx.runtime import Runtime
from anyqlora.planning.planner import RunPlan
from anyqlora.processes.group import SingleProcess
from anyqlora.runs.finished import EvalContext, FinishedRun
from anyqlora.runs.opened import FineTunedModel
from anyqlora.training import evaluation


class MlxModel(FineTunedModel):
    """See FineTunedModel; `built.model` is the module that computes, with its adapter on it."""

    def __init__(self, run: FinishedRun, plan: RunPlan, tokenizer: Any, built: BuiltModel):
        super().__init__(run, plan, tokenizer)
        self.built = built

    def _room(self, max_new_tokens: int) -> Callable[[Sequence[int]], int]:
        return evaluation.room(read_config(base_directory(self.plan.config)), max_new_tokens)

    def _answers(
        self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, streamer: Any
    ) -> list[str]:
        return answers(
            self.built.model,
            self.tokenizer,
            base_directory(self.plan.config),
            prompts,
            max_new_tokens=max_new_tokens,
            ends=learned_ends(self.run.report),
            temperature=temperature,
            seed=self.plan.config.seed,
            streamer=streamer,
        )

    def _evaluator(self, context: EvalContext) -> Callable[[], dict[str, Any]]:
        return evaluator(context, self.built)


def load_finetuned(run: FinishedRun, plan: RunPlan) -> MlxModel:
    """The run's model as `plan` says. Raises UsageError for an adapter that does not fit the base."""
    adapter = registry.adapter(run.config.adapter)
    if not adapter.mlx:
        raise NotSupported(f"a {run.config.adapter} adapter on MLX", cure="another --backend")
    config = plan.config
    text_tokenizer = tokenizer.load_tokenizer(str(run.folder), config.trust_remote_code, config.revision, offline=True)
    runtime = Runtime(plan)
    built = build(config, runtime)
    runtime.prepare(built, SingleProcess())
    if not adapter.trains_base:
        load(runtime, load_file(run.folder / ADAPTER), str(run.folder / ADAPTER))
    return MlxModel(run, plan, text_tokenizer, built)
