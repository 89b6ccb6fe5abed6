"""Rows as float8 codes and their scales, in one launch (Triton): a row is read twice, the second
time from the caches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX = torch.finfo(torch.float8_e4m3fn).max
BLOCK = 1024


def quantize_rows(x: torch.Tensor, column_scales: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`frozen_matmul.quantize_rows` of x [M, K] as float8, by the same arithmetic: codes [M, K], scales float32 [M]."""
    x = x.contiguous()
    codes, scales = (
        torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty(len(x), device=x.device),
    )
    if len(x):
        _quantize_rows[(len(x),)](
            x,
            column_scales,
            codes,
            scales,
            x.shape[1],
            MAX=MAX,
            HAS_COLUMN_SCALES=column_scales is not None,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    return codes, scales


@triton.jit
def _quantize_rows(
    x, column_scales, codes, scales, width, MAX: tl.constexpr, HAS_COLUMN_SCALES: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x += row * width
    codes += row * width
    largest, nan = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        exact = tl.load(x + at, at < width, other=0.0).to(tl.float32)
        if HAS_COLUMN_SCALES:
            exact *= tl.load(column_scales + at, at < width, other=0.0)
        largest = tl.maximum(largest, tl.abs(exact))
        nan += exact - exact  # NaN where a number is not finite
    scale = tl.div_rn(tl.max(largest, 0), MAX) + tl.sum(nan, 0)
    is_finite = scale == scale
    per_code = tl.where(is_finite & (scale > 0), tl.div_rn(1.0, scale), 0.0)
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        exact = tl.load(x + at, at < width, other=0.0).to(tl.float32)
        if HAS_COLUMN_SCALES:
            exact *= tl.load(column_scales + at, at < width, other=0.0)
        tl.store(codes + at, tl.where(is_finite, exact * per_code, 0.0).to(codes.dtype.element_ty), at < width)
