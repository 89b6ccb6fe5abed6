"""A DataLoader of which each process sees its share: every row once, batches as large as one process would see them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from anyqlora.distribution.processes import DistributionError


class SharedBatches:
    """The rows of share `number` of `count` of each batch. A random order is process 0's on all, anew in every pass."""

    def __init__(self, batches: BatchSampler, number: int, count: int):
        self.batches, self.number, self.count = batches, number, count

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for rows in BatchSampler(self._ordered(), self.batches.batch_size, self.batches.drop_last):
            each = len(rows) // self.count
            yield rows[self.number * each : (self.number + 1) * each]

    def _ordered(self) -> SequentialSampler | RandomSampler:
        sampler = self.batches.sampler
        if isinstance(sampler, SequentialSampler):
            return sampler
        assert isinstance(sampler, RandomSampler), "shared takes no other"
        own = sampler.generator or torch.default_generator
        seed = torch.randint(2**62, (1,), generator=own)
        if dist.is_initialized():
            device = "cpu" if "gloo" in dist.get_backend_config() else torch.accelerator.current_accelerator()
            seed = seed.to(device)
            dist.broadcast(seed, src=0)
        order = torch.Generator().manual_seed(int(seed))
        return RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples, generator=order)


def shared(loader: DataLoader, number: int, count: int) -> DataLoader:
    """Share `number` of `count` of what `loader` gives.

    Raises DistributionError for batches that cannot be shared evenly.
    """
    batches = getattr(loader, "batch_sampler", None)
    if (
        not isinstance(loader, DataLoader)
        or type(batches) is not BatchSampler
        or type(batches.sampler) not in (SequentialSampler, RandomSampler)
    ):
        raise DistributionError(
            f"{type(loader).__name__} cannot be shared among {count}",
            cure="a torch DataLoader over a map-style dataset with batch_size and shuffle; or auto_shard_dataset=False "
            "for one that is "
            "shared already",
        )
    assert isinstance(batches.sampler, (SequentialSampler, RandomSampler))
    last = 0 if batches.drop_last else len(batches.sampler) % batches.batch_size
    for rows in (batches.batch_size, last):
        if rows % count:
            raise DistributionError(
                f"a batch of {rows} rows cannot be shared evenly among {count}",
                cure=f"batch_size a multiple of {count}, and drop_last=True",
            )
    return DataLoader(
        loader.dataset,
        batch_sampler=SharedBatches(batches, number, count),
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
    )
