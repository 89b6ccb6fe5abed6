"""Loss, perplexity and exact match on held-out rows. Nothing of training changes, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from ..config import AUTO
from ..data import Example, batches
from .generate import PAD, answers, evaluating, learned_ends, room
from .runtime import Runtime

EXACT_MATCH_ROWS = 512


def evaluate(model: nn.Module, tokenizer, examples: list[Example], runtime: Runtime, *, batch_size: int, exact_match: bool,
             max_new_tokens: int, shown: int = 0, ends: Sequence[str] = (), between=lambda: None) -> dict:
    """{loss (nats per trained token), perplexity, tokens, exact_match (0..1), samples: [{prompt, answer, expected}]}.

    `between()` is called between batches; it may raise to end the evaluation.
    """
    total, trained = 0.0, 0
    with evaluating(model), runtime.autocast():
        for batch in batches(examples, batch_size, PAD):
            between()
            total += float(runtime.loss(model, batch, runtime.device))
            trained += batch.trained
    loss = total / trained
    found = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, "tokens": trained}
    asked = questions(examples, exact_match, shown)
    if asked:
        with runtime.autocast():
            given = answers(model, tokenizer, [e.prompt_ids for e in asked], max_new_tokens=max_new_tokens, batch_size=batch_size,
                            ends=ends, between=between)
        if exact_match:
            right = sum(g.strip() == e.answer.strip() for g, e in zip(given, asked, strict=True))
            found["exact_match"] = right / len(asked)
        found["samples"] = [{"prompt": e.prompt, "answer": g, "expected": e.answer} for e, g in zip(asked[:shown], given, strict=False)]
    return found


def questions(examples: list[Example], exact_match: bool, shown: int) -> list[Example]:
    """The rows whose prompts are answered."""
    found = [e for e in examples if e.answer is not None]
    return found if exact_match else found[:shown]


def evaluator(run, model: nn.Module, runtime: Runtime):
    """() -> the evaluation of `run`'s held-out rows, as its settings say."""
    config, held_out = run.config, run.data.held_out
    lengths = [len(e.ids) - len(e.prompt_ids) for e in held_out if e.answer is not None]
    exact = config.exact_match
    if exact == AUTO:  # worth its time where answers fit and are not essays
        exact = bool(lengths) and max(lengths) <= config.max_new_tokens and len(lengths) <= EXACT_MATCH_ROWS
    fits = room(model, config.max_new_tokens)
    mute = [e.where for e in questions(held_out, exact, config.samples) if not fits(e.prompt_ids)]
    if mute:
        run.console.warn(f"held-out prompts that fill the model's positions: {len(mute)}, the first is {mute[0]}; their answers are empty, "
                         "which counts as wrong")
    return lambda: evaluate(model, run.tokenizer, held_out, runtime, batch_size=config.eval_batch_size, exact_match=exact,
                            max_new_tokens=config.max_new_tokens, shown=config.samples, ends=learned_ends(run.data.report),
                            between=run.interruptible)
