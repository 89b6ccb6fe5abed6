"""Loss, perplexity and exact match on evaluation rows. Nothing of training changes, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from anyqlora.on_torch.device import is_out_of_memory
from anyqlora.on_torch.generate import answers, evaluating, room_for_tokens
from anyqlora.on_torch.loss import Loss
from anyqlora.on_torch.runtime import Runtime
from anyqlora.training import evaluation


def evaluator(run, model: nn.Module, loss: Loss, runtime: Runtime):
    """() -> the evaluation of `run`'s evaluation rows, as its settings say."""

    def total_loss(batches: Iterable) -> float:
        with evaluating(model), runtime.autocast():
            return sum(float(loss(model, batch, runtime.device)) for batch in batches)

    def answered(prompts: list, **options) -> list[str]:
        with runtime.autocast():
            return answers(model, run.tokenizer, prompts, **options)

    return evaluation.evaluator(
        run,
        room_for_tokens(model, run.config.max_new_tokens),
        total_loss,
        answered,
        is_out_of_memory,
        runtime.empty_cache,
    )
