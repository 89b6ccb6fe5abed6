"""Activations that wait for the backward pass in host memory."""

from __future__ import annotations

import torch
from torch import nn

SMALLEST = 1 << 20  # bytes: what is less is not worth its way


def offload_activations(smallest: int = SMALLEST):
    """A context around a forward pass: what it saves for backward goes to host memory, and comes back when backward
    asks for it.

    Weights stay. The copies run on the stream that computes, so each is done before its source is used again.
    """

    def pack(tensor: torch.Tensor):
        if isinstance(tensor, nn.Parameter) or tensor.numel() * tensor.element_size() < smallest:
            return None, tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(packed) -> torch.Tensor:
        device, tensor = packed
        return tensor if device is None else tensor.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
