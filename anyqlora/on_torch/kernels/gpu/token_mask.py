"""Dropout's masks by tokens' keys (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 64, 64  # of the tile that a program looks at


def token_mask(keys: torch.Tensor, width: int, below: int, begin: int = 0) -> torch.Tensor:
    """`dropout.token_mask` of keys int64 [M]; random numbers below `below` drop."""
    mask = torch.empty(len(keys), width, dtype=torch.uint8, device=keys.device)
    if mask.numel():
        grid = triton.cdiv(len(keys), ROWS), triton.cdiv(width + begin % 2, COLUMNS)
        _token_mask[grid](keys, mask, len(keys), width, begin, below, ROWS=ROWS, COLUMNS=COLUMNS)
    return mask


@triton.jit
def tile_mask(keys, rows, m, first, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Whether each number of a tile [ROWS, COLUMNS] stays, from `rows` and its first column, an even one."""
    key = tl.load(keys + rows, rows < m, other=0)[:, None]
    pairs = (first // 2 + tl.arange(0, COLUMNS // 2)).to(tl.uint32)[None, :]
    h = pairs * 0x9E3779B9 + (key & 0xFFFFFFFF).to(tl.uint32)
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) ^ ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    h = (h ^ (h >> 15)) * 0x735A2D97
    h = h ^ (h >> 15)
    halves = tl.join(h & 0xFFFF, h >> 16).to(tl.int32)  # [ROWS, COLUMNS / 2, 2]
    return tl.reshape(halves, (ROWS, COLUMNS)) >= threshold


@triton.jit
def _token_mask(keys, mask, m, k, begin, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    odd = begin % 2  # tiles begin at even columns, one before the first of an odd `begin`
    first = tl.program_id(1) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    stays = tile_mask(keys, rows, m, begin - odd + first, threshold, ROWS, COLUMNS).to(tl.uint8)
    place = columns[None, :] - odd
    tl.store(mask + rows[:, None] * k + place, stays, (rows[:, None] < m) & (place >= 0) & (place < k))
