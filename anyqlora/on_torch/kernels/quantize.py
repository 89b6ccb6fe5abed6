"""bitsandbytes' 4-bit codes on a CPU, by a table: the same bits in a sixth of the time."""

from __future__ import annotations

import functools
import math

import torch
from bitsandbytes import functional as bnb

BLOCK = 64
PIECE = 1 << 17  # weights at a time: they stay in a core's caches
CELLS = 512  # of the table for each unit: in none of them lie two borders between codes (fp4's nearest are 0.0026 apart)


def quantize_4bit(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [n / 2, 1], scales float32 [n / 64]) of a flat weight [n], equal to `defined`, which is called for what is not
    here: another device, a last block that is not full, weights that are not finite."""
    if weight.device.type != "cpu" or len(weight) % BLOCK:
        return defined(weight, kind)
    below, above, border = _table(kind)
    codes, scales = torch.empty(len(weight) // 2, dtype=torch.uint8), torch.empty(len(weight) // BLOCK)
    for first in range(0, len(weight), PIECE):
        blocks = weight[first : first + PIECE].float().view(-1, BLOCK)
        scale = blocks.abs().amax(1)
        if not bool(scale.isfinite().all()):
            return defined(weight, kind)
        x = (blocks * (1.0 / scale.clamp(min=1e-38)).unsqueeze(1)).clamp_(-1, 1).view(-1)
        cell = (x * CELLS).add_(CELLS).to(torch.int32)
        code = torch.where(x > border.index_select(0, cell), above.index_select(0, cell), below.index_select(0, cell))
        pairs = code.view(torch.int16)  # the first of two codes goes into the upper half of a byte
        codes[first // 2 : (first + len(x)) // 2] = ((pairs << 4) | (pairs >> 8)).to(torch.uint8)
        scales[first // BLOCK : (first + len(x)) // BLOCK] = scale
    return codes.unsqueeze(1), scales


def defined(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """bitsandbytes' own: the nearest of 16 values, found by searching their midpoints."""
    codes, state = bnb.quantize_4bit(weight.float(), blocksize=BLOCK, quant_type=kind)
    return codes, state.absmax


@functools.cache
def _table(kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each cell of [-1, 1] the code up to the border that lies in it, the code beyond it, and the border (infinity: there is none)."""
    values = bnb.get_4bit_type(kind, device="cpu")
    order = torch.argsort(values)
    borders = (values[order[:-1]] + values[order[1:]]) / 2
    cells = (borders * CELLS).add_(CELLS).to(torch.int32)  # by the arithmetic that weights go through, which keeps their order
    number = torch.arange(2 * CELLS + 1)
    rank = (cells[None] < number[:, None]).sum(1)  # borders below the cell
    border = torch.full((len(number),), math.inf)
    border[cells.long()] = borders
    codes = order.to(torch.uint8)
    return codes[rank], codes[(rank + 1).clamp(max=15)], border
