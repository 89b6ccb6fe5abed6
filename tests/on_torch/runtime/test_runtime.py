"""Runtime's verbs in loops of people's own: the example, and Accelerate's way of writing one."""

import importlib.util
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from anyqlora.core.errors import UsageError
from anyqlora.on_torch.runtime import Runtime
from anyqlora.testing import world
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "own_loop.py"
ZERO = {f"zero {stage}": {"strategy": "deepspeed", "deepspeed_zero_stage": stage} for stage in range(4)}
STRATEGIES = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "accelerate": {"strategy": "accelerate"},
    **ZERO,
}


def example():
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def own_loop(settings):
    return example().train(**settings)


@pytest.fixture(scope="module")
def one():
    """One process whose batches are those of two together."""
    return world(1, own_loop, {"strategy": "single", "batch_size": 8, "backend": "cpu"})[0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_example_equals_one_process(name, one):
    """101 rows in batches of 4: the last round has five rows for two processes.

    Loss, norm and what was learned after 27 steps.
    """
    ranks = world(2, own_loop, {**STRATEGIES[name], "batch_size": 4, "backend": "cpu"})
    for loss, norm, _ in ranks:
        assert loss == pytest.approx(one[0], rel=1e-4) and norm == pytest.approx(one[1], rel=1e-3)
    for key, value in one[2].items():
        np.testing.assert_allclose(ranks[0][2][key], value, rtol=1e-3, atol=1e-4)
    assert not ranks[1][2]


def ended(settings, is_member):
    """Whether this process is in a group before the loop's last call, and after it."""
    if is_member:
        dist.init_process_group("gloo")
    runtime = Runtime.of(backend="cpu", precision="fp32", **settings)
    before = dist.is_initialized()
    runtime.end_training()
    return before, dist.is_initialized()


@pytest.mark.parametrize("is_member", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "accelerate"])
def test_whoever_formed_the_group_leaves_it(strategy, is_member):
    assert world(2, ended, {"strategy": strategy}, is_member) == [(True, is_member)] * 2


