"""The loss: the sum of the trained tokens' negative log-likelihoods, with logits of some of them at a time and of no
other token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from anyqlora.data.stream import IGNORE_INDEX, Batch
from anyqlora.on_mlx.nn.attention import recomputed_attention

# Parts of a padded micro-batch's tokens: those that are trained are counted in whole ones, so that there are few shapes
SHARES = 8
NEAR, NEAR_IN_16_BITS = 1e-4, 0.03  # of the largest logit: how near those of some tokens are to the model's own


class Inputs(NamedTuple):
    """ids [B, T]; segments [B, T] where several documents share a row, else None; of the trained tokens their numbers
    in B * T and their labels, [N], with fillers behind them whose label is IGNORE_INDEX.
    keys: uint32 [B, T, 2], the lower and the upper half of what dropout of a token follows from, where that is known.
    """

    ids: mx.array
    segments: mx.array | None
    trained: mx.array
    labels: mx.array
    keys: mx.array | None = None


def inputs(batch: Batch, multiple: int = 1) -> Inputs:
    """What the loss of a batch is made of. T is padded to a whole `multiple`, and N where that is more than 1."""
    packed = int(batch.segments.max(initial=0)) > 0
    more = [(0, 0), (0, -batch.ids.shape[1] % multiple)]
    ids, targets, segments = (
        np.pad(values, more, constant_values=filler)
        for values, filler in ((batch.ids, 0), (batch.targets, IGNORE_INDEX), (batch.segments, -1))
    )
    keys = batch.token_keys
    if keys is not None:
        keys = mx.array(np.pad(keys, more).astype("<i8").view("<u4").reshape(*ids.shape, 2))
    trained = np.flatnonzero(targets != IGNORE_INDEX)
    share = -(-ids.size // SHARES) if multiple > 1 else 1
    fillers = (0, max(-len(trained) % share, 1 - len(trained)))
    return Inputs(
        mx.array(ids),
        mx.array(segments) if packed else None,
        mx.array(np.pad(trained, fillers).astype(np.int32)),
        mx.array(np.pad(targets.reshape(-1)[trained], fillers, constant_values=IGNORE_INDEX)),
        keys,
    )


@mx.custom_function
def token_nll(logits: mx.array, labels: mx.array) -> mx.array:
    """Sum over the labels [N] that are not IGNORE_INDEX of -log softmax(logits [N, V]), float32."""
    logits = logits.astype(mx.float32)
    chosen = mx.take_along_axis(logits, mx.maximum(labels, 0)[:, None], axis=-1).squeeze(-1)
    return mx.where(labels != IGNORE_INDEX, mx.logsumexp(logits, axis=-1) - chosen, 0).sum()


@token_nll.vjp
def _nll_of_logits(primals, cotangent, output):
    """The softmax, less 1 at the label; autograd's own takes three more arrays of [N, V]."""
    logits, labels = primals
    factors = mx.where(labels != IGNORE_INDEX, cotangent, 0)[:, None]
    is_label = mx.arange(logits.shape[-1]) == labels[:, None]
    return ((mx.softmax(logits.astype(mx.float32), axis=-1) - is_label) * factors).astype(logits.dtype), mx.zeros_like(
        labels
    )


class FullLogitsLoss:
    """By logits of all tokens."""

    def __init__(self, model: nn.Module):
        self.model = model

    def __call__(self, given: Inputs, factor: float | mx.array = 1.0) -> tuple[mx.array, mx.array]:
        """(`factor` times the loss, the loss), float32."""
        total = token_nll(self.run(given).flatten(0, 1)[given.trained], given.labels)
        return total * factor, total

    def total(self, given: Inputs) -> float:
        """The loss of which no gradient is asked."""
        return float(self(given)[1])

    def run(self, given: Inputs) -> mx.array:
        """The model's logits [B, T, V].

        Rows are padded on the right, so under causal attention padding reaches no trained token.
        """
        cache = None if given.segments is None else [DocumentMaskCache(given.segments)] * len(self.model.layers)
        with recomputed_attention():
            return self.model(given.ids, cache=cache)


