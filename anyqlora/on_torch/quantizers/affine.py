"""The portable 4-bit base: w = scale q + bias over groups of a row, packed as MLX packs it, so that one file is read by
both.
"""

from __future__ import annotations

import torch
from torch import nn

from anyqlora.config.schema import TrainConfig
from anyqlora.on_torch.quantizers.dequant_matmul import dequant_matmul

SMALLEST = 1e-7  # of a scale: what MLX divides by where a group is constant


class AffineLinear(nn.Linear):
    """x W^T + b. weight: int32 [out, in * bits / 32], the first code in the lowest bits; scales, biases: bf16 [out, in
    / group].
    """

    def __init__(self, linear: nn.Linear, bits: int, group: int):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bits, self.group = (
            linear.in_features,
            linear.out_features,
            bits,
            group,
        )
        with torch.device("meta"):
            self.weight = nn.Parameter(
                torch.empty(linear.out_features, linear.in_features * bits // 32, dtype=torch.int32),
                requires_grad=False,
            )
        self.scales = self.biases = None  # tensors that come with the weight; parameters where a file has them
        self.bias = linear.bias

    def expect_files(self, dtype: torch.dtype) -> AffineLinear:
        """Take weight, scales and biases from a checkpoint, by their names there; scales in `dtype`, as they are in the
        files.
        """
        shape = (self.out_features, self.in_features // self.group)
        with torch.device("meta"):
            self.weight = nn.Parameter(self.weight.to(torch.uint32), requires_grad=False)
            for name in ("scales", "biases"):
                delattr(self, name)
                self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
        return self

    @property
    def W_q(self) -> torch.Tensor:
        """By this name of HQQ's PEFT knows a layer whose `dequantize()` it has to ask for the weight: DoRA needs
        that.
        """
        return self.weight

    def dequantize(self) -> torch.Tensor:
        """float32 [out, in]."""
        return unpack(self.weight.data.view(torch.int32), self.scales.data, self.biases.data, self.bits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = dequant_matmul(x, self.dequantize)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def pack(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weight, scales, biases) of AffineLinear for float32 `weight` [out, in].

    MLX's rule (mlx/ops.cpp, quantize): the extreme of larger magnitude is met exactly, and zero wherever it lies in
    between.
    """
    groups, most = weight.reshape(weight.shape[0], -1, group), 2**bits - 1  # [out, in / group, group]
    high, low = groups.amax(2), groups.amin(2)
    from_low = low.abs() > high.abs()
    scale = ((high - low) / most).clamp(min=SMALLEST)
    scale, edge = torch.where(from_low, scale, -scale), torch.where(from_low, low, high)
    steps = (edge / scale).round()
    scale = torch.where(steps != 0, edge / steps, scale)
    bias = torch.where(steps != 0, edge, torch.zeros_like(edge))
    codes = ((groups - bias.unsqueeze(2)) / scale.unsqueeze(2)).round().clamp(0, most).to(torch.int32)
    places = torch.arange(0, 32, bits, dtype=torch.int32, device=weight.device)
    packed = (codes.reshape(weight.shape[0], -1, 32 // bits) << places).sum(2, dtype=torch.int32)
    return packed, scale.to(torch.bfloat16), bias.to(torch.bfloat16)


def unpack(packed: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 [out, in]."""
    places = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    codes = ((packed.unsqueeze(2) >> places) & (2**bits - 1)).reshape(*scales.shape, -1)  # [out, in / group, group]
    return (codes.float() * scales.float().unsqueeze(2) + biases.float().unsqueeze(2)).flatten(1)


class Affine4:
    bits = 4
    module_type = AffineLinear

    def __init__(self, config: TrainConfig, compute_dtype: torch.dtype):
        self.compute_dtype, self.group = compute_dtype, config.affine_group_size

    def empty_layer(self, linear: nn.Linear) -> AffineLinear:
        return AffineLinear(linear, self.bits, self.group)

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Codes and (scales, biases) of one weight [out, in]."""
        packed, scales, biases = pack(weight.float(), self.bits, self.group)
        return packed, (scales, biases)

    def unpack(self, packed: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return unpack(packed, *state, self.bits).to(self.compute_dtype)

    def quantize_into(self, module: AffineLinear, weight: torch.Tensor) -> nn.Parameter:
        return self.parameter(module, *self.pack(weight))

    def parameter(
        self, module: AffineLinear, codes: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
    ) -> nn.Parameter:
        """The module's weight, of codes and (scales, biases)."""
        module.scales, module.biases = state
        return nn.Parameter(codes, requires_grad=False)

    @staticmethod
    def quant_state(module: AffineLinear) -> tuple[torch.Tensor, torch.Tensor]:
        return module.scales, module.biases

    @staticmethod
    def state_tensors(state: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(("scales", "biases"), state, strict=True))

    @staticmethod
    def state_from(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return tensors["scales"], tensors["biases"]

    def dequantize(self, module: AffineLinear) -> torch.Tensor:
        return module.dequantize().to(self.compute_dtype)

    def codes(self, module: AffineLinear) -> torch.Tensor:
        return module.weight.data

    def tensors(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """{tensor of a file: value} of the weight `name`, as this library and mlx-lm read it."""
        packed, scales, biases = pack(weight.float(), self.bits, self.group)
        owner = name.removesuffix(".weight")
        return {name: packed.view(torch.uint32), f"{owner}.scales": scales, f"{owner}.biases": biases}

    def hf_config(self) -> dict:
        """What config.json says of such files, in mlx-lm's words."""
        return {"quantization": {"group_size": self.group, "bits": self.bits, "mode": "affine"}}
