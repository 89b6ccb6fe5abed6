"""Mixture-of-experts weights, which transformers keeps as one [experts, ., .] parameter that no linear layer owns.

`PackedExperts` takes the parameter's place on the experts module. The module's own forward indexes it by expert and
gives the result to `F.linear` or `@`; there the expert's weight is dequantized, used, and dropped, in forward and again
in backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from anyqlora.core.errors import NotSupported
from anyqlora.on_torch.quantizers.dequant_matmul import dequant_matmul

PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm)


class PackedExperts(nn.Module):
    """The codes of E weights, each quantized by itself as it stands in its parameter: [out, in], or [in, out] where
    forward uses `@`.
    """

    def __init__(self, name: str, shape: torch.Size, quantizer):
        super().__init__()
        self.name, self.shape, self.quantizer = name, shape, quantizer
        self.states: list = []

    def fill(self, weights: torch.Tensor) -> None:
        """Quantize float [E, ., .], one expert at a time."""
        for number, weight in enumerate(weights):
            codes, state = self.quantizer.pack(weight.float())
            if number == 0:
                self.register_buffer("codes", codes.new_empty(len(weights), *codes.shape), persistent=False)  # [E, ...]
            self.codes[number] = codes
            self.states.append(state)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Codes and states as tensors alone."""
        states = {
            f"{number}|{key}": value
            for number, state in enumerate(self.states)
            for key, value in self.quantizer.state_tensors(state).items()
        }
        return {"codes": self.codes, **states}

    def adopt(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take what another's `tensors` gave."""
        self.register_buffer("codes", tensors["codes"], persistent=False)
        states: dict[str, dict] = {}
        for name, value in tensors.items():
            number, is_state, key = name.partition("|")
            if is_state:
                states.setdefault(number, {})[key] = value
        self.states = [self.quantizer.state_from(state) for state in states.values()]

    def __getitem__(self, expert) -> _ExpertWeight:
        return _ExpertWeight(self, int(expert))

    def dequantize(self, expert: int) -> torch.Tensor:
        """One expert's weight in the compute dtype."""
        return self.quantizer.unpack(self.codes[expert], self.states[expert])

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """All experts in one product (Llama 4), the tokens sorted by expert: [E, N, in] x [E, in, out]."""
        if function is torch.bmm and isinstance(args[1], cls) and not kwargs:
            return torch.stack([x @ args[1][expert] for expert, x in enumerate(args[0])])
        raise _unknown(next(a for a in args if isinstance(a, cls)), function)


class _ExpertWeight:
    """Stands for one expert's weight in the experts module's forward. Only products with it are defined."""

    def __init__(self, experts: PackedExperts, expert: int, transposed: bool = False):
        self.experts, self.expert, self.transposed = experts, expert, transposed

    @property
    def T(self) -> _ExpertWeight:
        return _ExpertWeight(self.experts, self.expert, not self.transposed)

    def product(self, x: torch.Tensor, transposed: bool) -> torch.Tensor:
        """x W^T, or x W."""
        return dequant_matmul(x, lambda: self.experts.dequantize(self.expert), transposed=transposed != self.transposed)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear and isinstance(args[1], cls):
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            out = args[1].product(args[0], transposed=True)
            return out if bias is None else out + bias.to(out.dtype)
        if function in PRODUCTS and isinstance(args[1], cls):
            return args[1].product(args[0], transposed=False)
        raise _unknown(next(a for a in args if isinstance(a, cls)).experts, function)


def _unknown(experts: PackedExperts, use) -> NotSupported:
    return NotSupported(
        f"{experts.name}: this architecture uses its experts' weights in a way that is not built for quantized ones "
        f"({getattr(use, '__name__', use)})",
        cure="--quantizer none",
    )


def expert_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters [experts, ., .] of experts modules."""
    return [
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        if "expert" in type(module).__name__.lower()
        for attribute, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and parameter.is_floating_point()
    ]
