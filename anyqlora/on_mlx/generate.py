"""Answers, several prompts at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from anyqlora.data.end_tokens import stops
from anyqlora.data.tokenizer import token_texts
from anyqlora.models.architectures import read_config
from anyqlora.runs.stop_tokens import base_generation_config
from anyqlora.training.evaluation import PAD, alike, room


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; the mode is put back as it was. Nothing here draws from MLX's global random state."""
    mode = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(mode)


def stop_ids(directory: Path, tokenizer, ends: Sequence[str] = ()) -> list[int]:
    """The tokens that end an answer: the tokenizer's, those of the model's generation settings, and `ends`."""
    return stops(tokenizer, base_generation_config(directory).get("eos_token_id"), ends)


def caches(model: nn.Module, left: list[int]) -> list:
    """mlx-lm's caches for rows that are padded on the left by so many tokens each."""
    from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache, make_prompt_cache

    layer_caches = make_prompt_cache(model)
    if not any(left):
        return layer_caches
    batched = {
        KVCache: lambda cache: BatchKVCache(left),
        RotatingKVCache: lambda cache: BatchRotatingKVCache(cache.max_size, left),
    }
    return [batched[type(cache)](cache) for cache in layer_caches]


def padded_prompts(model: nn.Module) -> bool:
    """Whether rows of several lengths can be answered together: caches of another kind (recurrent states) know no
    padding.
    """
    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

    return all(type(cache) in (KVCache, RotatingKVCache) for cache in make_prompt_cache(model))


def answers(
    model: nn.Module,
    tokenizer,
    directory: Path,
    prompts: list,
    *,
    max_new_tokens: int,
    batch_size: int = 16,
    ends: Sequence[str] = (),
    between=lambda: None,
    temperature: float = 0.0,
    seed: int = 0,
    streamer=None,
) -> list[str]:
    """The text that follows each prompt (a list of token ids), greedily unless `temperature` is above 0.

    Special tokens are written out, as they are in rows: a tool call may begin with one. A prompt that leaves no room
    has no answer. A `streamer` is told the tokens of one prompt as they come.
    """
    texts: list[str] = [""] * len(prompts)
    left = list(map(room(read_config(directory), max_new_tokens), prompts))
    ending = stop_ids(directory, tokenizer, ends)
    padded, key = padded_prompts(model), mx.random.key(seed)
    with evaluating(model):
        for batch in alike(prompts, left, batch_size):
            for group in [batch] if padded else [[i] for i in batch]:
                between()
                key, own = mx.random.split(key)
                for i, tokens in zip(
                    group,
                    continue_sequences(
                        model, [prompts[i] for i in group], left[group[0]], ending, temperature, own, streamer
                    ),
                    strict=True,
                ):
                    texts[i] = token_texts(tokenizer, tokens)
    return texts


def continue_sequences(
    model: nn.Module, prompts: list, most: int, ending: list[int], temperature: float, key: mx.array, streamer=None
) -> list[list[int]]:
    """The tokens after each prompt, up to the first that ends it."""
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    ids = np.full((len(prompts), width), PAD, np.int32)  # on the left, so that all answers begin in one column
    for row, prompt in enumerate(prompts):
        ids[row, padding[row] :] = prompt
    cache, generated, done = caches(model, padding), [[] for _ in prompts], [False] * len(prompts)
    if streamer:
        streamer.put(ids[0])
    step = mx.array(ids)
    if width > 1:
        model(step[:, :-1], cache=cache)  # nobody asks for these tokens' logits, so they are not computed
        mx.eval([layer.state for layer in cache])
        step = step[:, -1:]
    for _ in range(most):
        logits = model(step, cache=cache)[:, -1].astype(mx.float32)  # [B, V]
        key, own = mx.random.split(key)
        chosen = mx.random.categorical(logits / temperature, key=own) if temperature else mx.argmax(logits, axis=-1)
        tokens = chosen.tolist()
        for row, token in enumerate(tokens):
            done[row] = done[row] or token in ending
            if not done[row]:
                generated[row].append(token)
        if streamer and not done[0]:
            streamer.put(np.array(tokens[:1]))
        if all(done):
            break
        step = chosen[:, None]
    if streamer:
        streamer.end()
    return generated
