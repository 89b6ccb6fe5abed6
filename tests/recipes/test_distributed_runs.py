"""train.py itself in worlds that are set up as torchrun does it: the loop, evaluation, checkpoints and the finished
adapter.
"""

import os
import signal

import numpy as np
import pytest
from safetensors.torch import load_file

from anyqlora.planning import cells
from anyqlora.planning.capabilities import CAPABILITIES
from anyqlora.testing import WorldFailed, world
from tests.support import runs, trials
from tests.support.equality import some

SETTINGS = {
    "model_name": "demo",
    "dataset": "demo",
    "context_length": 96,
    "max_steps": 4,
    "lr": 2e-3,
    "lora_dropout": 0.1,
    "precision": "fp32",
    "warmup_steps": 0,
    "save_steps": 2,
    "lora_rank": 4,
    "log_to": "none",
    "eval_fraction": 0.02,
    "exact_match": True,
    "max_new_tokens": 4,
    "use_gradient_checkpointing": False,
}
STRATEGIES = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "zero 1": {"strategy": "deepspeed", "deepspeed_zero_stage": 1},
    "zero 3": {"strategy": "deepspeed", "deepspeed_zero_stage": 3},
}


class Cut(Exception):
    """The run ends here, as by a crash."""


def trained(output, settings, until=None):
    def during(step):
        if step == until:
            raise Cut

    try:
        runs.run(output, during=during, **{**SETTINGS, **settings})
    except Cut:
        return "cut"
    return "finished"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    output = tmp_path_factory.mktemp("alone")
    world(1, trained, output, {"strategy": "single", "batch_size": 8})
    return output / "run"


def same(directory, alone):
    np.testing.assert_allclose(
        [m["loss"] for m in runs.metrics(directory)], [m["loss"] for m in runs.metrics(alone)], rtol=1e-5
    )
    np.testing.assert_allclose(
        [m["grad_norm"] for m in runs.metrics(directory)], [m["grad_norm"] for m in runs.metrics(alone)], rtol=1e-5
    )
    ours, theirs = runs.adapter(directory), runs.adapter(alone)
    assert runs.distance(theirs, ours, {name: value * 0 for name, value in theirs.items()}) < 1e-5
    np.testing.assert_allclose(
        [e["loss"] for e in runs.evaluations(directory)], [e["loss"] for e in runs.evaluations(alone)], rtol=1e-5
    )
    assert [e["exact_match"] for e in runs.evaluations(directory)] == [
        e["exact_match"] for e in runs.evaluations(alone)
    ]


@pytest.mark.parametrize("name", some(STRATEGIES, ("ddp", "fsdp", "zero 3")))
def test_a_run_equals_one_process(name, alone, tmp_path):
    assert world(2, trained, tmp_path, {**STRATEGIES[name], "batch_size": 4}) == ["finished"] * 2
    same(tmp_path / "run", alone)
    result = runs.result(tmp_path / "run")
    assert (result["strategy"], result["world_size"]) == (STRATEGIES[name]["strategy"], 2)
    moments = [
        load_file(d / "run" / "checkpoints" / "step-000004" / "optimizer.safetensors") for d in (tmp_path, alone.parent)
    ]
    assert {k: v.shape for k, v in moments[0].items()} == {k: v.shape for k, v in moments[1].items()}


@pytest.mark.parametrize(
    "first, then", some([("ddp", "fsdp"), ("fsdp", "zero 3"), ("zero 1", "ddp")], [("ddp", "fsdp")])
)  # from fused layers to plain ones
def test_a_run_that_was_cut_goes_on_under_another_strategy(first, then, alone, tmp_path):
    assert world(2, trained, tmp_path, {**STRATEGIES[first], "batch_size": 4}, 3) == ["cut"] * 2
    assert len(runs.metrics(tmp_path / "run")) == 3  # the checkpoint is of step 2
    assert world(2, trained, tmp_path, {**STRATEGIES[then], "batch_size": 4}) == ["finished"] * 2
    same(tmp_path / "run", alone)


def killed(output, settings, step, by):
    """The ranks `by` (one of them, or all) die of SIGKILL before this step."""

    def during(now):
        if now == step and by in ("all", os.environ["RANK"]):
            os.kill(os.getpid(), signal.SIGKILL)

    runs.run(output, during=during, **settings)


KINDS = {cells.label(kind): dict(kind) for kind in cells.strategies(CAPABILITIES["cpu"])}
KILLED = {
    **{f"{name}, nf4": {**kind, "train_type": "qlora"} for name, kind in KINDS.items()},
    **{f"ddp, {name}": {"strategy": "ddp", "quantizer": name} for name in CAPABILITIES["cpu"].quantizers},
    "ddp, bnb_dora": {"strategy": "ddp", "train_type": "bnb_dora"},
    "deepspeed 2, int8 + dora": {**KINDS["deepspeed 2"], "quantizer": "int8", "adapter": "dora"},
    "deepspeed 3, bnb_dora": {**KINDS["deepspeed 3"], "train_type": "bnb_dora"},
    "fsdp full_shard, full": {**KINDS["fsdp full_shard"], "train_type": "full"},
    "fsdp full_shard, bf16 and packing": {**KINDS["fsdp full_shard"], "precision": "bf16", "packing": True},
    "deepspeed 1, fp16": {**KINDS["deepspeed 1"], "precision": "fp16_autocast"},
}