def accelerate_style(settings):
    """A loop as it is written for Accelerate: accumulate, backward, clip, step, zero_grad, scheduler."""
    runtime = Runtime.of(loss="sum", backend="cpu", precision="fp32", gradient_accumulation_steps=2, **settings)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(10, 3, generator=generator), torch.randint(0, 2, (10,), generator=generator))
    model, optimizer, loader, scheduler = runtime.prepare(model, optimizer, DataLoader(rows, batch_size=1), scheduler)
    seen, norms, rates, boundaries = [], [], [], []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for x, y in loader:
            with runtime.accumulate(model):
                runtime.backward(F.cross_entropy(model(x), y, reduction="sum") / 4)
                norms.append(runtime.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen += x[:, 0].tolist()
            boundaries.append(runtime.sync_gradients)
            rates.append(scheduler.get_last_lr()[0])
    return {
        "warnings": [str(one.message) for one in warned if "optimizer.step" in str(one.message)],
        "seen": seen,
        "norms": [None if n is None else float(n) for n in norms],
        "rates": rates,
        "boundaries": boundaries,
        "learned": {k: v.numpy() for k, v in runtime.strategy.gather_trainable().items()},
        "last": runtime.grad_norm,
        "gathered": runtime.gather(torch.tensor(runtime.process_index)).tolist(),
        "mean": runtime.reduce(torch.tensor(float(runtime.process_index)), "mean").item(),
        "rows": [float(v) for v in rows.tensors[0][:, 0]],
        "device": str(runtime.device),
        "main": runtime.is_main_process,
    }


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero 0", "zero 2"])
def test_a_loop_written_for_accelerate(name):
    """Steps at every second micro-batch and at the loader's end, each row once, rates that fall at boundaries only."""
    ranks = world(2, accelerate_style, STRATEGIES[name])
    for rank, found in enumerate(ranks):
        assert found["warnings"] == [] and found["boundaries"] == [False, True, False, True, True]
        assert found["rates"] == pytest.approx([0.5, 0.25, 0.25, 0.125, 0.0625])
        assert [n is None for n in found["norms"]] == (
            [True] * 5 if name == "zero 2" else [True, False, True, False, False]
        )
        assert (
            found["gathered"] == [0, 1]
            and found["mean"] == 0.5
            and found["main"] == (rank == 0)
            and found["device"] == "cpu"
        )
    assert sorted(ranks[0]["seen"] + ranks[1]["seen"]) == pytest.approx(sorted(ranks[0]["rows"]))
    assert ranks[0]["last"] == pytest.approx(ranks[1]["last"]) and ranks[0]["last"] > 0.1
    torch.testing.assert_close(
        torch.from_numpy(ranks[0]["learned"]["0.weight"]), by_hand(ranks[0]["rows"]), rtol=1e-5, atol=1e-6
    )


def by_hand(first_column):
    """The same steps in plain torch on all rows."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(10, 3, generator=generator), torch.randint(0, 2, (10,), generator=generator)
    assert x[:, 0].tolist() == pytest.approx(first_column)
    for rows, rate in ((range(4), 0.5), (range(4, 8), 0.25), (range(8, 10), 0.125)):
        (F.cross_entropy(model(x[list(rows)]), y[list(rows)], reduction="sum") / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with torch.no_grad():
            for p in model.parameters():
                p -= rate * p.grad
                p.grad = None
    return model[0].weight.detach()


def alone():
    return Runtime.of("sum", backend="cpu", precision="fp32", strategy="single")


def test_objects_come_back_in_their_order_and_one_comes_alone():
    runtime, model = alone(), torch.nn.Linear(2, 2)
    assert runtime.prepare(model) is model
    loader = DataLoader(TensorDataset(torch.zeros(3, 2)), batch_size=2)
    kinds = [
        type(one).__name__
        for one in alone().prepare(loader, torch.optim.Adam(model.parameters(), betas=(0.5, 0.6)), model)
    ]
    assert kinds == ["ShardedLoader", "PreparedOptimizer", "Linear"]


def test_a_rebuilt_optimizer_keeps_its_kind_groups_and_options():
    runtime, model = alone(), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    made = torch.optim.AdamW(
        [{"params": model[1].parameters(), "lr": 0.3}, {"params": [model[0].weight]}],
        lr=0.1,
        betas=(0.5, 0.6),
        weight_decay=0.7,
    )
    optimizer, model = runtime.prepare(made, model)
    first, second = optimizer.param_groups
    assert type(optimizer.optimizer) is torch.optim.AdamW and optimizer.optimizer is not made
    assert (first["lr"], second["lr"], second["betas"], second["weight_decay"]) == (0.3, 0.1, (0.5, 0.6), 0.7)
    assert first["params"][0] is model[1].weight and second["params"] == [model[0].weight]


@pytest.mark.parametrize(
    "objects, why",
    [
        (lambda m: (), "0 models"),
        (lambda m: (m, torch.nn.Linear(1, 1)), "2 models"),
        (lambda m: (m, *two_optimizers(m, m)), "two optimizers update the same parameter"),
        (
            lambda m: (m, torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1)),
            "parameters that the model does not train",
        ),
        (lambda m: (m, stepped(m)), "has stepped already"),
    ],
)
def test_what_cannot_be_prepared(objects, why):
    with pytest.raises(UsageError, match=why):
        alone().prepare(*objects(torch.nn.Linear(2, 2)))


def stepped(model):
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def two_optimizers(first, second):
    return [torch.optim.SGD(module.parameters(), lr=1.0) for module in (first, second)]


def test_what_is_not_known_comes_back_in_its_place():
    """As step 5 of the guide to custom backends has it."""
    model, metric, loss = torch.nn.Linear(1, 1), object(), torch.nn.MSELoss()
    loaders = [DataLoader([1.0, 2.0]), DataLoader([3.0])]
    back = alone().prepare(None, metric, loaders[0], model, "text", loaders[1], 3, loss)
    assert [back[place] for place in (0, 1, 4, 6, 7)] == [None, metric, "text", 3, loss] and back[3] is model
    assert [list(back[place]) for place in (2, 5)] == [
        [torch.tensor([1.0]), torch.tensor([2.0])],
        [torch.tensor([3.0])],
    ]


def test_an_announced_boundary_is_not_taken_back():
    runtime = alone()
    model = runtime.prepare(torch.nn.Linear(1, 1))
    with runtime.micro_batch(is_final=True), pytest.raises(RuntimeError, match="announced as the last"):
        runtime.backward(model(torch.ones(1, 1)).sum(), is_final_micro_batch=False)


def test_setter_has_deepspeeds_name_too_and_no_sync_steps_nothing():
    runtime = alone()
    optimizer, model = runtime.prepare(torch.optim.SGD((model := torch.nn.Linear(1, 1)).parameters(), lr=1.0), model)
    before = model.weight.detach().clone()
    with runtime.no_sync(model):
        runtime.backward(model(torch.ones(1, 1)).sum())
        assert runtime.optimizer_step_and_zero_grad(optimizer, model) is None
    runtime.set_deepspeed_gradient_accumulation_boundary(False)
    runtime.backward(model(torch.ones(1, 1)).sum())
    assert runtime.optimizer_step_and_zero_grad(optimizer, model) is None and torch.equal(model.weight, before)
    runtime.set_deepspeed_gradient_accumulation_boundary(True)
    runtime.backward(model(torch.ones(1, 1)).sum())
    norm = runtime.optimizer_step_and_zero_grad(optimizer, model, max_grad_norm=None)
    assert isinstance(norm, float) and norm == pytest.approx(18**0.5)  # three micro-batches: (3, 3) for weight and bias
    torch.testing.assert_close(model.weight, before - 3)


def test_half_a_state_is_named(tmp_path):
    runtime = alone()
    runtime.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(UsageError, match="no state that can be read"):
        runtime.load_state(tmp_path)
    runtime.save_state(tmp_path / "state")
    other = alone()
    other.prepare(torch.nn.Sequential(torch.nn.Linear(1, 1)))
    with pytest.raises(UsageError, match="state of another model"):
        other.load_state(tmp_path / "state")
