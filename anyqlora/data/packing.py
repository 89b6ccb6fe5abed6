"""The order of rows in an epoch, and which rows share a sequence: both functions of the seed alone."""

from __future__ import annotations

import bisect

import numpy as np


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of `range(count)` for one epoch, int64 [count].

    Philox's raw bits are fixed by its definition, so that the order survives an upgrade of numpy, which promises
    nothing about `Generator.permutation`.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def pack(lengths: list[int], capacity: int, seed: int) -> list[list[int]]:
    """Numbers of the rows of each sequence: no sequence is longer than `capacity` tokens, every row is in exactly one.

    Best fit in a seeded order: a row joins the sequence that it fills best, among all that are still open. Rows are not
    sorted by length first, which would put rows of one kind into the same sequences.
    """
    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, number of the sequence), sorted
    for row in shuffled(len(lengths), seed, 0).tolist():
        at = bisect.bisect_left(room, (lengths[row], -1))
        left, number = room.pop(at) if at < len(room) else (capacity, len(sequences))
        if number == len(sequences):
            sequences.append([])
        sequences[number].append(row)
        if left > lengths[row]:
            bisect.insort(room, (left - lengths[row], number))
    return sequences
