"""The output head and the cross-entropy in one: a few rows of logits at a time, and their gradient while they are
there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from anyqlora.on_torch.kernels.cpu import bindings

LIFT = {
    torch.float16: 1024.0
}  # probabilities lie below fp16's smallest normal number, 6e-5: the gradient is made so much greater


class LogitTransform(NamedTuple):
    """What a model does to its head's logits: z = scale * x, or with `cap` z = cap * tanh(scale * x / cap)."""

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
    transform: LogitTransform = LogitTransform(),
    rows: int,
    is_native: bool = False,
    is_fused: bool = False,
    quantized: bindings.QuantizedHead | None = None,
) -> torch.Tensor:
    """Sum of -log softmax(transform(hidden W^T + bias))[target], float32, a scalar with gradient; equal to `reference`.

    hidden [N, H], weight [V, H], bias [V] or None, targets int64 [N]. `rows` of the N are looked at together, so that
    of the logits and their gradient [rows, V] are in memory and not [N, V]. The gradient is computed in the forward
    pass, where the logits are: backward only multiplies it by what the loss is multiplied by (Hsu et al. 2024, Liger
    kernel) - that of a weight in place, so that a second backward of the same graph is an error. is_native: rows of
    bf16 in C, in the place of the logits; is_fused: by bindings.lm_head_cross_entropy, which needs no memory for them,
    where weight and bias do not learn; `quantized`: with a gradient in 8 bits.
    """
    dtype = (
        torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else hidden.dtype
    )
    return _CrossEntropy.apply(
        hidden, weight, bias, targets, transform, rows, dtype, torch.is_grad_enabled(), is_native, is_fused, quantized
    )


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    transform: LogitTransform = LogitTransform(),
) -> torch.Tensor:
    """What `cross_entropy` computes."""
    logits = transform(torch.nn.functional.linear(hidden, weight, bias))
    return torch.nn.functional.cross_entropy(
        logits.float() if logits.dtype != torch.float64 else logits, targets, reduction="sum"
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, transform, rows, dtype, learns, is_native, is_fused, quantized):
        wanted = [learns and needed for needed in ctx.needs_input_grad[:3]]
        exact = torch.promote_types(dtype, torch.float32)  # float64 stays
        ctx.dtypes, ctx.lift = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype), LIFT.get(dtype, 1.0)
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        gradients = [
            hidden.new_empty(hidden.shape, dtype=dtype if ctx.lift == 1 else exact) if wanted[0] else None,
            torch.zeros_like(weight, dtype=exact) if wanted[1] else None,
            torch.zeros_like(bias, dtype=exact) if wanted[2] else None,
        ]
        in_c = transform.cap is None and bindings.is_for(w)
        if is_fused and in_c and not any(wanted[1:]) and hidden.shape[1] % 2 == 0:
            losses = bindings.lm_head_cross_entropy(
                hidden.to(dtype), w, b, targets, transform.scale, rows, gradients[0], quantized
            )
        else:
            losses = _by_logits(hidden, w, b, targets, transform, rows, gradients, is_native and in_c, ctx.lift)
        ctx.save_for_backward(*gradients)
        return losses.sum()

    @staticmethod
    def backward(ctx, grad_loss):
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        factor = grad_loss / ctx.lift
        grads = (
            None if grad_hidden is None else grad_hidden * factor,
            *(None if grad is None else grad.mul_(factor) for grad in (grad_weight, grad_bias)),
        )
        return *(None if grad is None else grad.to(own) for grad, own in zip(grads, ctx.dtypes, strict=True)), *[
            None
        ] * 8


def _by_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    transform: LogitTransform,
    rows: int,
    gradients: list,
    in_place: bool,
    lift: float,
) -> torch.Tensor:
    """The loss of each row [N]; what it gives, `lift` times as much, is put into the gradients of hidden [N, H], weight
    [V, H] and bias [V]; None is not wanted.
    """
    exact = torch.promote_types(weight.dtype, torch.float32)
    losses = torch.empty(len(hidden), dtype=exact, device=hidden.device)
    buffer = weight.new_empty(
        min(rows, len(hidden)), len(weight)
    )  # once: on a CPU fresh pages cost more than the writing
    for first in range(0, len(hidden), rows):
        chunk = slice(first, first + rows)
        h = hidden[chunk].to(weight.dtype)
        logits = (
            torch.mm(h, weight.T, out=buffer[: len(h)])
            if bias is None
            else torch.addmm(bias, h, weight.T, out=buffer[: len(h)])
        )
        if in_place:
            losses[chunk], z = bindings.cross_entropy_(logits, targets[chunk], transform.scale), logits
        else:
            losses[chunk], z = _losses(logits, targets[chunk], transform, exact)
            z = z.mul_(lift).to(h.dtype)
        if any(gradient is not None for gradient in gradients):
            _add_gradients(gradients, chunk, z, h, weight)
        del z  # else it stays while the next one is made
    return losses


def _losses(
    logits: torch.Tensor, targets: torch.Tensor, transform: LogitTransform, exact: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row [N], and the gradient of their sum by `logits` [N, V], in the dtype `exact`."""
    z = logits.to(exact, copy=True)
    slope = None
    if transform.scale != 1:
        z.mul_(transform.scale)
    if transform.cap is not None:
        z.div_(transform.cap).tanh_()
        slope = 1 - z.square()
        z.mul_(transform.cap)
    targets = targets.unsqueeze(1)
    z.sub_(z.amax(1, keepdim=True))
    chosen = z.gather(1, targets).squeeze(1)
    total = z.exp_().sum(1)
    z.div_(total.unsqueeze(1))  # softmax
    z.scatter_add_(1, targets, z.new_full((1, 1), -1).expand_as(targets))
    if slope is not None:
        z.mul_(slope)
    if transform.scale != 1:
        z.mul_(transform.scale)
    return total.log() - chosen, z


def _add_gradients(
    gradients: list, chunk: slice, grad_logits: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor
) -> None:
    """Put what these rows' logits [rows, V] give into the gradients."""
    grad_hidden, grad_weight, grad_bias = gradients
    if grad_hidden is not None:
        grad_hidden[chunk] = grad_logits @ weight
    if grad_weight is not None:
        grad_weight += grad_logits.T @ hidden
    if grad_bias is not None:
        grad_bias += grad_logits.sum(0)