class TrainedTokenLoss(FullLogitsLoss):
    """By logits of `rows` trained tokens at a time, whose gradient is made as soon as they are.

    The model's own forward is run: once with its backbone's output caught on the way, then with some of that output in
    its place. What the model does to logits after its head is therefore done; and the logits that the first run
    describes are never computed, as MLX computes what is asked for only.
    """

    def __init__(self, model: nn.Module, rows: int):
        """Raises ValueError where the model has no backbone apart from its head."""
        super().__init__(model)
        self.owner, self.name, blocks = backbone(model)
        self.rows = rows
        self.learned = [
            path for path, _ in tree_flatten(model.trainable_parameters()) if not path.startswith(blocks)
        ]  # the head's are among them

    def __call__(self, given: Inputs, factor: float | mx.array = 1.0) -> tuple[mx.array, mx.array]:
        values = tree_flatten(
            self.model.trainable_parameters(), destination={}
        )  # as arguments: what is closed over gets no gradient
        return self._by_parts(given.labels)(
            mx.array(factor), self.hidden(given), *(values[path] for path in self.learned)
        )[:2]

    def total(self, given: Inputs) -> float:
        hidden = self.hidden(given)
        return sum(float(token_nll(self.logits(hidden[part]), given.labels[part])) for part in self._parts(len(hidden)))

    def hidden(self, given: Inputs) -> mx.array:
        """The head's input for the trained tokens, [N, H]."""
        seen = []
        with use_chunked_loss(
            self.owner, self.name, lambda inside, *others, **named: seen.append(inside(*others, **named)) or seen[0]
        ):
            self.run(given)
        return seen[0].flatten(0, 1)[given.trained]

    def logits(self, hidden: mx.array) -> mx.array:
        """[N, V] of [N, H], by the model's own head."""
        with use_chunked_loss(self.owner, self.name, lambda *_, **__: hidden[None]):
            return self.model(mx.zeros((1, len(hidden)), mx.int32))[0]

    def _parts(self, count: int) -> list[slice]:
        return [slice(start, start + self.rows) for start in range(0, count, self.rows)]

    def _by_parts(self, labels: mx.array) -> Callable:
        """(factor, hidden [N, H], what the head may learn...) -> (factor times the loss, the loss, gradients of the
        first by the others).
        """

        def scaled(values, labels, factor):
            hidden, *learned = values
            self.model.update(tree_unflatten(list(zip(self.learned, learned, strict=True))))
            part = token_nll(self.logits(hidden), labels)
            return part * factor, part

        @mx.custom_function
        def made(factor, hidden, *learned):
            total, grad_hidden, grad_learned = (
                mx.array(0.0),
                [],
                [mx.zeros(value.shape, mx.float32) for value in learned],
            )
            for part in self._parts(len(labels)):
                (some,) = mx.depends(
                    [hidden[part]], [total, *grad_hidden[-1:]]
                )  # or the logits of all could be there at once
                (_, one), (grad_chunk, *more) = mx.value_and_grad(scaled)([some, *learned], labels[part], factor)
                total, grad_hidden, grad_learned = (
                    total + one,
                    [*grad_hidden, grad_chunk],
                    [have + new for have, new in zip(grad_learned, more, strict=True)],
                )
            return total * factor, total, mx.concatenate(grad_hidden), *grad_learned

        @made.vjp
        def made_vjp(primals, cotangents, outputs):
            factor, *others = primals
            return mx.zeros_like(factor), *(
                (gradient * cotangents[0]).astype(value.dtype)
                for gradient, value in zip(outputs[2:], others, strict=True)
            )

        return made


@contextlib.contextmanager
def use_chunked_loss(owner: nn.Module, name: str, call: Callable) -> Iterator[None]:
    """While it lasts, `call(module, ...)` answers for the module `name` of `owner`.

    The tree of modules stays as it is: the stand-in is an attribute, which Python finds before the module's item.
    """
    object.__setattr__(owner, name, StandIn(owner[name], call))
    try:
        yield
    finally:
        object.__delattr__(owner, name)


class StandIn:
    """Calls go to `call`, everything else to the module: its embeddings may be the head's weight."""

    def __init__(self, module: nn.Module, call: Callable):
        self._module, self._call = module, call

    def __call__(self, *others, **named):
        return self._call(self._module, *others, **named)

    def __getattr__(self, name: str):
        return getattr(self._module, name)


def backbone(model: nn.Module) -> tuple[nn.Module, str, str]:
    """The module that has the blocks: (its owner, its name there, how the blocks' parameters' paths begin).

    Raises ValueError.
    """
    modules = dict(model.named_modules())
    for path, module in modules.items():
        for name, value in module.items():
            if path and isinstance(value, list) and value and value[0] is model.layers[0]:
                parent, _, own = path.rpartition(".")
                return modules[parent], own, f"{path}.{name}."
    raise ValueError("its blocks are in no module apart from its head")


def loss_for(model: nn.Module, rows: int) -> tuple[FullLogitsLoss, str]:
    """(the loss, why it is not the one by `rows` tokens, or "").

    The model is run on some tokens, and what the two make of them compared.
    """
    if not rows:
        return FullLogitsLoss(model), ""
    given = Inputs(mx.arange(3, 15)[None], None, mx.array([1, 4, 9]), mx.array([5, 6, 7]))
    try:
        loss = TrainedTokenLoss(model, rows)
        logits, whole = loss.logits(loss.hidden(given)).astype(mx.float32), loss.run(given)[0, given.trained]
        far, largest = float(mx.abs(logits - whole).max()), float(mx.abs(whole).max())
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        return FullLogitsLoss(model), str(error)
    is_same = far <= largest * (NEAR if whole.dtype == mx.float32 else NEAR_IN_16_BITS)
    return (
        (loss, "")
        if is_same
        else (FullLogitsLoss(model), "its head does not make of some tokens what it makes of them among all")
    )


class DocumentMaskCache:
    """Stands where mlx-lm expects a cache of keys and values: it keeps none, and its mask keeps the documents of a row
    apart.

    Positions go on from document to document: mlx-lm's models take no positions. Rotary embeddings see differences of
    positions only; an architecture for which that is not so is found out by `build.try_out`.
    """

    offset = 0

    def __init__(self, segments: mx.array):
        self.segments = segments

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """bool [B, 1, T, T]: which key each query sees."""
        here, there = mx.arange(length)[:, None], mx.arange(length)[None]
        mask = here >= there
        if window_size is not None:
            mask = mask & (here < there + window_size)
        return (mask & (self.segments[:, :, None] == self.segments[:, None, :]))[:, None]
