"""w = scale q with q in -31 .. 31 and a scale for each row; four codes in three bytes."""

import torch
from torch import nn

from anyqlora.extend import TrainConfig, dequant_matmul

LARGEST = 31  # of a code of six bits, symmetric about 0


class Rowwise6Linear(nn.Linear):
    """x W^T + b. weight: uint8 [3 ceil(out in / 4)]; scales: float32 [out]."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        codes = torch.empty(3 * -(-self.out_features * self.in_features // 4), dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scales: torch.Tensor | None = None  # no buffer: transformers fills those itself when it has read a model

    @property
    def W_q(self) -> torch.Tensor:
        """By this name of HQQ's PEFT knows a layer whose `dequantize()` gives the weight: DoRA asks for it."""
        return self.weight

    def dequantize(self) -> torch.Tensor:
        """float32 [out, in]."""
        return unpack(self.weight.data, self.out_features * self.in_features).view(
            self.out_features, self.in_features
        ) * self.scales.unsqueeze(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dequant_matmul(x, self.dequantize, bias=self.bias)


class Rowwise6:
    """A `Quantizer` of anyqlora.extend."""

    bits = 6
    module_type = Rowwise6Linear

    def __init__(self, config: TrainConfig, compute_dtype: torch.dtype):
        self.compute_dtype = compute_dtype

    def empty_layer(self, linear: nn.Linear) -> Rowwise6Linear:
        return Rowwise6Linear(linear)

    def quantize_into(self, module: Rowwise6Linear, weight: torch.Tensor) -> nn.Parameter:
        weight = weight.float()
        module.scales = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
        return nn.Parameter(pack((weight / module.scales.unsqueeze(1)).round()), requires_grad=False)

    def dequantize(self, module: Rowwise6Linear) -> torch.Tensor:
        return module.dequantize().to(self.compute_dtype)

    def codes(self, module: Rowwise6Linear) -> torch.Tensor:
        return module.weight.data


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [3 ceil(n / 4)] of n codes, -31 .. 31: four of six bits in three bytes, the first in the lowest bits."""
    flat = (codes.flatten() + LARGEST).to(torch.int32)
    fours = nn.functional.pad(flat, (0, -len(flat) % 4)).view(-1, 4)
    words = fours[:, 0] | fours[:, 1] << 6 | fours[:, 2] << 12 | fours[:, 3] << 18  # 24 bits
    return torch.stack([words >> shift & 255 for shift in (0, 8, 16)], 1).to(torch.uint8).flatten()


def unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` codes, float32."""
    bytes_ = packed.view(-1, 3).to(torch.int32)
    words = bytes_[:, 0] | bytes_[:, 1] << 8 | bytes_[:, 2] << 16
    codes = torch.stack([words >> shift & 63 for shift in (0, 6, 12, 18)], 1).flatten()[:count]
    return (codes - LARGEST).float()
