"""The loss: the sum of the trained tokens' negative log-likelihoods."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..data import IGNORE, Batch


def token_loss(model: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
    """Sum over trained tokens of -log p(next token), float32, a scalar with gradient.

    Rows are padded on the right, so under causal attention padding reaches no trained token and no mask is needed: the
    fast causal kernel runs. Packed rows state their positions, from which transformers keeps documents apart.
    """
    ids = torch.from_numpy(batch.ids).long().to(device)  # [B, T]
    targets = torch.from_numpy(batch.targets).long().to(device).flatten()  # [B * T]
    packed = int(batch.segments.max(initial=0)) > 0
    positions = torch.from_numpy(batch.positions).long().to(device) if packed else None
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits  # [B, T, V]
    kept = (targets != IGNORE).nonzero().squeeze(1)  # [N]: only these rows need float32
    logits = logits.flatten(0, 1).index_select(0, kept).float()  # [N, V]
    return F.cross_entropy(logits, targets[kept], reduction="sum")
