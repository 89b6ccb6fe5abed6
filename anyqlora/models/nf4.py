"""NF4 in numpy: the codes and scales that bitsandbytes makes, and what they stand for, for frameworks that bitsandbytes
does not know.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

BLOCK, SCALES_BLOCK = 64, 256  # weights per scale; scales per scale of scales
CHUNK = 1 << 22  # weights quantized at a time
LEVELS = np.array(
    [  # QLoRA (Dettmers et al. 2023), appendix E: quantiles of a normal distribution, zero among them
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)


@dataclass
class Packed:
    """codes: uint8 [ceil(n / 2)], the first of two weights in the high half; absmax: float32 [ceil(n / 64)]; shape: of
    the weight.
    """

    codes: np.ndarray
    absmax: np.ndarray
    shape: tuple[int, ...]


def dynamic_map() -> np.ndarray:
    """float32 [256], ascending: the 8-bit dynamic type of Dettmers (2015), signed: a sign, an exponent in unary, and
    what is left of the byte as a fraction. Scales of scales are its multiples.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent
        step, numbers = float(np.float32(0.9) / np.float32(count)), np.arange(count + 1)
        # from both ends and rounded once, as torch's linspace: the last bit of a level is the same as there
        edges = np.where(
            2 * numbers < count + 1, float(np.float32(0.1)) + step * numbers, 1 - step * (count - numbers)
        ).astype(np.float32)
        means = (edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (exponent - 6))
        values += [sign * mean for mean in means.tolist() for sign in (1, -1)]
    return np.sort(np.array(values, np.float32))


def codes(blocks: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The number of the nearest level for each of float32 `blocks` in [-1, 1]."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, blocks).astype(np.uint8)


def scaled(values: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 [n] as blocks [ceil(n / block), block] divided by their largest magnitude, and those magnitudes."""
    padded = np.zeros(-(-len(values) // block) * block, np.float32)
    padded[: len(values)] = values
    blocks = padded.reshape(-1, block)
    absmax = np.abs(blocks).max(1)
    inverse = np.divide(np.float32(1), absmax, out=np.zeros_like(absmax), where=absmax > 0)
    return blocks * inverse[:, None], absmax


def pack(weight: np.ndarray, double_quant: bool) -> Packed:
    """`weight` (float32, any shape) as bitsandbytes packs it."""
    flat = np.ascontiguousarray(weight, np.float32).reshape(-1)
    halves, absmax = [], []
    for start in range(0, len(flat), CHUNK):
        blocks, largest = scaled(flat[start : start + CHUNK], BLOCK)
        chunk = codes(blocks, LEVELS).reshape(-1)[: len(flat) - start]
        chunk = np.append(chunk, np.uint8(7)) if len(chunk) % 2 else chunk
        halves.append(chunk[0::2] << 4 | chunk[1::2])
        absmax.append(largest)
    scales = np.concatenate(absmax)
    return Packed(np.concatenate(halves), rounded(scales) if double_quant else scales, weight.shape)


def rounded(absmax: np.ndarray) -> np.ndarray:
    """Scales as double quantization keeps them: about their mean, a byte each, in blocks of 256.

    torch sums in another order, so that the mean and with it a scale may differ from bitsandbytes' in its last bits;
    what is read from one file is equal on both.
    """
    offset = absmax.mean(dtype=np.float32)
    blocks, largest = scaled(absmax - offset, SCALES_BLOCK)
    levels = dynamic_map()
    return (levels[codes(blocks, levels)] * largest[:, None]).reshape(-1)[: len(absmax)] + offset


def from_files(read, name: str) -> Packed:
    """The weight `name` of a checkpoint that bitsandbytes wrote; `read(key)` gives one of its arrays."""
    state = json.loads(bytes(read(f"{name}.quant_state.bitsandbytes__nf4")).decode())
    absmax = read(f"{name}.absmax")
    if absmax.dtype == np.uint8:
        nested, levels = read(f"{name}.nested_absmax"), read(f"{name}.nested_quant_map")
        scales = levels[absmax] * np.repeat(nested, state["nested_blocksize"])[: len(absmax)]
        absmax = scales.astype(np.float32) + np.float32(state["nested_offset"])
    return Packed(read(name).reshape(-1), absmax.astype(np.float32), tuple(state["shape"]))


def unpack(packed: Packed) -> np.ndarray:
    """float32, of the shape that was packed."""
    indices = np.empty(2 * len(packed.codes), np.uint8)
    indices[0::2], indices[1::2] = packed.codes >> 4, packed.codes & 15
    count = int(np.prod(packed.shape))
    values = LEVELS[indices[:count]] * np.repeat(packed.absmax, BLOCK)[:count]
    return values.reshape(packed.shape)
