"""Runs that stop and go on, evaluate, stop early, keep the best: real runs on the embedded base."""

import contextlib
import json
import os
import shutil
import signal
from datetime import datetime

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load, save
from safetensors.torch import load_file, save_file

from anyqlora.config.resolve import resolve
from anyqlora.core.errors import DiskFull, NoCheckpoint, NonFinite, RunError, Stopped, UsageError
from anyqlora.core.files import FileSystem, tensors_to_bytes
from anyqlora.models.architectures import DEMO_BASE
from anyqlora.recipes import sft
from anyqlora.runs import directory as run_directory
from anyqlora.runs.checkpoints import Checkpoints
from anyqlora.runs.directory import IDENTITY
from anyqlora.training.outputs import RunOutputs
from anyqlora.training.session import TrainingSession
from tests.support import runs

SMALL = {
    "model_name": "demo",
    "dataset": "demo",
    "context_length": 128,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "precision": "fp32",
    "max_steps": 8,
    "lr": 2e-3,
    "lora_rank": 4,
    "lora_dropout": 0.1,
    "save_steps": 3,
    "save_model": True,
}
HELD_OUT = {**SMALL, "eval_dataset": "demo", "eval_steps": 2, "exact_match": False, "eval_batch_size": 32}


def adapter_bytes(directory):
    return (directory / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that is never stopped."""
    return runs.run(tmp_path_factory.mktemp("whole"), **SMALL)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_tensors_are_written_as_the_library_writes_them(metadata):
    """The reference is safetensors' own writer; of mixed dtypes, its reader."""
    draw = np.random.default_rng(0)
    same = {
        "b.é": draw.normal(size=(3, 5)).astype(np.float32),
        "a": np.float32(2.0).reshape(()),
        "none": np.zeros((0, 4), np.float32),
        "turned": draw.normal(size=(4, 6)).astype(np.float32).T,
    }
    contiguous = {name: np.ascontiguousarray(value).reshape(value.shape) for name, value in same.items()}
    assert b"".join(tensors_to_bytes(same, metadata)) == save(contiguous, metadata)
    mixed = {
        **same,
        "codes": draw.integers(0, 255, (7,)).astype(np.uint8),
        "c": np.arange(3, dtype=np.int64),
        "h": np.ones((2, 2), np.float16),
    }
    back = load(b"".join(tensors_to_bytes(mixed, metadata)))
    assert back.keys() == mixed.keys()
    assert all(back[name].dtype == value.dtype and np.array_equal(back[name], value) for name, value in mixed.items())


def test_two_runs_write_the_same_bytes(whole, tmp_path):
    again = runs.run(tmp_path, **SMALL)
    assert adapter_bytes(again) == adapter_bytes(whole)
    assert (again / "adapter/adapter_config.json").read_bytes() == (whole / "adapter/adapter_config.json").read_bytes()


def test_another_seed_writes_other_bytes(whole, tmp_path):
    assert adapter_bytes(runs.run(tmp_path, **{**SMALL, "seed": 43})) != adapter_bytes(whole)


def test_a_run_stopped_by_a_signal_goes_on_to_the_same_bytes(whole, tmp_path):
    """SIGTERM in step 5 saves and stops; the same command, without a run name, finds the run and finishes it."""

    def stop(step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped) as stopped:
        runs.run(tmp_path, name="", during=stop, **SMALL)
    assert stopped.value.exit_code == 75
    (directory,) = tmp_path.iterdir()
    assert not (directory / "result.json").exists()
    assert Checkpoints(directory / "checkpoints").steps() == [3, 5]
    runs.run(tmp_path, name="", **SMALL)
    assert [p.name for p in tmp_path.iterdir()] == [directory.name]
    assert adapter_bytes(directory) == adapter_bytes(whole)
    steps = [m["step"] for m in runs.metrics(directory)]
    assert steps == list(range(1, 9))
    same = ("step", "loss", "grad_norm", "lr", "tokens", "trained_tokens", "epoch")
    assert [[m[k] for k in same] for m in runs.metrics(directory)] == [
        [m[k] for k in same] for m in runs.metrics(whole)
    ]


@pytest.mark.parametrize(("method", "left"), [("due", [3, 5]), ("save", [3])])
def test_a_stop_loses_no_step_whenever_it_comes(method, left, tmp_path, monkeypatch):
    """One that comes when it is decided not to save step 4 waits for step 5, one that comes while step 3 is saved for
    nothing.
    """
    original, at = getattr(TrainingSession, method), {"due": ("save", 3), "save": (3,)}[method]

    def signalled(self, *asked):
        found = original(self, *asked)
        if asked[: len(at)] == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(TrainingSession, method, signalled)
    with pytest.raises(Stopped, match=f"step {left[-1]} is saved\n"):
        runs.run(tmp_path, **SMALL)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == left
    assert len(runs.metrics(tmp_path / "run")) == left[-1]


@pytest.mark.parametrize("optimizer", ["fused_adamw", "adamw_8bit"])
def test_every_kind_of_moments_goes_on_to_the_same_bytes(optimizer, tmp_path):
    """bitsandbytes counts its steps in a number, and keeps tables and scales beside the moments."""
    settings = {**SMALL, "optimizer": optimizer, "max_steps": 4, "save_steps": 2, "lora_rank": 64}
    whole = runs.run(tmp_path, "whole", **settings)

    def stop(step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        runs.run(tmp_path, "cut", during=stop, **settings)
    kept = load_file(next((tmp_path / "cut" / "checkpoints").glob("*/optimizer.safetensors")))
    assert any(value.dtype == torch.uint8 for value in kept.values()) == (optimizer == "adamw_8bit")
    assert adapter_bytes(runs.run(tmp_path, "cut", **settings)) == adapter_bytes(whole)


def loop_of(monkeypatch, act):
    """A loop that does something before its first step."""
    monkeypatch.setattr(sft, "train_loop", lambda session, make_engine: act(session))


def fail(error):
    raise error


@pytest.mark.parametrize(
    "error",
    [RunError("on purpose"), UsageError("on purpose"), DiskFull("on purpose"), ZeroDivisionError("on purpose")],
    ids=lambda e: type(e).__name__,
)
def test_what_fails_before_its_first_step_leaves_no_directory(error, tmp_path, monkeypatch):
    loop_of(monkeypatch, lambda run: fail(error))
    with pytest.raises(type(error), match="on purpose"):
        sft.train(resolve({**SMALL, "output_dir": str(tmp_path), "log_to": "none"}, environ={}))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_described_is_not_left_half_written(tmp_path, monkeypatch):
    write = FileSystem.write
    monkeypatch.setattr(
        FileSystem,
        "write",
        lambda self, path, content: (
            fail(OSError(28, "No space left")) if IDENTITY in path.name else write(self, path, content)
        ),
    )
    with pytest.raises(DiskFull):
        runs.run(tmp_path, **SMALL)
    assert list(tmp_path.iterdir()) == []


class Now(datetime):
    """A clock that stands."""

    @classmethod
    def now(cls):
        return cls(2026, 1, 2, 3, 4, 5)


def test_runs_that_start_in_the_same_second_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "datetime", Now)
    configs = [resolve({**SMALL, "output_dir": str(tmp_path), "lr": rate}, environ={}) for rate in (1e-3, 2e-3, 3e-3)]
    with contextlib.ExitStack() as opened:
        directories = [opened.enter_context(run_directory.locate_run(config)).directory for config in configs]
        assert [directory.name for directory in directories] == [
            f"20260102-030405-demo{end}" for end in ("", "-1", "-2")
        ]
        assert all(directory.is_dir() for directory in directories)  # each is taken
    for directory in directories:
        directory.rmdir()
    with pytest.raises(ZeroDivisionError), run_directory.locate_run(configs[0]):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_an_output_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFull, match="cannot be written"):
        runs.run(tmp_path / "file", name="", **SMALL)


