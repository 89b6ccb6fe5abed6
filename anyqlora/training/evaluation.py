"""What an evaluation is on any framework: loss, perplexity and exact match on evaluation rows, and the rows and tokens
that it goes by.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from anyqlora.config.schema import AUTO
from anyqlora.core.errors import RunError
from anyqlora.data.end_tokens import learned_ends
from anyqlora.data.rows import Example
from anyqlora.data.stream import Batch, make_batches
from anyqlora.models.architectures import position_table

EXACT_MATCH_ROWS = 512
PAD = 0  # whatever stands in padding is masked; a tokenizer's own pad token may lie beyond the embedding


def evaluate(
    examples: Sequence[Example],
    total_loss: Callable[[Iterator[Batch]], float],
    answers: Callable[..., list[str]],
    *,
    batch_size: int,
    exact_match: bool,
    max_new_tokens: int,
    shown: int = 0,
    ends: Sequence[str] = (),
    between=lambda: None,
) -> dict:
    """{loss (nats per trained token), perplexity, tokens, exact_match (0..1), samples: [{prompt, answer, expected}]}.

    `total_loss(batches)` is the sum over all trained tokens, `answers(prompts, ...)` the text after each prompt.
    `between()` is called between batches; it may raise to end the evaluation.
    """
    trained = 0

    def watched() -> Iterator[Batch]:
        nonlocal trained
        for batch in make_batches(examples, batch_size, PAD):
            between()
            trained += batch.trained
            yield batch

    loss = total_loss(watched()) / trained
    evaluation = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, "tokens": trained}
    asked = questions(examples, exact_match, shown)
    if asked:
        given = answers(
            [e.prompt_ids for e in asked],
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            ends=ends,
            between=between,
        )
        if exact_match:
            right = sum(answer.strip() == (e.answer or "").strip() for answer, e in zip(given, asked, strict=True))
            evaluation["exact_match"] = right / len(asked)
        evaluation["samples"] = [
            {"prompt": e.prompt, "answer": answer, "expected": e.answer}
            for e, answer in zip(asked[:shown], given, strict=False)
        ]
    return evaluation


def questions(examples: Sequence[Example], exact_match: bool, shown: int) -> Sequence[Example]:
    """The rows whose prompts are answered."""
    answerable = [e for e in examples if e.answer is not None]
    return answerable if exact_match else answerable[:shown]


def evaluator(
    run, fits: Callable[[np.ndarray], int], total_loss, answers, is_out_of_memory, free
) -> Callable[[], dict]:
    """() -> the evaluation of `run`'s evaluation rows, as its settings say. `fits`: see room.

    Out of memory it halves its batches, from then on: `is_out_of_memory(error)` tells, and `free()` gives back what was
    taken. Raises RunError for one that is a single row, and where other processes evaluate with this one.
    """
    config, held_out = run.config, run.data.held_out
    lengths = [len(e.ids) - len(e.prompt_ids) for e in held_out if e.answer is not None]
    exact = config.exact_match
    if exact == AUTO:  # worth its time where answers fit and are not essays
        exact = bool(lengths) and max(lengths) <= config.max_new_tokens and len(lengths) <= EXACT_MATCH_ROWS
    mute = [e.where for e in questions(held_out, exact, config.num_samples) if not fits(e.prompt_ids)]
    if mute:
        run.console.warn(
            f"evaluation prompts that fill the model's positions: {len(mute)}, the first is {mute[0]}; their answers "
            f"are "
            f"empty, "
            "which counts as wrong"
        )
    rows = config.eval_batch_size

    def poll() -> dict | None:
        try:
            return evaluate(
                held_out,
                total_loss,
                answers,
                batch_size=rows,
                exact_match=exact,
                max_new_tokens=config.max_new_tokens,
                shown=config.num_samples,
                ends=learned_ends(run.data.report),
                between=run.check_signals,
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if rows == 1 or run.process_group.size > 1:
                raise RunError(
                    f"out of memory in an evaluation of {rows} rows at a time",
                    cure="a smaller --eval_batch_size, --exact_match false, or shorter evaluation rows",
                ) from None
            return None

    def evaluated() -> dict:
        nonlocal rows
        while (result := poll()) is None:
            rows //= 2
            free()
            run.console.warn(f"out of memory in an evaluation: {rows} rows at a time from here on, and once more")
        return result

    return evaluated


def room(model_config: dict, max_new_tokens: int) -> Callable[[Sequence[int]], int]:
    """prompt -> the tokens that its answer may have: `max_new_tokens`, or what is left of the model's table of
    positions.
    """
    table = position_table(model_config)
    return lambda prompt: max_new_tokens if table is None else min(max_new_tokens, max(table - len(prompt), 0))


def alike(prompts: list, left: list[int], batch_size: int) -> Iterator[list[int]]:
    """Numbers of prompts that are answered together: of about one length, and with as much room."""
    order = sorted((i for i in range(len(prompts)) if left[i]), key=lambda i: len(prompts[i]))
    for _, group in itertools.groupby(order, key=left.__getitem__):
        numbers = list(group)
        yield from (numbers[first : first + batch_size] for first in range(0, len(numbers), batch_size))
