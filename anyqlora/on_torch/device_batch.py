"""A micro-batch on the device, as a model is given it: with padding on the right, or all documents in one row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from anyqlora.data.stream import IGNORE_INDEX, Batch
from anyqlora.on_torch.device import to_device
from anyqlora.on_torch.kernels.documents import Documents, current_documents
from anyqlora.on_torch.kernels.dropout import current_tokens


@dataclass(frozen=True, eq=False)
class DeviceBatch:
    """Some sequences. All that is counted of them is counted in the host's arrays: no device is waited for."""

    ids: torch.Tensor  # int64 [B, T]
    targets: torch.Tensor  # int64 [B * T], IGNORE_INDEX where nothing is trained
    trained: torch.Tensor  # int64 [N]: which of the B * T tokens are trained
    positions: torch.Tensor | None = None  # int64 [B, T] in a token's own document; None: each row is one document
    documents: Documents | None = (
        None  # for attention of ours; None: the model keeps documents apart by their positions
    )
    keys: torch.Tensor | None = None  # int64 [B, T]: what is dropped of a token follows from it; None: not known

    @classmethod
    def padded(cls, batch: Batch, device: torch.device) -> DeviceBatch:
        """Rows padded on the right, so that under causal attention padding reaches no trained token and no mask is
        needed. Packed rows state their positions, from which transformers keeps documents apart."""
        is_packed = int(batch.segments.max(initial=0)) > 0
        targets = batch.targets.reshape(-1)
        return cls(
            to_device(batch.ids, device),
            to_device(targets, device),
            to_device(np.flatnonzero(targets != IGNORE_INDEX), device),
            to_device(batch.positions, device) if is_packed else None,
            keys=None if batch.row_keys is None else to_device(batch.token_keys, device),
        )

    @classmethod
    def unpadded(cls, batch: Batch, device: torch.device, few_lengths: bool = True) -> DeviceBatch:
        """All documents in one row [1, T], by their numbers; rows of one document and one length as they are.

        On a CPU tokens that nobody sees, since they come after all others, bring T to one of the lengths that
        `padding_rows` leaves: `few_lengths` where products are oneDNN's, which compiles them for each, and keeps them.
        """
        own = batch.segments >= 0
        # A process that has no row in this step still takes part in it.
        if not own.any() or own.all() and not batch.segments.any():
            return cls.padded(batch, device)
        more = padding_rows(batch.tokens, few_lengths) if device.type == "cpu" else 0
        ids, positions, targets = (
            np.pad(array[own], (0, more), constant_values=value)
            for array, value in ((batch.ids, 0), (batch.positions, 1), (batch.targets, IGNORE_INDEX))
        )
        keys = batch.token_keys
        if keys is not None:
            keys = to_device(np.pad(keys[own], (0, more)), device)[None]
        numbers = np.cumsum(positions == 0, dtype=np.int32)  # a document begins at position 0
        return cls(
            to_device(ids, device)[None],
            to_device(targets, device),
            to_device(np.flatnonzero(targets != IGNORE_INDEX), device),
            to_device(positions, device)[None],
            Documents.on(device, numbers[None]),
            keys,
        )

    def forward(self, model: nn.Module):
        """The model's own forward pass of it."""
        current_tokens.set(self.keys)
        return forward(model, self.ids, self.positions, self.documents)


def forward(
    model: nn.Module, ids: torch.Tensor, positions: torch.Tensor | None = None, documents: Documents | None = None
):
    """A transformers model's own forward pass of ids [B, T], positions [B, T].

    Documents come in the place of the attention mask, as their numbers int32 [B, 1, 1, T]: transformers hands a mask of
    four dimensions on to attention as it is, and hands on nothing else. See unpadded.attend.
    """
    inputs = {"input_ids": ids}
    if positions is not None:
        inputs["position_ids"] = positions
    if documents is not None:
        inputs["attention_mask"] = documents.numbers[:, None, None]
    current_documents.set(documents)
    return model(**inputs, use_cache=False)


def padding_rows(tokens: int, few_lengths: bool = True) -> int:
    """How many tokens bring `tokens` to one of 16 lengths between two powers of two, or to a multiple of 64: a
    sixteenth or 7 at most. Not `few_lengths`: to a multiple of 16."""
    return -tokens % ((1 << min(max(tokens.bit_length() - 5, 3), 6)) if few_lengths else 16)
