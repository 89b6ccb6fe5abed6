"""Products with a frozen weight: y = x W^T and the gradient of x, in x's dtype or with both factors rounded to 8 bits.

In 8 bits a token's numbers share a scale, and so do the weights of an output: y = (codes of x) (codes of W)^T, times both scales. The
gradient of x sums over outputs, whose scales therefore go into the gradient of y before that is rounded, a token at a time: the same codes of
W serve both ways. Sums are exact (int32) or float32.

A number that stands out makes its token's steps wide for all others. int8 therefore codes x and W spread, each 32 inputs times a Hadamard matrix
(QuaRot, arXiv 2404.00456): x H (W H)^T is x W^T, and the gradient of x is spread back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from anyqlora.on_torch.kernels.cpu import bindings
from anyqlora.planning.memory.activations import ROWS

FLOAT8 = torch.float8_e4m3fn
SPREAD = 32  # numbers over which int8 spreads one
ALIGNED = 16  # cuBLAS and CUTLASS multiply float8 where both sides of a weight are multiples of it


Narrow = tuple[
    torch.Tensor, torch.Tensor
]  # LoRA's part of a product: m [M, R], in x's dtype, and a factor, as it is learned


class Products(Protocol):
    """How a group of linears that read one x [..., in] multiplies. What `weight` makes of W [out, in], and `read` of x, is its own affair.

    LoRA's factors and what is made of them: a [R, in], b [out, R], and m [M, R] of M tokens.
    """

    def takes(self, w: torch.Tensor) -> bool:
        """Whether it can multiply by W at all."""

    def weight(self, w: torch.Tensor): ...
    def read(self, x: torch.Tensor): ...
    def forward(self, read, weight, bias: torch.Tensor | None, narrow: Narrow | None = None) -> torch.Tensor:
        """x W^T + bias + m b^T, [..., out], and no view of anything; narrow: m and b [out, R]."""

    def backward(self, g: torch.Tensor, weight, to: torch.Tensor | None, narrow: Narrow | None = None) -> torch.Tensor:
        """`to` + g W + m a, [M, in] of g [M, out], written over `to`; narrow: m and a [R, in]."""

    def into(self, x: torch.Tensor, factors: Sequence[torch.Tensor], scales: Sequence[float]) -> torch.Tensor:
        """x a^T of x [M, in] and each factor a, times its scale, side by side: [M, the sum of their ranks]."""

    def back_into(self, g: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        """scale g b, [M, R] of g [M, out]."""

    def out_of(self, m: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """m a, [M, in] of m [M, R] and a [R, in]."""

    def outer(self, m: torch.Tensor, x: torch.Tensor, is_turned: bool = False) -> torch.Tensor:
        """A factor's gradient: m^T x [R, N] of x [M, N]; is_turned: [N, R]. In x's dtype or a wider one."""

    def at_once(self, x: torch.Tensor, layers: Sequence, kept: float) -> tuple | None:
        """`layers` (lora.Linear) of x [..., in] as `forward_all` and `backward_all` take them, None where they do not; kept: the part that dropout leaves."""

    def forward_all(
        self, x: torch.Tensor, dropped: torch.Tensor, layers: Sequence, shape: Sequence[int]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Each layer's output [*shape, out], and what `into` makes of `dropped`: the numbers of all calls above, in one."""

    def backward_all(
        self,
        dropped: torch.Tensor,
        layers: Sequence,
        middles: torch.Tensor,
        of_outputs: Sequence[torch.Tensor],
        needs_x: bool,
        is_dropped: bool,
    ):
        """The gradients of x where it needs one and, is_dropped, of what was dropped from apart from it, else None; of these layers' a, one below the
        other; and of each b."""


class Whole:
    """Products in x's dtype."""

    def takes(self, w):
        return True

    def weight(self, w):
        return w

    def read(self, x):
        return x

    def forward(self, read, weight, bias, narrow=None):
        if narrow is None:
            return F.linear(read, weight.to(read.dtype), None if bias is None else bias.to(read.dtype))
        y = read.new_empty(*read.shape[:-1], len(weight))
        out = y.view(-1, len(weight))
        out.addmm_(read.reshape(-1, read.shape[-1]), weight.to(y.dtype).T, beta=self._begun(out, narrow))
        return y if bias is None else y.add_(bias)

    def backward(self, g, weight, to, narrow=None):
        of_x = g.new_empty(len(g), weight.shape[1]) if to is None else to
        return of_x.addmm_(
            g, weight.to(g.dtype), beta=self._begun(of_x, narrow, is_turned=True, is_added=to is not None)
        )

    def into(self, x, factors, scales):
        made = x @ stacked(factors).to(x.dtype).T
        for part, scale in zip(made.split([len(a) for a in factors], 1), scales, strict=True):
            part.mul_(scale)
        return made

    def back_into(self, g, b, scale):
        return (g @ b.to(g.dtype)).mul_(scale)

    def out_of(self, m, a):
        return m @ a.to(m.dtype)

    def outer(self, m, x, is_turned=False):
        made = m.T @ x
        return made.T if is_turned else made  # the other way round oneDNN takes a third longer

    def at_once(self, x, layers, kept):
        return None

    @staticmethod
    def _begun(y, narrow, is_turned=False, is_added=False) -> int:
        """Puts LoRA's part into y [M, N], is_added: to what is there. Returns 1 if y holds something, to which the frozen part is to be added.

        In this order both are summed in float32 (a bias is not, nor what `to` is added to). The other way round LoRA's is lost where it is less
        than half a step of a frozen part that is rounded, as much of it is in the first steps of a run: in bf16 their losses are 0.6 to 0.9 % higher.
        """
        if narrow is not None:
            widened(y, narrow, is_turned, is_added)
        return int(is_added or narrow is not None)


