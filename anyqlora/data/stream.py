"""The micro-batches of a step, as a function of (seed, epoch, step)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anyqlora.data.packing import grouped, pack, shuffled
from anyqlora.data.rows import Example, Rows

IGNORE_INDEX = -100
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio, odd


@dataclass(frozen=True, eq=False)
class Batch:
    """Some sequences, padded on the right to the longest."""

    ids: np.ndarray  # int32 [B, T]
    targets: np.ndarray  # int32 [B, T]: the next token where it is trained, else IGNORE_INDEX
    positions: np.ndarray  # int32 [B, T]: place in its own document; padding counts from 0 as a document of its own
    segments: np.ndarray  # int32 [B, T]: number of the document in its sequence, -1 where padding
    rows: tuple[str, ...]  # "file:line" of every document, in order
    row_keys: np.ndarray | None = None  # uint64 [B]: what is random of a row follows from it; None: of none of them

    @property
    def trained(self) -> int:
        """Tokens that the loss counts."""
        return int((self.targets != IGNORE_INDEX).sum())

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.segments >= 0).sum())

    @property
    def token_keys(self) -> np.ndarray | None:
        """int64 [B, T]: what is random of a token follows from it, that is from its row's key and its place there."""
        if self.row_keys is None:
            return None
        places = np.arange(1, self.ids.shape[1] + 1, dtype=np.uint64)
        return mix(self.row_keys[:, None] + places * GOLDEN).view(np.int64)


class BatchStream:
    """`stream[step]` is the list of micro-batches of optimizer step `step`, for one rank.

    A step takes the next batch_size * gradient_accumulation_steps * world_size sequences of its epoch's permutation;
    the last step of an epoch takes what is left. Every rank gets the same number of micro-batches in a step: one that
    has no sequence left gets a batch of shape [1, 1] in which nothing is trained.
    """

    def __init__(
        self,
        rows: Sequence[Example],
        *,
        batch_size: int,
        gradient_accumulation_steps: int,
        num_epochs: int,
        max_steps: int,
        seed: int,
        packing: bool,
        context_length: int,
        pad_id: int | None,
        group_by_length: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ):
        """`max_steps` of 1 or more counts before `num_epochs`: fewer steps stop within an epoch, more run into further
        epochs.
        """
        self.documents = Rows.of(rows)
        lengths = self.documents.gather("lengths")
        trained = self.documents.gather("trained_tokens")
        groups = pack(lengths.tolist(), context_length, seed) if packing else []
        # The rows of sequence i are order[starts[i] : starts[i + 1]].
        self._rows = np.array([row for group in groups for row in group] if packing else np.arange(len(rows)), np.int32)
        sizes = np.array([len(group) for group in groups] if packing else np.ones(len(rows)), np.int64)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self.batch_size, self.accumulation, self.rank, self.world_size = (
            batch_size,
            gradient_accumulation_steps,
            rank,
            world_size,
        )
        self.seed, self.pad_id, self.group_by_length = seed, pad_id, group_by_length
        self.global_batch = batch_size * gradient_accumulation_steps * world_size
        self.steps_per_epoch = -(-len(sizes) // self.global_batch)
        self.total_steps = max_steps if max_steps > 0 else num_epochs * self.steps_per_epoch
        self._trained, self._tokens = (
            np.add.reduceat(of_row[self._rows].astype(np.int64), self._starts[:-1]) if len(sizes) else sizes
            for of_row in (trained, lengths)
        )
        self._order = (-1, np.empty(0, np.int64))  # the last epoch's permutation, kept only because it is slow to make

    def __len__(self) -> int:
        return self.total_steps

    @property
    def sequence_count(self) -> int:
        """Sequences of an epoch."""
        return len(self._starts) - 1

    def sequence(self, number: int) -> list[Example]:
        """The documents of a sequence."""
        return [self.documents[row] for row in self._rows[self._starts[number] : self._starts[number + 1]].tolist()]

    def resize(self, batch_size: int) -> None:
        """Micro-batches of another size; the rows of each step and their order stay."""
        if self.global_batch % (batch_size * self.world_size):
            raise ValueError(
                f"{self.global_batch} rows are not whole micro-batches of {batch_size} on {self.world_size} processes"
            )
        self.batch_size, self.accumulation = batch_size, self.global_batch // (batch_size * self.world_size)

    def attends(self, step: int) -> bool:
        """Whether a token is trained in the step that sees two or more: which keys a query is near to does not matter
        to one that sees one.
        """
        return any(e.trained[2:].any() for i in self._chosen(step) for e in self.sequence(i))

    def epoch(self, step: int) -> float:
        """Epochs behind us after `step` steps."""
        return step / self.steps_per_epoch

    def counts(self, step: int) -> tuple[int, int]:
        """(trained tokens, tokens that are not padding) of the whole step, over all ranks."""
        chosen = self._chosen(step)
        return int(self._trained[chosen].sum()), int(self._tokens[chosen].sum())

    def rows(self, step: int) -> list[str]:
        """ "file:line" of every document of the whole step, over all ranks."""
        return [example.where for i in self._chosen(step) for example in self.sequence(i)]

    def __getitem__(self, step: int) -> list[Batch]:
        chosen = self._chosen(step)
        slot = self.batch_size * self.world_size  # sequences of one micro-batch over all ranks
        first = self.rank * self.batch_size
        shares = [
            chosen[start : start + slot][first : first + self.batch_size] for start in range(0, len(chosen), slot)
        ]
        keys = self._row_keys(step)
        return [
            collate([self.sequence(i) for i in share], self.pad_id, keys[start + first : start + first + len(share)])
            for start, share in zip(range(0, len(chosen), slot), shares, strict=True)
        ]

    def _row_keys(self, step: int) -> np.ndarray:
        """uint64 [global_batch]: of the rows of a step, by their place in it, on whichever process they are."""
        (of_step,) = np.random.SeedSequence([self.seed, step]).generate_state(1, np.uint64)
        return mix(of_step + np.arange(1, self.global_batch + 1, dtype=np.uint64) * GOLDEN)

    def _chosen(self, step: int) -> np.ndarray:
        """The sequences of a step, in their order."""
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} of {self.total_steps}")
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            self._order = (
                epoch,
                grouped(self._tokens, self.global_batch, self.seed, epoch)
                if self.group_by_length
                else shuffled(self.sequence_count, self.seed, epoch),
            )
        return self._order[1][place * self.global_batch : (place + 1) * self.global_batch]


