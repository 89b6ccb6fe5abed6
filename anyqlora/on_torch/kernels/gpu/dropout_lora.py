"""Dropout inside LoRA's narrow products: what is dropped follows from tokens' keys and is never in memory (Triton)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from anyqlora.core.dropout import BUCKETS, threshold
from anyqlora.on_torch.kernels import fused_lora
from anyqlora.on_torch.kernels.frozen_matmul import FrozenMatmul, stacked
from anyqlora.on_torch.kernels.fused_lora import FULL, NO_DROPOUT, LoraLinear
from anyqlora.on_torch.kernels.gpu.token_mask import COLUMNS, ROWS, tile_mask

# Of a tile's ranks at most: greater tiles take more than a GPU of capability 8.6 has of shared memory, 101,376 bytes.
RANK_BYTES = 256
STRIPS = (
    16  # programs that share the rows of `lora_weight_grad`: each sums its own, and the sums are added in one order
)


def lora_linears(
    x: torch.Tensor, layers: Sequence[LoraLinear], dropout: fused_lora.Dropout = NO_DROPOUT, matmul: FrozenMatmul = FULL
) -> tuple[torch.Tensor, ...]:
    """fused_lora.lora_linears, where what is dropped is drawn again in each product from the tokens' keys, or from as
    many of torch's own generator.

    For backward x is saved once and [..., rank] of each layer; of what was dropped, only the keys.
    """
    if not dropout.rate:
        return fused_lora.lora_linears(x, layers, matmul=matmul)
    keys = dropout.keys
    if keys is None:
        keys = torch.randint(-(1 << 63), (1 << 63) - 1, (x.numel() // x.shape[-1],), device=x.device)
    drop = Dropout(keys, threshold(dropout.rate))
    factors = [factor for layer in layers for factor in (layer.a, layer.b)]
    with torch.autocast(x.device.type, enabled=False):
        return _LoraLinears.apply(x, tuple(layers), drop, matmul, *factors)


class _LoraLinears(torch.autograd.Function):
    """The products with A are one for all layers: their A lie one below the other, [R, in], R the
    sum of their ranks.
    """

    @staticmethod
    def forward(ctx, x, layers, drop, matmul, *factors):
        flat = x.reshape(-1, x.shape[-1]).contiguous()  # [M, in]
        lora_hidden = drop.lora_down(flat, stacked(factors[::2]).to(x.dtype))  # [M, R]
        prepared, outputs, ranks = matmul.prepare_input(x), [], [len(a) for a in factors[::2]]
        for layer, b, hidden in zip(layers, factors[1::2], lora_hidden.split(ranks, 1), strict=True):
            lora = hidden * (layer.scale / drop.keep_rate), b
            outputs.append(matmul.forward(prepared, layer.weight(), layer.bias, lora))
        ctx.layers, ctx.matmul, ctx.drop, ctx.ranks = layers, matmul, drop, ranks
        ctx.save_for_backward(x, lora_hidden, *factors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grad_outputs):
        x, lora_hidden, *factors = ctx.saved_tensors
        flat, dtype, drop = x.reshape(-1, x.shape[-1]).contiguous(), x.dtype, ctx.drop
        grad_x, grad_hidden, grad_b = None, [], []
        parts = ctx.layers, factors[1::2], lora_hidden.split(ctx.ranks, 1), grad_outputs
        for layer, b, hidden, grad_y in zip(*parts, strict=True):
            grad_y, scale = grad_y.reshape(-1, grad_y.shape[-1]), layer.scale / drop.keep_rate  # [M, out]
            grad_hidden.append((grad_y @ b.to(dtype)).mul_(scale))
            grad_b.append((grad_y.T @ hidden).mul_(scale).to(b.dtype))
            if ctx.needs_input_grad[0]:
                grad_x = ctx.matmul.backward(grad_y, layer.weight(), grad_x)
        grad_hidden = torch.cat(grad_hidden, 1)  # [M, R]
        grad_a = drop.lora_weight_grad(grad_hidden, flat).split(ctx.ranks)
        if grad_x is not None:
            grad_x = drop.add_lora_input_grad(grad_x, grad_hidden, stacked(factors[::2]).to(dtype)).view(x.shape)
        pairs = zip(factors[::2], grad_a, grad_b, strict=True)
        return grad_x, None, None, None, *(grad for a, grad_a, grad_b in pairs for grad in (grad_a.to(a.dtype), grad_b))


@dataclass(frozen=True, eq=False)
class Dropout:
    """Which numbers of [M, K] are dropped: `dropout.token_mask` of these keys int64 [M] and this threshold.

    What stays is not made greater. Products are summed in float32 and rounded once to the dtype of their factors.
    """

    keys: torch.Tensor
    threshold: int

    def lora_down(self, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """dropped(x) a^T, [M, R], of x [M, K] and a [R, K]."""
        (m, k), r = x.shape, len(a)
        out = torch.empty(m, r, dtype=x.dtype, device=x.device)
        rank = _tile(r, x.dtype)
        _lora_down[(triton.cdiv(m, ROWS), triton.cdiv(r, rank))](
            x, a, out, m, k, r, self.keys, self.threshold, RANK=rank, ROWS=ROWS, COLUMNS=COLUMNS, enable_fp_fusion=True
        )
        return out

    def lora_weight_grad(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """hidden^T dropped(x), [R, K] in float32, of hidden [M, R] and x [M, K]."""
        (m, k), r = x.shape, hidden.shape[1]
        parts, rank = torch.empty(STRIPS, r, k, dtype=torch.float32, device=x.device), _tile(r, x.dtype)
        _lora_weight_grad[(triton.cdiv(k, COLUMNS), STRIPS, triton.cdiv(r, rank))](
            hidden,
            x,
            parts,
            m,
            k,
            r,
            self.keys,
            self.threshold,
            triton.cdiv(triton.cdiv(m, ROWS), STRIPS),
            RANK=rank,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            enable_fp_fusion=True,
        )
        return parts.sum(0)

    def add_lora_input_grad(self, grad_x: torch.Tensor, hidden: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """grad_x + dropped(hidden a), written over grad_x [M, K], of hidden [M, R] and a [R, K]."""
        (m, k), r = grad_x.shape, len(a)
        _add_lora_input_grad[(triton.cdiv(m, ROWS), triton.cdiv(k, COLUMNS))](
            grad_x,
            hidden,
            a,
            m,
            k,
            r,
            self.keys,
            self.threshold,
            RANK=_tile(r, grad_x.dtype),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            enable_fp_fusion=True,
        )
        return grad_x

    @property
    def keep_rate(self) -> float:
        """Of the numbers, that stays."""
        return 1 - self.threshold / BUCKETS


def _tile(rank: int, dtype: torch.dtype) -> int:
    """How many ranks a program looks at; 16 are the least that a product of tiles takes."""
    return min(max(triton.next_power_of_2(rank), 16), RANK_BYTES // dtype.itemsize)


@triton.jit
def _lora_down(x, a, out, m, k, r, keys, threshold, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, ranks = (
        tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS),
        tl.program_id(1) * RANK + tl.arange(0, RANK),
    )
    total = tl.zeros((ROWS, RANK), tl.float32)
    for first in range(0, k, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        mask = columns[None, :] < k
        values = tl.load(x + rows[:, None] * k + columns[None, :], (rows[:, None] < m) & mask, other=0.0)
        values = tl.where(tile_mask(keys, rows, m, first, threshold, ROWS, COLUMNS), values, 0.0).to(x.dtype.element_ty)
        factors = tl.load(a + ranks[:, None] * k + columns[None, :], (ranks[:, None] < r) & mask, other=0.0)
        total = tl.dot(values, tl.trans(factors), total, input_precision="ieee")
    tl.store(
        out + rows[:, None] * r + ranks[None, :],
        total.to(out.dtype.element_ty),
        (rows[:, None] < m) & (ranks[None, :] < r),
    )


@triton.jit
def _lora_weight_grad(
    hidden, x, parts, m, k, r, keys, threshold, tiles, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    first, strip = tl.program_id(0) * COLUMNS, tl.program_id(1).to(tl.int64)
    columns, ranks = first + tl.arange(0, COLUMNS), tl.program_id(2) * RANK + tl.arange(0, RANK)
    total = tl.zeros((RANK, COLUMNS), tl.float32)
    for tile in range(strip * tiles, (strip + 1) * tiles):
        rows = tile * ROWS + tl.arange(0, ROWS)
        values = tl.load(
            x + rows[:, None] * k + columns[None, :], (rows[:, None] < m) & (columns[None, :] < k), other=0.0
        )
        values = tl.where(tile_mask(keys, rows, m, first, threshold, ROWS, COLUMNS), values, 0.0).to(x.dtype.element_ty)
        factors = tl.load(
            hidden + rows[:, None] * r + ranks[None, :], (rows[:, None] < m) & (ranks[None, :] < r), other=0.0
        )
        total = tl.dot(tl.trans(factors), values, total, input_precision="ieee")
    tl.store(
        parts + (strip * r + ranks[:, None]) * k + columns[None, :],
        total,
        (ranks[:, None] < r) & (columns[None, :] < k),
    )


@triton.jit
def _add_lora_input_grad(
    grad_x, hidden, a, m, k, r, keys, threshold, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows, first = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    mask = (rows[:, None] < m) & (columns[None, :] < k)
    more = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first_rank in range(0, r, RANK):
        ranks = first_rank + tl.arange(0, RANK)
        left = tl.load(
            hidden + rows[:, None] * r + ranks[None, :], (rows[:, None] < m) & (ranks[None, :] < r), other=0.0
        )
        right = tl.load(
            a + ranks[:, None] * k + columns[None, :], (ranks[:, None] < r) & (columns[None, :] < k), other=0.0
        )
        more = tl.dot(left, right, more, input_precision="ieee")
    more = tl.where(tile_mask(keys, rows, m, first, threshold, ROWS, COLUMNS), more, 0.0)
    at = grad_x + rows[:, None] * k + columns[None, :]
    tl.store(at, (tl.load(at, mask, other=0.0).to(tl.float32) + more).to(grad_x.dtype.element_ty), mask)
