"""Products with a frozen weight: y = x W^T and the gradient of x, in x's dtype or with both factors rounded to 8 bits.

In 8 bits a token's numbers share a scale, and so do the weights of an output: y = (codes of x) (codes of W)^T, times
both scales. The gradient of x sums over outputs, whose scales therefore go into the gradient of y before that is
rounded, a token at a time: the same codes of W serve both ways. Sums are exact (int32) or float32.

A number that stands out makes its token's steps wide for all others. int8 therefore codes x and W rotated, each 32
inputs times a Hadamard matrix (QuaRot, arXiv 2404.00456): x H (W H)^T is x W^T, and the gradient of x is rotated back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from anyqlora.on_torch._compat import int8_matmul, scaled_matmul
from anyqlora.on_torch.kernels.cpu import bindings
from anyqlora.planning.memory.activations import ROWS

FLOAT8 = torch.float8_e4m3fn
HADAMARD = 32  # numbers that int8 rotates together
ALIGNED = 16  # cuBLAS and CUTLASS multiply float8 where both sides of a weight are multiples of it


# LoRA's part of a product: its hidden activations [M, R], in x's dtype, and a factor, as it is learned.
LoraTerm = tuple[torch.Tensor, torch.Tensor]


class FrozenMatmul(Protocol):
    """How a group of linears that read one x [..., in] multiplies by its frozen weights. What `prepare_weight` makes of
    W [out, in], and `prepare_input` of x, is its own affair.

    LoRA's factors are a [R, in] and b [out, R], and its hidden activations [M, R] = scale x a^T, of M tokens.
    """

    def supports(self, weight: torch.Tensor) -> bool:
        """Whether it can multiply by W at all."""

    def prepare_weight(self, weight: torch.Tensor): ...
    def prepare_input(self, x: torch.Tensor): ...
    def forward(self, x, weight, bias: torch.Tensor | None, lora: LoraTerm | None = None) -> torch.Tensor:
        """x W^T + bias + hidden b^T, [..., out], and no view of anything. lora: hidden and b [out, R]."""

    def backward(
        self, grad_output: torch.Tensor, weight, accumulated: torch.Tensor | None, lora: LoraTerm | None = None
    ) -> torch.Tensor:
        """accumulated + grad_output W + hidden a, [M, in] of grad_output [M, out], written over `accumulated`.

        lora: the gradient of hidden and a [R, in].
        """

    def lora_down(self, x: torch.Tensor, factors: Sequence[torch.Tensor], scales: Sequence[float]) -> torch.Tensor:
        """x a^T of x [M, in] and each factor a, times its scale, side by side: [M, the sum of their ranks]."""

    def lora_hidden_grad(self, grad_output: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        """scale grad_output b, [M, R] of grad_output [M, out]."""

    def lora_input_grad(self, grad_hidden: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """grad_hidden a, [M, in] of grad_hidden [M, R] and a [R, in]."""

    def lora_weight_grad(self, hidden: torch.Tensor, x: torch.Tensor, transposed: bool = False) -> torch.Tensor:
        """A factor's gradient: hidden^T x [R, N] of x [M, N]; transposed: [N, R]. In x's dtype or a wider one."""

    def fusable(self, x: torch.Tensor, layers: Sequence, keep_rate: float) -> tuple | None:
        """`layers` (fused_lora.LoraLinear) of x [..., in] as `forward_fused` and `backward_fused` take them, None where
        they do not; keep_rate: the part that dropout leaves.
        """

    def forward_fused(
        self, x: torch.Tensor, dropped: torch.Tensor, layers: Sequence, shape: Sequence[int]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Each layer's output [*shape, out], and `lora_down` of `dropped`: the numbers of all calls above, in one."""

    def backward_fused(
        self,
        dropped: torch.Tensor,
        layers: Sequence,
        hidden: torch.Tensor,
        grad_outputs: Sequence[torch.Tensor],
        needs_x: bool,
        is_dropped: bool,
    ):
        """The gradients of x where it needs one and, is_dropped, of what was dropped from apart from it, else None; of
        these layers' a, one below the other; and of each b.
        """


