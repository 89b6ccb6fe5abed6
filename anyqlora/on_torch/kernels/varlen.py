"""Causal attention within documents by torch's flash attention of variable lengths: one launch for all documents (16
bits, CUDA).
"""

from __future__ import annotations

import functools
import inspect

import torch

from anyqlora.on_torch.kernels.documents import Documents


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    documents: Documents,
    window: int | None = None,
) -> torch.Tensor:
    """attention.reference within rounding: [B, T, H, D] of q [B, H, T, D], k and v [B, K, T, D], documents of rows [B,
    T]; see there."""
    from torch.nn.attention.varlen import varlen_attn  # torch 2.10 or newer, with a flash attention in it

    starts, longest = documents.bounds
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B T, heads, D]
    out = varlen_attn(
        q,
        k,
        v,
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **({"enable_gqa": True} if q.shape[1] != k.shape[1] and _asks_for_groups() else {}),
    )
    numbers = documents.numbers
    return out.masked_fill(numbers.flatten()[:, None, None] < 0, 0).view(*numbers.shape, *out.shape[1:])


@functools.cache
def _asks_for_groups() -> bool:
    """Whether torch wants to be told of heads that share keys: 2.11 sees it from the shapes."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
