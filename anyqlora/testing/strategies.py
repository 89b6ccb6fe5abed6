"""What every strategy passes: the same adapter as one process, whatever the number of processes and the way steps are
cut.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyqlora.testing.worlds import world

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyqlora.on_torch.runtime import Runtime

PLANS = (3, 1, 4, 2)  # micro-batches of each step
DEALT = 4  # parts that the rows of a micro-batch are dealt in, whatever the number of processes
VOCABULARY, WIDTH = 23, 12


def tiny_model() -> torch.nn.Module:
    """Frozen blocks with a low-rank adapter each, embedding and head tied, and an adapter that nothing passes
    through.
    """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(WIDTH, WIDTH)
            self.a, self.b = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.frozen(x) + self.b(self.a(x)))

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.idle = nn.Linear(WIDTH, 2, bias=False)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Tiny()
    for name, p in model.named_parameters():
        p.requires_grad_(".a." in name or ".b." in name or "idle" in name)
    return model


def ragged_rows(step: int, number: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [2, T] and which of them count, [2, T]; T and the counts differ from one to the next."""
    import torch

    generator = torch.Generator().manual_seed(1000 * step + 10 * number + part)
    length = int(torch.randint(3, 9, (), generator=generator))
    ids = torch.randint(0, VOCABULARY, (2, length), generator=generator)
    counts = torch.arange(length) < torch.tensor([[length], [max(2, length // 2)]])
    return ids, counts


def contract_run(
    strategy: str,
    options: dict,
    *,
    optimizer: str = "AdamW",
    lr: float = 1e-2,
    form: str = "early",
    first: int = 0,
    last: int = len(PLANS),
    load: str = "",
    save: str = "",
    **settings: Any,
) -> dict[str, Any]:
    """Steps `first` to `last` of the contract's job in this world, as a loop of somebody's own: what each rank saw of
    them.
    """
    import torch
    import torch.nn.functional as F

    from anyqlora.on_torch.runtime import Runtime

    text = ",".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()
    )
    runtime = Runtime.of(
        loss="sum",
        strategy=strategy,
        backend="cpu",
        precision="fp32",
        **({"strategy_opt": text} if text else {}),
        **settings,
    )
    model = tiny_model()
    plain = getattr(torch.optim, optimizer)([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0)
    prepared, model = runtime.prepare(plain, model)
    if load:
        runtime.load_state(load)
    start, norms, losses, unmoved, dead = gathered(runtime), [], [], [], []
    for step in range(first, last):
        mine = range(runtime.strategy.data_rank, DEALT, runtime.strategy.data_size)
        micro_batches = [ragged_rows(step, number, part) for number in range(PLANS[step]) for part in mine]
        everything = sum(
            int(ragged_rows(step, number, part)[1].sum()) for number in range(PLANS[step]) for part in range(DEALT)
        )
        total = 0.0
        for number, (ids, counts) in enumerate(micro_batches, 1):
            is_final = number == len(micro_batches)
            if form == "setter":
                runtime.set_gradient_accumulation_boundary(is_final)
            with runtime.micro_batch(is_final) if form == "early" else contextlib.nullcontext():
                losses_of = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="none")
                loss = losses_of[counts.flatten()].sum() / everything
                runtime.backward(loss, **({"is_final_micro_batch": is_final} if form == "late" else {}))
            total += loss.item()
            if is_final and step == first:
                dead = sorted(runtime.strategy.missing_gradients())
            norm = runtime.optimizer_step_and_zero_grad(prepared, model, max_grad_norm=1.0)
            unmoved.append(norm is None)
        norms.append(norm)
        total *= (
            runtime.strategy.data_size / runtime.num_processes
        )  # processes that see the same rows have the same sum
        losses.append(float(runtime.reduce(torch.tensor(total))))
    if save:
        runtime.save_state(save)
    return {
        "start": start,
        "end": gathered(runtime),
        "norms": norms,
        "losses": losses,
        "unmoved": unmoved,
        "dead": dead,
        "name": runtime.strategy.name,
        "size": runtime.num_processes,
        "data_size": runtime.strategy.data_size,
        "trainable": sorted(runtime.strategy.trainable),
        "unwrapped": type(runtime.unwrap_model(model)).__name__,
    }


def gathered(runtime: Runtime) -> dict[str, np.ndarray]:
    """{name: array} of what is learned, on rank 0."""
    return {name: tensor.numpy().copy() for name, tensor in runtime.strategy.gather_trainable().items()}


@functools.cache
def alone(last: int = len(PLANS), **settings: Any) -> dict[str, Any]:
    """The contract's job in one process."""
    (result,) = world(1, _contract_run, {"strategy": "single", "options": {}, "last": last, **settings})
    return result


def _contract_run(settings: dict[str, Any]) -> dict[str, Any]:
    return contract_run(**settings)


class StrategyContract:
    """Subclass it in a test module.

    Rows are ragged, embedding and head tied, one adapter gets no gradient, steps have 3, 1, 4 and 2 micro-batches, and
    the number of processes changes between saving and loading.

    strategy: a name or module:Class. options: its options. settings: of train.py. sums_every_step: whether gradients
    are summed over all processes in every step, so that the result is one process's; where not, only what does not
    follow from that is demanded. works_alone: whether it works in a group of one; where not, strategy single stands in
    for that.
    """

    strategy = ""
    options: dict = {}
    settings: dict = {}
    sums_every_step = True
    works_alone = True

    def run(self, size: int, **more: Any) -> list[dict[str, Any]]:
        own = (
            {"strategy": self.strategy, "options": self.options, **self.settings}
            if size > 1 or self.works_alone
            else {"strategy": "single", "options": {}}
        )
        return world(size, _contract_run, {**own, **more})

    @staticmethod
    def far(a: dict, b: dict, start: dict) -> float:
        """|a - b| / |a - start|, 2-norm over all tensors."""
        assert a.keys() == b.keys() == start.keys()
        return float(
            (sum(((a[k] - b[k]) ** 2).sum() for k in a) / sum(((a[k] - start[k]) ** 2).sum() for k in a)) ** 0.5
        )

    def agrees(self, ranks: list[dict], expected: dict, *, adapter: float) -> None:
        assert all(rank["norms"] == ranks[0]["norms"] and rank["losses"] == ranks[0]["losses"] for rank in ranks), (
            "ranks differ"
        )
        assert all(isinstance(norm, float) and norm > 0 for norm in ranks[0]["norms"])
        if self.sums_every_step:
            assert all(abs(a / b - 1) < 1e-5 for a, b in zip(ranks[0]["norms"], expected["norms"], strict=True)), (
                ranks[0]["norms"],
                expected["norms"],
            )
            assert all(abs(a / b - 1) < 1e-5 for a, b in zip(ranks[0]["losses"], expected["losses"], strict=True))
            assert self.far(expected["end"], ranks[0]["end"], expected["start"]) < adapter
        else:
            assert (
                ranks[0]["losses"][0] == expected["losses"][0]
                or abs(ranks[0]["losses"][0] / expected["losses"][0] - 1) < 1e-5
            )

    def test_what_was_asked_for_is_in_effect(self) -> None:
        for size in (1, 2) if self.works_alone else (2,):
            ranks = self.run(size, last=1)
            assert {rank["size"] for rank in ranks} == {size}
            assert len({rank["name"] for rank in ranks}) == 1 and ranks[0]["name"] != "single"
            assert len({tuple(rank["trainable"]) for rank in ranks}) == 1 and len(ranks[0]["trainable"]) == 5
            assert all(rank["dead"] == ["idle.weight"] for rank in ranks), "an adapter without a gradient goes unseen"

    def test_adamw_equals_one_process(self) -> None:
        self.agrees(self.run(2), alone(), adapter=1e-4)

    def test_sgd_equals_one_process(self) -> None:
        self.agrees(self.run(2, optimizer="SGD", lr=0.1), alone(optimizer="SGD", lr=0.1), adapter=1e-5)

    def test_boundaries_that_are_known_in_backward_only(self) -> None:
        self.agrees(self.run(2, form="late"), alone(), adapter=1e-4)

    def test_boundaries_that_are_set_by_hand(self) -> None:
        self.agrees(self.run(2, form="setter"), alone(), adapter=1e-4)

    def test_four_processes(self) -> None:
        self.agrees(self.run(4), alone(), adapter=1e-4)

    def test_off_a_boundary_nothing_steps(self) -> None:
        for rank in self.run(2, last=2):
            parts = DEALT // rank["data_size"]
            assert rank["unmoved"] == [True] * (3 * parts - 1) + [False] + [True] * (parts - 1) + [False]

    def test_the_first_process_gathers_whole_tensors_and_an_idle_adapter_stays(self) -> None:
        first, *others = self.run(2)
        expected = alone(last=1)["start"]
        assert {name: value.shape for name, value in first["end"].items()} == {
            name: value.shape for name, value in expected.items()
        }
        assert all(first["start"][name].tobytes() == value.tobytes() for name, value in expected.items())
        assert not any(other["end"] for other in others)
        assert first["end"]["idle.weight"].tobytes() == expected["idle.weight"].tobytes()
        assert all((first["end"][name] != value).any() for name, value in expected.items() if name != "idle.weight")

    def test_a_saved_state_goes_on_with_another_number_of_processes(self, tmp_path: Path) -> None:
        expected = alone()
        for before, after in ((2, 1), (2, 4), (4, 2)):
            state = str(tmp_path / f"{before}-{after}")
            saved = self.run(before, last=2, save=state)[0]
            loaded = self.run(after, first=2, load=state)
            assert all(loaded[0]["start"][name].tobytes() == value.tobytes() for name, value in saved["end"].items())
            joined = [
                {**rank, "norms": saved["norms"] + rank["norms"], "losses": saved["losses"] + rank["losses"]}
                for rank in loaded
            ]
            self.agrees(joined, expected, adapter=1e-4)

    def test_options_go_to_a_dictionary_and_back(self) -> None:
        from anyqlora.config import strategy_options
        from anyqlora.config.options_class import options_from_dict, options_to_dict

        cls = strategy_options.options_class(self.strategy)
        if cls is None:
            assert not self.options
            return
        options = options_from_dict(cls, self.options)
        stored = options_to_dict(options)
        assert options_from_dict(cls, stored) == options
        assert all(str(stored[key]).lower() == str(value).lower() for key, value in self.options.items())
