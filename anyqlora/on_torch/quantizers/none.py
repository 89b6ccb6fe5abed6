"""Weights as they are, in the precision's own type."""

from __future__ import annotations

import torch
from torch import nn

from anyqlora.config.schema import TrainConfig


class Unquantized:
    bits = 16
    module_type = nn.Linear

    def __init__(self, config: TrainConfig, compute_dtype: torch.dtype):
        self.compute_dtype = compute_dtype

    def empty_layer(self, linear: nn.Linear) -> nn.Linear:
        return linear

    def quantize_into(self, module: nn.Linear, weight: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(weight.to(module.weight.dtype), requires_grad=False)

    def dequantize(self, module: nn.Linear) -> torch.Tensor:
        return module.weight.detach()

    def codes(self, module: nn.Linear) -> torch.Tensor:
        return module.weight