class FullMatmul:
    """Products in x's dtype."""

    def supports(self, weight):
        return True

    def prepare_weight(self, weight):
        return weight

    def prepare_input(self, x):
        return x

    def forward(self, x, weight, bias, lora=None):
        if lora is None:
            return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        y = x.new_empty(*x.shape[:-1], len(weight))
        out = y.view(-1, len(weight))
        out.addmm_(x.reshape(-1, x.shape[-1]), weight.to(y.dtype).T, beta=self._put_lora(out, lora))
        return y if bias is None else y.add_(bias)

    def backward(self, grad_output, weight, accumulated, lora=None):
        grad_x = grad_output.new_empty(len(grad_output), weight.shape[1]) if accumulated is None else accumulated
        beta = self._put_lora(grad_x, lora, transposed=True, accumulate=accumulated is not None)
        return grad_x.addmm_(grad_output, weight.to(grad_output.dtype), beta=beta)

    def lora_down(self, x, factors, scales):
        hidden = x @ stacked(factors).to(x.dtype).T
        for part, scale in zip(hidden.split([len(a) for a in factors], 1), scales, strict=True):
            part.mul_(scale)
        return hidden

    def lora_hidden_grad(self, grad_output, b, scale):
        return (grad_output @ b.to(grad_output.dtype)).mul_(scale)

    def lora_input_grad(self, grad_hidden, a):
        return grad_hidden @ a.to(grad_hidden.dtype)

    def lora_weight_grad(self, hidden, x, transposed=False):
        grad = hidden.T @ x
        return grad.T if transposed else grad  # the other way round oneDNN takes a third longer

    def fusable(self, x, layers, keep_rate):
        return None

    @staticmethod
    def _put_lora(y, lora, transposed=False, accumulate=False) -> int:
        """Puts LoRA's part into y [M, N], accumulate: adds it to what is there. Returns 1 if y holds something, to
        which the frozen part is to be added.

        In this order both are summed in float32 (a bias is not, nor what is accumulated). The other way round LoRA's is
        lost where it is less than half a step of a frozen part that is rounded, as much of it is in the first steps of
        a run: in bf16 their losses are 0.6 to 0.9 % higher.
        """
        if lora is not None:
            add_lora(y, lora, transposed, accumulate)
        return int(accumulate or lora is not None)


def add_lora(y: torch.Tensor, lora: LoraTerm | None, transposed: bool = False, accumulate: bool = True) -> torch.Tensor:
    """y [..., N] with LoRA's part, hidden b^T or, transposed, hidden a, added to it; not accumulate: in place of what
    it holds.
    """
    if lora is not None:
        hidden, factor = lora[0], lora[1].to(y.dtype)
        y.view(-1, y.shape[-1]).addmm_(hidden, factor if transposed else factor.T, beta=int(accumulate))
    return y


