"""Accelerate's verbs mean what Accelerate means: the same loop with an Accelerator and with a Runtime."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.on_torch.runtime import Runtime
from anyqlora.testing import world
from tests.support.paths import ROOT

OPTIMIZERS = {"SGD": {"lr": 0.5, "momentum": 0.9}, "AdamW": {"lr": 0.02}}
ACCUMULATED = 4
STRATEGIES = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "accelerate": {"strategy": "accelerate"},
    **{f"zero {stage}": {"strategy": "deepspeed", "deepspeed_zero_stage": stage} for stage in range(4)},
}


def rows(count=64):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 3, generator=generator), torch.randint(0, 2, (count,), generator=generator))


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def maker(kind, optimizer):
    if kind == "accelerate":
        from accelerate import Accelerator

        return Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    return Runtime.of(backend="cpu", precision="fp32", gradient_accumulation_steps=ACCUMULATED, **kind)


def ported(kind, optimizer, batch_size=2, epochs=2):
    """What is trained, the rates and the norms: lines that both take, but for the name of what makes them."""
    accelerator = maker(kind, optimizer)
    model = network()
    made = getattr(torch.optim, optimizer)(model.parameters(), **OPTIMIZERS[optimizer])
    scheduler = torch.optim.lr_scheduler.LinearLR(made, 1.0, 0.1, total_iters=40)
    model, made, loader, scheduler = accelerator.prepare(model, made, DataLoader(rows(), batch_size), scheduler)
    rates, norms, metrics = [], [], []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.3))
                made.step()
                scheduler.step()
                made.zero_grad()
            metrics += accelerator.gather_for_metrics(y).tolist()
        rates.append(scheduler.get_last_lr()[0])
    learned = (
        {name: p.detach().numpy() for name, p in accelerator.unwrap_model(model).named_parameters()}
        if kind == "accelerate"
        else {name: tensor.numpy() for name, tensor in accelerator.strategy.gather_trainable().items()}
    )
    return learned, rates, [None if norm is None else float(norm) for norm in norms], metrics


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_loop_trains_what_it_trains_with_accelerate(optimizer, size):
    theirs = world(size, ported, "accelerate", optimizer)[0]
    ours = world(size, ported, {"strategy": "ddp" if size > 1 else "single"}, optimizer)[0]
    for name, value in theirs[0].items():
        np.testing.assert_allclose(ours[0][name], value, atol=1e-6, rtol=0)
    assert ours[1] == pytest.approx(theirs[1]) and ours[2] == pytest.approx(theirs[2], rel=1e-4)
    assert ours[3] == theirs[3] == rows().tensors[1].tolist() * 2


@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("SGD", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_what_one_big_batch_does(name, optimizer):
    learned, _, norms, _ = world(2, ported, STRATEGIES[name], optimizer)[0]
    one, _, expected, _ = world(1, big_batches, optimizer)[0]
    for key, value in one.items():
        np.testing.assert_allclose(learned[key], value, atol=1e-6, rtol=0)
    if name not in ("zero 1", "zero 2", "zero 3"):  # which measure in their step
        assert norms == pytest.approx(expected, rel=1e-4)


def big_batches(optimizer):
    """Plain torch: a batch is a step's."""
    model = network()
    made = getattr(torch.optim, optimizer)(model.parameters(), **OPTIMIZERS[optimizer])
    scheduler = torch.optim.lr_scheduler.LinearLR(made, 1.0, 0.1, total_iters=40)
    norms = []
    for _ in range(2):
        for x, y in DataLoader(rows(), 2 * 2 * ACCUMULATED):
            F.cross_entropy(model(x), y).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
            made.step()
            scheduler.step(), scheduler.step()  # one for each process, as Accelerate goes
            made.zero_grad()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}, None, norms, None


def unified(settings):
    """Method 3 of the demand's document, whose micro-batches change in number while it trains."""
    runtime = Runtime.of(backend="cpu", precision="fp32", **settings)
    model = network()
    model, optimizer = runtime.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    x, y = rows().tensors
    batches, norms = iter(range(0, 64, 4)), []
    for count in (3, 1, 4):
        for number, start in enumerate(itertools.islice(batches, count)):
            mine = slice(start + 2 * runtime.process_index, start + 2 * runtime.process_index + 2)
            mine = mine if runtime.num_processes > 1 else slice(start, start + 4)
            runtime.backward(F.cross_entropy(model(x[mine]), y[mine]), is_final_micro_batch=number == count - 1)
        norms.append(runtime.optimizer_step_and_zero_grad(optimizer=optimizer, model=model, max_grad_norm=0.3))
    learned = {name: tensor.numpy() for name, tensor in runtime.strategy.gather_trainable().items()}
    runtime.end_training()
    return learned, norms


