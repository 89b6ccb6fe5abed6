"""Who is here, and what goes from one process to the others: the verbs of Accelerate that no model is needed for."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from anyqlora.core.errors import UsageError

NAMES = {"single": "NO", "fsdp": "FSDP", "deepspeed": "DEEPSPEED", "tp": "TP"}  # strategies, as Accelerate calls them
MAX_AXES = 16  # of a tensor that is gathered
PRECISIONS = {"fp32": "no", "fp16_autocast": "fp16"}


@dataclass(frozen=True)
class RuntimeState:
    """Accelerate's AcceleratorState, as loops ask and print it."""

    distributed_type: str
    num_processes: int
    process_index: int
    local_process_index: int
    device: torch.device
    mixed_precision: str
    deepspeed_plugin: None = None  # what Accelerate's plugins say is a setting here
    fsdp_plugin: None = None

    def __str__(self) -> str:
        return (
            f"{self.distributed_type}, process {self.process_index} of {self.num_processes} on {self.device}, "
            f"precision {self.mixed_precision}"
        )


class Collectives:
    """Of a `Runtime`: it has the plan and the strategy."""

    plan: Any
    strategy: Any
    device: torch.device
    round: Any  # of the batch that a prepared loader gave last

    # ------------------------------------------------------------------------------------------------- who is here

    @property
    def process_index(self) -> int:
        return self.strategy.rank

    @property
    def num_processes(self) -> int:
        return self.strategy.world_size

    @property
    def local_process_index(self) -> int:
        """This process's number on its machine."""
        return int(os.environ.get("LOCAL_RANK", 0)) if self.num_processes > 1 else 0

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        return self.num_processes > 1

    @property
    def distributed_type(self) -> str:
        """Accelerate's name: NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED, TP; another strategy's own in capitals."""
        name = self.strategy.name
        if name in ("ddp", "accelerate"):
            return "MULTI_CPU" if self.device.type == "cpu" else "MULTI_GPU"
        return NAMES.get(name, name.upper())

    @property
    def state(self) -> RuntimeState:
        """What Accelerate keeps apart from the Accelerator: who is here."""
        return RuntimeState(
            self.distributed_type,
            self.num_processes,
            self.process_index,
            self.local_process_index,
            self.device,
            self.mixed_precision,
        )

    @property
    def mixed_precision(self) -> str:
        """Accelerate's name of the precision: no, bf16, fp16."""
        return PRECISIONS.get(self.plan.precision, "bf16")

    # ------------------------------------------------------------------------------------------ who does something

    def print(self, *values, **options) -> None:
        """Once, whatever the number of processes."""
        if self.is_main_process:
            print(*values, **options)

    def on_process(self, function: Callable | None = None, process_index: int = 0) -> Callable:
        """A function that does something on one process only; it returns None on the others."""
        return self._only(lambda: self.process_index == process_index, function)

    def on_main_process(self, function: Callable | None = None) -> Callable:
        return self._only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable | None = None) -> Callable:
        return self._only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable | None = None) -> Callable:
        return self._only(lambda: self.is_last_process, function)

    @staticmethod
    def _only(is_here: Callable[[], bool], function: Callable | None) -> Callable:
        if function is None:
            return functools.partial(Collectives._only, is_here)

        @functools.wraps(function)
        def on_one(*args, **kwargs):
            return function(*args, **kwargs) if is_here() else None

        return on_one

    def main_process_first(self) -> contextlib.AbstractContextManager:
        """The first process goes through the block, then the others."""
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager:
        """On each machine the first process goes through the block, then the others."""
        return self._first(self.is_local_main_process)

    @contextlib.contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if is_first:
                self.wait_for_everyone()

    @contextlib.contextmanager
    def split_between_processes(self, inputs, apply_padding: bool = False) -> Iterator:
        """This process's part of a list, a tuple, a tensor or a dict of such, cut along the first axis: the first
        processes have one more where it does not come out even. With `apply_padding` all have as many, the last item
        again where one lacks.
        """
        yield self._part(inputs, apply_padding)

    def _part(self, inputs, apply_padding: bool):
        if isinstance(inputs, Mapping):
            lengths = {len(value) for value in inputs.values()}
            if len(lengths) > 1:
                raise UsageError(
                    f"split_between_processes: the dict's values have {sorted(lengths)} items",
                    cure="values of one length",
                )
            return {key: self._part(value, apply_padding) for key, value in inputs.items()}
        each, more = divmod(len(inputs), self.num_processes)
        start = self.process_index * each + min(self.process_index, more)
        part = inputs[start : start + each + (self.process_index < more)]
        if apply_padding and more and self.process_index >= more and len(inputs):
            last = inputs[-1:]
            return torch.cat([part, last]) if torch.is_tensor(part) else part + last
        return part

    # ----------------------------------------------------------------------------------------- between processes

    def wait_for_everyone(self) -> None:
        if self.num_processes > 1:
            self.gather(torch.zeros(1, device=self.device))

    def broadcast_object(self, value):
        """The first process's object, on all."""
        if self.num_processes == 1:
            return value
        held = [value if self.is_main_process else None]
        dist.broadcast_object_list(held, 0, group=self.strategy.patient)
        return held[0]

    def gather_object(self, value) -> list:
        """The objects of all processes, in their order; all have them."""
        if self.num_processes == 1:
            return [value]
        held: list = [None] * self.num_processes
        dist.all_gather_object(held, value, group=self.strategy.patient)
        return held

    def gather(self, tensor):
        """The tensors of all processes, one after another along the first axis; all have it. Also of tensors in lists,
        tuples and dicts.

        Processes may have different numbers of rows, as after the last batch of an epoch. Raises UsageError where they
        differ in another axis.
        """
        return _each(lambda one: torch.cat(self._parts(one)), tensor)

    def _parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of each process; a number is a row."""
        tensor = tensor.detach().to(self.device)
        tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor.contiguous()
        if self.num_processes == 1:
            return [tensor]
        shapes = self._shapes(tensor)
        if any(shape[1:] != shapes[0][1:] for shape in shapes):
            raise UsageError(
                f"gather: the processes' tensors differ in more than their rows: {', '.join(map(str, shapes))}",
                cure="runtime.pad_across_processes(tensor, dim=1) before",
            )
        longest = max(shape[0] for shape in shapes)
        if longest > len(tensor):
            tensor = torch.cat([tensor, tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])])
        parts = [torch.empty_like(tensor) for _ in shapes]
        dist.all_gather(parts, tensor)
        return [part[: shape[0]] for part, shape in zip(parts, shapes, strict=True)]

    def _shapes(self, tensor: torch.Tensor) -> list[list[int]]:
        """Each process's shape."""
        own = torch.zeros(1 + MAX_AXES, dtype=torch.int64, device=self.device)
        own[: 1 + tensor.ndim] = torch.tensor([tensor.ndim, *tensor.shape])
        every = [torch.empty_like(own) for _ in range(self.num_processes)]
        dist.all_gather(every, own)
        return [one[1 : 1 + int(one[0])].tolist() for one in every]

    def gather_for_metrics(self, input_data, use_gather_object: bool = False):
        """`gather` of what was computed of a prepared loader's batch, without the row that stands in for none: each row
        once, in the sampler's order. Objects that hold no tensors come as one list.
        """
        rows = self._rows()
        if use_gather_object or not _holds_tensors(input_data):
            items = input_data if isinstance(input_data, (list, tuple)) else [input_data]
            every = self.gather_object(list(items))
            return [item for part, count in zip(every, rows, strict=True) for item in part[: _taken(part, count)]]
        return _each(lambda tensor: self._gather_rows(tensor, rows), input_data)

    def _rows(self) -> list[int | None]:
        """Rows of each process's batch; None: all that it has, since the batch is of no prepared loader.

        Of processes that see the same rows the first one's count.
        """
        ranks = [int(rank) for rank in self.gather(torch.tensor(self.strategy.data_rank))]
        return [
            0 if rank in ranks[:place] else self.round.rows[rank] if self.round else None
            for place, rank in enumerate(ranks)
        ]

    def _gather_rows(self, tensor: torch.Tensor, rows: list[int | None]) -> torch.Tensor:
        parts = self._parts(tensor)
        return torch.cat([part if count is None else part[:count] for part, count in zip(parts, rows, strict=True)])

    def reduce(self, tensor, reduction: str = "sum", scale: float = 1.0):
        """The sum, or the mean, of the processes' tensors; all have it."""
        if reduction not in ("sum", "mean", "none"):
            raise UsageError(f"reduce: {reduction!r} is neither sum nor mean")
        if scale != 1.0:
            raise UsageError("reduce: scale is of XLA devices, which are none of ours", cure="multiply what comes back")
        return _each(lambda one: self._reduce(one, reduction), tensor)

    def _reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        tensor = tensor.detach().to(self.device, copy=True)
        if self.num_processes > 1 and reduction != "none":
            dist.all_reduce(tensor)
        return tensor / self.num_processes if reduction == "mean" else tensor

    def pad_across_processes(self, tensor, dim: int = 0, pad_index: int = 0, pad_first: bool = False):
        """The tensor, as long along `dim` as the longest of the processes', filled with `pad_index`."""
        return _each(lambda one: self._pad(one, dim, pad_index, pad_first), tensor)

    def _pad(self, tensor: torch.Tensor, dim: int, pad_index: int, pad_first: bool) -> torch.Tensor:
        if dim >= tensor.ndim or dim < -tensor.ndim:
            return tensor
        longest = int(self.gather(torch.tensor(tensor.shape[dim])).max())
        if longest == tensor.shape[dim]:
            return tensor
        shape = [*tensor.shape]
        shape[dim] = longest - tensor.shape[dim]
        filling = tensor.new_full(shape, pad_index)
        return torch.cat([filling, tensor] if pad_first else [tensor, filling], dim)


def _each(act: Callable, value) -> Any:
    """`act` on each tensor of lists, tuples and dicts."""
    if torch.is_tensor(value):
        return act(value)
    if isinstance(value, Mapping):
        return {key: _each(act, one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_each(act, one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    raise UsageError(
        f"{type(value).__name__} is no tensor, nor a list, tuple or dict of tensors", cure="gather_object, for objects"
    )


def _holds_tensors(value) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensors(one) for one in value.values())
    return torch.is_tensor(value) or (isinstance(value, (list, tuple)) and any(_holds_tensors(one) for one in value))


def _taken(part: list, count: int | None) -> int:
    return len(part) if count is None else min(len(part), count)
