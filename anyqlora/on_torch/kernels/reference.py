"""What kernels compute, in torch's own operators: each kernel is compared with it, and it with a model's own module
before that is replaced.
"""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0, is_late: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis (Zhang and Sennrich 2019).

    The quotient is rounded to x's dtype before the product (Llama), or the product after (`is_late`: Gemma, with offset
    1; OLMo 2).
    """
    exact = x.float()
    normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (offset + weight.float())).to(x.dtype) if is_late else weight * normed.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x cos + (-x2, x1) sin, with x1 and x2 the halves of x [B, T, H, D]; cos, sin [B or 1, T, D] (Su et al. 2021).

    Where these are float32 and x has 16 bits, the sum alone is rounded, to x's dtype.
    """
    return promoted(x.to(torch.promote_types(x.dtype, cos.dtype)), cos, sin).to(x.dtype)


def promoted(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same in the wider dtype of both, as models write it: what comes back for x is rounded part by part."""
    x1, x2 = x.chunk(2, -1)
    return x * cos.unsqueeze(2) + torch.cat((-x2, x1), -1) * sin.unsqueeze(2)


def is_rotatable(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether kernels, which go by x's width, can read cos and sin: they rotate all of each head, and are of x's dtype
    or float32.
    """
    return (
        cos.shape[-1] == sin.shape[-1] == x.shape[-1]
        and cos.dtype == sin.dtype
        and cos.dtype in (x.dtype, torch.float32)
        and x.dtype != torch.float64
        and x.device == cos.device == sin.device
    )


class Rotation(torch.autograd.Function):
    """`rotate` by `kernel(x, cos, sin, is_backward=)`, which computes it or its transpose; nothing is saved but cos and
    sin.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, kernel):
        angles = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(*angles)
        ctx.kernel = kernel
        return kernel(x, *angles, is_backward=False)

    @staticmethod
    def backward(ctx, grad_y):
        return ctx.kernel(grad_y, *ctx.saved_tensors, is_backward=True), None, None, None


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate sigmoid(gate) * up, of one shape and dtype (Shazeer 2020)."""
    return torch.nn.functional.silu(gate) * up
