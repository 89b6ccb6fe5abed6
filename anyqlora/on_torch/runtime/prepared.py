"""What `Runtime.prepare` gives back beside the model: an optimizer and a scheduler that act at boundaries, a loader of
this process's rows."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.data.packing import shuffled


def rebuilt(optimizer: Optimizer, trainable: dict[str, nn.Parameter]) -> Callable[[list[nn.Parameter]], Optimizer]:
    """parameters -> an optimizer of the same kind, groups and options over them; they stand in the order of
    `trainable`.

    Raises UsageError when it has stepped already, or updates what is not trained.
    """
    if optimizer.state:
        raise UsageError(
            "the optimizer has stepped already: what it has learned belongs to parameters that sharding replaces",
            cure="prepare before the first step; load_state brings a state back",
        )
    number = {id(p): place for place, p in enumerate(trainable.values())}
    strange = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in number]
    if strange:
        raise UsageError(
            f"the optimizer has {len(strange)} parameters that the model does not train, the first of shape "
            f"{list(strange[0])}",
            cure="an optimizer over the model's own parameters",
        )
    groups = [
        ({key: value for key, value in group.items() if key != "params"}, [number[id(p)] for p in group["params"]])
        for group in optimizer.param_groups
    ]

    taken = inspect.signature(type(optimizer)).parameters  # defaults also has what the class adds by itself
    defaults = {key: value for key, value in optimizer.defaults.items() if key in taken}

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return type(optimizer)(
            [{"params": [parameters[place] for place in places], **options} for options, places in groups], **defaults
        )

    return make


class PreparedOptimizer:
    """An optimizer whose `step` updates, and whose `zero_grad` clears, at boundaries only."""

    def __init__(self, runtime, optimizer: Optimizer):
        self.runtime, self.optimizer = runtime, optimizer

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict:
        return self.optimizer.state

    def step(self, closure=None) -> None:
        """At a boundary: the update, with the clipping that was asked for before; gradients are cleared with it."""
        if closure is not None:
            raise NotSupported("an optimizer with a closure: a strategy owns the backward pass")
        if self.runtime.sync_gradients:
            self.runtime.optimizer_step_and_zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing is left to do: a step clears what it has used, and off a boundary gradients stay."""

    def state_dict(self) -> dict:
        return self.optimizer.state_dict()


class PreparedScheduler:
    """A scheduler that goes on when the optimizer has: at boundaries, unless the step was skipped."""

    def __init__(self, runtime, scheduler: LRScheduler, optimizer: Optimizer):
        self.runtime, self.scheduler = runtime, scheduler
        scheduler.optimizer = optimizer

    def step(self) -> None:
        if self.runtime.sync_gradients and not self.runtime.skipped:
            with warnings.catch_warnings():
                # torch's reminder of the order of calls looks at the optimizer that the scheduler was made for. Here
                # another one has stepped.
                warnings.filterwarnings("ignore", message=r"Seems like `optimizer\.step\(\)` has been overridden")
                self.scheduler.step()

    def get_last_lr(self) -> list[float]:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict:
        return {
            key: value
            for key, value in self.scheduler.state_dict().items()
            if isinstance(value, (int, float, str, list))
        }

    def load_state_dict(self, state: dict) -> None:
        self.scheduler.load_state_dict(state)
        for group, lr in zip(self.scheduler.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = lr


class ShardedLoader:
    """The part of a DataLoader's rows that this process sees, on its device.

    A round is one batch of the loader's own size for each process; in the last one rows are dealt evenly, and a process
    that gets none has a batch of no rows, so that all take as many rounds and each row comes once. A shuffled loader is
    shuffled by the run's seed and the epoch, the same everywhere.
    """

    def __init__(self, runtime, loader: DataLoader):
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None or loader.batch_size is None:
            raise NotSupported(
                "a DataLoader that is not over rows by number (an IterableDataset, or a batch_sampler of its own)",
                cure="a DataLoader over a list of rows, with a batch_size",
            )
        self.runtime, self.loader, self.epoch, self.at_end = runtime, loader, 0, False
        self.rank, self.size = runtime.strategy.data_rank, runtime.strategy.data_size

    def __len__(self) -> int:
        rows, round_ = len(self.loader.sampler), self.loader.batch_size * self.size
        return rows // round_ if self.loader.drop_last else -(-rows // round_)

    def __iter__(self) -> Iterator:
        own = self._own()
        last_full = sum(1 for rows in own if rows)
        batches = iter(
            DataLoader(
                self.loader.dataset,
                batch_sampler=own[:last_full],
                num_workers=self.loader.num_workers,
                collate_fn=self.loader.collate_fn,
                pin_memory=self.loader.pin_memory,
                worker_init_fn=self.loader.worker_init_fn,
            )
        )
        self.epoch += 1
        for number, rows in enumerate(own, 1):
            self.at_end = number == len(own)
            yield self._placed(next(batches) if rows else _empty(self.loader.collate_fn([self.loader.dataset[0]])))
        self.at_end = False

    def _own(self) -> list[list[int]]:
        sampler, batch = self.loader.sampler, self.loader.batch_size
        if isinstance(sampler, RandomSampler):
            order = shuffled(len(self.loader.dataset), self.runtime.plan.config.seed, self.epoch)[: len(sampler)]
        else:
            order = np.array(list(sampler), np.int64)
        rounds = [
            order[start : start + batch * self.size]
            for start in range(0, len(self) * batch * self.size, batch * self.size)
        ]
        return [np.array_split(rows, self.size)[self.rank].tolist() for rows in rounds]

    def _placed(self, batch):
        if torch.is_tensor(batch):
            return batch.to(self.runtime.device)
        if isinstance(batch, dict):
            return {key: self._placed(value) for key, value in batch.items()}
        if isinstance(batch, (list, tuple)):
            parts = [self._placed(value) for value in batch]
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        return batch

    def state_dict(self) -> dict:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict) -> None:
        self.epoch = state["epoch"]


def _empty(batch):
    """The batch without its rows."""
    if torch.is_tensor(batch):
        return batch[:0]
    if isinstance(batch, dict):
        return {key: _empty(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_empty(value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return (
            type(batch)(_empty(value) for value in batch)
            if any(torch.is_tensor(v) or isinstance(v, (dict, list, tuple)) for v in batch)
            else type(batch)()
        )
    return batch
