"""Loss, perplexity and exact match on evaluation rows. Nothing of training changes, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from anyqlora.models.architectures import read_config
from anyqlora.models.hub import base_directory
from anyqlora.on_mlx.build import BuiltModel
from anyqlora.on_mlx.generate import answers, evaluating
from anyqlora.on_mlx.memory import is_out_of_memory
from anyqlora.on_mlx.nn.loss import inputs
from anyqlora.training import evaluation


def evaluator(run, built: BuiltModel):
    """() -> the evaluation of `run`'s evaluation rows, as its settings say."""
    directory = base_directory(run.config)

    def total_loss(losses: Iterable) -> float:
        with evaluating(built.model):
            return sum(built.loss.total(inputs(batch)) for batch in losses)

    def answered(prompts: list, **options) -> list[str]:
        return answers(built.model, run.tokenizer, directory, prompts, **options)

    fits = evaluation.room(read_config(directory), run.config.max_new_tokens)
    return evaluation.evaluator(run, fits, total_loss, answered, is_out_of_memory, mx.clear_cache)
