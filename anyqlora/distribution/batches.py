"""What processes that compute a batch together tell each other before they do: none computes alone, none on other rows.

Each process has the whole batch (`share` takes its rows of it, without a message), or its own rows (`whole` collects
them all).
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from anyqlora.distribution.processes import DistributionError, num_processes, process_id
from anyqlora.distribution.tensors import Sharding, distribute_data_input

BATCH, END, FAILURE = range(3)


def message_device() -> torch.device:
    """Where tensors lie that the group of all processes exchanges."""
    if "gloo" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def exchanged(values: Sequence[int]) -> list[list[int]]:
    """The `values` (int64, as many on each) of every process, by its number."""
    own = torch.tensor(list(values), dtype=torch.int64, device=message_device())
    parts = [torch.empty_like(own) for _ in range(num_processes())]
    dist.all_gather(parts, own)
    return [part.tolist() for part in parts]


def of_process_0(value: Any) -> Any:
    """What process 0 has; it can be pickled."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=message_device())
    return box[0]


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Of shapes, types and bytes."""
    code = 0
    for tensor in tensors:
        code = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), code)
        code = zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, code)
    return code


def share(tensor: torch.Tensor, sharding: Sharding, axis: str) -> DTensor:
    """`tensor` [rows, ...], the same on all, split by rows along `axis` of the mesh; where they cannot be split evenly,
    whole on each, so that every process computes all of them.
    """
    mesh = sharding.mesh
    laid = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    count = mesh.size(cast(tuple, mesh.mesh_dim_names).index(axis))
    if tensor.ndim == 0 or len(tensor) % count:
        warnings.warn(
            f"{len(tensor) if tensor.ndim else 1} rows cannot be split evenly among {count}: every process computes "
            "all of them",
            stacklevel=2,
        )
        return laid
    return laid.redistribute(placements=sharding.placements)


def local_part(tensor: torch.Tensor, like: DTensor) -> DTensor:
    """The part of `tensor`, which is the same on all, that lies where `like` does."""
    mesh = like.device_mesh
    places = [place if isinstance(place, Shard) else Replicate() for place in like.placements]
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(placements=places)


class AgreedBatches:
    """The batches of `loader`, once all processes know that they have the same ones; with `shares` each process has its
    own rows, and the whole batches are given.

    `leaves` lists a batch's tensors, `mapped` puts others in their place; `layout` makes a layout of a shape, split
    along `axis`. Raises DistributionError, on every process, where one has other rows, has none left, or failed.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        distribution: Any,
        shares: bool,
        leaves: Callable[[Any], list[torch.Tensor]],
        mapped: Callable[[Callable[[Any], Any], Any], Any],
    ):
        self.loader, self.distribution, self.shares = loader, distribution, shares
        self.leaves, self.mapped = leaves, mapped

    def __iter__(self) -> Iterator[Any]:
        return self._agreed(iter(self.loader))  # not at the first batch: a DataLoader draws a seed here

    def _agreed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            failure, batch, kind = None, None, BATCH
            try:
                batch = next(batches)
            except StopIteration:
                kind = END
            except Exception as error:
                kind, failure = FAILURE, error
            self.agree(kind, batch, failure)
            if kind == END:
                return
            yield self.mapped(self._whole, batch) if self.shares else batch

    def agree(self, kind: int, batch: Any, failure: Exception | None = None) -> None:
        """All processes come to the same end: they go on with this batch, or stop, or raise."""
        tensors = [] if batch is None else self.leaves(batch)
        rows = next((len(tensor) for tensor in tensors if tensor.ndim), 0)
        mesh = self.distribution.device_mesh.backend_mesh
        replica = mesh.get_local_rank(self.distribution.batch_dim_name)
        states = exchanged([kind, rows, checksum(tensors), replica])
        if failure is not None:
            raise failure
        kinds = [process[0] for process in states]
        if FAILURE in kinds:
            raise DistributionError(
                f"process {kinds.index(FAILURE)} failed while it read its data", cure="its own message says why"
            )
        if len(set(kinds)) > 1:
            raise DistributionError(
                f"the data of process {kinds.index(END)} ended before that of process {kinds.index(BATCH)}",
                cure="as many batches on each process",
            )
        if self.shares and len({process[1] for process in states}) > 1:
            raise DistributionError(
                f"this process's share of the batch has {rows} rows, and the others' have "
                f"{', '.join(str(process[1]) for process in states)}",
                cure="as many rows on each process in each batch: drop_last=True",
            )
        # those who share a replica, or all, have the same rows
        first = {process[3] if self.shares else 0: process[2] for process in reversed(states)}
        for number, process in enumerate(states):
            if process[2] != first[process[3] if self.shares else 0]:
                raise DistributionError(
                    f"the batch of process {number} is not that of the others (this is process {process_id()})",
                    cure="hand each process the whole data, in the same order; or auto_shard_dataset=False where each "
                    "has its own rows",
                )

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0:
            return tensor
        return distribute_data_input(tensor, self.distribution.get_data_layout(tensor.shape)).full_tensor()