def widened(y: torch.Tensor, narrow: Narrow | None, is_turned: bool = False, is_added: bool = True) -> torch.Tensor:
    """y [..., N] with LoRA's part, m b^T or, is_turned, m a, added to it; not is_added: in place of what it holds."""
    if narrow is not None:
        middle, factor = narrow[0], narrow[1].to(y.dtype)
        y.view(-1, y.shape[-1]).addmm_(middle, factor if is_turned else factor.T, beta=int(is_added))
    return y


def stacked(factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each layer's a, one below the other: [the sum of their ranks, in]."""
    return factors[0] if len(factors) == 1 else torch.cat(tuple(factors))


@functools.lru_cache(64)
def _of_columns(scales: tuple[float, ...], ranks: tuple[int, ...]) -> torch.Tensor:
    """float32: each layer's scale for each of its columns."""
    return torch.tensor(
        [scale for scale, rank in zip(scales, ranks, strict=True) for _ in range(rank)], dtype=torch.float32
    )


class NativeWhole(Whole):
    """The same in C, bf16 on a CPU: LoRA's part is summed in the same registers, and its factors' gradients are float32."""

    def into(self, x, factors, scales):
        if not _is_narrowed(x, factors):
            return super().into(x, factors, scales)
        return bindings.narrow_product(x, stacked(factors), _of_columns(tuple(scales), tuple(len(a) for a in factors)))

    def back_into(self, g, b, scale):
        if not _is_narrowed(g, [b]):
            return super().back_into(g, b, scale)
        return bindings.narrow_product(g, b, _of_columns((scale,), (b.shape[1],)), is_turned=True)

    def out_of(self, m, a):
        return NativeWhole.backward(self, m, a.to(m.dtype), None)  # also where the frozen weights are codes

    def outer(self, m, x, is_turned=False):
        if not (bindings.preferred("outer_product") and bindings.is_for(m, x) and m.stride(1) == 1):
            return super().outer(m, x, is_turned)
        return bindings.outer_product(m, x, is_turned)

    def forward(self, read, weight, bias, narrow=None):
        if not _fits(read, weight, narrow):
            return super().forward(read, weight, bias, narrow)
        x = read.reshape(-1, read.shape[-1])
        y = x.new_empty(*read.shape[:-1], len(weight))
        bindings.product(
            x.contiguous(),
            weight,
            y.view(-1, len(weight)),
            bias=None if bias is None else bias.to(y.dtype),
            narrow=narrow,
        )
        return y

    def backward(self, g, weight, to, narrow=None):
        if not _fits(g, weight, narrow):
            return super().backward(g, weight, to, narrow)
        of_x = g.new_empty(len(g), weight.shape[1]) if to is None else to
        bindings.product(g.contiguous(), weight, of_x, is_turned=True, is_added=to is not None, narrow=narrow)
        return of_x

    def at_once(self, x, layers, kept):
        if not (bindings.preferred("linears") and bindings.is_for(x) and all(layer.is_kept for layer in layers)):
            return None  # of weights that are made for each product there is one at a time
        ranks = [layer.a.shape[0] for layer in layers]
        made = tuple(
            bindings.Layer(layer.weight(), layer.bias, layer.a, layer.b, layer.scale / kept, sum(ranks[:i]))
            for i, layer in enumerate(layers)
        )
        return made if all(map(_is_native, made)) else None

    def forward_all(self, x, dropped, layers, shape):
        return bindings.linears(x.contiguous(), dropped.contiguous(), layers, shape)

    def backward_all(self, dropped, layers, middles, of_outputs, needs_x, is_dropped):
        return bindings.linears_backward(
            dropped.contiguous(), layers, middles, [g.contiguous() for g in of_outputs], needs_x, is_dropped
        )


class Int8(Whole):
    """Products of int8 codes, summed in int32: twice bf16's rate on processors with AVX512-VNNI or AMX."""

    def weight(self, w):
        return self._coded(w, is_spread=True)

    def read(self, x):
        return *self._coded(x.reshape(-1, x.shape[-1]), is_spread=True), x

    def forward(self, read, weight, bias, narrow=None):
        (codes, scales, x), (of_weight, of_outputs) = read, weight
        y = x.new_empty(*x.shape[:-1], len(of_weight))
        self._multiply(
            codes,
            of_weight,
            scales,
            of_outputs,
            y.view(-1, len(of_weight)),
            bias=None if bias is None else bias.to(y.dtype),
            narrow=narrow,
        )
        return y

    def backward(self, g, weight, to, narrow=None):
        of_weight, of_outputs = weight
        codes, scales = self._coded(g, of_outputs)
        out = g.new_empty(len(g), of_weight.shape[1]) if to is None else to
        self._multiply(codes, of_weight, scales, None, out, is_turned=True, is_added=to is not None, narrow=narrow)
        return out

    def _coded(self, x, columns=None, is_spread=False):
        return coded(x, torch.int8, columns, is_spread)

    def _multiply(
        self, left, right, of_rows, of_columns, out, *, is_turned=False, is_added=False, bias=None, narrow=None
    ):
        """`native.product` of codes; turned, it is of spread inputs."""
        across = right if is_turned else right.T  # [K, N]
        is_added = self._begun(out, narrow, is_turned, is_added)
        made = left.new_empty(min(ROWS, len(left)), across.shape[1], dtype=torch.int32)
        for some, scales, to in zip(left.split(ROWS), of_rows.split(ROWS), out.split(ROWS), strict=True):
            self._scaled(
                torch._int_mm(some, across, out=made[: len(some)]), scales, of_columns, to, is_added, is_turned
            )
        if bias is not None:
            out.add_(bias)

    def _scaled(self, sums, of_rows, of_columns, to, is_added, is_spread):
        exact = sums * of_rows[:, None] * (1 if of_columns is None else of_columns)
        exact = spread(exact) if is_spread else exact
        to.copy_(exact + to.float() if is_added else exact)


class NativeInt8(Int8, NativeWhole):
    """The same of bf16 on a CPU, in C: what is around the products and, where oneDNN's are not faster, the products."""

    def _coded(self, x, columns=None, is_spread=False):
        return (
            bindings.int8_rows(x, columns, is_spread) if bindings.is_for(x) else super()._coded(x, columns, is_spread)
        )

    def _multiply(self, left, right, of_rows, of_columns, out, *, is_turned=False, **how):
        if bindings.is_for(out) and _fits(left, right, how.get("narrow")):
            bindings.product(
                left,
                right,
                out,
                of_rows=of_rows,
                of_columns=of_columns,
                is_turned=is_turned,
                is_spread=is_turned,
                **how,
            )
        else:
            super()._multiply(left, right, of_rows, of_columns, out, is_turned=is_turned, **how)

    def _scaled(self, sums, of_rows, of_columns, to, is_added, is_spread):
        if bindings.is_for(to):
            bindings.int8_out(sums, of_rows, of_columns, to, is_added=is_added, is_spread=is_spread)
        else:
            super()._scaled(sums, of_rows, of_columns, to, is_added, is_spread)


class EachWay:
    """Forward by one's products, back by another's."""

    def __init__(self, ahead: Products, back: Products):
        self.ahead, self.back = ahead, back
        self.read, self.into = ahead.read, ahead.into
        self.back_into, self.out_of, self.outer = back.back_into, back.out_of, back.outer

    def takes(self, w):
        return self.ahead.takes(w) and self.back.takes(w)

    def weight(self, w):
        return self.ahead.weight(w), self.back.weight(w)

    def forward(self, read, weight, bias, narrow=None):
        return self.ahead.forward(read, weight[0], bias, narrow)

    def backward(self, g, weight, to, narrow=None):
        return self.back.backward(g, weight[1], to, narrow)

    def at_once(self, x, layers, kept):
        def each(products, number):
            return products.at_once(
                x, [layer._replace(weight=lambda weight=layer.weight: weight()[number]) for layer in layers], kept
            )

        ahead, back = each(self.ahead, 0), each(self.back, 1)
        return ahead if back else None

    def forward_all(self, x, dropped, layers, shape):
        return self.ahead.forward_all(x, dropped, layers, shape)

    def backward_all(self, dropped, layers, *given):
        return self.back.backward_all(dropped, [layer._replace(weight=layer.weight[1]) for layer in layers], *given)


def _fits(left: torch.Tensor, right: torch.Tensor, narrow: Narrow | None) -> bool:
    """Whether `native.product` multiplies these: it reads words of 32 bits."""
    depth = left.shape[-1] * left.element_size()
    return (
        bindings.preferred("product")
        and left.dtype == right.dtype in (torch.bfloat16, torch.int8)
        and depth % 4 == 0
        and right.is_contiguous()
        and (
            narrow is None
            or bindings.is_for(narrow[0])
            and narrow[1].dtype == torch.float32
            and narrow[0].shape[1] % 2 == 0
            and narrow[0].stride(1) == 1
        )
    )


def _is_native(layer: bindings.Layer) -> bool:
    """Whether `native.linears` multiplies this one: it reads words of 32 bits."""
    weight = layer.weight[0] if isinstance(layer.weight, tuple) else layer.weight
    words = 4 // weight.element_size()
    fits = weight.dtype in (torch.bfloat16, torch.int8) and not (
        weight.shape[0] % words or weight.shape[1] % words or layer.a.shape[0] % 2
    )
    narrow = layer.a.dtype == layer.b.dtype == torch.float32 and layer.a.is_contiguous() and layer.b.is_contiguous()
    return (
        fits
        and narrow
        and weight.is_contiguous()
        and weight.device.type == "cpu"
        and (layer.bias is None or bindings.is_for(layer.bias))
    )


def _is_narrowed(x: torch.Tensor, factors: Sequence[torch.Tensor]) -> bool:
    """Whether `native.narrow_product` multiplies these."""
    return (
        bindings.preferred("narrow_product")
        and bindings.is_for(x)
        and x.shape[1] % 2 == 0
        and all(factor.dtype == torch.float32 for factor in factors)
    )


class Float8(Whole):
    """Products of float8 codes (e4m3): twice bf16's rate on NVIDIA GPUs of compute capability 8.9 and later.

    Sums are those of the tensor cores, a little short of float32 (`use_fast_accum`): with a scale for each row, torch is fast in no other way.
    """

    def __init__(self, is_triton: bool = False):
        """`is_triton`: rows are coded in one launch each time, by float8.py."""
        self.coded = functools.partial(coded, kind=FLOAT8)
        if is_triton:
            from anyqlora.on_torch.kernels.gpu import float8

            self.coded = float8.coded

    def takes(self, w):
        return not (w.shape[0] % ALIGNED or w.shape[1] % ALIGNED)

    def weight(self, w):
        return _Float8Weight(*self.coded(w))

    def read(self, x):
        return *self.coded(x.reshape(-1, x.shape[-1])), x

    def forward(self, read, weight, bias, narrow=None):
        codes, scales, x = read
        y = x.new_empty(*x.shape[:-1], len(weight.codes))
        torch._scaled_mm(
            codes,
            weight.codes.T,
            scales[:, None],
            weight.scales[None],
            out_dtype=x.dtype,
            use_fast_accum=True,
            out=y.view(-1, y.shape[-1]),
        )
        return widened(y if bias is None else y.add_(bias), narrow)

    def backward(self, g, weight, to, narrow=None):
        codes, scales = self.coded(g, columns=weight.scales)
        of_x = torch._scaled_mm(
            codes, weight.turned, scales[:, None], weight.ones, out_dtype=g.dtype, use_fast_accum=True
        )
        of_x = of_x if to is None else to.add_(of_x)
        return widened(of_x, narrow, is_turned=True)


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


def coded(
    x: torch.Tensor, kind: torch.dtype, columns: torch.Tensor | None = None, is_spread: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (`kind`: int8 or a float8, [M, K]) of x * columns, is_spread of that `spread`, the largest code for the largest magnitude of a row; and
    what a code of 1 stands for in each row (float32 [M]).

    A row that is not all finite has codes of 0 and a scale that is not a number, so that its products are none either.
    """
    is_whole = not kind.is_floating_point
    exact = x.float() if columns is None else x.float() * columns
    exact = spread(exact) if is_spread else exact
    scales = exact.abs().amax(1) / (torch.iinfo if is_whole else torch.finfo)(kind).max
    per_code = (1 / scales).nan_to_num(0, 0, 0)
    codes = (exact * per_code[:, None]).nan_to_num_(0, 0, 0)
    return (codes.round_() if is_whole else codes).to(kind), torch.where(scales.isfinite(), scales, torch.nan)


def spread(x: torch.Tensor) -> torch.Tensor:
    """x [M, K] with each 32 columns times the orthonormal Hadamard matrix of that size, its own inverse; those after the last 32 stay."""
    spreads = x.shape[1] // SPREAD * SPREAD
    some = x[:, :spreads].unflatten(1, (-1, SPREAD)) @ _hadamard().to(x)
    return torch.cat([some.flatten(1), x[:, spreads:]], 1)


@functools.cache
def _hadamard() -> torch.Tensor:
    """Sylvester's, over the root of its size, float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < SPREAD:
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.float64), matrix)
    return matrix / math.sqrt(SPREAD)
