"""The frozen base model of a run: read from its files on one process, and the way of each weight from there to packed
codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from anyqlora.core import registry
from anyqlora.on_torch.loading import stream
from anyqlora.on_torch.loading.quantized_cache import QuantizedCache

PackWeight = Callable[[str, nn.Module, torch.Tensor], nn.Parameter]  # see WeightPacker.pack


class WeightPacker:
    """What becomes of a linear layer's weight when it is read.

    A strategy may stand before `pack`: tensor parallelism gives it a slice of the weight at a time, sharding moves what
    comes out to host memory.
    """

    def __init__(self, quantizer, adapter):
        self.quantizer, self.adapter = quantizer, adapter

    def pack(self, name: str, module: nn.Module, weight: torch.Tensor) -> nn.Parameter:
        """The parameter that `module`, of the quantizer's `module_type`, holds for the weight [out, in] in float32 or,
        where that is exact, bf16: what the adapter leaves of it (PiSSA takes its leading part), quantized. An adapter
        that starts from what quantization has lost (LoftQ) is shown that."""
        packed = self.quantizer.quantize_into(module, self.adapter.base_weight(name, weight))
        if self.adapter.observes:
            module.weight = packed
            self.adapter.on_quantized(name, weight, self.quantizer.dequantize(module))
        return packed


@dataclass(frozen=True)
class BaseModelLoader:
    """The base model of a run: `load` reads it; a process that is to receive it from another makes the `outlined`
    one."""

    directory: str
    quantizer: object
    adapter: object
    dtype: torch.dtype  # of what is not packed
    device: torch.device
    quantizer_name: str
    is_prequantized: bool  # whether the files hold codes
    trust_remote_code: bool
    cache: QuantizedCache | None = None  # of what the quantizer makes of the files alone

    def load(self, pack: PackWeight, device: torch.device | None = None) -> nn.Module:
        """Each linear weight goes through `pack` and ends on `device`."""
        options = {"dtype": self.dtype, "device": device or self.device, "trust_remote_code": self.trust_remote_code}
        cached = self.cache and self.cache.entry()
        if cached:
            options["made_in"] = stream.exact_dtype(self.directory, self.dtype)  # as without the cache
        if not self.is_prequantized and not cached:
            policy = stream.LoadPolicy(self.quantizer, pack, self.adapter.select_targets)
            return stream.load_streamed(self.directory, policy, **options)
        read = stream.load_packed if registry.quantizer(self.quantizer_name).is_mlx_packed else stream.load_quantized
        model = read(str(cached or self.directory), self.quantizer, **options)
        model.name_or_path = self.directory
        self.adapter.select_targets(model, self.quantizer.module_type)
        return model

    def outline(self, model: nn.Module) -> dict:
        """What another process must know of a model that was read, to make the same without its values. JSON-able."""
        return stream.meta_model(model, self.quantizer)

    def outlined(self, outline: dict) -> nn.Module:
        """The model of an `outline`, on the meta device."""
        return stream.meta_model_with_shapes(
            self.directory,
            self.quantizer,
            self.adapter.select_targets,
            outline,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
        )
