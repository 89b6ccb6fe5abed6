"""What a quantizer is: how the frozen linear weights of a model are kept, as typing.Protocol classes.

`Quantizer` is what every one has. The other four say what more it can do, and what that is for; a quantizer takes part
in what it has the members for. `anyqlora.testing.QuantizerContract` tests all of them.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class Quantizer(Protocol):
    """How linear weights are kept, one at a time. Made of (config: TrainConfig, compute_dtype: torch.dtype).

    bits: of one weight, without scales; 16 where nothing is quantized. module_type: the class of the layers that hold
    packed weights (subclasses count). compute_dtype: what `dequantize` gives and layers multiply in.
    """

    bits: int
    module_type: type[nn.Module]
    compute_dtype: torch.dtype

    def empty_layer(self, linear: nn.Linear) -> nn.Module:
        """The layer that is to hold `linear`'s weight, without a value: a `module_type` on the meta device, of the same
        shape, with `linear`'s bias where it has one. Its forward is x W^T + bias with W = dequantize(layer), and gives
        x its gradient.
        """
        ...

    def quantize_into(self, module: nn.Module, weight: torch.Tensor) -> nn.Parameter:
        """What becomes `module.weight`, frozen, of `weight` [out, in] in float32 or bf16 on its final device.

        Scales and the like become plain attributes of the module or the parameter: transformers fills buffers itself
        when it has read a model. Nothing of `weight` is kept.
        """
        ...

    def dequantize(self, module: nn.Module) -> torch.Tensor:
        """The weight [out, in] in `compute_dtype`: the same each time, whatever the module has computed meanwhile."""
        ...

    def codes(self, module: nn.Module) -> torch.Tensor:
        """The packed numbers alone, for asserting that they are there: `bits` times out times in bits."""
        ...


@runtime_checkable
class ExpertQuantizer(Quantizer, Protocol):
    """One that also packs weights which no linear layer owns: the experts of a mixture, [experts, ., .], an expert at a
    time.
    """

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """(codes, state) of one weight [., .] in float32: codes of all experts lie in one tensor [experts, ...]."""
        ...

    def unpack(self, codes: torch.Tensor, state: Any) -> torch.Tensor:
        """The weight in `compute_dtype`."""
        ...


@runtime_checkable
class BroadcastQuantizer(Quantizer, Protocol):
    """One whose packed weights one process hands to others: what ddp, fsdp, deepspeed, tp and accelerate start from."""

    def quant_state(self, module: nn.Module) -> Any:
        """What the module needs beside its codes (scales)."""
        ...

    def state_tensors(self, state: Any) -> dict[str, torch.Tensor]:
        """A state as tensors alone, by names of the quantizer's own."""
        ...

    def state_from(self, tensors: dict[str, torch.Tensor]) -> Any:
        """The state that `state_tensors` gave these of."""
        ...

    def parameter(self, module: nn.Module, codes: torch.Tensor, state: Any) -> nn.Parameter:
        """The module's weight, of codes and state, as `quantize_into` makes it of a weight."""
        ...


@runtime_checkable
class FileQuantizer(Quantizer, Protocol):
    """One whose packed weights can be written: by `anyqlora quantize`, and for the next start (`quantized_cache`).

    group: weights of a row that share a scale, of which every row has a whole number; 1 where rows may have any length.
    """

    group: int

    def tensors(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """{name in the file: value} of the weight `name`, under the names by which a checkpoint is read."""
        ...

    def hf_config(self) -> dict[str, Any]:
        """What config.json says of such files."""
        ...


@runtime_checkable
class KernelQuantizer(Quantizer, Protocol):
    """One that has several ways of packing and unpacking."""

    def set_kernels(self, kernels: str, device: torch.device) -> list[str]:
        """Quantize and dequantize by these kernels (a name of the setting `kernels`) on `device` from here on: the same
        numbers, sooner. Returns a line for each that cannot be taken, and why. Called before `empty_layer`.
        """
        ...
