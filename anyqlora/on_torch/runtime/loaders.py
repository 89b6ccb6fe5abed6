"""The part of a DataLoader that one process sees: its sampler's own rows, each by one process."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

CHUNK = 1024  # rounds whose row numbers go from the first process to the others at once


@dataclass
class Round:
    """One batch for each process: what of it is here, and how many rows each process has."""

    own: Any  # the row numbers of the batch here; None, where rows have no numbers
    rows: list[int]  # of each process; 0 where it sees a row that counts nothing

    def weight(self, rank: int) -> float:
        """By what a mean over the batch here counts, in the mean over the processes that have rows."""
        return len(self.rows) / sum(rows > 0 for rows in self.rows) if self.rows[rank] else 0.0


class ShardedLoader:
    """The part of a DataLoader's rows that this process sees, on its device.

    The first process asks the loader's own sampler, batch sampler or stream, and says to the others what is theirs: a
    sampler's order, its generator and its repetitions are kept, and no two processes draw different ones. A round is
    one batch for each process, so that all take as many. In the last one rows are dealt evenly; fewer rows than
    processes go with the round before. Where there is none, or rows cannot be dealt, a process without any sees one
    that counts nothing. Everything else is the loader's own.
    """

    def __init__(self, runtime, loader: DataLoader):
        self.runtime, self.loader = runtime, loader
        self.skipped = 0  # batches that the iteration under way begins after
        self.rank, self.size = runtime.strategy.data_rank, runtime.strategy.data_size
        self.epoch, self.at_end = 0, False
        self.round: Round | None = None  # that of the batch that was given last; None outside of an iteration
        self.drawn: torch.Tensor | None = None  # the generator's state when the epoch under way was drawn
        self.again: torch.Tensor | None = None  # the state by which the next epoch is drawn: one is gone on with
        self.later: torch.Tensor | None = None  # that of torch's own generator meanwhile
        self.position = 0  # batches given of the epoch under way
        self._rounds: collections.deque[Round] = collections.deque()
        self._inner: DataLoader | None = None

    def __getattr__(self, name: str):
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        batches = self.loader.batch_sampler
        if self._is_stream or not self._deals_rows:
            return math.ceil(len(self.loader) / self.size)
        full, rest = divmod(len(batches.sampler), batches.batch_size * self.size)
        return full + bool(not batches.drop_last and (rest >= self.size or (rest and not full)))

    @property
    def total_batch_size(self) -> int:
        """Rows of a round."""
        return (self.loader.batch_size or 1) * self.size

    def set_epoch(self, epoch: int) -> None:
        """For samplers and sets of rows that draw by the epoch's number."""
        for one in (self.loader.sampler, self.loader.batch_sampler, self.loader.dataset):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)

    # ------------------------------------------------------------------------------------------------- iterating

    def __iter__(self) -> Iterator:
        self._draw()
        self.runtime.begin_loader(self)
        try:
            batches = self._batches_of_stream() if self._is_stream else self._batches_of_rows()
            self.position = self.skipped
            ahead = next(itertools.islice(batches, self.skipped if self._is_stream else 0, None), None)
            self._drawn_again()
            while ahead is not None:
                (batch, self.round), ahead = ahead, next(batches, None)
                self.at_end = ahead is None
                self.position += 1
                self.runtime.note_round(self.round)
                yield self._placed(batch)
        finally:
            self.at_end, self.round = False, None
            self.runtime.end_loader(self)
        self.epoch, self.drawn, self.position = self.epoch + 1, None, 0

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.loader.dataset, IterableDataset)

    @property
    def _deals_rows(self) -> bool:
        """Whether batches are cut from the order of rows here; else a batch sampler has made them."""
        return type(self.loader.batch_sampler) is BatchSampler

    def _generator(self) -> torch.Generator:
        """By which the sampler draws: its own, the loader's, or torch's."""
        samplers = [self.loader.sampler, getattr(self.loader.batch_sampler, "sampler", None)]
        own = next((one.generator for one in samplers if getattr(one, "generator", None) is not None), None)
        return own or self.loader.generator or torch.default_generator

    def _draw(self) -> None:
        generator = self._generator()
        if self.again is not None:
            self.later = generator.get_state() if generator is torch.default_generator else None
            generator.set_state(self.again)
        self.drawn = generator.get_state()

    def _drawn_again(self) -> None:
        """torch's own generator goes on where it was: others draw by it, too."""
        if self.again is not None and self.later is not None:
            torch.default_generator.set_state(self.later)
        self.again = None

    def _batches_of_rows(self) -> Iterator[tuple[Any, Round]]:
        self._rounds.clear()
        if self._inner is None:
            self._inner = self._rebuilt()
        for batch in self._inner:
            yield batch, self._rounds.popleft()

    def _rebuilt(self) -> DataLoader:
        """The loader with this process's batches, and all else that its maker asked for."""
        loader = self.loader
        if loader.batch_size is None and loader.batch_sampler is None:  # rows one by one, which nobody puts together
            numbers = {"batch_size": None, "sampler": _Numbers(self, each=True)}
        else:
            numbers = {"batch_sampler": _Numbers(self, each=False)}
        return DataLoader(
            loader.dataset,
            **numbers,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            in_order=loader.in_order,
        )

    def rounds(self) -> Iterator[Round]:
        """The rounds of one epoch: from the first process's sampler, a chunk of them at a time."""
        dealt = self._dealt() if self.runtime.is_main_process else iter(())
        # A sampler of somebody's own may look at what was trained until then: it is asked for one round at a time.
        samplers = (self.loader.sampler, self.loader.batch_sampler)
        is_torchs = all(one is None or type(one).__module__ == Sampler.__module__ for one in samplers)
        size = CHUNK if is_torchs and self.runtime.num_processes > 1 else 1
        while chunk := self.runtime.broadcast_object(list(itertools.islice(dealt, size))):
            for parts in chunk:
                rows = [len(part) for part in parts]
                own = parts[self.rank] or next(filter(None, parts))[:1]
                yield Round(own, rows)

    def _dealt(self) -> Iterator[list[list]]:
        """[rows of process 0, rows of process 1 ...] of each round."""
        loader, batches = self.loader, self.loader.batch_sampler
        if batches is None:  # rows one by one, which nobody puts together
            yield from _padded(([number] for number in loader.sampler), self.size)
            return
        size, drops = None, False
        if self._deals_rows:
            numbers, size, drops = iter(batches.sampler), batches.batch_size, batches.drop_last
            batches = iter(lambda: list(itertools.islice(numbers, size)), [])
        held: list[list] = []
        for several in _padded(batches, self.size):
            if not all(several) or (size and len(several[-1]) < size):  # the end: too few for whole batches
                if drops:
                    break
                rows = list(itertools.chain(*several))
                if len(rows) >= self.size or not held:
                    several = _evenly(rows, self.size)
                else:
                    held, several = _evenly([*itertools.chain(*held), *rows], self.size), []
            if held:
                yield held
            held = several or held
            if not several:
                return
        if held:
            yield held

    def _batches_of_stream(self) -> Iterator[tuple[Any, Round]]:
        """Rows without numbers: the first process reads, with the loader's workers, and gives the others theirs."""
        batches = iter(self.loader) if self.runtime.is_main_process else iter(())
        are_rows = self.loader.batch_size is None and self.loader.batch_sampler is None
        while several := self.runtime.broadcast_object(list(itertools.islice(batches, self.size))):
            rows = [1 if are_rows else _count(batch) for batch in several]
            if len(several) < self.size and not are_rows and sum(rows) >= self.size and all(map(_is_cut, several)):
                shares = _shares(rows, self.size)
                several = [part for one, sizes in zip(several, shares, strict=True) for part in _cut(one, sizes)]
                rows = [_count(batch) for batch in several]
            rows += [0] * (self.size - len(several))
            yield several[self.rank if self.rank < len(several) else 0], Round(None, rows)

    def _placed(self, batch):
        if torch.is_tensor(batch):
            return batch.to(self.runtime.device, non_blocking=self.loader.pin_memory)
        if hasattr(batch, "to") and hasattr(batch, "keys"):  # transformers' BatchEncoding, which stays one
            return batch.to(self.runtime.device)
        if isinstance(batch, dict):
            return {key: self._placed(value) for key, value in batch.items()}
        if isinstance(batch, (list, tuple)):
            parts = [self._placed(value) for value in batch]
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        return batch

    # ------------------------------------------------------------------------------------------- what is kept

    def state_dict(self) -> dict:
        """Where the iteration is: an epoch under way is drawn again by the same numbers; `skip_first_batches` goes on
        in it.
        """
        drawn = None if self.drawn is None or not self.position else self.drawn.tolist()
        return {"epoch": self.epoch, "drawn": drawn, "position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, drawn = state["epoch"], state.get("drawn")
        self.again = None if drawn is None else torch.tensor(drawn, dtype=torch.uint8)


class _Numbers(Sampler):
    """This process's row numbers, as a DataLoader asks for them: epoch by epoch, in batches or each alone."""

    def __init__(self, sharded: ShardedLoader, each: bool):
        self.sharded, self.each = sharded, each

    def __iter__(self) -> Iterator:
        sharded = self.sharded
        for number, one in enumerate(sharded.rounds()):
            if number >= sharded.skipped:
                sharded._rounds.append(one)
                yield one.own[0] if self.each else one.own

    def __len__(self) -> int:
        return len(self.sharded)


class SkippedLoader:
    """A prepared loader whose next iteration begins after so many of its batches."""

    def __init__(self, loader: ShardedLoader, batches: int):
        self.loader, self.batches = loader, batches

    def __getattr__(self, name: str):
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(len(self.loader) - self.batches, 0)

    def __iter__(self) -> Iterator:
        self.loader.skipped = self.batches
        try:
            yield from self.loader
        finally:
            self.loader.skipped = 0


def _padded(batches: Iterable, size: int) -> Iterator[list[list]]:
    """`size` batches at a time; the last ones may be empty."""
    batches = iter(batches)
    while several := [list(one) for one in itertools.islice(batches, size)]:
        yield several + [[] for _ in range(size - len(several))]


def _evenly(rows: list, parts: int) -> list[list]:
    """The rows in so many parts, in their order; the first ones have one more where it does not come out even."""
    each, more = divmod(len(rows), parts)
    starts = [number * each + min(number, more) for number in range(parts + 1)]
    return [rows[start:end] for start, end in itertools.pairwise(starts)]


def _shares(rows: list[int], parts: int) -> list[list[int]]:
    """Into how many rows each batch is cut, so that there are `parts` batches; the largest ones are cut most."""
    cuts = [1] * len(rows)
    for _ in range(parts - len(rows)):
        place = max(range(len(rows)), key=lambda number: rows[number] / cuts[number])
        cuts[place] += 1
    return [[len(part) for part in _evenly(list(range(count)), cut)] for count, cut in zip(rows, cuts, strict=True)]


def _is_cut(batch) -> bool:
    """Whether all that a batch holds is tensors of as many rows."""
    if torch.is_tensor(batch):
        return batch.ndim > 0
    values = list(batch.values()) if hasattr(batch, "values") else batch if isinstance(batch, (list, tuple)) else []
    return bool(values) and all(map(_is_cut, values)) and len({_count(value) for value in values}) == 1


def _cut(batch, sizes: list[int]) -> list:
    """The batch in parts of so many rows."""
    if torch.is_tensor(batch):
        return list(batch.split(sizes))
    if hasattr(batch, "values"):
        columns = {key: _cut(value, sizes) for key, value in batch.items()}
        return [{key: column[number] for key, column in columns.items()} for number in range(len(sizes))]
    columns = [_cut(value, sizes) for value in batch]
    return [[column[number] for column in columns] for number in range(len(sizes))]


def _count(batch) -> int:
    """The rows of a batch: those of its first tensor, else its items."""
    if torch.is_tensor(batch):
        return len(batch) if batch.ndim else 1
    if hasattr(batch, "values"):
        return next((_count(value) for value in batch.values()), 0)
    if isinstance(batch, (list, tuple)):
        parts = [value for value in batch if torch.is_tensor(value) or hasattr(value, "values")]
        return _count(parts[0]) if parts else len(batch)
    return 1