def by_hand():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = rows().tensors
    start, norms = 0, []
    for count in (3, 1, 4):
        for _ in range(count):
            (F.cross_entropy(model(x[start : start + 4]), y[start : start + 4]) / count).backward()
            start += 4
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}, norms


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "zero 0", "zero 1", "zero 2", "zero 3"])
def test_a_mean_is_over_the_micro_batches_that_there_were(name):
    learned, norms = world(
        *((1, unified, {"strategy": "single"}) if name == "single" else (2, unified, STRATEGIES[name]))
    )[0]
    expected, their_norms = by_hand()
    for key, value in expected.items():
        np.testing.assert_allclose(learned[key], value, atol=1e-6, rtol=0)
    assert norms == pytest.approx(their_norms, rel=1e-4)


# ------------------------------------------------------------------------------------- boundaries that nobody steps at


def prepared(**settings):
    runtime = Runtime.of(backend="cpu", precision="fp32", strategy="single", **settings)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return (runtime, *runtime.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0)))


def loss_of(model):
    return model(torch.ones(1, 1)).mean()


def method_1(runtime, model):
    for _ in range(2):
        for number in range(3):
            runtime.backward(loss_of(model), is_final_micro_batch=number == 2)


def method_2(runtime, model):
    for _ in range(2):
        for number in range(3):
            runtime.set_deepspeed_gradient_accumulation_boundary(number == 2)
            runtime.backward(loss_of(model))


def before(runtime, model):
    for _ in range(2):
        for number in range(3):
            if number == 2:
                runtime.backward(loss_of(model))
            else:
                with runtime.no_sync(model):
                    runtime.backward(loss_of(model))


def automatic(runtime, model):
    for _ in range(2):
        with runtime.accumulate(model):
            runtime.backward(loss_of(model))


@pytest.mark.parametrize("loop", [method_1, method_2, before, automatic])
def test_a_boundary_that_no_step_follows_is_an_error(loop):
    runtime, model, _ = prepared()
    with pytest.raises(UsageError, match="no step was taken") as error:
        loop(runtime, model)
    assert "optimizer_step_and_zero_grad" in error.value.cure