@pytest.mark.parametrize("by", some(["all", "1"], ["all"]))
@pytest.mark.parametrize("name", some(KILLED, ("fsdp full_shard, nf4",)))
def test_a_killed_run_writes_the_same_bytes_once_it_has_gone_on(name, by, tmp_path):
    """The reference is the run that nobody stopped. With dropout, and killed one step after a checkpoint: all processes
    at once, or one, whose loss ends the other.
    """
    settings = {**SETTINGS, "max_steps": 5, "lora_dropout": 0.1, "batch_size": 4, "exact_match": False, **KILLED[name]}
    if settings["strategy"] == "tp":
        settings["batch_size"] = 8  # of both, which see the same rows
    if settings.get("train_type") == "full":
        settings = {key: value for key, value in settings.items() if not key.startswith("lora_")}
    world(2, whole, tmp_path / "whole", settings)
    with pytest.raises(WorldFailed, match="ended without a word|Connection closed by peer|PeerLost"):
        world(2, killed, tmp_path / "killed", settings, 3, by)
    assert len(runs.metrics(tmp_path / "killed" / "run")) == 3 and not (tmp_path / "killed/run/result.json").exists()
    world(2, whole, tmp_path / "killed", settings)
    assert trials.differences(tmp_path / "killed" / "run", tmp_path / "whole" / "run") == []


@pytest.mark.parametrize("name", some(STRATEGIES, ("fsdp",)))
def test_two_processes_start_from_an_adapter(name, alone, tmp_path):
    """At a rate of nothing it stays what it was."""
    world(
        2, trained, tmp_path, {**STRATEGIES[name], "batch_size": 4, "lr": 0, "max_steps": 1, "init_adapter": str(alone)}
    )
    ours, theirs = runs.adapter(tmp_path / "run"), runs.adapter(alone)
    assert ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in ours)
    first, last = runs.evaluations(tmp_path / "run")[0], runs.evaluations(alone)[-1]
    assert first["loss"] == pytest.approx(last["loss"], rel=1e-5) and first["exact_match"] == last["exact_match"]


def test_a_run_of_two_goes_on_in_one(alone, tmp_path):
    world(2, trained, tmp_path, {"strategy": "fsdp", "batch_size": 4}, 2)
    world(1, trained, tmp_path, {"strategy": "single", "batch_size": 8})
    same(tmp_path / "run", alone)


def test_a_model_that_was_trained_whole_under_fsdp(tmp_path):
    full = {
        **{name: value for name, value in SETTINGS.items() if not name.startswith("lora_")},
        "train_type": "full",
        "max_steps": 2,
        "optimizer": "sgd",
        "eval_fraction": 0.0,
        "exact_match": "auto",
    }
    world(1, whole, tmp_path / "alone", {**full, "strategy": "single", "batch_size": 8})
    world(2, whole, tmp_path / "fsdp", {**full, "strategy": "fsdp", "batch_size": 4})
    ours, theirs = (load_file(tmp_path / name / "run" / "model" / "model.safetensors") for name in ("fsdp", "alone"))
    assert ours.keys() == theirs.keys() and all(ours[name].dtype == value.dtype for name, value in theirs.items())
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name].float().numpy(), value.float().numpy(), rtol=1e-2, atol=1e-3)


def test_an_output_directory_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorldFailed, match="DiskFull: .* cannot be written"):
        world(2, trained, tmp_path / "file", {**STRATEGIES["ddp"], "batch_size": 4})


def test_what_fails_before_its_first_step_leaves_no_directory(tmp_path):
    with pytest.raises(WorldFailed, match="UsageError"):
        world(2, trained, tmp_path, {**STRATEGIES["ddp"], "batch_size": 4, "lora_target_modules": "nosuch"})
    assert list(tmp_path.iterdir()) == []


def whole(output, settings):
    runs.run(output, **settings)


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"strategy": "single"}, "strategy single is one process, and world_size is 2"),
        ({"strategy": "fsdp", "quantizer": "int8"}, "int8 weights cannot be sharded"),
        ({"strategy": "deepspeed", "optimizer": "adamw_8bit"}, "does not know a sharded optimizer state"),
    ],
)
def test_what_cannot_be_is_said(settings, why, tmp_path):
    with pytest.raises(WorldFailed, match=why):
        world(2, trained, tmp_path, {**settings, "batch_size": 4})
