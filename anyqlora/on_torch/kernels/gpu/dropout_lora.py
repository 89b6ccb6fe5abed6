"""Dropout inside LoRA's narrow products: what is dropped follows from a seed and is never in memory (Triton)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from anyqlora.on_torch.kernels import fused_lora
from anyqlora.on_torch.kernels.frozen_matmul import Products, stacked
from anyqlora.on_torch.kernels.fused_lora import LANES, WHOLE, Linear

EIGHT = 8  # numbers that one draw of Philox, 128 bits, decides on
ROWS, COLUMNS = 64, 64  # of the tile that a program looks at
RANKS = 256  # bytes of a tile's ranks at most: of the shared memory of a GPU of capability 8.6, 101,376 bytes, greater tiles take more than there is
STRIPS = 16  # programs that share the rows of `outer`: each sums its own, and the sums are added in one order


def linears(
    x: torch.Tensor, layers: Sequence[Linear], dropout: float = 0.0, products: Products = WHOLE
) -> tuple[torch.Tensor, ...]:
    """lora.linears, where what is dropped is drawn again in each product from one number of torch's own generator on the CPU.

    For backward x is kept once and [..., rank] of each layer; of what was dropped, only the seed.
    """
    if not dropout:
        return fused_lora.linears(x, layers, products=products)
    drop = Dropout(int(torch.randint(1 << 31, ())), dropout)
    factors = [factor for layer in layers for factor in (layer.a, layer.b)]
    with torch.autocast(x.device.type, enabled=False):
        return _Linears.apply(x, tuple(layers), drop, products, *factors)


class _Linears(torch.autograd.Function):
    """The narrow products of all layers are one: their A lie one below the other, [R, in], R the sum of their ranks."""

    @staticmethod
    def forward(ctx, x, layers, drop, products, *factors):
        flat = x.reshape(-1, x.shape[-1]).contiguous()  # [M, in]
        middles = drop.into(flat, stacked(factors[::2]).to(x.dtype))  # [M, R]
        read, out, ranks = products.read(x), [], [len(a) for a in factors[::2]]
        for layer, b, middle in zip(layers, factors[1::2], middles.split(ranks, 1), strict=True):
            out.append(products.forward(read, layer.weight(), layer.bias, (middle * (layer.scale / drop.part), b)))
        ctx.layers, ctx.products, ctx.drop, ctx.ranks = layers, products, drop, ranks
        ctx.save_for_backward(x, middles, *factors)
        return tuple(out)

    @staticmethod
    def backward(ctx, *of_outputs):
        x, middles, *factors = ctx.saved_tensors
        flat, kind, drop = x.reshape(-1, x.shape[-1]).contiguous(), x.dtype, ctx.drop
        of_x, of_middles, of_b = None, [], []
        for layer, b, middle, of_y in zip(
            ctx.layers, factors[1::2], middles.split(ctx.ranks, 1), of_outputs, strict=True
        ):
            g, scale = of_y.reshape(-1, of_y.shape[-1]), layer.scale / drop.part  # [M, out]
            of_middles.append((g @ b.to(kind)).mul_(scale))
            of_b.append((g.T @ middle).mul_(scale).to(b.dtype))
            if ctx.needs_input_grad[0]:
                of_x = ctx.products.backward(g, layer.weight(), of_x)
        of_middle = torch.cat(of_middles, 1)  # [M, R]
        of_a = drop.outer(of_middle, flat).split(ctx.ranks)
        if of_x is not None:
            of_x = drop.add_back(of_x, of_middle, stacked(factors[::2]).to(kind)).view(x.shape)
        return (
            of_x,
            None,
            None,
            None,
            *(
                gradient
                for a, one, other in zip(factors[::2], of_a, of_b, strict=True)
                for gradient in (one.to(a.dtype), other)
            ),
        )


@dataclass(frozen=True)
class Dropout:
    """Which numbers of any [M, K] are dropped: a function of `seed` (31 bits), of the place, and of `rate` alone.

    What stays is not made greater. Products are summed in float32 and rounded once to the dtype of their factors.
    """

    seed: int
    rate: float

    def into(self, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """dropped(x) a^T, [M, R], of x [M, K] and a [R, K]."""
        (m, k), r = x.shape, len(a)
        out = torch.empty(m, r, dtype=x.dtype, device=x.device)
        rank = _tile(r, x.dtype)
        _into[(triton.cdiv(m, ROWS), triton.cdiv(r, rank))](
            x, a, out, m, k, r, self.seed, self.threshold, RANK=rank, ROWS=ROWS, COLUMNS=COLUMNS, enable_fp_fusion=True
        )
        return out

    def outer(self, middle: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """middle^T dropped(x), [R, K] in float32, of middle [M, R] and x [M, K]."""
        (m, k), r = x.shape, middle.shape[1]
        parts, rank = torch.empty(STRIPS, r, k, dtype=torch.float32, device=x.device), _tile(r, x.dtype)
        _outer[(triton.cdiv(k, COLUMNS), STRIPS, triton.cdiv(r, rank))](
            middle,
            x,
            parts,
            m,
            k,
            r,
            self.seed,
            self.threshold,
            triton.cdiv(triton.cdiv(m, ROWS), STRIPS),
            RANK=rank,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            enable_fp_fusion=True,
        )
        return parts.sum(0)

    def add_back(self, to: torch.Tensor, middle: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """to + dropped(middle a), written over `to` [M, K], of middle [M, R] and a [R, K]."""
        (m, k), r = to.shape, len(a)
        _add_back[(triton.cdiv(m, ROWS), triton.cdiv(k, COLUMNS))](
            to,
            middle,
            a,
            m,
            k,
            r,
            self.seed,
            self.threshold,
            RANK=_tile(r, to.dtype),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            enable_fp_fusion=True,
        )
        return to

    @property
    def threshold(self) -> int:
        return round(self.rate * LANES)

    @property
    def part(self) -> float:
        """Of the numbers, that stays."""
        return 1 - self.threshold / LANES

    def kept(self, m: int, k: int) -> torch.Tensor:
        """What stays, bool [m, k]: the definition of what the kernels draw."""
        groups = triton.cdiv(k, EIGHT)
        words = torch.stack(philox(self.seed, torch.arange(m * groups)), 1)  # [m groups, 4]
        halves = torch.stack([words & (LANES - 1), words >> 16], 2)  # [m groups, 4, 2]
        return halves.reshape(m, groups * EIGHT)[:, :k] >= self.threshold


def philox(seed: int, counters: torch.Tensor) -> list[torch.Tensor]:
    """Philox 4x32-10 (Salmon et al. 2011): four words of 32 bits, as int64 [N], of each counter (N, 0, 0, 0) under the key (seed, 0)."""
    word, c, key = (
        (1 << 32) - 1,
        [counters & ((1 << 32) - 1), *(torch.zeros_like(counters) for _ in range(3))],
        [seed, 0],
    )
    for _ in range(10):
        (high0, low0), (high1, low1) = _product(0xD2511F53, c[0]), _product(0xCD9E8D57, c[2])
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
    return c


def _product(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low 32 bits of a b, for numbers of 32 bits, within int64."""
    low, high = (a & 0xFFFF) * b, (a >> 16) * b  # each below 2^48
    low, high = (low + ((high & 0xFFFF) << 16)), high >> 16
    return high + (low >> 32), low & ((1 << 32) - 1)


