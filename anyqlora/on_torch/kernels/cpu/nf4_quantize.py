"""bitsandbytes' 4-bit codes on a CPU, the same bits: in C a fortieth of its time, and by a table, which needs no
compiler, a quarter.
"""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor

import torch
from bitsandbytes import functional as bnb

from anyqlora.on_torch.kernels.cpu import bindings

BLOCK = 64
PIECE = 1 << 17  # weights at a time: they stay in a core's caches
CELLS = (
    512  # of the table for each unit: in none of them lie two borders between codes (fp4's nearest are 0.0026 apart)
)


def quantize_4bit(weight: torch.Tensor, kind: str, is_native: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [n / 2, 1], scales float32 [n / 64]) of a flat weight [n], equal to `reference`, which is called for
    what is not here: another device, a last block that is not full, weights that are not finite. is_native: in C.
    """
    if weight.device.type != "cpu" or len(weight) % BLOCK:
        return reference(weight, kind)
    if is_native:
        codes, scales = bindings.quantize_4bit(
            weight if weight.dtype == torch.bfloat16 else weight.float(), *_steps(kind)
        )
        return (codes.unsqueeze(1), scales) if bool(scales.isfinite().all()) else reference(weight, kind)
    codes, scales = torch.empty(len(weight) // 2, dtype=torch.uint8), torch.empty(len(weight) // BLOCK)
    threads = torch.get_num_threads()
    size = -(-len(weight) // threads // BLOCK) * BLOCK
    parts = list(zip(weight.split(size), codes.split(size // 2), scales.split(size // BLOCK), strict=True))
    if threads == 1 or len(weight) <= PIECE:
        is_filled = [_fill(*part, kind) for part in parts]
    else:
        # Each thread has a part of its own. Split over threads by torch, these short operations end in waiting for one
        # another, and where other processes run that takes 10 to 50 times as long as the arithmetic.
        try:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                is_filled = list(pool.map(lambda part: _fill(*part, kind), parts))
        finally:
            torch.set_num_threads(threads)
    return (codes.unsqueeze(1), scales) if all(is_filled) else reference(weight, kind)


def _fill(weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, kind: str) -> bool:
    """Put the codes and scales of a flat weight where they belong. False where a weight is not finite."""
    below, above, border = _table(kind)
    # Of one piece: fresh pages for every intermediate result took longer than the arithmetic.
    buffers = [
        torch.empty(min(PIECE, len(weight)), dtype=dtype)
        for dtype in (torch.float32, torch.float32, torch.int32, torch.bool, torch.uint8, torch.uint8)
    ]
    for first in range(0, len(weight), PIECE):
        piece = weight[first : first + PIECE]
        x, y, cell, is_beyond, low, high = (buffer[: len(piece)] for buffer in buffers)
        blocks = x.copy_(piece).view(-1, BLOCK)
        scale = torch.amax(
            torch.abs(x, out=y).view(-1, BLOCK), 1, out=scales[first // BLOCK : (first + len(x)) // BLOCK]
        )
        if not bool(scale.isfinite().all()):
            return False
        blocks.mul_((1.0 / scale.clamp(min=1e-38)).unsqueeze(1)).clamp_(-1, 1)
        cell.copy_(torch.mul(x, CELLS, out=y).add_(CELLS))
        torch.gt(x, torch.index_select(border, 0, cell, out=y), out=is_beyond)
        code = torch.where(
            is_beyond,
            torch.index_select(above, 0, cell, out=high),
            torch.index_select(below, 0, cell, out=low),
            out=low,
        )
        pairs = code.view(torch.int16)  # the first of two codes goes into the upper half of a byte
        codes[first // 2 : (first + len(x)) // 2] = (pairs << 4).bitwise_or_(pairs >> 8)
    return True


def reference(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """bitsandbytes' own: the nearest of 16 values, found by searching their midpoints."""
    codes, state = bnb.quantize_4bit(weight.float(), blocksize=BLOCK, quant_type=kind)
    return codes, state.absmax


@functools.cache
def _borders(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The midpoints between neighbouring values, float32 [15], and the codes [16] of the values in their order."""
    values = bnb.get_4bit_type(kind, device="cpu")
    order = torch.argsort(values)
    return (values[order[:-1]] + values[order[1:]]) / 2, order


@functools.cache
def _steps(kind: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What `bindings.quantize_4bit` needs to know of the values."""
    borders, order = _borders(kind)
    return borders, order.diff().int(), int(order[0])


@functools.cache
def _table(kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each cell of [-1, 1] the code up to the border that lies in it, the code beyond it, and the border (infinity:
    there is none).
    """
    borders, order = _borders(kind)
    cells = (
        (borders * CELLS).add_(CELLS).to(torch.int32)
    )  # by the arithmetic that weights go through, which keeps their order
    number = torch.arange(2 * CELLS + 1)
    rank = (cells[None] < number[:, None]).sum(1)  # borders below the cell
    border = torch.full((len(number),), math.inf)
    border[cells.long()] = borders
    codes = order.to(torch.uint8)
    return codes[rank], codes[(rank + 1).clamp(max=15)], border
