"""Dropout whose masks follow from tokens (core/dropout.py). So a step drops the same whatever processes, micro-batches,
padding or kernels it is computed with; torch's own draws from a generator of each process, in the order of its calls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import nn

from anyqlora.core.dropout import BUCKETS, FIRST, PER_PAIR, SECOND, layer_key, representable, threshold
from anyqlora.on_torch.kernels.cpu import bindings

PIECE = 1 << 20  # numbers at a time on a CPU: they stay in its caches, and threads seldom wait for one another
# Numbers of 32 bits as torch's int32 has them.
MULTIPLIERS = [number - (1 << 32 if number >> 31 else 0) for number in (PER_PAIR, FIRST, SECOND)]
SIGNS = 0x80008000 - (1 << 32)  # the highest bits of two halves


def token_mask(
    keys: torch.Tensor, width: int, dropout: float, *, begin: int = 0, kernels: str = "portable"
) -> torch.Tensor:
    """What stays of columns `begin` to `begin` + width of tokens with these keys, int64 [M]: uint8 [M, width], 1 or 0.

    core/dropout.py has the definition. All `kernels` give the same: "native" (C), "triton", or "portable" (torch's own
    operations).
    """
    if kernels == "native":
        return bindings.token_mask(keys, width, threshold(dropout), begin)
    if kernels == "triton":
        from anyqlora.on_torch.kernels.gpu import token_mask as triton_masks

        return triton_masks.token_mask(keys, width, threshold(dropout), begin)
    first = begin // 2
    pairs = _per_pair(first, (begin + width + 1) // 2, keys.device)
    out = torch.empty(len(keys), width, dtype=torch.uint8, device=keys.device)
    rows = max(1, PIECE // max(width, 1)) if keys.device.type == "cpu" else max(len(keys), 1)
    for some, place in zip(keys.split(rows), out.split(rows), strict=True):
        low, high = some.to(torch.int32)[:, None], (some >> 32).to(torch.int32)[:, None]
        bits = torch.add(pairs, low, out=pairs.new_empty(len(some), len(pairs)))
        bits = bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(MULTIPLIERS[1]).bitwise_xor_(high)
        bits = bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(MULTIPLIERS[2])
        bits = bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).bitwise_xor_(SIGNS)  # halves compare as signed
        halves = bits.view(torch.int16)[:, begin - 2 * first : begin - 2 * first + width]
        torch.ge(halves, threshold(dropout) - BUCKETS // 2, out=place.view(torch.bool))
    return out


@functools.lru_cache(maxsize=64)
def _per_pair(first: int, end: int, device: torch.device) -> torch.Tensor:
    """int32 [end - first]: what each pair of columns brings into its 32 bits."""
    return torch.arange(first, end, dtype=torch.int32, device=device).mul_(MULTIPLIERS[0])


class CurrentTokens:
    """The keys of the tokens that were last given to a model, int64 [B, T], for the dropout in it.

    They are held until the end of the backward pass, in which checkpointed layers run again, on a GPU in a thread of
    autograd's (which a context variable would not reach). With torch's reentrant checkpointing the backward of a batch
    has to come before the next one's forward.
    """

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None

    def set(self, keys: torch.Tensor | None) -> None:
        self.keys = keys

    @contextlib.contextmanager
    def holding(self, keys: torch.Tensor | None) -> Iterator[None]:
        """Within, the current tokens are those of these keys."""
        before, self.keys = self.keys, keys
        try:
            yield
        finally:
            self.keys = before

    def of(self, x: torch.Tensor) -> torch.Tensor | None:
        """The keys [M] of x [..., in] of M tokens; None where they are not known: of what a loop of somebody else's
        gives a model, and of tokens that a router has chosen.
        """
        if self.keys is None or self.keys.numel() * x.shape[-1] != x.numel() or self.keys.device != x.device:
            return None
        return self.keys.flatten()


current_tokens = CurrentTokens()


def recomputing_contexts() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """torch.utils.checkpoint's context_fn: what a layer drops in forward it drops when it runs again, whatever the
    model has been given in between.
    """
    return contextlib.nullcontext(), current_tokens.holding(current_tokens.keys)


class TokenDropout(nn.Dropout):
    """Dropout of a layer's input [..., in] by its tokens' keys, or as torch does it where they are not known.

    Layers of one `name` drop the same values. `kernels` is whose kernels draw the mask.
    """

    kernels = "portable"

    def __init__(self, p: float, name: str):
        super().__init__(p)
        self.key = layer_key(name)

    def keys(self, x: torch.Tensor) -> torch.Tensor | None:
        """Those of x's tokens in this layer, int64 [M]."""
        keys = current_tokens.of(x)
        return None if keys is None else keys ^ self.key

    def mask(self, x: torch.Tensor) -> torch.Tensor | None:
        """What stays of x [..., in], uint8 [M, in]."""
        keys = self.keys(x)
        return None if keys is None else token_mask(keys, x.shape[-1], self.p, kernels=self.kernels)

    def drop_without_keys(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.p:
            return x
        mask = self.mask(x)
        if mask is None:
            return self.drop_without_keys(x)
        return _Masked.apply(x, mask.view(x.shape), 1 - representable(self.p))


class _Masked(torch.autograd.Function):
    """x / keep_rate where the mask is 1, else 0."""

    @staticmethod
    def forward(ctx, x, mask, keep_rate):
        ctx.save_for_backward(mask)
        ctx.keep_rate = keep_rate
        return x * mask.to(x.dtype) / keep_rate

    @staticmethod
    def backward(ctx, grad_y):
        (mask,) = ctx.saved_tensors
        return grad_y * mask.to(grad_y.dtype) / ctx.keep_rate, None, None


def token_dropouts(model: nn.Module) -> list[TokenDropout]:
    return [module for module in model.modules() if isinstance(module, TokenDropout)]
