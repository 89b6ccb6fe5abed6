"""Rotary position embedding, forward and backward in one pass each (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anyqlora.on_torch.kernels.reference import Rotation, is_rotatable, promoted
from anyqlora.on_torch.kernels.reference import rotate as reference


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`reference`, bit for bit, of x [B, T, H, D] with its gradient; nothing is saved but cos and sin.

    It does not write over x: that would save a tensor that is freed at once anyway, and autograd forbids it where x
    comes from a function of several outputs. Where cos and sin are of another width than x, or neither of its dtype nor
    float32, torch's own operators run, or refuse them.
    """
    return Rotation.apply(x, cos, sin, _launch) if is_rotatable(x, cos, sin) else reference(x, cos, sin)


def _launch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_backward: bool) -> torch.Tensor:
    x = x.contiguous()
    out, (batch, length, heads, width) = torch.empty_like(x), x.shape
    _rotate[(batch * length,)](
        x,
        out,
        cos,
        sin,
        heads,
        width,
        cos.shape[0] * length,
        BACKWARD=is_backward,
        HEADS=triton.next_power_of_2(heads),
        HALF=triton.next_power_of_2(width // 2),
        enable_fp_fusion=False,
    )  # the reference rounds each product, to the dtype of cos
    return out


def rotate_as_models(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same with the bits of a model's own, forward and back: float32 angles give float32."""
    return rotate(x, cos, sin) if cos.dtype == x.dtype else promoted(x, cos, sin)


@triton.jit
def _rotate(x, out, cos, sin, heads, width, positions, BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    token, half = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    mask, head = half < width // 2, tl.arange(0, HEADS)
    at = (token % positions) * width + half
    cos1, sin1 = tl.load(cos + at, mask, other=0.0).to(tl.float32), tl.load(sin + at, mask, other=0.0).to(tl.float32)
    at += width // 2
    cos2, sin2 = tl.load(cos + at, mask, other=0.0).to(tl.float32), tl.load(sin + at, mask, other=0.0).to(tl.float32)
    at = (token * heads + head)[:, None] * width + half[None, :]  # [HEADS, HALF]
    exists = (head < heads)[:, None] & mask[None, :]
    dtype: tl.constexpr = cos.dtype.element_ty
    x1 = tl.load(x + at, exists, other=0.0).to(tl.float32)
    x2 = tl.load(x + at + width // 2, exists, other=0.0).to(tl.float32)
    if BACKWARD:  # the transpose: x1 went into the second half by sin2, x2 into the first by -sin1
        y1 = (x1 * cos1).to(dtype).to(tl.float32) + (x2 * sin2).to(dtype).to(tl.float32)
        y2 = (x2 * cos2).to(dtype).to(tl.float32) - (x1 * sin1).to(dtype).to(tl.float32)
    else:
        y1 = (x1 * cos1).to(dtype).to(tl.float32) - (x2 * sin1).to(dtype).to(tl.float32)
        y2 = (x2 * cos2).to(dtype).to(tl.float32) + (x1 * sin2).to(dtype).to(tl.float32)
    tl.store(out + at, y1.to(out.dtype.element_ty), exists)
    tl.store(out + at + width // 2, y2.to(out.dtype.element_ty), exists)