def test_a_script_that_ends_so_is_told():
    code = (
        "import torch; from anyqlora import Runtime; runtime = Runtime.of(cpu=True, strategy='single'); "
        "model = runtime.prepare(torch.nn.Linear(1, 1)); "
        "runtime.backward(model(torch.ones(1, 1)).mean(), is_final_micro_batch=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "no step was taken" in done.stderr and "cure: runtime.optimizer_step_and_zero_grad" in done.stderr


@pytest.mark.parametrize("verb", ["end_training", "save_state", "get_state_dict", "free_memory"])
def test_so_is_the_last_one(verb, tmp_path):
    runtime, model, _ = prepared()
    runtime.backward(loss_of(model), is_final_micro_batch=True)
    with pytest.raises(UsageError, match="no step was taken"):
        getattr(runtime, verb)(*([tmp_path / "state"] if verb == "save_state" else []))
    assert not (tmp_path / "state").exists()


def test_a_backward_that_says_nothing_is_a_boundary_whatever_the_one_before_said():
    runtime, model, optimizer = prepared()
    runtime.backward(loss_of(model), is_final_micro_batch=False)
    optimizer.step()
    assert model.weight.item() == 0
    runtime.backward(loss_of(model))
    optimizer.step()
    assert model.weight.item() == -1  # the mean of both


def test_two_losses_of_one_micro_batch_are_added():
    runtime, model, optimizer = prepared(gradient_accumulation_steps=2)
    for _ in range(2):
        with runtime.accumulate(model):
            runtime.backward(loss_of(model))
            runtime.backward(2 * loss_of(model))
            optimizer.step()
            optimizer.zero_grad()
    assert model.weight.item() == -3
    runtime.set_gradient_accumulation_boundary(True)
    runtime.backward(loss_of(model))
    runtime.backward(loss_of(model))
    optimizer.step()
    assert model.weight.item() == -5


def test_gradients_of_a_step_that_is_not_taken_are_dropped_by_zero_grad():
    runtime, model, optimizer = prepared()
    runtime.backward(5 * loss_of(model))
    optimizer.zero_grad()
    runtime.backward(loss_of(model))
    optimizer.step()
    assert model.weight.item() == -1


def test_zero_grad_ahead_of_the_last_backward_of_a_step_leaves_the_step_whole():
    runtime, model, optimizer = prepared(gradient_accumulation_steps=2)
    for _ in range(2):
        with runtime.accumulate(model):
            optimizer.zero_grad()
            runtime.backward(loss_of(model))
            optimizer.step()
    assert model.weight.item() == -1


# ------------------------------------------------------------------------------------------------- several optimizers


def two(settings, order):
    """Two optimizers, each over one layer, in loops that step both, or one and then the other."""
    runtime = Runtime.of(backend="cpu", precision="fp32", **settings)
    model = network()
    x, y = rows().tensors
    mine = slice(runtime.process_index, None, runtime.num_processes)
    first = torch.optim.SGD(model[0].parameters(), lr=0.5)
    second = torch.optim.AdamW(model[2].parameters(), lr=0.02)
    model, first, second = runtime.prepare(model, first, second)
    for _ in range(4):
        if order == "both":
            runtime.backward(F.cross_entropy(model(x[mine]), y[mine]))
            first.step(), second.step()
            first.zero_grad(), second.zero_grad()
        else:
            for optimizer in (first, second):
                first.zero_grad(), second.zero_grad()
                runtime.backward(F.cross_entropy(model(x[mine]), y[mine]))
                optimizer.step()
    learned = {name: tensor.numpy().copy() for name, tensor in runtime.strategy.gather_trainable().items()}
    return learned, sorted(runtime.strategy.gather_moments())


def two_by_hand(order):
    model = network()
    x, y = rows().tensors
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.5), torch.optim.AdamW(model[2].parameters(), lr=0.02)
    for _ in range(4):
        for optimizers in [[first, second]] if order == "both" else [[first], [second]]:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            [optimizer.step() for optimizer in optimizers]
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("order", ["both", "in turn"])
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_optimizers_both_step(name, order):
    learned, moments = world(2, two, STRATEGIES[name], order)[0]
    for key, value in two_by_hand(order).items():
        np.testing.assert_allclose(learned[key], value, atol=1e-6, rtol=0)
    assert {key.partition("|")[0] for key in moments} == {"2.weight", "2.bias"}


def refused(settings):
    try:
        two(settings, "both")
    except NotSupported as error:
        return str(error)


def test_two_optimizers_are_refused_where_an_engine_has_one():
    assert all("2 optimizers under strategy deepspeed" in text for text in world(2, refused, STRATEGIES["zero 2"]))


def test_gradients_that_an_optimizer_left_are_named():
    runtime = Runtime.of(backend="cpu", precision="fp32", strategy="single")
    model = network()
    optimizers = [torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 2)]
    model, first, second = runtime.prepare(model, *optimizers)
    runtime.backward(model(torch.ones(1, 3)).mean())
    first.step()
    with pytest.raises(UsageError, match="1 of the optimizers did not step"):
        runtime.backward(model(torch.ones(1, 3)).mean())
    second.zero_grad()
    runtime.backward(model(torch.ones(1, 3)).mean())
    first.step(), second.step()


def conditional(settings):
    """The demand's "before" code, which asks for DeepSpeed and calls its engine."""
    runtime = Runtime.of(backend="cpu", precision="fp32", **settings)
    model = network()
    model, _ = runtime.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    x, y = rows().tensors
    assert runtime.distributed_type == "DEEPSPEED"
    errors = []
    for act in (
        lambda: model.set_gradient_accumulation_boundary(False),
        lambda: model.backward(F.cross_entropy(model(x), y)),
        model.step,
    ):
        try:
            act()
        except UsageError as error:
            errors.append(f"{error}, {error.cure}")
    return errors


@pytest.mark.parametrize("stage", [0, 2])
def test_the_engines_own_verbs_say_what_to_write_instead(stage):
    boundary, backward, step = world(2, conditional, STRATEGIES[f"zero {stage}"])[0]
    assert "runtime.set_gradient_accumulation_boundary(is_boundary)" in boundary
    assert "runtime.backward(loss, is_final_micro_batch=...)" in backward
    assert "runtime.optimizer_step_and_zero_grad(" in step