def _tile(rank: int, dtype: torch.dtype) -> int:
    """How many ranks a program looks at; 16 are the least that a product of tiles takes."""
    return min(max(triton.next_power_of_2(rank), 16), RANKS // dtype.itemsize)


@triton.jit
def _kept(rows, first, k, seed, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Whether each number of a tile [ROWS, COLUMNS] stays, from `rows` and its first column."""
    groups = rows[:, None] * tl.cdiv(k, 8) + first // 8 + tl.arange(0, COLUMNS // 8)[None, :]
    a, b, c, d = tl.randint4x(seed, groups.to(tl.uint32))
    words = tl.join(tl.join(a, c), tl.join(b, d)).to(
        tl.uint32, bitcast=True
    )  # [ROWS, COLUMNS / 8, 2, 2]: a, b, c, d in order
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (ROWS, COLUMNS)) >= threshold


@triton.jit(do_not_specialize=["seed"])
def _into(x, a, out, m, k, r, seed, threshold, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, ranks = (
        tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS),
        tl.program_id(1) * RANK + tl.arange(0, RANK),
    )
    total = tl.zeros((ROWS, RANK), tl.float32)
    for first in range(0, k, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        there = columns[None, :] < k
        values = tl.load(x + rows[:, None] * k + columns[None, :], (rows[:, None] < m) & there, other=0.0)
        values = tl.where(_kept(rows, first, k, seed, threshold, ROWS, COLUMNS), values, 0.0).to(x.dtype.element_ty)
        factors = tl.load(a + ranks[:, None] * k + columns[None, :], (ranks[:, None] < r) & there, other=0.0)
        total = tl.dot(values, tl.trans(factors), total, input_precision="ieee")
    tl.store(
        out + rows[:, None] * r + ranks[None, :],
        total.to(out.dtype.element_ty),
        (rows[:, None] < m) & (ranks[None, :] < r),
    )


@triton.jit(do_not_specialize=["seed"])
def _outer(
    middle, x, parts, m, k, r, seed, threshold, tiles, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    first, strip = tl.program_id(0) * COLUMNS, tl.program_id(1).to(tl.int64)
    columns, ranks = first + tl.arange(0, COLUMNS), tl.program_id(2) * RANK + tl.arange(0, RANK)
    total = tl.zeros((RANK, COLUMNS), tl.float32)
    for tile in range(strip * tiles, (strip + 1) * tiles):
        rows = tile * ROWS + tl.arange(0, ROWS)
        values = tl.load(
            x + rows[:, None] * k + columns[None, :], (rows[:, None] < m) & (columns[None, :] < k), other=0.0
        )
        values = tl.where(_kept(rows, first, k, seed, threshold, ROWS, COLUMNS), values, 0.0).to(x.dtype.element_ty)
        factors = tl.load(
            middle + rows[:, None] * r + ranks[None, :], (rows[:, None] < m) & (ranks[None, :] < r), other=0.0
        )
        total = tl.dot(tl.trans(factors), values, total, input_precision="ieee")
    tl.store(
        parts + (strip * r + ranks[:, None]) * k + columns[None, :],
        total,
        (ranks[:, None] < r) & (columns[None, :] < k),
    )


@triton.jit(do_not_specialize=["seed"])
def _add_back(to, middle, a, m, k, r, seed, threshold, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, first = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    there = (rows[:, None] < m) & (columns[None, :] < k)
    more = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in range(0, r, RANK):
        ranks = part + tl.arange(0, RANK)
        left = tl.load(
            middle + rows[:, None] * r + ranks[None, :], (rows[:, None] < m) & (ranks[None, :] < r), other=0.0
        )
        right = tl.load(
            a + ranks[:, None] * k + columns[None, :], (ranks[:, None] < r) & (columns[None, :] < k), other=0.0
        )
        more = tl.dot(left, right, more, input_precision="ieee")
    more = tl.where(_kept(rows, first, k, seed, threshold, ROWS, COLUMNS), more, 0.0)
    at = to + rows[:, None] * k + columns[None, :]
    tl.store(at, (tl.load(at, there, other=0.0).to(tl.float32) + more).to(to.dtype.element_ty), there)