def test_a_directory_that_was_there_stays(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    loop_of(monkeypatch, lambda run: fail(RunError("on purpose")))
    with pytest.raises(RunError):
        sft.train(resolve({**SMALL, "output_dir": str(tmp_path), "run_name": "run", "log_to": "none"}, environ={}))
    assert (tmp_path / "run" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_stopped_before_its_first_step_is_found_again(number, whole, tmp_path, monkeypatch):
    loop_of(monkeypatch, lambda run: os.kill(os.getpid(), number))
    with pytest.raises(Stopped, match="nothing is saved yet"):
        sft.train(resolve({**SMALL, "output_dir": str(tmp_path), "log_to": "none"}, environ={}))
    monkeypatch.undo()
    (directory,) = tmp_path.iterdir()
    runs.run(tmp_path, name="", **SMALL)
    assert list(tmp_path.iterdir()) == [directory] and adapter_bytes(directory) == adapter_bytes(whole)


def test_a_failure_after_steps_leaves_what_was_trained(tmp_path):
    with pytest.raises(ZeroDivisionError):
        runs.run(tmp_path, during=lambda step: step == 4 and fail(ZeroDivisionError()), **SMALL)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [3] and len(runs.metrics(tmp_path / "run")) == 4
    with pytest.raises(ZeroDivisionError):
        runs.run(tmp_path, during=lambda step: fail(ZeroDivisionError()), **SMALL)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [3]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(whole, tmp_path, capfd):
    with pytest.raises(Stopped):
        runs.run(tmp_path, during=lambda step: step == 6 and os.kill(os.getpid(), signal.SIGTERM), **SMALL)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.steps() == [6, 7]
    target = checkpoints.path(7) / "optimizer.safetensors"
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 1
    target.write_bytes(content)
    runs.run(tmp_path, **SMALL)
    assert "step-000007 is not used: optimizer.safetensors: its sha256" in capfd.readouterr().err
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(whole)


def test_no_good_checkpoint_is_exit_code_3(tmp_path):
    with pytest.raises(Stopped):
        runs.run(tmp_path, during=lambda step: step == 3 and os.kill(os.getpid(), signal.SIGTERM), **SMALL)
    for path in (tmp_path / "run" / "checkpoints").glob("*/manifest.json"):
        path.write_text("{")
    with pytest.raises(NoCheckpoint, match="step-000004.*\n.*step-000003") as refused:
        runs.run(tmp_path, **SMALL)
    assert refused.value.exit_code == 3


def test_another_run_in_the_same_directory_is_refused_naming_what_differs(whole):
    with pytest.raises(UsageError, match=r"lr: 0.002 there, 0.001 now"):
        runs.run(whole.parent, **{**SMALL, "lr": 1e-3})


def test_a_finished_run_is_left_as_it_is(whole):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*")}
    runs.run(whole.parent, **SMALL)
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*")} == before


def test_evaluating_and_sampling_at_any_step_changes_no_byte(whole, tmp_path):
    every = runs.run(
        tmp_path, "every", **{**HELD_OUT, "eval_steps": 1, "num_samples": 2, "exact_match": True, "max_new_tokens": 4}
    )
    assert adapter_bytes(every) == adapter_bytes(whole)
    assert [e["step"] for e in runs.evaluations(every)] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert len((every / "samples.jsonl").read_text().splitlines()) == 18


def test_evaluation_equals_a_plain_forward_over_each_row(tmp_path):
    """The reference: transformers on the dequantized base, one row at a time."""
    from anyqlora.config.resolve import resolve
    from anyqlora.data import dataset, tokenizer
    from anyqlora.models.architectures import DEMO_BASE
    from tests.support import reference_loop

    directory = runs.run(tmp_path, **{**HELD_OUT, "train_type": "lora", "eval_steps": 8})
    config = resolve(HELD_OUT, environ={}, origin="test")
    rows = [(e.ids, e.trained) for e in dataset.load_data(config, tokenizer.load_tokenizer("demo")).held_out]
    model = reference_loop.peft_model(DEMO_BASE, rank=4, alpha=32, seed=42).eval()
    losses, _ = reference_loop.train(model, [rows], lr=0.0, total_steps=1, warmup=0, clip=1.0, weight_decay=0.0)
    assert runs.evaluations(directory)[0]["loss"] == pytest.approx(losses[0], rel=1e-6)


NOTHING_GAINED = "the model is no better than it was"


def misled(tmp_path, **settings) -> dict:
    """Settings of a run whose evaluation loss rises: each of its rows is answered by one word."""
    prompts = [
        json.loads(line)["prompt"]
        for line in (DEMO_BASE.parent / "task" / "train.jsonl").read_text().splitlines()[:200]
    ]
    (rows := tmp_path / "misleading.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt, "completion": "no"}) + "\n" for prompt in prompts)
    )
    return {
        **HELD_OUT,
        "dataset": str(rows),
        "lr": 1e-2,
        "lr_scheduler": "constant",
        "warmup_steps": 0,
        "max_steps": 40,
        "save_steps": 0,
        **settings,
    }


def test_early_stopping(tmp_path, capfd):
    directory = runs.run(tmp_path, **misled(tmp_path, early_stopping_patience=2))
    losses = [e["loss"] for e in runs.evaluations(directory)[1:]]
    stopped_at = runs.result(directory)["steps"]
    assert stopped_at < 40
    assert stopped_at == 2 * (losses.index(min(losses)) + 1 + 2)
    assert [e["step"] for e in runs.evaluations(directory)] == list(range(0, stopped_at + 1, 2)), (
        "each step once, the last one too"
    )
    before, after = (runs.evaluations(directory)[at] for at in (0, -1))
    assert after["loss"] > before[
        "loss"
    ] and f"{before['loss']:.4f} before step 1 and is {after['loss']:.4f} after step {stopped_at}" in (
        said := capfd.readouterr().err
    )
    assert said.count(NOTHING_GAINED) == 1


def test_a_run_that_stopped_early_and_died_before_it_was_written_ends_as_one_that_did_not(tmp_path, monkeypatch):
    settings = misled(tmp_path, early_stopping_patience=1)
    whole = runs.run(tmp_path, "whole", **settings)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(RunOutputs, "write_final", lambda *_: 1 / 0)
        runs.run(tmp_path, **settings)
    directory = runs.run(tmp_path, **settings)
    assert runs.result(whole)["steps"] < 40 and runs.result(directory)["eval"] == runs.result(whole)["eval"]
    ours, theirs = ([(e["step"], e["loss"]) for e in runs.evaluations(one)] for one in (directory, whole))
    assert ours == theirs


def test_a_run_that_helps_is_not_warned_of(tmp_path, capfd):
    directory = runs.run(tmp_path, **{**HELD_OUT, "lr": 1e-3})
    assert runs.result(directory)["eval"]["after"]["loss"] < runs.result(directory)["eval"]["before"]["loss"]
    assert NOTHING_GAINED not in capfd.readouterr().err


def test_a_step_that_is_not_finite_is_skipped_and_three_end_the_run(tmp_path):
    """The loss is made not finite for real: the base's final norm overflows float32 on the way to the logits."""
    base = tmp_path / "base"
    shutil.copytree(DEMO_BASE, base)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][:] = float("inf")
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFinite) as ended:
        runs.run(tmp_path, **{**SMALL, "model_name": str(base)})
    assert ended.value.exit_code == 4
    lines = runs.metrics(tmp_path / "run")
    assert [m["skipped"] for m in lines] == [True] * 3
    assert lines[-1]["loss"] == "nan" and "train.jsonl:" in lines[-1]["rows"]
    assert not (tmp_path / "run" / "adapter").exists()


