"""Causal attention within documents by torch's flash attention of variable lengths: one launch for all documents (16
bits, CUDA).
"""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    documents: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """attention.reference within rounding: [B, T, H, D] of q [B, H, T, D], k and v [B, K, T, D], documents int [B, T];
    see there.
    """
    from torch.nn.attention.varlen import varlen_attn  # torch 2.10 or newer, with a flash attention in it

    starts, longest = bounds(documents)
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
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.masked_fill(documents.flatten()[:, None, None] < 0, 0).view(*documents.shape, *out.shape[1:])


def bounds(documents: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(first tokens of all documents and the number of all tokens, int32 [N + 1]; tokens of the longest one).

    Padding counts as a document. The answer is kept on the tensor: all layers ask for the same, and it takes the
    device's whole attention.
    """
    cached = getattr(documents, "bounds", None)
    if cached is None:
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = torch.cat(
            [begins.flatten().nonzero().flatten(), torch.tensor([documents.numel()], device=documents.device)]
        ).int()
        cached = documents.bounds = starts, int(starts.diff().max())
    return cached
