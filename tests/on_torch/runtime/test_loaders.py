"""A prepared DataLoader against the sampler itself: what one process would see, dealt to two."""

import collections
import multiprocessing

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from anyqlora.on_torch.runtime import Runtime
from anyqlora.testing import world


class Rows(Dataset):
    """Row n is n."""

    def __init__(self, length=23):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        return torch.tensor(number)


class Stream(IterableDataset):
    """Rows without numbers; each of its workers reads its part."""

    def __init__(self, length=23):
        self.length = length

    def __iter__(self):
        worker = get_worker_info()
        return iter(range(self.length)[worker.id :: worker.num_workers] if worker else range(self.length))


class Unseeded(Stream):
    """Another order in each process."""

    def __iter__(self):
        return iter(torch.randperm(self.length).tolist())


class Backwards(Sampler):
    """A sampler of somebody's own."""

    def __iter__(self):
        return iter(range(22, -1, -1))

    def __len__(self):
        return 23


class ByLength(Sampler):
    """A batch sampler of somebody's own: batches of other sizes."""

    def __iter__(self):
        return iter([[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10, 11]])

    def __len__(self):
        return 5


def seeded(seed=7):
    return torch.Generator().manual_seed(seed)


LOADERS = {
    "in order": lambda: DataLoader(Rows(), batch_size=4),
    "one row over": lambda: DataLoader(Rows(17), batch_size=4),
    "dropped": lambda: DataLoader(Rows(), batch_size=4, drop_last=True),
    "fewer rows than processes": lambda: DataLoader(Rows(1), batch_size=4),
    "shuffled": lambda: DataLoader(Rows(), batch_size=4, shuffle=True),
    "a generator": lambda: DataLoader(Rows(), batch_size=4, shuffle=True, generator=seeded()),
    "a sampler's generator": lambda: DataLoader(Rows(), 4, sampler=RandomSampler(Rows(), generator=seeded(3))),
    "with replacement": lambda: DataLoader(
        Rows(), 4, sampler=RandomSampler(Rows(), replacement=True, num_samples=20, generator=seeded())
    ),
    "fewer samples": lambda: DataLoader(Rows(), 4, sampler=RandomSampler(Rows(), num_samples=9)),
    "more samples": lambda: DataLoader(Rows(), 4, sampler=RandomSampler(Rows(), num_samples=60)),
    "a subset": lambda: DataLoader(Rows(), 2, sampler=SubsetRandomSampler([3, 5, 8, 13, 21])),
    "weights": lambda: DataLoader(Rows(), 4, sampler=WeightedRandomSampler([1.0, 2.0] * 10 + [9.0] * 3, 31)),
    "a sampler of one's own": lambda: DataLoader(Rows(), 4, sampler=Backwards()),
    "a batch sampler": lambda: DataLoader(Rows(), batch_sampler=BatchSampler(SequentialSampler(Rows()), 5, True)),
    "a batch sampler of one's own": lambda: DataLoader(Rows(), batch_sampler=ByLength()),
    "rows alone": lambda: DataLoader(Rows(), batch_size=None),
    "two workers": lambda: DataLoader(
        Rows(), batch_size=4, shuffle=True, num_workers=2, multiprocessing_context="fork", generator=seeded()
    ),
    "workers that stay": lambda: DataLoader(
        Rows(),
        batch_size=3,
        shuffle=True,
        num_workers=1,
        persistent_workers=True,
        prefetch_factor=4,
        multiprocessing_context="fork",
    ),
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "a stream of two workers": lambda: DataLoader(
        Stream(), batch_size=4, num_workers=2, multiprocessing_context="fork"
    ),
    "a stream of rows alone": lambda: DataLoader(Stream(), batch_size=None),
    "a stream without a seed": lambda: DataLoader(Unseeded(), batch_size=4),
}


def seen(epochs=2):
    """{loader: of each epoch the batches here, the rows of all that count, and how many batches were foretold}."""
    multiprocessing.current_process()._config["daemon"] = False  # a world's ranks may have no workers, else
    runtime, found = Runtime.of(backend="cpu", precision="fp32", strategy="ddp"), {}
    for name, make in LOADERS.items():
        _, loader = runtime.prepare(torch.nn.Linear(1, 1), make())
        torch.manual_seed(100 + 100 * runtime.process_index)  # each process draws other numbers, as they do
        found[name] = [epoch(runtime, loader) for _ in range(epochs)]
        runtime.free_memory()
    return found


def epoch(runtime, loader):
    batches, gathered = [], []
    for batch in loader:
        batch = torch.as_tensor(batch).reshape(-1)
        batches.append(batch.tolist())
        gathered += runtime.gather_for_metrics(batch).tolist()
    is_foretold = not isinstance(loader.dataset, IterableDataset)
    return batches, gathered, len(loader) if is_foretold else None


@pytest.fixture(scope="module")
def ranks():
    return world(2, seen)


@pytest.mark.parametrize("name", LOADERS)
def test_the_rows_are_the_samplers_each_by_one_process(name, ranks):
    torch.manual_seed(100)
    alone = LOADERS[name]()
    for here, there in zip(*(rank[name] for rank in ranks), strict=True):
        (first, gathered, length), (second, other, _) = here, there
        expected = [row for batch in alone for row in torch.as_tensor(batch).reshape(-1).tolist()]
        assert gathered == other and len(first) == len(second) and all(first) and all(second)
        assert length in (None, len(first))
        if name == "dropped":  # a round that is not whole, as each of them would drop a batch that is not
            assert gathered == expected[:16]
        elif name == "a stream without a seed":  # one process's order, and no other's
            assert sorted(gathered) == list(range(23))
        else:
            assert gathered == expected
        counted = collections.Counter(row for batches in (first, second) for batch in batches for row in batch)
        extra = counted - collections.Counter(gathered)
        assert sum(extra.values()) == (name in ("fewer rows than processes", "rows alone", "a stream of rows alone"))


def test_one_process_sees_what_it_would_without_us():
    runtime = Runtime.of(backend="cpu", precision="fp32", strategy="single")
    for make in LOADERS.values():
        torch.manual_seed(5)
        alone = make()
        plain = [torch.as_tensor(batch).tolist() for _ in range(2) for batch in alone]
        _, loader = runtime.prepare(torch.nn.Linear(1, 1), make())
        torch.manual_seed(5)
        assert [torch.as_tensor(batch).tolist() for _ in range(2) for batch in loader] == plain
        runtime.free_memory()
