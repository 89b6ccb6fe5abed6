"""Greedy answers, several prompts at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from transformers import GenerationConfig

from anyqlora.data.end_tokens import learned_ends, stops
from anyqlora.data.tokenizer import token_texts
from anyqlora.training import evaluation
from anyqlora.training.evaluation import PAD, alike

__all__ = ["answers", "evaluating", "learned_ends", "room_for_tokens", "stop_ids"]


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


def stop_ids(model: nn.Module, tokenizer, ends: Sequence[str] = ()) -> list[int]:
    """The tokens that end an answer: the tokenizer's, those that the model's generation settings name, and `ends`."""
    return stops(tokenizer, getattr(model.generation_config, "eos_token_id", None), ends)


@contextlib.contextmanager
def generation_settings(model: nn.Module) -> Iterator[None]:
    """Nothing that comes with the model says how it generates: transformers takes what is not stated from its
    generation_config.
    """
    owner = next(module for module in model.modules() if "generation_config" in vars(module))  # beneath PEFT's wrappers
    before, owner.generation_config = owner.generation_config, GenerationConfig()
    try:
        yield
    finally:
        owner.generation_config = before


def room_for_tokens(model: nn.Module, max_new_tokens: int) -> Callable[[Sequence[int]], int]:
    """prompt -> the tokens that its answer may have: `max_new_tokens`, or what is left of the model's table of
    positions.
    """
    return evaluation.room(model.config.to_dict(), max_new_tokens)


class UntilEnd:
    """A streamer that is not told the token which ends an answer."""

    def __init__(self, streamer, ending: list[int]):
        self.streamer, self.ending, self.asked = streamer, ending, False

    def put(self, tokens: torch.Tensor) -> None:
        """The prompt, `[1, T]`, and then one token at a time, `[1]`."""
        if not (self.asked and int(tokens) in self.ending):
            self.streamer.put(tokens)
        self.asked = True

    def end(self) -> None:
        self.streamer.end()


def answers(
    model: nn.Module,
    tokenizer,
    prompts: list,
    *,
    max_new_tokens: int,
    batch_size: int = 16,
    ends: Sequence[str] = (),
    between=lambda: None,
    streamer=None,
    **sampling,
) -> list[str]:
    """The text that follows each prompt (a list of token ids), greedily unless `sampling` says otherwise.

    `ends`: see learned_ends.

    Special tokens are written out, as they are in rows: a tool call may begin with one. A prompt that leaves no `room`
    has no answer. A `streamer` is told the tokens of one prompt as they come.
    """
    texts: list[str] = [""] * len(prompts)
    left = list(map(room_for_tokens(model, max_new_tokens), prompts))
    ending = stop_ids(model, tokenizer, ends)
    device = next(model.parameters()).device
    asked = {"do_sample": False, "eos_token_id": ending, "pad_token_id": PAD, "use_cache": True, **sampling}
    with evaluating(model), generation_settings(model):
        for batch in alike(prompts, left, batch_size):
            between()
            width = max(len(prompts[i]) for i in batch)
            ids = torch.full((len(batch), width), PAD, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(batch):  # on the left, so that all answers begin in one column
                ids[row, width - len(prompts[i]) :] = torch.as_tensor(prompts[i], dtype=torch.long)
                mask[row, width - len(prompts[i]) :] = 1
            out = model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                streamer=streamer and UntilEnd(streamer, ending),
                generation_config=GenerationConfig(max_new_tokens=left[batch[0]], **asked),
            )
            for row, i in enumerate(batch):
                new = out[row, width:].tolist()
                end = next((k for k, token in enumerate(new) if token in ending), len(new))
                texts[i] = token_texts(tokenizer, new[:end])
    return texts
