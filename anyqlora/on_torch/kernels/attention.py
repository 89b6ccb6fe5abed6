"""Causal attention within documents: each by itself, with no mask of [T, T]; in bf16 on a CPU a block of queries at a
time, or all in C.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from anyqlora.on_torch._compat import softmax_backward
from anyqlora.on_torch.kernels.cpu import bindings
from anyqlora.on_torch.kernels.documents import Documents

QUERIES = 128  # of a block
SCORES = 1 << 20  # of the blocks that are looked at together, float32: they stay in a processor's caches
MASKED = float("-inf")


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    documents: Documents | None = None,
    window: int | None = None,
    is_native: bool = False,
) -> torch.Tensor:
    """softmax(scale q k^T) v under a causal mask, [B, T, H, D]; equal to `reference`.

    q [B, H, T, D], k and v [B, K, T, D], where H is a multiple of K. documents: of rows [B, T]; None: each row is one.
    window: so many tokens back, one's own among them. is_native: in C, where heads are of a width that it takes.
    """
    if is_native and bindings.is_for(q, k, v) and q.shape[3] % bindings.LANES == 0:
        rows, length = q.shape[0], q.shape[2]
        if documents is None:
            spans, longest = torch.tensor([[row, 0, length] for row in range(rows)]).view(rows, 3), length
        else:
            spans, longest = torch.from_numpy(documents.spans), documents.longest
        inputs = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return _Native.apply(*inputs, spans, longest, window or length, scale)
    if documents is None:
        return _one_document(q, k, v, scale, window)
    out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
    for row, first, end in documents.spans.tolist():
        part = [x[row : row + 1, :, first:end] for x in (q, k, v)]
        out[row : row + 1, first:end] = _one_document(*part, scale, window)
    return out


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    documents: Documents | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """What `attention` computes, with whole masks and scores."""
    length = q.shape[2]
    position = torch.arange(length, device=q.device)
    seen = position[:, None] >= position[None]
    if window is not None:
        seen = seen & (position[:, None] - position[None] < window)
    seen = seen.expand(len(q), 1, length, length)
    if documents is not None:
        numbers = documents.numbers
        seen = seen & (numbers[:, None, :, None] == numbers[:, None, None]) & (numbers >= 0)[:, None, :, None]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (scale * q @ k.transpose(-1, -2)).masked_fill(~seen, MASKED)
    return (scores.softmax(-1).nan_to_num(0) @ v).transpose(1, 2)


class _Native(torch.autograd.Function):
    """By bindings.attention, of q [B, T, H, D], k and v [B, T, K, D]. Saved for backward: these, the output, and a
    number for each query.
    """

    @staticmethod
    def forward(ctx, q, k, v, spans, longest, window, scale):
        ctx.form = spans, longest, window, scale
        out, logsumexp = bindings.attention(q, k, v, *ctx.form)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        return (
            *bindings.attention_backward(grad_out.contiguous(), *ctx.saved_tensors, *ctx.form),
            None,
            None,
            None,
            None,
        )


def _one_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Attention where all tokens of a row are of one document, [B, T, H, D]."""
    length = q.shape[2]
    if window is not None and window < length:
        position = torch.arange(length, device=q.device)
        distance = position[:, None] - position[None]
        seen = (distance >= 0) & (distance < window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True).transpose(1, 2)
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return _Blocks.apply(q, k, v, scale)
    return F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, scale=scale, enable_gqa=True).transpose(1, 2)


class _Blocks(torch.autograd.Function):
    """Products in bf16, softmax in float32. For backward only q, k and v are saved: the probabilities are computed
    again.

    torch's own kernel for CPUs reaches a sixth of the product rate of a CPU with AVX512-BF16 at 64 numbers per head.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale):
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        (rows, heads, length, width), kv_heads = q.shape, k.shape[1]
        out = torch.empty(rows, length, heads, width, dtype=q.dtype)
        grouped = out.view(rows, length, kv_heads, -1, width).permute(0, 2, 3, 1, 4)  # [B, K, G, T, D]
        for row, head_slice, first, end, block in _blocks(q, k):
            keys, values = k[row, head_slice, :end], v[row, head_slice, :end]
            p = _softmax(torch.bmm(block, keys.transpose(1, 2)), first, end, scale)
            product = torch.bmm(p.to(v.dtype), values)
            grouped[row, head_slice, :, first:end] = product.view(len(product), -1, end - first, width)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v = ctx.saved_tensors
        grad_out = grad_out.transpose(1, 2)  # [B, H, T, D]
        grad_q = torch.empty(q.shape, dtype=q.dtype)
        grad_k, grad_v = torch.zeros(k.shape), torch.zeros(v.shape)  # float32: sums over blocks
        grouped_grad_q = grad_q.view(*k.shape[:2], -1, *q.shape[2:])
        for (row, head_slice, first, end, block), (*_, grad) in zip(_blocks(q, k), _blocks(grad_out, k), strict=True):
            keys, values = k[row, head_slice, :end], v[row, head_slice, :end]
            p = _softmax(torch.bmm(block, keys.transpose(1, 2)), first, end, ctx.scale)
            grad_v[row, head_slice, :end] += torch.bmm(p.to(v.dtype).transpose(1, 2), grad)
            grad_p = torch.bmm(grad, values.transpose(1, 2))
            grad_scores = softmax_backward(grad_p.float(), p).mul_(ctx.scale).to(grad_p.dtype)
            product = torch.bmm(grad_scores, keys)
            grouped_grad_q[row, head_slice, :, first:end] = product.view(len(product), -1, end - first, q.shape[3])
            grad_k[row, head_slice, :end] += torch.bmm(grad_scores.transpose(1, 2), block)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None


def _blocks(x: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[int, slice, int, int, torch.Tensor]]:
    """(row, key heads, first query, end, the queries of these heads [K', G n, D]) of each block of x [B, H, T, D]."""
    (rows, heads, length, width), kv_heads = x.shape, k.shape[1]
    queries = min(QUERIES, length)
    together = max(1, SCORES * kv_heads // (heads * queries * length))  # key heads
    grouped = x.reshape(rows, kv_heads, heads // kv_heads, length, width)
    for row in range(rows):
        for head in range(0, kv_heads, together):
            head_slice = slice(head, head + together)
            for first in range(0, length, queries):
                end = min(first + queries, length)
                yield (
                    row,
                    head_slice,
                    first,
                    end,
                    grouped[row, head_slice, :, first:end].reshape(-1, (heads // kv_heads) * (end - first), width),
                )


def _softmax(scores: torch.Tensor, first: int, end: int, scale: float) -> torch.Tensor:
    """softmax(scale * scores [K', G n, end]) in float32, of n queries that begin at key `first`, each over the keys up
    to its own.
    """
    scores, queries = scores.float().mul_(scale), end - first
    later = torch.full((queries, queries), MASKED).triu_(1)
    scores.view(len(scores), -1, queries, end)[..., first:].add_(later)
    return scores.softmax(-1)
