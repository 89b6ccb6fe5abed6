"""FrozenMatmul in 8 bits, taken only where they prove themselves: on rows of the run's own, before its first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import nn

from anyqlora.core.errors import RunError
from anyqlora.on_torch.adapters.fused_layers import SharedInputGroup, fused_layers
from anyqlora.on_torch.kernels.cpu import bindings
from anyqlora.on_torch.kernels.frozen_matmul import FrozenMatmul, FullMatmul, add_lora
from anyqlora.on_torch.loss import TrainedTokenLoss
from anyqlora.on_torch.memory.malloc import return_freed_pages

# How far a group's outputs and gradients may be off: int8 is 0.01-0.03 where no number of a token stands out, float8
# 0.03-0.06
NEAR = 0.08
TINY = 1e-30
LOSS = 0.005  # how far the loss of those rows may move


class _ComparedProducts(FullMatmul):
    """Whole products beside which the rounded ones are made, too.

    How far these are `off` is a part of what tells tokens apart: of the norm of the whole ones without their mean over
    a row's tokens, since one number that stands out in every token makes that mean large.
    """

    def __init__(self, rounded: FrozenMatmul):
        self.rounded, self.squares = (
            rounded,
            {"outputs": [0.0, TINY], "gradients": [0.0, TINY]},
        )  # of differences, and of what they are a part of

    @property
    def off(self) -> float:
        """Of outputs or of gradients, whichever is farther."""
        worst = max(math.sqrt(off / whole) for off, whole in self.squares.values())
        return worst if math.isfinite(worst) else math.inf

    def forward(self, x, weight, bias, lora=None):
        y = super().forward(x, weight, bias)
        self._note(
            "outputs", y, weight, lambda rounded, prepared: rounded.forward(rounded.prepare_input(x), prepared, bias)
        )
        return add_lora(y, lora)

    def backward(self, grad_output, weight, accumulated, lora=None):
        grad_x = super().backward(grad_output, weight, None)
        self._note("gradients", grad_x, weight, lambda rounded, prepared: rounded.backward(grad_output, prepared, None))
        grad_x = grad_x if accumulated is None else accumulated.add_(grad_x)
        return add_lora(grad_x, lora, transposed=True)

    def _note(self, what: str, whole: torch.Tensor, weight: torch.Tensor, product: Callable) -> None:
        noted = self.squares[what]
        if not self.rounded.supports(weight):
            noted[0] = math.inf
            return
        rounded, whole = (
            y.detach().float().flatten(0, -2)
            for y in (product(self.rounded, self.rounded.prepare_weight(weight)), whole)
        )
        apart = whole - whole.mean(0) if len(whole) > 1 else whole
        noted[0] += float((rounded - whole).square().sum())
        noted[1] += float(apart.square().sum())


def calibrate(
    model: nn.Module,
    rounded: FrozenMatmul,
    losses: Callable[[], Iterable[torch.Tensor]],
    broadcast: Callable = lambda chosen: chosen,
) -> list[str]:
    """Let the groups of `model`'s fused layers multiply by `rounded` where that is near their whole products. Returns
    what is to be said.

    `losses` gives those of some rows, one after another, with gradients: they are run forward and back on whole
    products, with the rounded ones beside them, and forward again on what was chosen. Nothing that is learned is
    changed. `told` gives all processes what the first one has chosen. Raises RunError where no group, or the loss as a
    whole, is near.
    """
    groups = list({id(layer.group): layer.group for layer in fused_layers(model)}.values())
    if not groups:
        raise RunError(
            "frozen_matmul: none of this model's LoRA layers is fused with its weight", cure="--frozen_matmul full"
        )
    whole = _compared(groups, rounded, losses)
    model.zero_grad()
    off = {number: group.products.off for number, group in enumerate(groups)}
    near = broadcast([number for number in off if off[number] <= NEAR])
    for number, group in enumerate(groups):
        group.multiply_by(rounded if number in near else group.whole)
    worst = groups[max(off, key=off.__getitem__)].names[0]
    if not near:
        raise RunError(
            f"frozen_matmul: no layer's products are within {NEAR:.0%} of whole ones, {worst}'s are "
            f"{max(off.values()):.0%} off",
            cure="--frozen_matmul full",
        )
    with (
        return_freed_pages()
    ):  # in a forward pass they would lie among what passes, beside holes as large as what they are made from
        for group in groups:
            group.make()
    moved = abs(_total(losses) - whole) / max(abs(whole), TINY)
    if not moved <= LOSS:
        raise RunError(
            f"frozen_matmul: the rows' loss moves by {moved:.2%}, and {LOSS:.1%} is allowed",
            cure="--frozen_matmul full",
        )
    left = len(groups) - len(near)
    notes = [
        f"products of {left} of {len(groups)} groups of linear layers are not rounded: they would be more than "
        f"{NEAR:.0%} off, {worst}'s {max(off.values()):.0%}"
    ] * bool(left)
    return [
        *notes,
        f"rounded products are at most {max(off[number] for number in near):.1%} off whole ones; the rows' loss moves "
        f"by {moved:.3%}",
    ]


def calibrate_head(
    loss: TrainedTokenLoss,
    hidden: Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]],
    broadcast: Callable = lambda value: value,
) -> tuple[bindings.QuantizedHead | None, list[str]]:
    """(the output head's weights in 8 bits, from which the gradient of its input is near the one from the whole
    weights, or None; what is to be said of it).

    `hidden` gives the head's inputs [N, H] and the targets [N] of some rows. Only where the head is one C kernel, and a
    factor at most follows.
    """
    if not loss.spec.is_fused or loss.spec.transform.cap is not None:
        return None, []
    with return_freed_pages():
        quantized = bindings.quantize_lm_head(loss.head.weight.detach())
    if quantized is None:
        return None, []
    full, in_8_bits = (replace(loss, quantized_head=weights) for weights in (None, quantized))
    difference, norm = 0.0, TINY
    with torch.no_grad():
        for x, targets in hidden():
            exact, ours = (_gradient(each, x, targets) for each in (full, in_8_bits))
            difference += float((ours - exact).square().sum())
            norm += float(exact.square().sum())
    off = math.sqrt(difference / norm)
    if not broadcast(off <= NEAR):
        return None, [f"the output head's gradient is not rounded: it would be {off:.0%} off"]
    return quantized, [f"the output head's gradient in 8 bits is {off:.1%} off the whole one"]


@torch.enable_grad()
def _gradient(loss: TrainedTokenLoss, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    hidden = hidden.detach().requires_grad_()
    return torch.autograd.grad(loss.from_hidden(hidden, targets), hidden)[0].float()


def _compared(
    groups: list[SharedInputGroup], rounded: FrozenMatmul, losses: Callable[[], Iterable[torch.Tensor]]
) -> float:
    """The loss on whole products; each group's `products` know how far rounded ones are off."""
    for group in groups:
        group.multiply_by(_ComparedProducts(rounded), keeps=False)
    return _total(losses, is_back=True)


def _total(losses: Callable[[], Iterable[torch.Tensor]], is_back: bool = False) -> float:
    torch.manual_seed(0)  # what dropout draws is the same for both; every step seeds anew
    total = 0.0
    for loss in losses():
        if is_back:
            loss.backward()
        total += float(loss.detach())
    return total
