"""4-bit weights to 16 or 32 bits in one launch, double-quantized scales included (Triton)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

TILE = 64  # blocks of weights that a program takes: 64 x 64 weights are 2 KiB of codes


def dequantize(codes: torch.Tensor, state: QuantState, out: torch.Tensor | None = None) -> torch.Tensor:
    """The weight of `codes` (uint8 [n / 2, 1], high nibble first), of state.shape, in state.dtype or that of `out`,
    which is written to.

    Bit-equal to `reference`: a product and, for double-quantized scales, a product and a sum before it, each rounded to
    float32.
    """
    out = torch.empty(state.shape, dtype=state.dtype, device=codes.device) if out is None else out
    if out.numel() != state.shape.numel() or not out.is_contiguous():
        raise ValueError(f"a contiguous buffer of {state.shape.numel()} numbers is needed, not {tuple(out.shape)}")
    nested = state.state2 is not None
    scales, offset = (state.state2, state.offset) if nested else (state, state.absmax)
    blocks = triton.cdiv(out.numel(), state.blocksize)
    _dequantize[(triton.cdiv(blocks, TILE),)](
        codes,
        state.code,
        state.absmax,
        scales.code,
        scales.absmax,
        offset,
        out,
        codes.numel(),
        out.numel(),
        NESTED=nested,
        BLOCK=state.blocksize,
        SCALES=scales.blocksize,
        TILE=TILE,
        enable_fp_fusion=False,
    )  # a fused multiply-add rounds once where the definition rounds twice
    return out.view(state.shape)


def reference(codes: torch.Tensor, state: QuantState) -> torch.Tensor:
    """What `dequantize` computes, in steps that anybody can follow."""
    nibbles = (
        torch.stack([codes.flatten() >> 4, codes.flatten() & 15], 1).flatten()[: state.shape.numel()].long()
    )  # [n]
    absmax = state.absmax
    if state.state2 is not None:
        levels = state.state2.code[absmax.long()]
        absmax = levels * state.state2.absmax.repeat_interleave(state.state2.blocksize)[: len(levels)] + state.offset
    return (
        (state.code[nibbles] * absmax.repeat_interleave(state.blocksize)[: len(nibbles)])
        .to(state.dtype)
        .view(state.shape)
    )


@triton.jit
def _dequantize(
    codes,
    levels,
    absmax,
    scale_levels,
    scale_absmax,
    offset,
    out,
    size,
    n,
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALES: tl.constexpr,
    TILE: tl.constexpr,
):
    blocks = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    exists = blocks * BLOCK < n
    scale = tl.load(absmax + blocks, exists, other=0)  # [TILE]: float32, or the 8-bit codes of what follows
    if NESTED:
        level = tl.load(scale_levels + scale.to(tl.int32))
        scale = level * tl.load(scale_absmax + blocks // SCALES, exists, other=0.0) + tl.load(offset)
    bytes = blocks[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]  # [TILE, BLOCK / 2]
    both = tl.load(codes + bytes, bytes < size, other=0).to(tl.int32)
    pairs = tl.interleave(tl.load(levels + (both >> 4)), tl.load(levels + (both & 15)))  # [TILE, BLOCK]
    weights = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + weights, (pairs * scale[:, None]).to(out.dtype.element_ty), weights < n)
