"""Root-mean-square norms, forward and backward, a row in one pass (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

STRIPS = 512  # programs that share the rows where the weight learns: each sums its rows' part of the weight's gradient


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0, is_late: bool = False
) -> torch.Tensor:
    """`reference.rms_norm`, with gradients for x [..., H] and, where it wants one, weight [H]. float32 inside; rounds
    where the reference does.
    """
    return _RmsNorm.apply(x, weight, eps, offset, is_late)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, is_late):
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        x = x.contiguous()
        y = torch.empty_like(x, dtype=x.dtype if is_late else torch.promote_types(x.dtype, weight.dtype))
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        _forward[(rows,)](
            x,
            weight,
            y,
            rstd,
            width,
            eps,
            offset,
            LATE=is_late,
            WIDTH=triton.next_power_of_2(width),
            num_warps=_warps(width),
            enable_fp_fusion=False,
        )
        ctx.save_for_backward(x, weight, rstd)
        ctx.form = offset, is_late
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, weight, rstd = ctx.saved_tensors
        (offset, is_late), learns = ctx.form, ctx.needs_input_grad[1]
        rows, width = len(rstd), x.shape[-1]
        grad_x, strips = torch.empty_like(x), min(rows, STRIPS) if learns else rows
        parts = torch.empty(strips, width, dtype=torch.float32, device=x.device) if learns else rstd
        _backward[(strips,)](
            grad_y.contiguous(),
            x,
            weight,
            rstd,
            grad_x,
            parts,
            rows,
            width,
            offset,
            LATE=is_late,
            LEARNS=learns,
            WIDTH=triton.next_power_of_2(width),
            num_warps=_warps(width),
            enable_fp_fusion=False,
        )
        return grad_x, parts.sum(0).to(weight.dtype) if learns else None, None, None, None


def _warps(width: int) -> int:
    return min(max(triton.next_power_of_2(width) // 256, 1), 16)


@triton.jit
def _forward(x, weight, y, rstd, width, eps, offset, LATE: tl.constexpr, WIDTH: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask = columns < width
    values = tl.load(x + row * width + columns, mask, other=0.0)
    exact, factors = values.to(tl.float32), tl.load(weight + columns, mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(exact * exact) / width + eps)
    normed = exact * inverse
    if not LATE:
        normed = normed.to(values.dtype).to(tl.float32)
    tl.store(y + row * width + columns, (normed * (factors + offset)).to(y.dtype.element_ty), mask)
    tl.store(rstd + row, inverse)


@triton.jit
def _backward(
    grad_y,
    x,
    weight,
    rstd,
    grad_x,
    parts,
    rows,
    width,
    offset,
    LATE: tl.constexpr,
    LEARNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    strip, columns = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask = columns < width
    factors = tl.load(weight + columns, mask, other=0.0).to(tl.float32) + offset
    part = tl.zeros((WIDTH,), tl.float32)
    for row in range(strip, rows, tl.num_programs(0)):
        values = tl.load(x + row * width + columns, mask, other=0.0)
        grad = tl.load(grad_y + row * width + columns, mask, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + row)
        normed = values.to(tl.float32) * inverse
        inner = grad * factors  # the gradient of `normed`
        if not LATE:
            inner = inner.to(grad_y.dtype.element_ty).to(values.dtype).to(tl.float32)
        if LEARNS:
            part += grad * normed if LATE else grad * normed.to(values.dtype).to(tl.float32)
        inner = inverse * (inner - normed * (tl.sum(inner * normed) / width))
        tl.store(grad_x + row * width + columns, inner.to(grad_x.dtype.element_ty), mask)
    if LEARNS:
        tl.store(parts + strip * width + columns, part, mask)
