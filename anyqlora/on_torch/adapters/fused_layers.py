"""PEFT's LoRA layers whose forward and backward are one function with the frozen weight: the same parameters under the
same names.
"""

from __future__ import annotations

import functools
import re

import torch
from peft.tuners import lora
from torch import nn

from anyqlora.models.architectures import shared_input_groups
from anyqlora.on_torch._compat import version_of
from anyqlora.on_torch.kernels.dropout import TokenDropout
from anyqlora.on_torch.kernels.frozen_matmul import FrozenMatmul
from anyqlora.on_torch.kernels.fused_lora import FULL, NO_DROPOUT, Dropout, LoraLinear, lora_linears
from anyqlora.on_torch.linears import is_linear, linears

DEFAULT = ["default"]  # PEFT's name of the one adapter
PLAIN = tuple(
    getattr(lora, name) for name in ("Linear", "Linear4bit") if hasattr(lora, name)
)  # the latter where bitsandbytes is


class FusedLoraLinear:
    """Stands before a class of PEFT's LoRA layers.

    What is not plain training of the one adapter goes PEFT's own way.
    """

    group: SharedInputGroup

    def forward(self, x: torch.Tensor, *arguments, **options) -> torch.Tensor:
        if arguments or options or self.disable_adapters or self.merged or self.active_adapters != DEFAULT:
            return super().forward(x, *arguments, **options)
        return self.group.output(self, x)


class SharedInputGroup:
    """Layers that read one tensor.

    Whichever is called first computes all of them; the others, called with that tensor, take theirs.
    """

    def __init__(
        self,
        layers: dict[str, nn.Module],
        quantizer,
        keeps: bool = False,
        product=lora_linears,
        whole: FrozenMatmul = FULL,
    ):
        """`keeps`: what is made of the weights stays in memory once it is there.

        `product` computes, and `whole` multiplies in x's dtype.
        """
        self.names, self.layers, self.quantizer, self.keeps, self.product = (
            list(layers),
            list(layers.values()),
            quantizer,
            keeps,
            product,
        )
        self.forget()
        self.whole = whole
        self.multiply_by(whole)

    def multiply_by(self, products: FrozenMatmul, keeps: bool = True) -> None:
        """From now on the products with the frozen weights are these.

        Not `keeps`: nothing stays in memory, whatever the group does else.
        """
        self.products = products
        weights, self.is_kept = [functools.partial(self._weight, layer) for layer in self.layers], keeps and self.keeps
        self.weights = [functools.cache(weight) for weight in weights] if self.is_kept else weights

    def make(self) -> None:
        """What stays in memory of the weights, now."""
        for weight in self.weights if self.is_kept else ():
            weight()

    def _weight(self, layer: nn.Module):
        return self.products.prepare_weight(self.quantizer.dequantize(layer.base_layer))

    def forget(self) -> None:
        """Let go of outputs that nobody has come for: a forward pass broke off."""
        self.source, self.version, self.outputs = None, -1, {}

    def output(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """`layer`'s [..., out] of x [..., in]."""
        if self.source is not x or self.version != version_of(x) or id(layer) not in self.outputs:
            self.source, self.version, self.outputs = x, version_of(x), self._outputs(x)
        out = self.outputs.pop(id(layer))
        if not self.outputs:
            self.source = None
        return out

    def _outputs(self, x: torch.Tensor) -> dict[int, torch.Tensor]:
        first = self.layers[0]
        packed = isinstance(first.base_layer, self.quantizer.module_type) and self.quantizer.bits < 16
        kind = self.quantizer.compute_dtype if packed else first.base_layer.weight.dtype
        if torch.is_autocast_enabled(x.device.type):
            kind = torch.get_autocast_dtype(x.device.type)
        is_kept = self.is_kept or not packed and self.products is self.whole  # then it is the model's own
        parts = [self._parts(layer, weight, is_kept) for layer, weight in zip(self.layers, self.weights, strict=True)]
        out = self.product(x.to(kind), parts, dropout_of(first.lora_dropout["default"], x), self.products)
        # bitsandbytes' layers give back the type that they were given
        return {id(layer): y.to(x.dtype) if packed else y for layer, y in zip(self.layers, out, strict=True)}

    @staticmethod
    def _parts(layer: nn.Module, weight, is_kept: bool) -> LoraLinear:
        return LoraLinear(
            weight,
            layer.base_layer.bias,
            layer.lora_A["default"].weight,
            layer.lora_B["default"].weight,
            layer.scaling["default"],
            is_kept,
        )


def dropout_of(module: nn.Module, x: torch.Tensor) -> Dropout:
    """What a module of PEFT's LoRA layers drops of x [..., in]."""
    if not isinstance(module, nn.Dropout) or not module.training or not module.p:
        return NO_DROPOUT
    return Dropout(module.p, module.keys(x), module.kernels) if isinstance(module, TokenDropout) else Dropout(module.p)


@functools.cache
def _class_of(kind: type) -> type:
    return type(f"Fused{kind.__name__}", (FusedLoraLinear, kind), {})


def fuse_layers(
    model: nn.Module, quantizer, cached: int = 0, product=lora_linears, whole: FrozenMatmul = FULL
) -> list[str]:
    """Put a fused layer, computed by `product` and `whole`, in the place of each of PEFT's LoRA layers in `model`.

    The first `cached` layers of the model keep their dequantized weights. Returns the names of the LoRA layers that
    stay as they are, since they do more than add B A x, as DoRA's do.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, lora.LoraLayer)}
    fused = {}
    for name, module in layers.items():
        if _is_plain(module, quantizer):
            fused[name] = _class_of(type(module)).__new__(_class_of(type(module)))
            fused[name].__dict__ = module.__dict__  # the same parts: parameters, hooks, settings
            model.set_submodule(name, fused[name])
    for names in shared_input_groups(fused):
        number = re.search(r"\.(\d+)\.", names[0])  # of the layer
        keeps = number is not None and int(number[1]) < cached
        group = SharedInputGroup({name: fused[name] for name in names}, quantizer, keeps, product, whole)
        for layer in group.layers:
            layer.group = group
    return sorted(layers.keys() - fused.keys())


def _is_plain(module: lora.LoraLayer, quantizer) -> bool:
    """Whether the layer's output is W x + bias + scale B A x with a frozen W that `quantizer` gives as [out, in]."""
    base = module.base_layer
    is_product = (
        isinstance(base, quantizer.module_type)
        if quantizer.bits < 16
        else isinstance(base, nn.Linear) and is_linear(base)
    )
    return (
        is_product
        and type(module) in PLAIN
        and not (module.lora_variant or any(module.lora_bias.values()) or module.fan_in_fan_out)
    )


def fused_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, FusedLoraLinear)]


def are_all_fused(model: nn.Module, held: type) -> bool:
    """Whether each frozen linear layer, `held` by a quantizer or plain, is in a fused one, of an even rank as
    csrc/matmul.c has it.
    """
    layers = fused_layers(model)
    inside = {id(layer.base_layer) for layer in layers}
    frozen = [module for name, module in linears(model, held).items() if "lora_" not in name]
    return all(layer.lora_A["default"].out_features % 2 == 0 for layer in layers) and all(
        id(module) in inside for module in frozen
    )