def stacked(factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each layer's a, one below the other: [the sum of their ranks, in]."""
    return factors[0] if len(factors) == 1 else torch.cat(tuple(factors))


@functools.lru_cache(64)
def _column_scales(scales: tuple[float, ...], ranks: tuple[int, ...]) -> torch.Tensor:
    """float32: each layer's scale for each of its columns."""
    return torch.tensor(
        [scale for scale, rank in zip(scales, ranks, strict=True) for _ in range(rank)], dtype=torch.float32
    )


class CpuFullMatmul(FullMatmul):
    """The same in C, bf16 on a CPU: LoRA's part is summed in the same registers, and its factors' gradients are
    float32.
    """

    def lora_down(self, x, factors, scales):
        if not _fits_lora_matmul(x, factors):
            return super().lora_down(x, factors, scales)
        return bindings.lora_matmul(x, stacked(factors), _column_scales(tuple(scales), tuple(len(a) for a in factors)))

    def lora_hidden_grad(self, grad_output, b, scale):
        if not _fits_lora_matmul(grad_output, [b]):
            return super().lora_hidden_grad(grad_output, b, scale)
        return bindings.lora_matmul(grad_output, b, _column_scales((scale,), (b.shape[1],)), transposed=True)

    def lora_input_grad(self, grad_hidden, a):
        # Not by self.backward: also where the frozen weights are codes.
        return CpuFullMatmul.backward(self, grad_hidden, a.to(grad_hidden.dtype), None)

    def lora_weight_grad(self, hidden, x, transposed=False):
        if not (bindings.preferred("lora_weight_grad") and bindings.is_for(hidden, x) and hidden.stride(1) == 1):
            return super().lora_weight_grad(hidden, x, transposed)
        return bindings.lora_weight_grad(hidden, x, transposed)

    def forward(self, x, weight, bias, lora=None):
        if not _fits(x, weight, lora):
            return super().forward(x, weight, bias, lora)
        rows = x.reshape(-1, x.shape[-1])
        y = rows.new_empty(*x.shape[:-1], len(weight))
        bias = None if bias is None else bias.to(y.dtype)
        bindings.frozen_matmul(rows.contiguous(), weight, y.view(-1, len(weight)), bias=bias, lora=lora)
        return y

    def backward(self, grad_output, weight, accumulated, lora=None):
        if not _fits(grad_output, weight, lora):
            return super().backward(grad_output, weight, accumulated, lora)
        accumulate = accumulated is not None
        grad_x = accumulated if accumulate else grad_output.new_empty(len(grad_output), weight.shape[1])
        rows = grad_output.contiguous()
        bindings.frozen_matmul(rows, weight, grad_x, transposed=True, accumulate=accumulate, lora=lora)
        return grad_x

    def fusable(self, x, layers, keep_rate):
        if not (bindings.preferred("lora_linears") and bindings.is_for(x) and all(layer.is_cached for layer in layers)):
            return None  # of weights that are made for each product there is one at a time
        ranks = [layer.a.shape[0] for layer in layers]
        native = tuple(
            bindings.LoraLinear(
                layer.weight(), layer.bias, layer.a, layer.b, layer.scale / keep_rate, sum(ranks[:number])
            )
            for number, layer in enumerate(layers)
        )
        return native if all(map(_is_native, native)) else None

    def forward_fused(self, x, dropped, layers, shape):
        return bindings.lora_linears(x.contiguous(), dropped.contiguous(), layers, shape)

    def backward_fused(self, dropped, layers, hidden, grad_outputs, needs_x, is_dropped):
        grad_outputs = [grad.contiguous() for grad in grad_outputs]
        return bindings.lora_linears_backward(dropped.contiguous(), layers, hidden, grad_outputs, needs_x, is_dropped)


class Int8Matmul(FullMatmul):
    """Products of int8 codes, summed in int32: twice bf16's rate on processors with AVX512-VNNI or AMX."""

    def prepare_weight(self, weight):
        return self._quantize(weight, hadamard=True)

    def prepare_input(self, x):
        return *self._quantize(x.reshape(-1, x.shape[-1]), hadamard=True), x

    def forward(self, x, weight, bias, lora=None):
        (codes, row_scales, x), (weight_codes, column_scales) = x, weight
        y = x.new_empty(*x.shape[:-1], len(weight_codes))
        bias, out = None if bias is None else bias.to(y.dtype), y.view(-1, len(weight_codes))
        self._multiply(codes, weight_codes, row_scales, column_scales, out, bias=bias, lora=lora)
        return y

    def backward(self, grad_output, weight, accumulated, lora=None):
        weight_codes, output_scales = weight
        codes, row_scales = self._quantize(grad_output, output_scales)
        accumulate = accumulated is not None
        out = accumulated if accumulate else grad_output.new_empty(len(grad_output), weight_codes.shape[1])
        self._multiply(codes, weight_codes, row_scales, None, out, transposed=True, accumulate=accumulate, lora=lora)
        return out

    def _quantize(self, x, column_scales=None, hadamard=False):
        return quantize_rows(x, torch.int8, column_scales, hadamard)

    def _multiply(
        self, left, right, row_scales, column_scales, out, *, transposed=False, accumulate=False, bias=None, lora=None
    ):
        """`bindings.frozen_matmul` of codes; transposed, it is of rotated inputs."""
        factor = right if transposed else right.T  # [K, N]
        accumulate = self._put_lora(out, lora, transposed, accumulate)
        sums = left.new_empty(min(ROWS, len(left)), factor.shape[1], dtype=torch.int32)
        chunks = left.split(ROWS), row_scales.split(ROWS), out.split(ROWS)
        for chunk, scales, chunk_out in zip(*chunks, strict=True):
            chunk_sums = int8_matmul(chunk, factor, out=sums[: len(chunk)])
            self._dequantize(chunk_sums, scales, column_scales, chunk_out, accumulate, transposed)
        if bias is not None:
            out.add_(bias)

    def _dequantize(self, sums, row_scales, column_scales, out, accumulate, hadamard):
        exact = sums * row_scales[:, None] * (1 if column_scales is None else column_scales)
        exact = rotated(exact) if hadamard else exact
        out.copy_(exact + out.float() if accumulate else exact)


class CpuInt8Matmul(Int8Matmul, CpuFullMatmul):
    """The same of bf16 on a CPU, in C: what is around the products and, where oneDNN's are not faster, the products."""

    def _quantize(self, x, column_scales=None, hadamard=False):
        if bindings.is_for(x):
            return bindings.quantize_int8_rows(x, column_scales, hadamard)
        return super()._quantize(x, column_scales, hadamard)

    def _multiply(self, left, right, row_scales, column_scales, out, *, transposed=False, **options):
        if bindings.is_for(out) and _fits(left, right, options.get("lora")):
            scales = {"row_scales": row_scales, "column_scales": column_scales}
            bindings.frozen_matmul(left, right, out, **scales, transposed=transposed, hadamard=transposed, **options)
        else:
            super()._multiply(left, right, row_scales, column_scales, out, transposed=transposed, **options)

    def _dequantize(self, sums, row_scales, column_scales, out, accumulate, hadamard):
        if bindings.is_for(out):
            bindings.dequantize_int8(sums, row_scales, column_scales, out, accumulate=accumulate, hadamard=hadamard)
        else:
            super()._dequantize(sums, row_scales, column_scales, out, accumulate, hadamard)


class SplitMatmul:
    """Forward by one's products, backward by another's."""

    def __init__(self, ahead: FrozenMatmul, back: FrozenMatmul):
        self.ahead, self.back = ahead, back
        self.prepare_input, self.lora_down = ahead.prepare_input, ahead.lora_down
        self.lora_hidden_grad, self.lora_input_grad = back.lora_hidden_grad, back.lora_input_grad
        self.lora_weight_grad = back.lora_weight_grad

    def supports(self, weight):
        return self.ahead.supports(weight) and self.back.supports(weight)

    def prepare_weight(self, weight):
        return self.ahead.prepare_weight(weight), self.back.prepare_weight(weight)

    def forward(self, x, weight, bias, lora=None):
        return self.ahead.forward(x, weight[0], bias, lora)

    def backward(self, grad_output, weight, accumulated, lora=None):
        return self.back.backward(grad_output, weight[1], accumulated, lora)

    def fusable(self, x, layers, keep_rate):
        def each(matmul, number):
            own = [layer._replace(weight=lambda weight=layer.weight: weight()[number]) for layer in layers]
            return matmul.fusable(x, own, keep_rate)

        ahead, back = each(self.ahead, 0), each(self.back, 1)
        return ahead if back else None

    def forward_fused(self, x, dropped, layers, shape):
        return self.ahead.forward_fused(x, dropped, layers, shape)

    def backward_fused(self, dropped, layers, *arguments):
        own = [layer._replace(weight=layer.weight[1]) for layer in layers]
        return self.back.backward_fused(dropped, own, *arguments)


def _fits(left: torch.Tensor, right: torch.Tensor, lora: LoraTerm | None) -> bool:
    """Whether `bindings.frozen_matmul` is to multiply these: it reads words of 32 bits."""
    depth = left.shape[-1] * left.element_size()
    return (
        bindings.preferred("frozen_matmul")
        and left.dtype == right.dtype in (torch.bfloat16, torch.int8)
        and depth % 4 == 0
        and right.is_contiguous()
        and (
            lora is None
            or bindings.is_for(lora[0])
            and lora[1].dtype == torch.float32
            and lora[0].shape[1] % 2 == 0
            and lora[0].stride(1) == 1
        )
    )


def _is_native(layer: bindings.LoraLinear) -> bool:
    """Whether `bindings.lora_linears` multiplies this one: it reads words of 32 bits."""
    weight = layer.weight[0] if isinstance(layer.weight, tuple) else layer.weight
    per_word = 4 // weight.element_size()
    fits = weight.dtype in (torch.bfloat16, torch.int8) and not (
        weight.shape[0] % per_word or weight.shape[1] % per_word or layer.a.shape[0] % 2
    )
    lora_fits = layer.a.dtype == layer.b.dtype == torch.float32 and layer.a.is_contiguous() and layer.b.is_contiguous()
    return (
        fits
        and lora_fits
        and weight.is_contiguous()
        and weight.device.type == "cpu"
        and (layer.bias is None or bindings.is_for(layer.bias))
    )


def _fits_lora_matmul(x: torch.Tensor, factors: Sequence[torch.Tensor]) -> bool:
    """Whether `bindings.lora_matmul` is to multiply these."""
    return (
        bindings.preferred("lora_matmul")
        and bindings.is_for(x)
        and x.shape[1] % 2 == 0
        and all(factor.dtype == torch.float32 for factor in factors)
    )


class Fp8Matmul(FullMatmul):
    """Products of float8 codes (e4m3): twice bf16's rate on NVIDIA GPUs of compute capability 8.9 and later.

    Sums are those of the tensor cores, a little short of float32 (`use_fast_accum`): with a scale for each row, torch
    is fast in no other way.
    """

    def __init__(self, is_triton: bool = False):
        """`is_triton`: rows are quantized in one launch each time, by gpu/float8.py."""
        self.quantize = functools.partial(quantize_rows, dtype=FLOAT8)
        if is_triton:
            from anyqlora.on_torch.kernels.gpu import float8

            self.quantize = float8.quantize_rows

    def supports(self, weight):
        return not (weight.shape[0] % ALIGNED or weight.shape[1] % ALIGNED)

    def prepare_weight(self, weight):
        return _Float8Weight(*self.quantize(weight))

    def prepare_input(self, x):
        return *self.quantize(x.reshape(-1, x.shape[-1])), x

    def forward(self, x, weight, bias, lora=None):
        codes, scales, x = x
        y = x.new_empty(*x.shape[:-1], len(weight.codes))
        scaled_matmul(
            codes,
            weight.codes.T,
            scales[:, None],
            weight.scales[None],
            out_dtype=x.dtype,
            use_fast_accum=True,
            out=y.view(-1, y.shape[-1]),
        )
        return add_lora(y if bias is None else y.add_(bias), lora)

    def backward(self, grad_output, weight, accumulated, lora=None):
        codes, scales = self.quantize(grad_output, column_scales=weight.scales)
        options = {"out_dtype": grad_output.dtype, "use_fast_accum": True}
        grad_x = scaled_matmul(codes, weight.transposed, scales[:, None], weight.ones, **options)
        grad_x = grad_x if accumulated is None else accumulated.add_(grad_x)
        return add_lora(grad_x, lora, transposed=True)


class _Float8Weight:
    """Codes [out, in] and scales [out] of a weight; what backward needs of it is made when it is first needed."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor):
        self.codes, self.scales = codes, scales

    @functools.cached_property
    def transposed(self) -> torch.Tensor:
        """The codes, a column after another: the only order in which a GPU takes the right factor."""
        return self.codes.T.contiguous().T

    @functools.cached_property
    def ones(self) -> torch.Tensor:
        return self.scales.new_ones(1, self.codes.shape[1])


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, column_scales: torch.Tensor | None = None, hadamard: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (`dtype`: int8 or a float8, [M, K]) of x * column_scales, with `hadamard` of that `rotated`, the largest
    code for the largest magnitude of a row; and what a code of 1 stands for in each row (float32 [M]).

    A row that is not all finite has codes of 0 and a scale of NaN, so that its products are NaN, too.
    """
    is_integer = not dtype.is_floating_point
    exact = x.float() if column_scales is None else x.float() * column_scales
    exact = rotated(exact) if hadamard else exact
    largest = exact.abs().amax(1)
    largest_code = (torch.iinfo if is_integer else torch.finfo)(dtype).max
    scales = largest / largest.new_tensor(largest_code)  # by a number, CUDA multiplies by the rounded 1 / number
    per_code = (1 / scales).nan_to_num(0, 0, 0)
    codes = (exact * per_code[:, None]).nan_to_num_(0, 0, 0)
    return (codes.round_() if is_integer else codes).to(dtype), torch.where(scales.isfinite(), scales, torch.nan)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [M, K] with each 32 columns times the orthonormal Hadamard matrix of that size, its own inverse; those after
    the last 32 stay.
    """
    whole = x.shape[1] // HADAMARD * HADAMARD
    blocks = x[:, :whole].unflatten(1, (-1, HADAMARD)) @ _hadamard().to(x)
    return torch.cat([blocks.flatten(1), x[:, whole:]], 1)


@functools.cache
def _hadamard() -> torch.Tensor:
    """Sylvester's, over the root of its size, float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < HADAMARD:
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.float64), matrix)
    return matrix / math.sqrt(HADAMARD)
