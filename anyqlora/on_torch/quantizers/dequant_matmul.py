"""The product with a packed weight: dequantized in forward and again in backward, never kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def dequant_matmul(
    x: torch.Tensor,
    dequantize: Callable[[], torch.Tensor],
    *,
    transposed: bool = True,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + bias, or x W when not `transposed`, with W = dequantize(); in autocast's dtype where that is on, else in
    x's.

    No gradient reaches the bias.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return _Product.apply(x, dequantize, transposed, bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dequantize, transposed, bias):
        ctx.dequantize, ctx.transposed = dequantize, transposed
        weight = dequantize().to(x.dtype)
        return F.linear(x, weight if transposed else weight.T, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient):
        weight = ctx.dequantize().to(gradient.dtype)
        return gradient @ (weight if ctx.transposed else weight.T), None, None, None
