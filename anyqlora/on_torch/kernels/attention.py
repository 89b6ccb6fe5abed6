"""Causal attention within documents: each by itself, with no mask of [T, T]; in bf16 on a CPU a block of queries at a time, or all by attention.c."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from anyqlora.on_torch._compat import softmax_backward
from anyqlora.on_torch.kernels.cpu import bindings

QUERIES = 128  # of a block
SCORES = 1 << 20  # of the blocks that are looked at together, float32: they stay in a processor's caches
MASKED = float("-inf")


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    documents: torch.Tensor | None = None,
    window: int | None = None,
    is_native: bool = False,
) -> torch.Tensor:
    """softmax(scale q k^T) v under a causal mask, [B, T, H, D]; equal to `defined`.

    q [B, H, T, D], k and v [B, K, T, D], where H is a multiple of K. documents int [B, T]: tokens see tokens of their own document
    only, which lie side by side; -1 is padding, whose output is zero. window: so many tokens back, one's own among them. is_native: by
    attention.c, where heads are of a width that it takes.
    """
    if is_native and bindings.is_for(q, k, v) and q.shape[3] % bindings.LANES == 0:
        return _InC.apply(
            *(x.transpose(1, 2).contiguous() for x in (q, k, v)), _table(q, documents), window or q.shape[2], scale
        )
    if documents is None:
        return _one(q, k, v, scale, window)
    out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
    for row, first, end in _spans(documents):
        part = [x[row : row + 1, :, first:end] for x in (q, k, v)]
        out[row : row + 1, first:end] = _one(*part, scale, window)
    return out


def defined(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    documents: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """What `attention` computes, with whole masks and scores."""
    length = q.shape[2]
    place = torch.arange(length, device=q.device)
    seen = place[:, None] >= place[None]
    if window is not None:
        seen = seen & (place[:, None] - place[None] < window)
    seen = seen.expand(len(q), 1, length, length)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None]) & (documents >= 0)[:, None, :, None]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (scale * q @ k.transpose(-1, -2)).masked_fill(~seen, MASKED)
    return (scores.softmax(-1).nan_to_num(0) @ v).transpose(1, 2)


def _spans(documents: torch.Tensor) -> list[tuple[int, int, int]]:
    """(row, first token, end) of each document [B, T]. Kept on the tensor: all layers ask for the same, and a device is waited for."""
    if not hasattr(documents, "spans"):
        documents.spans = list(_found(documents))
    return documents.spans


def _found(documents: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    for row, numbers in enumerate(documents.tolist()):
        start = 0
        for number, group in itertools.groupby(numbers):
            end = start + sum(1 for _ in group)
            if number >= 0:
                yield row, start, end
            start = end


class _Table(NamedTuple):
    """Documents as attention.c takes them."""

    spans: torch.Tensor  # int64 [N, 3]: row, first token, end
    longest: int  # tokens


def _table(q: torch.Tensor, documents: torch.Tensor | None) -> _Table:
    """The documents [B, T] of q [B, H, T, D]; each row is one where there are none. It is kept on the tensor: all layers ask for the same."""
    known = getattr(documents, "table", None)
    if known is None:
        spans = [(row, 0, q.shape[2]) for row in range(len(q))] if documents is None else _spans(documents)
        known = _Table(
            torch.tensor(spans, dtype=torch.int64).view(-1, 3), max((end - first for _, first, end in spans), default=0)
        )
        if documents is not None:
            documents.table = known
    return known


class _InC(torch.autograd.Function):
    """By attention.c, of q [B, T, H, D], k and v [B, T, K, D]. Kept for backward: these, what comes out, and a number for each query."""

    @staticmethod
    def forward(ctx, q, k, v, table, window, scale):
        ctx.form = *table, window, scale
        out, log_sums = bindings.attention(q, k, v, *ctx.form)
        ctx.save_for_backward(q, k, v, out, log_sums)
        return out

    @staticmethod
    def backward(ctx, of_out):
        return *bindings.attention_backward(of_out.contiguous(), *ctx.saved_tensors, *ctx.form), None, None, None


def _one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Attention where all tokens of a row are of one document, [B, T, H, D]."""
    length = q.shape[2]
    if window is not None and window < length:
        place = torch.arange(length, device=q.device)
        far = place[:, None] - place[None]
        seen = (far >= 0) & (far < window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True).transpose(1, 2)
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return _Blocks.apply(q, k, v, scale)
    return F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, scale=scale, enable_gqa=True).transpose(1, 2)


