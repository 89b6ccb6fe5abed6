"""Rows one after another without padding: attention that keeps their documents apart, and the proof that a model takes
it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from anyqlora.core.errors import RunError
from anyqlora.on_torch._compat import attention_implementation
from anyqlora.on_torch.device_batch import forward
from anyqlora.on_torch.generate import evaluating
from anyqlora.on_torch.kernels import varlen
from anyqlora.on_torch.kernels.attention import attention
from anyqlora.on_torch.kernels.deterministic import deterministic
from anyqlora.on_torch.kernels.documents import Documents, current_documents

NAME, VARLEN, NATIVE = (
    "anyqlora",
    "anyqlora_varlen",
    "anyqlora_native",
)  # in transformers' table; the second has all documents in one launch
PLAIN = "anyqlora_plain"  # transformers' own, where nothing of ours can be; its backward is deterministic
# Tokens that a model is shown to see what it does: always as many, since oneDNN compiles each product for each number
# of tokens
TOKENS = 12
ELSEWHERE = (
    "softcap",
    "s_aux",
    "position_bias",
    "cache",
)  # what architectures add to attention that is not computed here
WINDOWS = (
    "sliding_window",
    "attention_chunk_size",
)  # how far back a token sees: only documents longer than these show them
SEEN = 3  # of each document's tokens, while a model is shown to see what it does
DROPOUTS = ("attention_dropout", "attn_pdrop")  # of attention, which only training shows
NEAR = {torch.float32: 1e-3}  # of the largest logit: how near flat rows are to padded ones; in 16 bits 0.05


def attend(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    is_causal=None,
    *,
    alone=attention,
    within=attention,
    **options,
):
    """transformers' attention interface, [B, T, H, D]: ours where every token sees its document's tokens before it,
    else torch's.

    Documents come in the mask's place, as their numbers int32 [B, 1, 1, T]: see DeviceBatch.forward.
    """
    documents = None
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        documents = current_documents.of(attention_mask[:, 0, 0])
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    own = (
        causal
        and query.shape[2] == key.shape[2]
        and not dropout
        and not any(options.get(name) is not None for name in ELSEWHERE)
    )
    if documents is None and (attention_mask is not None or not own):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **options)
    if not own:
        raise RunError(
            "this architecture's attention is more than causal attention within documents", cure="--padding_free false"
        )
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Without documents a window that matters is a mask. Qwen2-MoE's layers have one of which they tell only the mask.
    window = options.get("sliding_window", getattr(module, "sliding_window", None)) if documents is not None else None
    product = alone if documents is None else within
    return product(query, key, value, scale=scale, documents=documents, window=window), None


by_native = functools.partial(attention, is_native=True)
for name, function in (
    (NAME, attend),
    (VARLEN, functools.partial(attend, within=varlen.attention)),
    (NATIVE, functools.partial(attend, alone=by_native, within=by_native)),
    (PLAIN, sdpa_attention_forward),
):
    AttentionInterface.register(name, deterministic(function))
    AttentionMaskInterface.register(name, sdpa_mask)


def remove_padding_from(model: nn.Module, name: str = NAME) -> str:
    """Set the attention `name` as the model's. Returns why that was not done, "" where it was.

    Two documents in one row are compared with two rows, by the model's own forward, with windows that are shorter than
    they.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    before = attention_implementation(base.config)
    if before != "sdpa":
        return f"this architecture's attention is {before}"
    if any(getattr(config, name, 0) for config in _configs(base) for name in DROPOUTS):
        return "its attention has dropout"
    base.set_attn_implementation(name)
    try:
        same = _are_kept_apart(model)
        why = "" if same else "this architecture does not keep documents in one row apart"
    except (AttributeError, ImportError, IndexError, RunError, RuntimeError, TypeError, ValueError) as error:
        why = f"this architecture does not take documents in one row: {error}"
    if why:
        base.set_attn_implementation(before)
    return why


def make_deterministic(model: nn.Module) -> None:
    """Where torch's own attention has stayed, let its backward on a GPU be deterministic."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if attention_implementation(base.config) == "sdpa":
        base.set_attn_implementation(PLAIN)


def _are_kept_apart(model: nn.Module) -> bool:
    device = next(model.parameters()).device
    ids = torch.arange(TOKENS, device=device)
    positions = torch.arange(TOKENS // 2, device=device)
    with evaluating(model), _narrowed(model):
        rows = model(input_ids=ids.view(2, -1), use_cache=False).logits.flatten(0, 1).float()
        documents = Documents.on(device, np.arange(2, dtype=np.int32).repeat(TOKENS // 2)[None])
        out = forward(model, ids[None], positions.repeat(2)[None], documents)
    off = (out.logits[0].float() - rows).abs().max()
    return bool(off <= NEAR.get(out.logits.dtype, 0.05) * rows.abs().max())


def _configs(model: nn.Module) -> list:
    """The configurations that the model's parts read, each once."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return list(configs.values())


@contextlib.contextmanager
def _narrowed(model: nn.Module) -> Iterator[None]:
    """The model with windows of SEEN tokens in the place of its own: those of its configurations, its modules, and what
    ours ask for them."""
    options = [module.attend_options for module in model.modules() if hasattr(module, "attend_options")]
    places = [*options, *map(vars, (*model.modules(), *_configs(model)))]
    before = [(place, name, place[name]) for place in places for name in WINDOWS if type(place.get(name)) is int]
    for place, name, _ in before:
        place[name] = SEEN
    try:
        yield
    finally:
        for place, name, value in before:
            place[name] = value
