"""Full fine-tuning: every weight is learned, in float32."""

from __future__ import annotations

import torch
from torch import nn

from anyqlora.config.schema import TrainConfig


class Full:
    folder = "model"
    observes = False

    def __init__(self, config: TrainConfig, device: torch.device):
        self.config = config

    def select_targets(self, model: nn.Module, held: type = nn.Linear) -> None:
        """All of it."""

    def base_weight(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def attach(self, model: nn.Module) -> nn.Module:
        # An update of lr * 1e-3 vanishes in bf16's 8 bits, so what is learned is float32 and bf16 is autocast's.
        return model.float().requires_grad_(True)

    def trainable(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return dict(sorted((name, p) for name, p in model.named_parameters() if p.requires_grad))

    def tensors(self, trainable: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return trainable

    def adapter_config(self) -> dict:
        return {}
