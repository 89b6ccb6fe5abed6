"""The layers of an mlx-lm model: which are linear, and how one is replaced or recomputed."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from anyqlora.on_mlx.nn.attention import recomputed_attention
from anyqlora.on_mlx.nn.quantizers import Nf4Linear, UnpackedLinear


def linears(model: nn.Module) -> dict[str, tuple[int, int]]:
    """{name: (outputs, inputs)} of the linear layers that are frozen and packed: those in the model's blocks, not its
    head.
    """
    inside = {id(module) for block in model.layers for module in block.modules()}
    return {name: shape(module) for name, module in model.named_modules() if id(module) in inside and is_linear(module)}


def is_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, nn.QuantizedLinear, UnpackedLinear, Nf4Linear)


def shape(module: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer, packed or not."""
    if isinstance(module, Nf4Linear):
        return module.shape
    outputs, inputs = module.weight.shape
    return outputs, inputs * 32 // module.bits if isinstance(module, nn.QuantizedLinear) else inputs


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place that `name` states."""
    *parents, attribute = name.split(".")
    owner = model
    for part in parents:
        owner = owner[int(part)] if isinstance(owner, list) else owner[part]
    if isinstance(owner, list):
        owner[int(attribute)] = module
    else:
        owner[attribute] = module


def recompute(block: nn.Module) -> None:
    """Keep only what enters this block for backward, and compute the rest again there.

    The instance changes, its class does not.
    """
    kind = type(block)

    class Recomputed(kind):
        def __call__(self, x, *others, **named):
            def forward(trained, x):
                self.update(trained)
                with recomputed_attention():  # here too, as this runs again when the loss has long returned
                    return kind.__call__(self, x, *others, **named)

            return mx.checkpoint(forward)(self.trainable_parameters(), x)

    Recomputed.__name__ = kind.__name__
    block.__class__ = Recomputed