def test_the_run_directory_describes_the_run(whole):
    names = {p.name for p in whole.iterdir()}
    assert {
        "adapter",
        "checkpoints",
        "metrics.jsonl",
        "config.resolved.yaml",
        "plan.json",
        "env.json",
        "data_report.json",
        "result.json",
    } <= names
    resolved = yaml.safe_load((whole / "config.resolved.yaml").read_text())
    assert resolved["lr"] == 2e-3 and resolved["gradient_accumulation_steps"] == 2
    found = runs.result(whole)
    assert found["status"] == "finished" and found["steps"] == 8 and found["tokens_seen"] > found["tokens_trained"] > 0
    import hashlib

    assert found["adapter_sha256"] == hashlib.sha256(adapter_bytes(whole)).hexdigest()
    assert json.loads((whole / "env.json").read_text())["version of torch"]


def test_a_run_that_goes_on_keeps_what_its_plan_chose(tmp_path):
    """What was stated when it began and is left to the plan now is as in the checkpoint, so that the bytes are those of
    the whole run.
    """
    chosen = {
        "fused_lora": False,
        "padding_free": False,
        "logits_chunk_tokens": 16,
        "dequantized_layers": 0,
        "use_gradient_checkpointing": True,
        "checkpointed_layers": 1,
    }
    whole = runs.run(tmp_path, "whole", **SMALL, **chosen)

    class Cut(Exception):
        pass

    def cut(step):
        if step == 5:
            raise Cut

    with pytest.raises(Cut):
        runs.run(tmp_path, "cut", during=cut, **SMALL, **chosen)
    going_on = runs.run(tmp_path, "cut", **SMALL)
    assert adapter_bytes(going_on) == adapter_bytes(whole)
    said = yaml.safe_load((going_on / "config.resolved.yaml").read_text())
    assert {name: said[name] for name in chosen} == chosen
    assert adapter_bytes(runs.run(tmp_path, "other", **SMALL)) != adapter_bytes(
        whole
    )  # or nothing would have been shown