def make_stream(plan, rows: Sequence[Example], rank: int = 0) -> BatchStream:
    """The plan's batches of the training rows, for the process `rank`: processes along a model axis see the same
    rows.
    """
    config = plan.config
    return BatchStream(
        rows,
        batch_size=plan.batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        num_epochs=config.num_epochs,
        max_steps=config.max_steps,
        seed=config.seed,
        packing=plan.packing,
        group_by_length=config.group_by_length,
        context_length=config.context_length,
        rank=rank * plan.data_processes // plan.world_size,
        world_size=plan.data_processes,
        pad_id=0,
    )  # the tokenizer's own pad token may lie beyond the embedding


def make_batches(rows: Sequence[Example], batch_size: int, pad_id: int | None) -> list[Batch]:
    """All examples in their order, one document to a row, for evaluation."""
    return [collate([[e] for e in rows[i : i + batch_size]], pad_id) for i in range(0, len(rows), batch_size)]


def collate(sequences: list[list[Example]], pad_id: int | None, row_keys: np.ndarray | None = None) -> Batch:
    """The batch of these sequences, each of which is a list of documents that must not see each other, and has one of
    `row_keys`.
    """
    lengths = [sum(len(e.ids) for e in sequence) for sequence in sequences]
    shape = (max(len(sequences), 1), max(lengths, default=1))  # [B, T]
    ids = np.full(shape, pad_id or 0, np.int32)
    targets = np.full(shape, IGNORE_INDEX, np.int32)
    segments = np.full(shape, -1, np.int32)
    positions = np.zeros(shape, np.int32)
    for row in range(shape[0]):
        start = 0
        for number, example in enumerate(sequences[row] if sequences else []):
            end = start + len(example.ids)
            ids[row, start:end] = example.ids
            targets[row, start : end - 1] = np.where(example.trained[1:], example.ids[1:], IGNORE_INDEX)
            segments[row, start:end] = number
            positions[row, start:end] = np.arange(end - start)
            start = end
        positions[row, start:] = np.arange(shape[1] - start)
    if row_keys is not None and not sequences:  # the row of padding
        row_keys = np.zeros(1, np.uint64)
    where = tuple(e.where for sequence in sequences for e in sequence)
    return Batch(ids, targets, positions, segments, where, row_keys)


def mix(numbers: np.ndarray) -> np.ndarray:
    """uint64 of the same shape that look random, each of one of `numbers`: the finalizer of splitmix64 (Steele et al.
    2014), whose stream is that of a number and its successors at distance GOLDEN.
    """
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
