"""The output head and the cross-entropy in one: a few rows of logits at a time, and their gradient while they are there."""

from __future__ import annotations

from typing import NamedTuple

import torch

from anyqlora.on_torch.kernels.cpu import bindings

LIFT = {
    torch.float16: 1024.0
}  # probabilities lie below fp16's smallest normal number, 6e-5: the gradient is made so much greater


class After(NamedTuple):
    """What a model does to its head's product: z = scale * x, or with `cap` z = cap * tanh(scale * x / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        scaled = logits * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap


def cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    after: After = After(),
    rows: int,
    is_native: bool = False,
    is_fused: bool = False,
    rounded: bindings.Rounded | None = None,
) -> torch.Tensor:
    """Sum of -log softmax(after(hidden W^T + bias))[target], float32, a scalar with gradient; equal to `defined`.

    hidden [N, H], weight [V, H], bias [V] or None, targets int64 [N]. `rows` of the N are looked at together, so that of the logits
    and their gradient [rows, V] are in memory and not [N, V]. The gradient is computed in the forward pass, where the logits are:
    backward only multiplies it by what the loss is multiplied by (Hsu et al. 2024, Liger kernel) - that of a weight in place, so
    that a second backward of the same graph is an error. is_native: rows of bf16 by native.c, in the place of the
    logits; is_fused: by head.c, which needs no memory for them, where weight and bias do not learn; `rounded`: with a gradient in 8 bits.
    """
    dtype = (
        torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else hidden.dtype
    )
    return _CrossEntropy.apply(
        hidden, weight, bias, targets, after, rows, dtype, torch.is_grad_enabled(), is_native, is_fused, rounded
    )


def defined(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    after: After = After(),
) -> torch.Tensor:
    """What `cross_entropy` computes."""
    logits = after(torch.nn.functional.linear(hidden, weight, bias))
    return torch.nn.functional.cross_entropy(
        logits.float() if logits.dtype != torch.float64 else logits, targets, reduction="sum"
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, after, rows, dtype, learns, is_native, is_fused, rounded):
        wanted = [learns and needed for needed in ctx.needs_input_grad[:3]]
        exact = torch.promote_types(dtype, torch.float32)  # float64 stays
        ctx.kinds, ctx.lift = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype), LIFT.get(dtype, 1.0)
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        gradients = [
            hidden.new_empty(hidden.shape, dtype=dtype if ctx.lift == 1 else exact) if wanted[0] else None,
            torch.zeros_like(weight, dtype=exact) if wanted[1] else None,
            torch.zeros_like(bias, dtype=exact) if wanted[2] else None,
        ]
        in_c = after.cap is None and bindings.is_for(w)
        if is_fused and in_c and not any(wanted[1:]) and hidden.shape[1] % 2 == 0:
            losses = bindings.head(hidden.to(dtype), w, b, targets, after.scale, rows, gradients[0], rounded)
        else:
            losses = _by_logits(hidden, w, b, targets, after, rows, gradients, is_native and in_c, ctx.lift)
        ctx.save_for_backward(*gradients)
        return losses.sum()

    @staticmethod
    def backward(ctx, of_loss):
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        factor = of_loss / ctx.lift
        found = (
            None if of_hidden is None else of_hidden * factor,
            *(None if g is None else g.mul_(factor) for g in (of_weight, of_bias)),
        )
        return *(None if g is None else g.to(kind) for g, kind in zip(found, ctx.kinds, strict=True)), *[None] * 8


def _by_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    after: After,
    rows: int,
    gradients: list,
    in_place: bool,
    lift: float,
) -> torch.Tensor:
    """The loss of each row [N]; what it gives, `lift` times as much, is put into the gradients of hidden [N, H], weight [V, H] and bias [V]; None is not wanted."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    losses = torch.empty(len(hidden), dtype=exact, device=hidden.device)
    room = weight.new_empty(
        min(rows, len(hidden)), len(weight)
    )  # once: on a CPU fresh pages cost more than the writing
    for first in range(0, len(hidden), rows):
        some = slice(first, first + rows)
        h = hidden[some].to(weight.dtype)
        logits = (
            torch.mm(h, weight.T, out=room[: len(h)])
            if bias is None
            else torch.addmm(bias, h, weight.T, out=room[: len(h)])
        )
        if in_place:
            losses[some], z = bindings.losses_(logits, targets[some], after.scale), logits
        else:
            losses[some], z = _losses(logits, targets[some], after, exact)
            z = z.mul_(lift).to(h.dtype)
        if any(gradient is not None for gradient in gradients):
            _add_gradients(gradients, some, z, h, weight)
        del z  # else it stays while the next one is made
    return losses


def _losses(
    logits: torch.Tensor, targets: torch.Tensor, after: After, exact: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row [N], and the gradient of their sum by `logits` [N, V], in the dtype `exact`."""
    z = logits.to(exact, copy=True)
    slope = None
    if after.scale != 1:
        z.mul_(after.scale)
    if after.cap is not None:
        z.div_(after.cap).tanh_()
        slope = 1 - z.square()
        z.mul_(after.cap)
    targets = targets.unsqueeze(1)
    z.sub_(z.amax(1, keepdim=True))
    chosen = z.gather(1, targets).squeeze(1)
    total = z.exp_().sum(1)
    z.div_(total.unsqueeze(1))  # softmax
    z.scatter_add_(1, targets, z.new_full((1, 1), -1).expand_as(targets))
    if slope is not None:
        z.mul_(slope)
    if after.scale != 1:
        z.mul_(after.scale)
    return total.log() - chosen, z


def _add_gradients(
    gradients: list, some: slice, of_logits: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor
) -> None:
    """Put what these rows' logits [rows, V] give into the gradients."""
    of_hidden, of_weight, of_bias = gradients
    if of_hidden is not None:
        of_hidden[some] = of_logits @ weight
    if of_weight is not None:
        of_weight += of_logits.T @ hidden
    if of_bias is not None:
        of_bias += of_logits.sum(0)