@pytest.mark.parametrize(
    ("stated", "layers"), [({"use_gradient_checkpointing": True}, 3), ({"checkpointed_layers": 1}, 1), ({}, 0)]
)
def test_what_is_stated_of_recomputation_now_is_not_held_against_what_was_chosen(stated, layers, tmp_path):
    """Its two settings go together: who runs out of memory is told to go on with one of them."""

    class Cut(Exception):
        pass

    def cut(step):
        if step == 5:
            raise Cut

    with pytest.raises(Cut):
        runs.run(tmp_path, "cut", during=cut, **SMALL)
    said = yaml.safe_load((runs.run(tmp_path, "cut", **SMALL, **stated) / "config.resolved.yaml").read_text())
    assert (said["use_gradient_checkpointing"], said["checkpointed_layers"]) == (layers > 0, layers)


def test_rows_of_two_tokens_show_no_gradient_of_queries(tmp_path):
    """A token that sees one key has nothing to choose from: only a step with longer rows shows whether all of the model
    learns.
    """
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "{word}"}}\n' for word in ("a", "b", "c", "a longer row than these")))
    found = runs.run(
        tmp_path,
        **{
            **SMALL,
            "dataset": str(rows),
            "batch_size": 1,
            "gradient_accumulation_steps": 1,
            "max_steps": 8,
            "save_steps": 0,
        },
    )
    assert [m["tokens"] for m in runs.metrics(found)][0] == 2 < max(m["tokens"] for m in runs.metrics(found))
    assert all(value.any() for name, value in runs.adapter(found).items() if "q_proj.lora_B" in name)
