"""The tokens at which an answer ends."""

from __future__ import annotations

from collections.abc import Sequence

RARE = 1 / 20  # of the commonest end token: what ends fewer answers ends them by chance, where rows were cut


def learned_ends(report: dict) -> list[str]:
    """The tokens that ended the answers of a run's training rows, from its data report: a base model whose chat
    template ends turns with a token of its own names that one nowhere else.
    """
    counts = report.get("train", {}).get("end_tokens", {})
    return [name for name, count in counts.items() if count >= RARE * max(counts.values())]


def stops(tokenizer, named, ends: Sequence[str] = ()) -> list[int]:
    """The tokens that end an answer: the tokenizer's, those that the model's generation settings name (one, several or
    None), and `ends`.
    """
    named = named if isinstance(named, list) else [named]
    return sorted(
        {i for i in [tokenizer.eos_token_id, *named, *map(tokenizer.convert_tokens_to_ids, ends)] if i is not None}
    )
