"""What an adapter is: what is learned beside the frozen weights, and how that is kept, as typing.Protocol classes.

`anyqlora.testing.AdapterContract` tests them.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class Adapter(Protocol):
    """Made of (config: TrainConfig, device: torch.device); its methods are called in the order in which they stand
    here.

    folder: where the finished files go, as "adapter" (PEFT's form) or a whole "model". observes: whether it is an
    ObservingAdapter. Adapters go on linear layers only: the experts of a mixture stay frozen (and quantized), its
    attention and shared layers learn.
    """

    folder: Literal["adapter", "model"]
    observes: bool

    def select_targets(self, model: nn.Module, held: type[nn.Module] = nn.Linear) -> None:
        """Decide which linear layers it goes on, of type `held` where they are packed already; before any weight is
        read. Raises UsageError where the setting names none, or one that cannot have it.
        """
        ...

    def base_weight(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """What the frozen layer `name` is to hold, of its full-precision `weight` [out, in], which passes by once:
        mostly the weight.
        """
        ...

    def attach(self, model: nn.Module) -> nn.Module:
        """The model with what is learned on it, which alone requires gradients, in float32.

        All else is frozen already.
        """
        ...

    def trainable(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """{name in the file: parameter} of what is learned, sorted; of a whole process's model, wrapped or not."""
        ...

    def tensors(self, trainable: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """{name in the file: value} that the finished file holds, of the values of `trainable`."""
        ...

    def adapter_config(self) -> dict[str, Any]:
        """The content of adapter_config.json, with which PEFT loads the file; empty for a whole model."""
        ...


@runtime_checkable
class ObservingAdapter(Adapter, Protocol):
    """One that starts from what quantization has lost."""

    def on_quantized(self, name: str, weight: torch.Tensor, held: torch.Tensor) -> None:
        """The full-precision `weight` [out, in] of layer `name`, and `held`, what its layer has of it, dequantized.

        Between `base_weight` and `attach`.
        """
        ...
