"""The loss: the sum of the trained tokens' negative log-likelihoods."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..data import IGNORE, Batch


def arrays(batch: Batch, multiple: int = 1) -> tuple[mx.array, mx.array, mx.array | None]:
    """ids and targets [B, T]; segments [B, T] where several documents share a row, else None. T is padded to a whole `multiple`."""
    packed = int(batch.segments.max(initial=0)) > 0
    more = [(0, 0), (0, -batch.ids.shape[1] % multiple)]
    ids, targets, segments = (mx.array(np.pad(values, more, constant_values=filler))
                              for values, filler in ((batch.ids, 0), (batch.targets, IGNORE), (batch.segments, -1)))
    return ids, targets, segments if packed else None


def token_loss(model: nn.Module, ids: mx.array, targets: mx.array, segments: mx.array | None = None) -> mx.array:
    """Sum over trained tokens of -log p(next token), float32.

    Rows are padded on the right, so under causal attention padding reaches no trained token and no mask is needed.
    """
    cache = None if segments is None else [Documents(segments)] * len(model.layers)
    logits = model(ids, cache=cache).astype(mx.float32)  # [B, T, V]
    kept = targets != IGNORE
    chosen = mx.take_along_axis(logits, mx.where(kept, targets, 0)[..., None], axis=-1).squeeze(-1)
    return mx.where(kept, mx.logsumexp(logits, axis=-1) - chosen, 0).sum()


class Documents:
    """Stands where mlx-lm expects a cache of keys and values: it keeps none, and its mask keeps the documents of a row apart.

    Positions go on from document to document: mlx-lm's models take no positions. Rotary embeddings see differences of positions only;
    an architecture for which that is not so is found out by `build.try_out`.
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
