"""--resume force: a finished run goes on with other settings, and nothing is lost on the way."""

import json
import shutil

import pytest

from anyqlora.core.errors import DiskFull, NoCheckpoint, UsageError
from anyqlora.core.files import FileSystem
from anyqlora.data.readers.sources import DEMO
from anyqlora.runs.checkpoints import Checkpoints
from anyqlora.runs.directory import IDENTITY
from anyqlora.runs.finished import read_run
from anyqlora.training.outputs import RunOutputs
from tests.support import runs
from tests.training.test_session import SMALL, adapter_bytes, fail

CONSTANT = {
    **SMALL,
    "lr_scheduler": "constant",
    "warmup_steps": 0,
    "max_steps": 3,
}  # a rate that does not ask how many steps there will be


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A run that finished after 3 steps."""
    return runs.run(tmp_path_factory.mktemp("short"), **CONSTANT)


@pytest.fixture
def finished(short, tmp_path):
    return shutil.copytree(short, tmp_path / "run")


def longer(finished, **settings):
    return runs.run(finished.parent, **{**CONSTANT, "max_steps": 6, **settings})


def test_a_finished_run_is_trained_further_to_the_bytes_of_the_longer_run(finished, tmp_path):
    """The reference is the run that was asked for all its steps at once."""
    with pytest.raises(UsageError, match="max_steps: 3 there, 6 now"):
        longer(finished)
    before = (finished / "result.json").read_bytes()
    longer(finished, resume="force")
    assert [line["step"] for line in runs.metrics(finished)] == [1, 2, 3, 4, 5, 6]
    assert runs.result(finished)["steps"] == 6 and read_run(finished).config.max_steps == 6
    assert (finished / "result-000003.json").read_bytes() == before
    assert adapter_bytes(finished) == adapter_bytes(runs.run(tmp_path, "whole", **{**CONSTANT, "max_steps": 6}))
    longer(finished)  # is finished now, and is left
    assert len(runs.metrics(finished)) == 6


def test_the_same_settings_leave_it_finished(finished):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    runs.run(finished.parent, **CONSTANT, resume="force")
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


@pytest.mark.parametrize("step", [3, 5])
def test_what_is_cut_off_goes_on_with_the_same_command(step, finished):
    with pytest.raises(ZeroDivisionError):
        longer(finished, resume="force", during=lambda now: now == step and fail(ZeroDivisionError()))
    assert not (finished / "result.json").exists() and (finished / "adapter").is_dir()
    longer(finished, resume="force")
    assert runs.result(finished)["steps"] == 6 and [line["step"] for line in runs.metrics(finished)] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_a_kill_before_the_new_identity_leaves_the_old_run(finished, monkeypatch):
    """It has its last checkpoint, and the old command ends it again with the same bytes."""
    before = adapter_bytes(finished)
    write = FileSystem.write
    monkeypatch.setattr(
        FileSystem,
        "write",
        lambda self, path, content: (
            fail(OSError(28, "No space left")) if IDENTITY in path.name else write(self, path, content)
        ),
    )
    with pytest.raises(DiskFull):
        longer(finished, resume="force")
    monkeypatch.undo()
    assert json.loads((finished / IDENTITY).read_text())["max_steps"] == 3
    runs.run(finished.parent, **CONSTANT)
    assert runs.result(finished)["steps"] == 3 and adapter_bytes(finished) == before


@pytest.mark.parametrize("is_there", [False, True])
def test_without_a_usable_checkpoint_it_is_refused_and_stays_finished(is_there, finished):
    checkpoints = Checkpoints(finished / "checkpoints")
    for step in checkpoints.steps():
        (checkpoints.path(step) / "manifest.json").write_text("{")
    if not is_there:
        shutil.rmtree(checkpoints.directory)
    with pytest.raises(
        NoCheckpoint, match="step-000003: manifest.json" if is_there else "no checkpoint of it left to go on from"
    ):
        longer(finished, resume="force")
    assert read_run(finished).result["steps"] == 3


def test_the_end_of_a_run_that_goes_on_may_stay_its_best_step(tmp_path):
    """Its last checkpoint does not know of its last evaluation.

    What follows, at a rate that wrecks the model, is no better; a kill in between changes nothing.
    """
    settings = {
        **CONSTANT,
        "eval_dataset": "demo",
        "eval_steps": 2,
        "exact_match": False,
        "eval_batch_size": 32,
        "load_best_model_at_end": True,
        "max_steps": 4,
    }
    directory = runs.run(tmp_path, **settings)
    best = runs.evaluations(directory)[-1]
    assert best["step"] == 4 and best["loss"] == min(e["loss"] for e in runs.evaluations(directory))
    further = {**settings, "max_steps": 8, "lr": 0.3, "resume": "force"}
    with pytest.raises(ZeroDivisionError):
        runs.run(tmp_path, **further, during=lambda now: now == 4 and fail(ZeroDivisionError()))
    runs.run(tmp_path, **further)
    assert [e["step"] for e in runs.evaluations(directory)] == [0, 2, 4, 6, 8]
    after = runs.result(directory)["eval"]["after"]
    assert (after["step"], after["loss"]) == (4, best["loss"])


def test_a_run_without_a_step_left_is_not_forced(finished):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="3 steps are done, and with these settings the run has 3(.|\n)*--max_steps"):
        runs.run(finished.parent, **{**CONSTANT, "lr": 9e-4, "resume": "force"})
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_a_forced_run_is_evaluated_on_its_own_rows(tmp_path, monkeypatch):
    """Where the one before had stopped early and died before its end."""
    settings = {
        **CONSTANT,
        "eval_dataset": "demo",
        "eval_steps": 1,
        "exact_match": False,
        "eval_batch_size": 32,
        "lr": 0.5,
        "early_stopping_patience": 1,
        "max_steps": 8,
    }
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(RunOutputs, "write_final", lambda *_: 1 / 0)
        runs.run(tmp_path, **settings)
    others = tmp_path / "others.jsonl"
    others.write_text("".join((DEMO / "heldout.jsonl").read_text().splitlines(keepends=True)[:3]))
    directory = runs.run(tmp_path, **{**settings, "eval_dataset": str(others), "resume": "force"})
    before, after = runs.evaluations(directory)[-2:]
    assert (
        before["step"] == after["step"] == runs.result(directory)["steps"]
        and before["loss"] != after["loss"] == runs.result(directory)["eval"]["after"]["loss"]
    )


def test_a_forced_run_that_stops_early_at_once_is_the_one_that_was_asked_for(tmp_path):
    """No checkpoint is saved, which would have been the place of its identity, and no result is lost."""
    settings = {
        **CONSTANT,
        "eval_dataset": "demo",
        "eval_steps": 1,
        "exact_match": False,
        "eval_batch_size": 32,
        "lr": 0.5,
        "early_stopping_patience": 1,
        "max_steps": 8,
    }
    directory = runs.run(tmp_path, **settings)
    first, steps = (directory / "result.json").read_bytes(), len(runs.metrics(directory))
    assert steps < 8
    for rate in (0.4, 0.3):
        runs.run(tmp_path, **{**settings, "lr": rate, "resume": "force"})
        assert json.loads((directory / IDENTITY).read_text())["lr"] == rate
    assert (directory / f"result-{steps:06d}.json").read_bytes() == first and (
        directory / f"result-{steps:06d}-1.json"
    ).exists()
