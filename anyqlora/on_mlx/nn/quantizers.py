"""How frozen weights are kept on MLX: one class for each name that its row of the table has.

A quantizer has
    bits, module_type
    pack(linear) -> module              what holds the weight of an nn.Linear from here on
    dequantize(module, after) -> array  [out, in], float32 where the codes say no less; made once the array `after`,
                                        if given, is there
    refusal(inputs) -> str              why a layer with so many inputs cannot be packed, or ""
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from anyqlora.config.schema import TrainConfig
from anyqlora.models import nf4

PAIRS = np.stack([np.repeat(nf4.LEVELS, 16), np.tile(nf4.LEVELS, 16)], axis=1)  # [256, 2]: the two weights of each byte


class Unquantized:
    bits = 16
    module_type = nn.Linear

    def __init__(self, config: TrainConfig, compute: mx.Dtype):
        self.config, self.compute = config, compute

    def refusal(self, inputs: int) -> str:
        return ""

    def pack(self, linear: nn.Linear) -> nn.Module:
        return linear

    def dequantize(self, module: nn.Module, after: mx.array | None = None) -> mx.array:
        return follow_config(module.weight, after)


class Affine(Unquantized):
    """w = scale q + bias over groups of a row, MLX's own packing.

    Codes are taken from float32 weights; scale and bias have the precision of bf16, in memory as in the portable file.
    """

    mode = "affine"
    module_type = nn.QuantizedLinear

    @property
    def group(self) -> int:
        return self.config.affine_group_size

    def refusal(self, inputs: int) -> str:
        return f"{inputs} inputs are no multiple of {self.group}" if inputs % self.group else ""

    def pack(self, linear: nn.Linear) -> nn.QuantizedLinear:
        linear.weight = linear.weight.astype(mx.float32)
        packed = nn.QuantizedLinear.from_linear(linear, self.group, self.bits, mode=self.mode)
        for name in ("scales", "biases"):
            if packed.get(name) is not None and packed[name].dtype != mx.uint8:
                packed[name] = packed[name].astype(mx.bfloat16).astype(self.compute)
        return packed

    def dequantize(self, module: nn.QuantizedLinear, after: mx.array | None = None) -> mx.array:
        return unpack_weights(module, after)


class Affine2(Affine):
    bits = 2


class Affine3(Affine):
    bits = 3


class Affine4(Affine):
    bits = 4


class Affine5(Affine):
    bits = 5


class Affine6(Affine):
    bits = 6


class Affine8(Affine):
    bits = 8


class Mxfp4(Affine):
    """Four-bit floats that share a power of two (OCP Microscaling 1.0)."""

    bits, mode, group = 4, "mxfp4", 32


class Nvfp4(Affine):
    """Four-bit floats that share an eight-bit float."""

    bits, mode, group = 4, "nvfp4", 16


def follow_config(value: mx.array, after: mx.array | None) -> mx.array:
    """`value`, and what is made of it is made when `after` is there.

    Weights are constants of a step: else all of them may be unpacked before the first product, and a compiled step,
    which joins equal expressions, would keep what forward has unpacked until backward.
    """
    return value if after is None else mx.depends([value], [after])[0]


def unpack_weights(module: nn.QuantizedLinear, after: mx.array | None = None) -> mx.array:
    """Its weight, float32 [out, in]."""
    scales, biases = (
        part if part is None or part.dtype == mx.uint8 else part.astype(mx.float32)
        for part in (module.scales, module.get("biases"))
    )
    return mx.dequantize(
        follow_config(module.weight, after),
        scales,
        biases,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )


def unpacked_matmul(x: mx.array, weight: Callable[[mx.array], mx.array]) -> mx.array:
    """x W^T in x's dtype, with W = weight(after) [out, in] made in forward after x and again in backward after the
    gradient, and not kept.

    A processor multiplies in float32, and neither matrix transposed: MLX's 16 bits and its BLAS's other order take
    longer there.
    """
    on_processor = mx.default_device() == mx.cpu
    kind = mx.float32 if on_processor else x.dtype

    @mx.custom_function
    def made(x):
        turned = weight(x).astype(kind).T
        return (x.astype(kind) @ (mx.contiguous(turned) if on_processor else turned)).astype(x.dtype)

    @made.vjp
    def made_vjp(x, cotangent, output):
        return (cotangent.astype(kind) @ weight(cotangent).astype(kind)).astype(x.dtype)

    return made(x)


class UnpackedLinear(nn.QuantizedLinear):
    """The same, its weight unpacked for each product: MLX's product with packed weights takes a processor up to twenty
    times as long.
    """

    def __call__(self, x: mx.array) -> mx.array:
        out = unpacked_matmul(x, partial(unpack_weights, self))
        return out + self.bias if "bias" in self else out


class Nf4Linear(nn.Module):
    """x W^T + b with W in bitsandbytes' NF4."""

    def __init__(self, packed: nf4.Packed, bias: mx.array | None):
        super().__init__()
        self.shape = packed.shape
        self._codes, self._absmax = (
            mx.array(packed.codes),
            mx.array(packed.absmax),
        )  # frozen, and no parameters of the files' names
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        out = unpacked_matmul(x, self.dequantize)
        return out + self.bias if "bias" in self else out

    def dequantize(self, after: mx.array | None = None) -> mx.array:
        """float32 [out, in]."""
        count, room = self.shape[0] * self.shape[1], self._absmax.size * nf4.BLOCK
        values = mx.array(PAIRS)[follow_config(self._codes, after).reshape(-1)].reshape(-1)
        if values.size != room:  # the last block is not full, or the last byte is
            values = mx.concatenate([values[:count], mx.zeros(room - count)])
        return (values.reshape(-1, nf4.BLOCK) * self._absmax[:, None]).reshape(-1)[:count].reshape(self.shape)


class Nf4(Unquantized):
    bits = 4
    module_type = Nf4Linear

    def pack(self, linear: nn.Linear) -> Nf4Linear:
        weight = np.array(linear.weight.astype(mx.float32))
        return Nf4Linear(nf4.pack(weight, self.config.double_quant), linear.get("bias"))

    def dequantize(self, module: Nf4Linear, after: mx.array | None = None) -> mx.array:
        return module.dequantize(after)
