"""LoRA together with its frozen weight: linear layers that read one input, as one function with a backward written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from anyqlora.on_torch.kernels.frozen_matmul import Products, Whole, stacked

WHOLE = Whole()
LANES = 1 << 16  # random numbers of 16 bits decide what dropout drops
NARROW = (
    "mps",
)  # devices on which torch draws no numbers of 64 bits ("random_mps_ currently does not handle the lowest() -> max() range")


class Linear(NamedTuple):
    """One linear layer: y = W x + bias + scale B A x, with W [out, in] frozen, A [rank, in] and B [out, rank] learned.

    weight() is what the group's products make of W; is_kept: it is in memory, and not made for each product.
    """

    weight: Callable[[], object]
    bias: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    is_kept: bool = False


def linears(
    x: torch.Tensor, layers: Sequence[Linear], dropout: float = 0.0, products: Products = WHOLE
) -> tuple[torch.Tensor, ...]:
    """Each layer's [..., out] of x [..., in], in x's dtype; equal to `defined` where nothing is dropped.

    For backward x is kept once, each layer's [..., rank], and a byte for each value of x where there is dropout: layers of one input
    drop the same values. Everything is computed in x's dtype; W is asked for in forward and again in backward, and not kept.
    """
    factors = [factor for layer in layers for factor in (layer.a, layer.b)]
    with torch.autocast(x.device.type, enabled=False):
        at_once = products.at_once(x, layers, 1 - whole(dropout))
        if at_once:
            return _AtOnce.apply(x, tuple(layers), at_once, dropout, products, *factors)
        return _Linears.apply(x, tuple(layers), dropout, products, *factors)


def defined(x: torch.Tensor, layers: Sequence[Linear]) -> tuple[torch.Tensor, ...]:
    """What `linears` computes without dropout, as autograd differentiates it."""
    return tuple(
        F.linear(x, layer.weight(), layer.bias) + layer.scale * (x @ layer.a.to(x.dtype).T @ layer.b.to(x.dtype).T)
        for layer in layers
    )


class _Linears(torch.autograd.Function):
    """The narrow products with x are one for all layers: their A lie one below the other, [R, in], R the sum of their ranks."""

    @staticmethod
    def forward(ctx, x, layers, dropout, products, *factors):
        flat = x.reshape(-1, x.shape[-1])  # [M, in]
        mask, kept = (drawn(flat, dropout), 1 - whole(dropout)) if dropout else (None, 1.0)
        middles = products.into(dropped(flat, mask), factors[::2], [layer.scale / kept for layer in layers])  # [M, R]
        read, out = products.read(x), []
        for layer, b, middle in zip(layers, factors[1::2], _parts(middles, factors), strict=True):
            out.append(
                products.forward(read, layer.weight(), layer.bias, (middle, b))
            )  # and no view of it: Llama 4 adds to its shared expert's output in place
        ctx.layers, ctx.products, ctx.kept = layers, products, kept
        ctx.save_for_backward(x, mask, middles, *factors)
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    def backward(ctx, *of_outputs):
        x, mask, middles, *factors = ctx.saved_tensors
        products, flat = ctx.products, x.reshape(-1, x.shape[-1])
        of_factors, of_middles, used = [None] * len(factors), [], {}  # of those layers whose output was used
        for number, (layer, middle, of_y) in enumerate(
            zip(ctx.layers, _parts(middles, factors), of_outputs, strict=True)
        ):
            if of_y is None:
                continue
            used[number] = g = of_y.reshape(-1, of_y.shape[-1])  # [M, out]
            b = factors[2 * number + 1]
            of_middles.append(products.back_into(g, b, layer.scale / ctx.kept))  # [M, rank]
            of_factors[2 * number + 1] = products.outer(middle, g, is_turned=True).to(b.dtype)
        below, of_middle, of_x = (
            [factors[2 * number] for number in used],
            of_middles[0] if len(used) == 1 else torch.cat(of_middles, 1),
            None,
        )
        for number, a, of_a in zip(
            used, below, products.outer(of_middle, dropped(flat, mask)).split([len(a) for a in below]), strict=True
        ):
            of_factors[2 * number] = of_a.to(a.dtype)
        if ctx.needs_input_grad[0]:
            narrow = of_middle, stacked(below)
            for number, g in used.items():
                is_last = number == max(used) and mask is None
                of_x = products.backward(g, ctx.layers[number].weight(), of_x, narrow if is_last else None)
            if mask is not None:
                of_x += dropped(products.out_of(*narrow), mask)
        return None if of_x is None else of_x.view(x.shape), None, None, None, *of_factors


class _AtOnce(torch.autograd.Function):
    """The same numbers by `products.forward_all` and `backward_all`: where tokens are few, calls take as long as what they compute."""

    @staticmethod
    def forward(ctx, x, layers, at_once, dropout, products, *factors):
        flat = x.reshape(-1, x.shape[-1])  # [M, in]
        mask = drawn(flat, dropout) if dropout else None
        out, middles = products.forward_all(flat, dropped(flat, mask), at_once, x.shape[:-1])
        ctx.weights, ctx.at_once, ctx.products = (
            [layer.weight for layer in layers],
            [layer._replace(weight=None) for layer in at_once],
            products,
        )
        ctx.save_for_backward(x, mask, middles, *factors)
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    def backward(ctx, *of_outputs):
        x, mask, middles, *factors = ctx.saved_tensors
        flat, of_factors = x.reshape(-1, x.shape[-1]), [None] * len(factors)
        used = [number for number, of_y in enumerate(of_outputs) if of_y is not None]
        layers = [
            ctx.at_once[number]._replace(weight=ctx.weights[number](), a=factors[2 * number], b=factors[2 * number + 1])
            for number in used
        ]
        of_y = [of_outputs[number].reshape(-1, of_outputs[number].shape[-1]) for number in used]  # [M, out]
        of_x, of_dropped, of_a, of_b = ctx.products.backward_all(
            dropped(flat, mask), layers, middles, of_y, ctx.needs_input_grad[0], mask is not None
        )
        for number, *of_both in zip(used, of_a.split([layer.a.shape[0] for layer in layers]), of_b, strict=True):
            of_factors[2 * number : 2 * number + 2] = of_both
        if of_dropped is not None:
            of_x += dropped(of_dropped, mask)
        return None if of_x is None else of_x.view(x.shape), None, None, None, None, *of_factors


def _parts(middles: torch.Tensor, factors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Each layer's columns of [M, R]."""
    return middles.split([len(a) for a in factors[::2]], 1)


def whole(dropout: float) -> float:
    """The probability nearest to `dropout` that 16 random bits can have."""
    return round(dropout * LANES) / LANES


def drawn(x: torch.Tensor, dropout: float) -> torch.Tensor:
    """What stays of x [M, in]: uint8, 1 or 0, drawn from torch's own generator."""
    return (_random(x.numel(), x.device) >= round(dropout * LANES) - LANES // 2).view(torch.uint8).view(x.shape)


def _random(count: int, device: torch.device) -> torch.Tensor:
    """Any int16 [count]: four from each of the generator's 64-bit numbers, where it has such."""
    if device.type in NARROW:
        return torch.empty(count, dtype=torch.int16, device=device).random_(-LANES // 2, LANES // 2)
    return (
        torch.empty(-(-count // 4), dtype=torch.int64, device=device)
        .random_(-(1 << 63), None)
        .view(torch.int16)[:count]
    )


def dropped(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """x without what the mask drops. By how much the rest grows is left to the narrow products."""
    return x if mask is None else x * mask.to(x.dtype)  # of bool, or of two dtypes, it takes eight times as long
