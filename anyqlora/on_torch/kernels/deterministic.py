"""Attention with a deterministic backward on NVIDIA's and AMD's GPUs.

torch's flash and memory-efficient kernels have one, and take it only where torch may refuse what has none
(attention_backward.cu asks for warn_only=False); a whole run is not to end at some operation that has none. So torch
may refuse while attention's backward runs, and warns else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

DEVICES = ("cuda",)
WARN, REFUSE = 1, 2  # torch.set_deterministic_debug_mode


def deterministic(attend: Callable) -> Callable:
    """transformers' attention interface `attend` as it is, with such a backward where deterministic algorithms are
    asked for.
    """

    @functools.wraps(attend)
    def wrapped(module, query, key, value, *masks, **options):
        if not (query.device.type in DEVICES and torch.are_deterministic_algorithms_enabled()):
            return attend(module, query, key, value, *masks, **options)
        out, weights = attend(module, *refuse_until(query, key, value), *masks, **options)
        return refuse_from(out), weights

    return wrapped


def refuse_until(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The inputs; their gradients end what `refuse_from` has begun."""
    return _End.apply(*inputs)


def refuse_from(out: torch.Tensor) -> torch.Tensor:
    """The output; from its gradient to those of the inputs torch refuses what has no deterministic form."""
    return _Begin.apply(out)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad_out):
        torch.set_deterministic_debug_mode(REFUSE)
        return grad_out


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        torch.set_deterministic_debug_mode(WARN)  # a backward that ran out of memory has not come to its end
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx, *grad_inputs):
        torch.set_deterministic_debug_mode(WARN)
        return grad_inputs
