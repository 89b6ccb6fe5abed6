"""Products with a frozen weight: y = x W^T and the gradient of x, in x's dtype or with both factors rounded to 8 bits.

In 8 bits a token's numbers share a scale, and so do the weights of an output: y = (codes of x) (codes of W)^T, times both scales. The
gradient of x sums over outputs, whose scales therefore go into the gradient of y before that is rounded, a token at a time: the same codes of
W serve both ways. Sums are exact (int32) or float32.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
import torch.nn.functional as F

from ...memory import ROWS
from . import native

FLOAT8 = torch.float8_e4m3fn
ALIGNED = 16  # cuBLAS and CUTLASS multiply float8 where both sides of a weight are multiples of it


class Products(Protocol):
    """How a group of linears that read one x [..., in] multiplies. What `weight` makes of W [out, in], and `read` of x, is its own affair."""

    def takes(self, w: torch.Tensor) -> bool:
        """Whether it can multiply by W at all."""

    def weight(self, w: torch.Tensor): ...
    def read(self, x: torch.Tensor): ...
    def forward(self, read, weight, bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + bias, [..., out], and no view of anything."""

    def backward(self, g: torch.Tensor, weight, to: torch.Tensor | None) -> torch.Tensor:
        """`to` + g W, [M, in] of g [M, out], written over `to`."""


class Whole:
    """Products in x's dtype."""

    def takes(self, w):
        return True

    def weight(self, w):
        return w

    def read(self, x):
        return x

    def forward(self, read, weight, bias):
        return F.linear(read, weight.to(read.dtype), None if bias is None else bias.to(read.dtype))

    def backward(self, g, weight, to):
        weight = weight.to(g.dtype)
        return g @ weight if to is None else to.addmm_(g, weight)


class Int8(Whole):
    """Products of int8 codes, summed in int32: twice bf16's rate on processors with AVX512-VNNI or AMX."""

    def __init__(self, is_native: bool = False):
        """`is_native`: what is around the products is done in C."""
        self.is_native = is_native

    def weight(self, w):
        return self._coded(w)

    def read(self, x):
        return *self._coded(x.reshape(-1, x.shape[-1])), x

    def forward(self, read, weight, bias):
        (codes, scales, x), (of_weight, of_outputs) = read, weight
        y = x.new_empty(*x.shape[:-1], len(of_weight))
        self._multiply(codes, of_weight.T, scales, of_outputs, y.view(-1, len(of_weight)))
        return y if bias is None else y.add_(bias)

    def backward(self, g, weight, to):
        of_weight, of_outputs = weight
        codes, scales = self._coded(g, of_outputs)
        out = g.new_empty(len(g), of_weight.shape[1]) if to is None else to
        self._multiply(codes, of_weight, scales, None, out, is_added=to is not None)
        return out

    def _coded(self, x, columns=None):
        return native.int8_rows(x, columns) if self.is_native and native.is_for(x) else coded(x, torch.int8, columns)

    def _multiply(self, left, right, of_rows, of_columns, out, *, is_added=False):
        made = left.new_empty(min(ROWS, len(left)), right.shape[1], dtype=torch.int32)
        for some, scales, to in zip(left.split(ROWS), of_rows.split(ROWS), out.split(ROWS), strict=True):
            sums = torch._int_mm(some, right, out=made[: len(some)])
            if self.is_native and native.is_for(out):
                native.int8_out(sums, scales, of_columns, to, is_added=is_added)
            else:
                exact = sums * scales[:, None] * (1 if of_columns is None else of_columns)
                to.copy_(exact + to.float() if is_added else exact)


class Float8(Whole):
    """Products of float8 codes (e4m3): twice bf16's rate on NVIDIA GPUs of compute capability 8.9 and later.

    Sums are those of the tensor cores, a little short of float32 (`use_fast_accum`): with a scale for each row, torch is fast in no other way.
    """

    def __init__(self, is_triton: bool = False):
        """`is_triton`: rows are coded in one launch each time, by float8.py."""
        self.coded = functools.partial(coded, kind=FLOAT8)
        if is_triton:
            from . import float8

            self.coded = float8.coded

    def takes(self, w):
        return not (w.shape[0] % ALIGNED or w.shape[1] % ALIGNED)

    def weight(self, w):
        return _Float8Weight(*self.coded(w))

    def read(self, x):
        return *self.coded(x.reshape(-1, x.shape[-1])), x

    def forward(self, read, weight, bias):
        codes, scales, x = read
        y = x.new_empty(*x.shape[:-1], len(weight.codes))
        torch._scaled_mm(codes, weight.codes.T, scales[:, None], weight.scales[None], out_dtype=x.dtype, use_fast_accum=True, out=y.view(-1, y.shape[-1]))
        return y if bias is None else y.add_(bias)

    def backward(self, g, weight, to):
        codes, scales = self.coded(g, columns=weight.scales)
        of_x = torch._scaled_mm(codes, weight.turned, scales[:, None], weight.ones, out_dtype=g.dtype, use_fast_accum=True)
        return of_x if to is None else to.add_(of_x)


class _Float8Weight:
    """Codes [out, in] and scales [out] of a weight; what backward needs of it is made when it is first needed."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor):
        self.codes, self.scales = codes, scales

    @functools.cached_property
    def turned(self) -> torch.Tensor:
        """The codes, a column after another: the only order in which a GPU takes the right factor."""
        return self.codes.T.contiguous().T

    @functools.cached_property
    def ones(self) -> torch.Tensor:
        return self.scales.new_ones(1, self.codes.shape[1])


def coded(x: torch.Tensor, kind: torch.dtype, columns: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (`kind`: int8 or a float8, [M, K]) of x * columns, the largest code for the largest magnitude of a row; and what a code of 1
    stands for in each row (float32 [M]).

    A row that is not all finite has codes of 0 and a scale that is not a number, so that its products are none either.
    """
    is_whole = not kind.is_floating_point
    exact = x.float() if columns is None else x.float() * columns
    scales = exact.abs().amax(1) / (torch.iinfo if is_whole else torch.finfo)(kind).max
    per_code = (1 / scales).nan_to_num(0, 0, 0)
    codes = (exact * per_code[:, None]).nan_to_num_(0, 0, 0)
    return (codes.round_() if is_whole else codes).to(kind), torch.where(scales.isfinite(), scales, torch.nan)
