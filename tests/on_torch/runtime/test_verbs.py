"""The rest of Accelerate's verbs: each does on two processes what Accelerate's does."""

import copy
import logging
import random
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from anyqlora.core.errors import UsageError
from anyqlora.on_torch.runtime import Runtime, get_logger
from anyqlora.reporting.trackers import installed_trackers
from anyqlora.testing import world


def maker(kind):
    if kind == "accelerate":
        from accelerate import Accelerator

        return Accelerator(cpu=True)
    return Runtime.of(backend="cpu", precision="fp32", **kind)


def verbs(kind, directory):
    """What each verb gives: lines that both take, but for the name of what makes them."""
    accelerator = maker(kind)
    rank = accelerator.process_index
    found = {
        "who": [
            (accelerator.num_processes, rank, accelerator.local_process_index),
            (accelerator.is_main_process, accelerator.is_local_main_process, accelerator.is_last_process),
            (str(accelerator.mixed_precision), accelerator.use_distributed),
            (accelerator.state.num_processes, accelerator.distributed_type == "MULTI_CPU"),
        ]
    }
    for name, inputs in {
        "list": list("abcde"),
        "tuple": (1, 2, 3),
        "short": ["x"],
        "dict": {"a": [1, 2, 3], "b": [4, 5, 6]},
        "tensor": torch.arange(5),
    }.items():
        for padded in (False, True)[: 1 + (name != "tuple")]:  # Accelerate 1.15 cannot pad a tuple
            with accelerator.split_between_processes(copy.deepcopy(inputs), apply_padding=padded) as part:
                found[f"split {name} {padded}"] = part.tolist() if torch.is_tensor(part) else part
    uneven = torch.arange(2 + rank) + 10 * rank
    found["padded"] = accelerator.pad_across_processes(uneven, pad_index=-1).tolist()
    found["padded first"] = accelerator.pad_across_processes({"a": uneven}, pad_first=True)["a"].tolist()
    wide = torch.ones(2, 1 + rank)
    found["padded along 1"] = accelerator.pad_across_processes(wide, dim=1).tolist()
    found["gathered"] = accelerator.gather({"a": torch.tensor([rank]), "b": [torch.tensor(rank + 5)]})["a"].tolist()
    found["objects"] = accelerator.gather_for_metrics([f"rank {rank}"])
    found["reduced"] = [accelerator.reduce(torch.tensor([1.0 + rank]), how).tolist() for how in ("sum", "mean")]
    found["triggers"] = [
        accelerator.check_trigger(),
        (rank == 1 and accelerator.set_trigger(), accelerator.check_trigger())[1],
    ]
    found["triggers"].append(accelerator.check_trigger())
    path = directory / f"first-{type(accelerator).__name__}"
    with accelerator.main_process_first():
        found["first"] = path.exists()
        if rank == 0:
            time.sleep(0.3)
            path.write_text("done")

    @accelerator.on_main_process
    def here():
        return rank

    @accelerator.on_process(process_index=1)
    def there():
        return rank

    found["on"] = [
        here(),
        there(),
        accelerator.on_last_process(lambda: rank)(),
        accelerator.on_local_main_process(here)(),
    ]
    accelerator.wait_for_everyone()
    found["cleared"] = accelerator.free_memory("model", "optimizer")
    return found


def test_verbs_of_no_model_are_accelerates(tmp_path):
    theirs = world(2, verbs, "accelerate", tmp_path)
    for ours, expected in zip(world(2, verbs, {"strategy": "ddp"}, tmp_path), theirs, strict=True):
        expected["cleared"] = [None, None]
        assert ours == expected


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def saved(settings, directory):
    runtime = Runtime.of(backend="cpu", precision="fp32", **settings)
    model = network()
    model = runtime.prepare(model)
    state = runtime.get_state_dict(model)
    runtime.save_model(model, directory, max_shard_size=200)
    return {name: tensor.numpy().copy() for name, tensor in state.items()}


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero 3"])
def test_the_whole_model_is_saved(name, tmp_path):
    settings = {"strategy": "deepspeed", "deepspeed_zero_stage": 3} if name == "zero 3" else {"strategy": name}
    state = world(2, saved, settings, tmp_path)[0]
    expected = network().state_dict()
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(state[key], value.numpy())
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    read = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    assert len(shards) > 1 and (tmp_path / "model.safetensors.index.json").exists() and read.keys() == expected.keys()
    assert all(torch.equal(read[key], value) for key, value in expected.items())


