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


def grouped(lengths: np.ndarray, batch: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the sequences for one epoch in which those of a step are of about one length, int64 [count].

    As Hugging Face's group_by_length: of each 50 steps of the plain permutation the sequences are sorted by length;
    then the steps change places, so that lengths do not fall from the first to the last of them. The step with the
    longest sequence comes first: it shows whether memory is enough.
    """
    order = shuffled(len(lengths), seed, epoch)
    whole = len(order) // batch * batch
    parts = [order[start : min(start + _SORTED * batch, whole)] for start in range(0, whole, _SORTED * batch)]
    by_length = [part[np.argsort(-lengths[part], kind="stable")] for part in parts]
    steps = np.concatenate([np.empty(0, np.int64), *by_length]).reshape(-1, batch)
    if not len(steps):
        return order
    places = shuffled(len(steps), seed, ~epoch & 0xFFFFFFFF)
    longest = int(lengths[steps].max(1)[places].argmax())
    places[[0, longest]] = places[[longest, 0]]
    return np.concatenate([steps[places].reshape(-1), order[whole:]])


_SORTED = 50  # steps of which the sequences are sorted together


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
