"""The parts of a model: its blocks, and the linear layers, which are quantized and which an adapter can go on."""

from __future__ import annotations

import re

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from anyqlora.on_torch._compat import float32_patterns

# Subclasses of nn.Linear that compute x W^T + b in a forward of their own; any other such subclass may compute
# anything.
SAME_PRODUCT = {"FalconLinear"}


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers that text passes through one after another, as transformers marks them."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def is_linear(module: nn.Module) -> bool:
    """Whether the module computes x W^T + b and nothing else: nn.Linear, or GPT-2's Conv1D, which keeps W^T."""
    kind = type(module)
    plain = isinstance(module, nn.Linear) and (kind.forward is nn.Linear.forward or kind.__name__ in SAME_PRODUCT)
    return plain or isinstance(module, Conv1D)


def linear_inputs(module: nn.Module) -> int:
    """How many inputs a linear layer has."""
    return module.nx if isinstance(module, Conv1D) else module.in_features


def linears(model: nn.Module, held: type = nn.Linear) -> dict[str, nn.Module]:
    """{name: module} of the linear layers that are frozen and packed: all but the output head, and those that the
    architecture wants in float32. `held` is the type that a quantizer has put in their place."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if module is not head
        and (is_linear(module) or (held is not nn.Linear and isinstance(module, held)))
        and not float32_modules(model, f"{name}.weight")
    }


def float32_modules(model: nn.Module, parameter: str) -> bool:
    """Whether the architecture names this parameter among those that lose too much in 16 bits (transformers' flags for
    it).
    """
    return any(re.search(pattern.replace("*", ".*"), parameter) for pattern in float32_patterns(model))


def text_linears(model: nn.Module, held: type = nn.Linear) -> dict[str, nn.Module]:
    """Those linear layers that text passes through: the decoder's, without the towers and projectors of other
    senses.
    """
    layers = linears(model, held)
    decoder = model.get_decoder()
    prefix = next((name for name, module in model.named_modules() if module is decoder), "")
    inside = {name: module for name, module in layers.items() if not prefix or name.startswith(f"{prefix}.")}
    return inside or layers
