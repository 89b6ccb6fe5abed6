"""Greedy answers, several prompts at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module):
    """Evaluation mode without gradients or a trace: modes and random state are put back as they were."""
    modes = {module: module.training for module in model.modules()}
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


RARE = 1 / 20  # of the commonest end token: what ends fewer answers ends them by chance, where rows were cut
PAD = 0  # whatever stands in padding is masked; a tokenizer's own pad token may lie beyond the embedding


def learned_ends(report: dict) -> list[str]:
    """The tokens that ended the answers of a run's training rows, from its data report: a base model whose chat template ends turns
    with a token of its own names that one nowhere else."""
    counts = report.get("train", {}).get("end_tokens", {})
    return [name for name, count in counts.items() if count >= RARE * max(counts.values())]


def stop_ids(model: nn.Module, tokenizer, ends: Sequence[str] = ()) -> list[int]:
    """The tokens that end an answer: the tokenizer's, those that the model's generation settings name, and `ends`."""
    named = getattr(model.generation_config, "eos_token_id", None)
    named = named if isinstance(named, list) else [named]
    return sorted({i for i in [tokenizer.eos_token_id, *named, *map(tokenizer.convert_tokens_to_ids, ends)] if i is not None})


def answers(model: nn.Module, tokenizer, prompts: list, *, max_new_tokens: int, batch_size: int = 16, ends: Sequence[str] = (),
            between=lambda: None, **sampling) -> list[str]:
    """The text that follows each prompt (a list of token ids), greedily unless `sampling` says otherwise. `ends`: see learned_ends."""
    texts: list[str] = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    stops = stop_ids(model, tokenizer, ends)
    device = next(model.parameters()).device
    options = {"do_sample": False, **sampling}
    with evaluating(model):
        for first in range(0, len(order), batch_size):
            between()
            some = order[first : first + batch_size]
            width = max(len(prompts[i]) for i in some)
            ids = torch.full((len(some), width), PAD, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(some):  # on the left, so that all answers begin in one column
                ids[row, width - len(prompts[i]) :] = torch.as_tensor(prompts[i], dtype=torch.long)
                mask[row, width - len(prompts[i]) :] = 1
            out = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=max_new_tokens,
                                 eos_token_id=stops, pad_token_id=PAD, use_cache=True, **options)
            for row, i in enumerate(some):
                new = out[row, width:].tolist()
                end = next((k for k, token in enumerate(new) if token in stops), len(new))
                texts[i] = tokenizer.decode(new[:end], skip_special_tokens=True)
    return texts
