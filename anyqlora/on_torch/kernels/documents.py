"""Where the documents of a batch lie in its rows: what attention that keeps them apart has to know, counted once for
all layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from anyqlora.on_torch.device import to_device


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of rows [B, T]. Tokens of one lie side by side, and see each other only. What follows from the
    numbers is counted in host memory: no device is waited for."""

    numbers: (
        torch.Tensor
    )  # int32 [B, T] on the device: which document a token is of; -1 is padding, whose output is zero
    host_numbers: np.ndarray  # the same in host memory

    @classmethod
    def on(cls, device: torch.device, host_numbers: np.ndarray) -> Documents:
        """Documents by numbers [B, T] in host memory."""
        return cls(to_device(host_numbers, device, torch.int32), host_numbers)

    @classmethod
    def read(cls, numbers: torch.Tensor) -> Documents:
        """Documents by numbers [B, T] on a device, which is waited for."""
        return cls(numbers, numbers.cpu().numpy())

    @cached_property
    def _runs(self) -> np.ndarray:
        """int64 [R, 3]: row, first token and end of each run of equal numbers, padding's too, in order."""
        numbers = self.host_numbers
        starts = np.ones(numbers.shape, bool)
        starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        rows, firsts = np.nonzero(starts)
        ends = np.append(firsts[1:], 0)
        ends[ends == 0] = numbers.shape[1]  # the last run of its row
        return np.stack([rows, firsts, ends], 1).astype(np.int64)

    @cached_property
    def spans(self) -> np.ndarray:
        """int64 [N, 3]: row, first token and end of each document."""
        return self._runs[self.host_numbers[self._runs[:, 0], self._runs[:, 1]] >= 0]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int((self.spans[:, 2] - self.spans[:, 1]).max(initial=0))

    @cached_property
    def bounds(self) -> tuple[torch.Tensor, int]:
        """(int32 [R + 1] on the device: where each run of equal numbers begins among all B * T tokens, and B * T;
        tokens of the longest). Padding counts as a document."""
        starts = self._runs[:, 0] * self.host_numbers.shape[1] + self._runs[:, 1]
        starts = np.append(starts, self.host_numbers.size)
        return to_device(starts, self.numbers.device, torch.int32), int(np.diff(starts).max(initial=0))


class CurrentDocuments:
    """The documents of the batch that was last given to a model, for the attention in it.

    A model hands its layers a mask and nothing else, and documents' numbers are in the mask's place. What was counted
    of them is found here, by the memory that they lie in: while it is held here nothing else can lie there. It is held
    until the next batch, and so through the backward pass, in which checkpointed layers run again, on a GPU in a thread
    of autograd's (which a context variable would not reach). Numbers of another batch, whose backward pass comes later
    than the next one's forward, are counted anew in each layer.
    """

    def __init__(self) -> None:
        self.documents: Documents | None = None

    def set(self, documents: Documents | None) -> None:
        self.documents = documents

    def of(self, numbers: torch.Tensor) -> Documents:
        """The documents of numbers int32 [B, T]."""
        current = self.documents
        if current is not None and _is_same_memory(current.numbers, numbers):
            return current
        return Documents.read(numbers)


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.device == b.device and a.data_ptr() == b.data_ptr()


current_documents = CurrentDocuments()