class Counter:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def broken_off(settings, directory, stop):
    """Weights after two epochs; `stop`: broken off after so many batches of the second and gone on with; None: not."""
    runtime = Runtime.of(backend="cpu", precision="fp32", **settings)
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    rows = TensorDataset(torch.randn(22, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    counter = Counter({"steps": 0, "tensor": torch.ones(2)})
    model, optimizer, loader = runtime.prepare(model, optimizer, DataLoader(rows, 2, shuffle=True))
    runtime.register_for_checkpointing(counter)
    drawn = []

    def train(batches, until=None):
        for number, (x,) in enumerate(batches, 1):
            runtime.backward(model(x).square().mean() * (1 + np.random.rand() + random.random()))
            optimizer.step()
            counter.state["steps"] += 1
            drawn.append(sorted(x[:, 0].tolist()))
            if number == until:
                return

    first = directory / "state"
    if stop == "again":
        torch.manual_seed(99 + runtime.process_index)
        runtime.load_state(first)
        train(runtime.skip_first_batches(loader, 3))
    else:
        train(loader)
        train(loader, stop)
        if stop:
            runtime.save_state(first)
    learned = {name: tensor.numpy().copy() for name, tensor in runtime.strategy.gather_trainable().items()}
    return learned, counter.state["steps"], drawn


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_loop_that_was_broken_off_goes_on_to_the_same_bits(strategy, tmp_path):
    """In the middle of a shuffled epoch, with dropout, numpy's and Python's numbers and a registered object."""
    size = 1 if strategy == "single" else 2
    whole = world(size, broken_off, {"strategy": strategy}, tmp_path, None)[0]
    world(size, broken_off, {"strategy": strategy}, tmp_path, 3)
    again = world(size, broken_off, {"strategy": strategy}, tmp_path, "again")[0]
    assert again[1] == whole[1] and again[2] == whole[2][-len(again[2]) :]
    for key, value in whole[0].items():
        np.testing.assert_array_equal(again[0][key], value)


def uneven(settings):
    """Accelerate's by_feature/multi_process_metrics.py counts rows by itself, after `gather`."""
    runtime = Runtime.of(backend="cpu", precision="fp32", **settings)
    _, loader = runtime.prepare(torch.nn.Linear(1, 1), DataLoader(TensorDataset(torch.arange(13.0)), 4))
    seen, every = 0, []
    for step, (x,) in enumerate(loader):
        rows = runtime.gather(x)
        if runtime.use_distributed:
            if step == len(loader) - 1:
                rows = rows[: len(loader.dataset) - seen]
            else:
                seen += len(rows)
        every += rows.tolist()
    lengths = runtime.gather([torch.ones(1 + 2 * runtime.process_index, 2), torch.tensor(runtime.process_index)])
    try:
        runtime.gather(torch.ones(2, 1 + runtime.process_index))
    except UsageError as error:
        return every, [one.tolist() for one in lengths], str(error.cure)


def test_processes_may_gather_different_numbers_of_rows():
    for every, (ones, ranks), cure in world(2, uneven, {"strategy": "ddp"}):
        assert sorted(every) == [*range(13)] and ones == [[1, 1]] * 4 and ranks == [0, 1]
        assert "pad_across_processes" in cure


def empty_group(settings):
    """The optimizer of Accelerate's by_feature/deepspeed_with_config_support.py: nothing of a Llama is not decayed."""
    runtime = Runtime.of(backend="cpu", precision="fp32", **settings)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW([{"params": [*model.parameters()]}, {"params": [], "weight_decay": 0.0}], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=8)
    model, optimizer, scheduler = runtime.prepare(model, optimizer, scheduler)
    for _ in range(2):
        runtime.backward(model(torch.ones(1, 2)).mean())
        optimizer.step(), scheduler.step(), optimizer.zero_grad()
    return scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("settings", [{"strategy": "ddp"}, {"strategy": "deepspeed", "deepspeed_zero_stage": 2}])
def test_a_scheduler_may_have_a_group_without_parameters(settings):
    """Two steps on two processes are four of eight, as Accelerate counts them."""
    assert world(2, empty_group, settings) == [([0.5, 0.5], 0.5)] * 2


def logged(directory):
    runtime = Runtime.of(cpu=True, precision="fp32", strategy="ddp")
    logging.basicConfig(filename=f"{directory}/{runtime.process_index}", format="%(message)s", force=True)
    logger = get_logger("loop", log_level="info")
    logger.info("first's")
    logger.info("everybody's", main_process_only=False)
    logger.info("in order %d", runtime.process_index, main_process_only=False, in_order=True)
    logger.debug("not at this level", main_process_only=False)
    logger.info(runtime.state)
    return runtime.state.deepspeed_plugin


def test_a_logger_speaks_for_all_processes(tmp_path):
    assert world(2, logged, str(tmp_path)) == [None, None]
    first, second = (tmp_path / str(rank) for rank in range(2))
    state = "MULTI_CPU, process 0 of 2 on cpu, precision no"
    assert first.read_text().splitlines() == ["first's", "everybody's", "in order 0", state]
    assert second.read_text().splitlines() == ["everybody's", "in order 1"]


def test_a_registered_state_comes_back_as_it_was(tmp_path):
    state = {
        1: [1.5, float("inf"), -float("inf"), None, True, "text"],
        "pair": (torch.tensor(3, dtype=torch.int64), {"narrow": torch.tensor([0.1, -2.0]).bfloat16()}),
        "none": {},
    }
    runtime = Runtime.of(backend="cpu", precision="fp32", strategy="single")
    runtime.prepare(torch.nn.Linear(2, 1).bfloat16())
    written, read = Counter(state), Counter({})
    runtime.register_for_checkpointing(written)
    runtime.save_state(tmp_path / "state")
    runtime._checkpointed = [read]
    runtime.load_state(tmp_path / "state")
    assert repr(read.state) == repr(state)


def test_all_trackers_are_those_that_are_installed():
    runtime = Runtime.of(cpu=True, precision="fp32", strategy="single", log_with="all")
    assert runtime.plan.config.log_to == ",".join(installed_trackers()) and "tensorboard" in installed_trackers()


def test_save_is_torch_save_or_safetensors(tmp_path):
    runtime = Runtime.of(backend="cpu", precision="fp32", strategy="single")
    runtime.save({"rate": 0.5}, tmp_path / "any.pt")
    runtime.save({"a": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)
    assert torch.load(tmp_path / "any.pt") == {"rate": 0.5}
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], torch.ones(2))


def test_what_could_run_code_is_not_registered(tmp_path):
    runtime = Runtime.of(backend="cpu", precision="fp32", strategy="single")
    runtime.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(UsageError, match="int has no state_dict"):
        runtime.register_for_checkpointing(3)
    runtime.register_for_checkpointing(Counter({"a": Counter({})}))
    with pytest.raises(UsageError, match="more than tensors, numbers, text"):
        runtime.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_numbers_go_to_the_tracker_that_was_asked_for(tmp_path):
    runtime = Runtime.of(
        backend="cpu", precision="fp32", strategy="single", log_with="tensorboard", project_dir=tmp_path
    )
    runtime.init_trackers("mine", config={"lr": 0.5})
    runtime.log({"loss": 1.5}, step=7)
    runtime.log({"loss": 1.25})
    assert runtime.get_tracker("tensorboard").name == "tensorboard"
    with pytest.raises(UsageError, match="no tracker 'wandb'"):
        runtime.get_tracker("wandb")
    runtime.end_training()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "mine" / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(7, 1.5), (8, 1.25)]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"fsdp_plugin": object()}, "fsdp_plugin: object of Accelerate's is not offered"),
        ({"kwargs_handlers": [1]}, "kwargs_handlers: int of Accelerate's is not offered"),
        ({"split_batches": True}, "split_batches"),
        ({"dispatch_batches": True}, "dispatch_batches"),
        ({"loss": "median"}, "neither mean nor sum"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_do_nothing_here_are_named(settings, why):
    with pytest.raises(UsageError, match=why):
        Runtime.of(backend="cpu", precision="fp32", strategy="single", **settings)


def test_accelerators_arguments_are_taken():
    runtime = Runtime.of(
        cpu=True, mixed_precision="no", gradient_accumulation_steps=3, even_batches=True, strategy="single"
    )
    assert (str(runtime.device), runtime.mixed_precision, runtime.gradient_accumulation_steps) == ("cpu", "no", 3)
