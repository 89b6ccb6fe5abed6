"""LoRA together with its frozen weight: linear layers that read one input, as one function with a backward written by
hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from anyqlora.core.dropout import BUCKETS, representable, threshold
from anyqlora.on_torch.kernels.dropout import token_mask
from anyqlora.on_torch.kernels.frozen_matmul import FrozenMatmul, FullMatmul, stacked

FULL = FullMatmul()
# Devices on which torch draws no numbers of 64 bits ("random_mps_ currently does not handle the lowest() -> max()
# range").
WITHOUT_INT64 = ("mps",)


class LoraLinear(NamedTuple):
    """One linear layer: y = W x + bias + scale B A x, with W [out, in] frozen, A [rank, in] and B [out, rank] learned.

    weight() is what the group's FrozenMatmul makes of W; is_cached: it is in memory, and not made for each product.
    """

    weight: Callable[[], object]
    bias: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    is_cached: bool = False


class Dropout(NamedTuple):
    """What is dropped of x [..., in] of M tokens: at this rate, by the tokens' keys int64 [M], drawn by whose `kernels`
    (dropout.token_mask); without keys by torch's own generator.
    """

    rate: float
    keys: torch.Tensor | None = None
    kernels: str = "portable"


NO_DROPOUT = Dropout(0.0)


def lora_linears(
    x: torch.Tensor, layers: Sequence[LoraLinear], dropout: Dropout = NO_DROPOUT, matmul: FrozenMatmul = FULL
) -> tuple[torch.Tensor, ...]:
    """Each layer's [..., out] of x [..., in], in x's dtype; equal to `reference` where nothing is dropped.

    For backward x is saved once, each layer's hidden activations [..., rank], and a byte for each value of x where
    there is dropout: layers of one input drop the same values. Everything is computed in x's dtype; W is asked for in
    forward and again in backward, and not saved.
    """
    factors = [factor for layer in layers for factor in (layer.a, layer.b)]
    with torch.autocast(x.device.type, enabled=False):
        fused = matmul.fusable(x, layers, 1 - representable(dropout.rate))
        if fused:
            return _FusedLoraLinears.apply(x, tuple(layers), fused, dropout, matmul, *factors)
        return _LoraLinears.apply(x, tuple(layers), dropout, matmul, *factors)


def reference(x: torch.Tensor, layers: Sequence[LoraLinear]) -> tuple[torch.Tensor, ...]:
    """What `lora_linears` computes without dropout, as autograd differentiates it."""
    return tuple(
        F.linear(x, layer.weight(), layer.bias) + layer.scale * (x @ layer.a.to(x.dtype).T @ layer.b.to(x.dtype).T)
        for layer in layers
    )


class _LoraLinears(torch.autograd.Function):
    """The products with A are one for all layers: their A lie one below the other, [R, in], R the
    sum of their ranks.
    """

    @staticmethod
    def forward(ctx, x, layers, dropout, matmul, *factors):
        flat = x.reshape(-1, x.shape[-1])  # [M, in]
        mask, keep_rate = draw_mask(flat, dropout), 1 - representable(dropout.rate)
        scales = [layer.scale / keep_rate for layer in layers]
        lora_hidden = matmul.lora_down(apply_mask(flat, mask), factors[::2], scales)  # [M, R]
        prepared, outputs = matmul.prepare_input(x), []
        for layer, b, hidden in zip(layers, factors[1::2], _split_hidden(lora_hidden, factors), strict=True):
            # No view of anything: Llama 4 adds to its shared expert's output in place.
            outputs.append(matmul.forward(prepared, layer.weight(), layer.bias, (hidden, b)))
        ctx.layers, ctx.matmul, ctx.keep_rate = layers, matmul, keep_rate
        ctx.save_for_backward(x, mask, lora_hidden, *factors)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grad_outputs):
        x, mask, lora_hidden, *factors = ctx.saved_tensors
        matmul, flat = ctx.matmul, x.reshape(-1, x.shape[-1])
        grad_factors, grad_hidden, used = [None] * len(factors), [], {}  # of those layers whose output was used
        hidden_of = _split_hidden(lora_hidden, factors)
        for number, (layer, hidden, grad_y) in enumerate(zip(ctx.layers, hidden_of, grad_outputs, strict=True)):
            if grad_y is None:
                continue
            used[number] = grad_y = grad_y.reshape(-1, grad_y.shape[-1])  # [M, out]
            b = factors[2 * number + 1]
            grad_hidden.append(matmul.lora_hidden_grad(grad_y, b, layer.scale / ctx.keep_rate))  # [M, rank]
            grad_factors[2 * number + 1] = matmul.lora_weight_grad(hidden, grad_y, transposed=True).to(b.dtype)
        used_a = [factors[2 * number] for number in used]
        grad_hidden, grad_x = grad_hidden[0] if len(used) == 1 else torch.cat(grad_hidden, 1), None
        stacked_grad = matmul.lora_weight_grad(grad_hidden, apply_mask(flat, mask))
        for number, a, grad_a in zip(used, used_a, stacked_grad.split([len(a) for a in used_a]), strict=True):
            grad_factors[2 * number] = grad_a.to(a.dtype)
        if ctx.needs_input_grad[0]:
            lora = grad_hidden, stacked(used_a)
            for number, grad_y in used.items():
                is_last = number == max(used) and mask is None
                grad_x = matmul.backward(grad_y, ctx.layers[number].weight(), grad_x, lora if is_last else None)
            if mask is not None:
                grad_x += apply_mask(matmul.lora_input_grad(*lora), mask)
        return None if grad_x is None else grad_x.view(x.shape), None, None, None, *grad_factors


class _FusedLoraLinears(torch.autograd.Function):
    """The same numbers by `forward_fused` and `backward_fused`: where tokens are few, calls take as long as what they
    compute.
    """

    @staticmethod
    def forward(ctx, x, layers, fused, dropout, matmul, *factors):
        flat = x.reshape(-1, x.shape[-1])  # [M, in]
        mask = draw_mask(flat, dropout)
        outputs, lora_hidden = matmul.forward_fused(flat, apply_mask(flat, mask), fused, x.shape[:-1])
        ctx.weights, ctx.matmul = [layer.weight for layer in layers], matmul
        ctx.fused = [layer._replace(weight=None) for layer in fused]
        ctx.save_for_backward(x, mask, lora_hidden, *factors)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grad_outputs):
        x, mask, lora_hidden, *factors = ctx.saved_tensors
        flat, grad_factors = x.reshape(-1, x.shape[-1]), [None] * len(factors)
        used = [number for number, grad_y in enumerate(grad_outputs) if grad_y is not None]
        layers = [
            ctx.fused[number]._replace(weight=ctx.weights[number](), a=factors[2 * number], b=factors[2 * number + 1])
            for number in used
        ]
        grad_y = [grad_outputs[number].reshape(-1, grad_outputs[number].shape[-1]) for number in used]  # [M, out]
        grad_x, grad_dropped, grad_a, grad_b = ctx.matmul.backward_fused(
            apply_mask(flat, mask), layers, lora_hidden, grad_y, ctx.needs_input_grad[0], mask is not None
        )
        for number, *both in zip(used, grad_a.split([layer.a.shape[0] for layer in layers]), grad_b, strict=True):
            grad_factors[2 * number : 2 * number + 2] = both
        if grad_dropped is not None:
            grad_x += apply_mask(grad_dropped, mask)
        return None if grad_x is None else grad_x.view(x.shape), None, None, None, None, *grad_factors


def _split_hidden(lora_hidden: torch.Tensor, factors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Each layer's columns of [M, R]."""
    return lora_hidden.split([len(a) for a in factors[::2]], 1)


def draw_mask(x: torch.Tensor, dropout: Dropout) -> torch.Tensor | None:
    """What stays of x [M, in]: uint8, 1 or 0; None: all."""
    if not dropout.rate:
        return None
    if dropout.keys is not None:
        return token_mask(dropout.keys, x.shape[1], dropout.rate, kernels=dropout.kernels)
    stays = _random(x.numel(), x.device) >= threshold(dropout.rate) - BUCKETS // 2
    return stays.view(torch.uint8).view(x.shape)


def _random(count: int, device: torch.device) -> torch.Tensor:
    """Any int16 [count]: four from each of the generator's 64-bit numbers, where it has such."""
    if device.type in WITHOUT_INT64:
        return torch.empty(count, dtype=torch.int16, device=device).random_(-BUCKETS // 2, BUCKETS // 2)
    random_words = torch.empty(-(-count // 4), dtype=torch.int64, device=device)
    return random_words.random_(-(1 << 63), None).view(torch.int16)[:count]


def apply_mask(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """x without what the mask drops. By how much the rest grows is left to LoRA's scales."""
    return x if mask is None else x * mask.to(x.dtype)  # of bool, or of two dtypes, it takes eight times as long
