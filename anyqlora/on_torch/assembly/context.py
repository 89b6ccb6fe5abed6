"""What building a model starts from, what its passes hand on to each other, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from anyqlora.config.schema import TrainConfig
from anyqlora.data.stream import Batch
from anyqlora.on_torch.kernels.cpu.bindings import QuantizedHead
from anyqlora.on_torch.loss import Loss, LossSpec, make_loss
from anyqlora.on_torch.runtime import Runtime


@dataclass(frozen=True)
class BuiltModel:
    """model: with its adapter. trainable: {file name: Parameter}. adapter, quantizer: see their packages. loss: (model,
    batch, device) -> the sum over trained tokens. notes: fast paths that the plan names and this model cannot take, and
    why. news: what else is worth a line."""

    model: nn.Module
    trainable: dict[str, nn.Parameter]
    adapter: object
    quantizer: object
    loss: Loss
    notes: list[str] = field(default_factory=list)
    news: list[str] = field(default_factory=list)


@dataclass
class BuildContext:
    """What is asked for, and the model as it comes to be. Each pass sets what the ones after it read."""

    config: TrainConfig
    runtime: Runtime
    sample: Sequence[Batch] = ()  # rows of the run, on which products in 8 bits prove themselves
    kernels: str = "portable"  # those that run here
    adapter: object = None
    quantizer: object = None
    model: nn.Module | None = None
    is_prequantized: bool = False  # whether the files of the base hold codes
    loss_spec: LossSpec = LossSpec()
    quantized_head: QuantizedHead | None = None  # what was packed to see whether it can be used
    news: list[str] = field(default_factory=list)

    @property
    def is_outline(self) -> bool:
        """Whether this process has the model without its values: another one reads them."""
        return any(parameter.is_meta for parameter in self.model.parameters())

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        return self.adapter.trainable(self.model)

    def specify(self, **changes) -> None:
        """What is known of the loss from here on."""
        self.loss_spec = replace(self.loss_spec, **changes)

    def loss(self) -> Loss:
        """The loss as it is specified by now."""
        return make_loss(self.loss_spec, self.model, self.quantized_head)