class _Blocks(torch.autograd.Function):
    """Products in bf16, softmax in float32. For backward only q, k and v are kept: the probabilities are computed again.

    torch's own kernel for CPUs reaches a sixth of the product rate of a CPU with AVX512-BF16 at 64 numbers per head.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale):
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        (rows, heads, length, width), shared = q.shape, k.shape[1]
        out = torch.empty(rows, length, heads, width, dtype=q.dtype)
        grouped = out.view(rows, length, shared, -1, width).permute(0, 2, 3, 1, 4)  # [B, K, G, T, D]
        for row, some, first, end, block in _blocks(q, k):
            keys, values = k[row, some, :end], v[row, some, :end]
            p = _softmax(torch.bmm(block, keys.transpose(1, 2)), first, end, scale)
            made = torch.bmm(p.to(v.dtype), values)
            grouped[row, some, :, first:end] = made.view(len(made), -1, end - first, width)
        return out

    @staticmethod
    def backward(ctx, of_out):
        q, k, v = ctx.saved_tensors
        of_out = of_out.transpose(1, 2)  # [B, H, T, D]
        of_q = torch.empty(q.shape, dtype=q.dtype)
        of_k, of_v = torch.zeros(k.shape), torch.zeros(v.shape)  # float32: sums over blocks
        grouped_of_q = of_q.view(*k.shape[:2], -1, *q.shape[2:])
        for (row, some, first, end, block), (*_, g) in zip(_blocks(q, k), _blocks(of_out, k), strict=True):
            keys, values = k[row, some, :end], v[row, some, :end]
            p = _softmax(torch.bmm(block, keys.transpose(1, 2)), first, end, ctx.scale)
            of_v[row, some, :end] += torch.bmm(p.to(v.dtype).transpose(1, 2), g)
            of_p = torch.bmm(g, values.transpose(1, 2))
            of_scores = softmax_backward(of_p.float(), p).mul_(ctx.scale).to(of_p.dtype)
            made = torch.bmm(of_scores, keys)
            grouped_of_q[row, some, :, first:end] = made.view(len(made), -1, end - first, q.shape[3])
            of_k[row, some, :end] += torch.bmm(of_scores.transpose(1, 2), block)
        return of_q, of_k.to(k.dtype), of_v.to(v.dtype), None


def _blocks(x: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[int, slice, int, int, torch.Tensor]]:
    """(row, key heads, first query, end, the queries of these heads [K', G n, D]) of each block of x [B, H, T, D]."""
    (rows, heads, length, width), shared = x.shape, k.shape[1]
    queries = min(QUERIES, length)
    together = max(1, SCORES * shared // (heads * queries * length))  # key heads
    grouped = x.reshape(rows, shared, heads // shared, length, width)
    for row in range(rows):
        for head in range(0, shared, together):
            some = slice(head, head + together)
            for first in range(0, length, queries):
                end = min(first + queries, length)
                yield (
                    row,
                    some,
                    first,
                    end,
                    grouped[row, some, :, first:end].reshape(-1, (heads // shared) * (end - first), width),
                )


def _softmax(scores: torch.Tensor, first: int, end: int, scale: float) -> torch.Tensor:
    """softmax(scale * scores [K', G n, end]) in float32, of n queries that begin at key `first`, each over the keys up to its own."""
    scores, queries = scores.float().mul_(scale), end - first
    later = torch.full((queries, queries), MASKED).triu_(1)
    scores.view(len(scores), -1, queries, end)[..., first:].add_(later)
    return scores.softmax(-1)
