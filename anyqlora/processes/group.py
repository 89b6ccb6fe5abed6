"""How the processes of a run talk: one alone, or several over gloo's, NCCL's or MLX's collectives."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path
from typing import Any

import numpy as np


class SingleProcess:
    """What the processes of a run tell each other, when there is one: what it says is what it hears."""

    rank, size, is_first = 0, 1, True

    def broadcast(self, value: Any) -> Any:
        """The first process's JSON-able `value`, on all."""
        return value

    def broadcast_arrays(self, arrays: dict | None) -> dict | None:
        """The first process's {name: numpy array}, on all."""
        return arrays

    def all_gather_object(self, value: object) -> list:
        """Each process's JSON-able `value`, in the order of ranks."""
        return [value]

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Each value summed over all processes, in float64."""
        return list(values)

    def barrier(self) -> None:
        """Until all processes are here, however long one of them takes."""


class ProcessGroup(SingleProcess):
    """The same among several processes. A framework's own says how JSON and bytes travel.

    `stacks` is the open file that tells where the threads of this process are, when another one is lost or SIGUSR2
    comes; None: nowhere.
    """

    stacks = None

    def write_stacks(self, directory: Path) -> None:
        """From now on they are written, to rank-N.txt in `directory`. Raises OSError where that cannot be made."""
        directory.mkdir(parents=True, exist_ok=True)
        # open while the process lives: a signal handler writes to it
        self.stacks = open(directory / f"rank-{self.rank}.txt", "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR2, file=self.stacks, all_threads=True)

    def broadcast_arrays(self, arrays):
        shapes = self.broadcast(
            {name: [str(a.dtype), list(a.shape)] for name, a in arrays.items()}
            if arrays is not None and self.is_first
            else None
        )
        return shapes and {
            name: self._broadcast_array(
                np.ascontiguousarray(arrays[name]) if arrays is not None and self.is_first else np.empty(shape, dtype),
                shape,
            )
            for name, (dtype, shape) in shapes.items()
        }

    def _broadcast_array(self, array: np.ndarray, shape: list[int]) -> np.ndarray:
        content = array.reshape(-1).view(
            np.uint8
        )  # frameworks lack some of numpy's dtypes; no dimension has no bytes to view
        return (self.broadcast_bytes(content) if content.size else content).view(array.dtype).reshape(shape)

    def broadcast_bytes(self, content: np.ndarray) -> np.ndarray:
        """The first process's uint8 [n], on all, where `content` has that size."""
        raise NotImplementedError
