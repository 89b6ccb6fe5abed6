"""What a run leaves in its directory when it is killed, forced, or out of room, and what it then says of its times."""

import contextlib
import json
import resource
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from anyqlora.core.errors import DiskFull
from anyqlora.core.files import FileSystem
from anyqlora.runs.checkpoints import Checkpoints
from anyqlora.runs.directory import IDENTITY
from tests.support import runs
from tests.training.test_session import SMALL, adapter_bytes, fail


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that is never stopped."""
    return runs.run(tmp_path_factory.mktemp("whole"), **SMALL)


@pytest.mark.distributed
def test_the_speed_of_a_run_that_went_on_is_that_of_all_its_steps(tmp_path):
    """The reference is metrics.jsonl, which has the seconds of each step.

    A checkpoint from before times were kept is read, too.
    """

    def be_slow_and_fail(step):
        time.sleep(0.15)
        if step == 6:
            fail(ZeroDivisionError())

    with pytest.raises(ZeroDivisionError):
        runs.run(tmp_path, during=be_slow_and_fail, **SMALL)
    shutil.copytree(tmp_path / "run", tmp_path / "older" / "run")
    lines, found = runs.metrics(runs.run(tmp_path, **SMALL)), runs.result(tmp_path / "run")
    seconds = sum(line["seconds"] for line in lines)
    assert found["tokens_per_second"] == pytest.approx(sum(line["tokens"] for line in lines) / seconds, rel=1e-6)
    assert found["trained_tokens_per_second"] == pytest.approx(
        sum(line["trained_tokens"] for line in lines) / seconds, rel=1e-6
    )
    assert found["seconds"] > seconds + found["saving_seconds"] and seconds > 0.9
    checkpoints = Checkpoints(tmp_path / "older" / "run" / "checkpoints")
    loaded = checkpoints.read(6)
    state = {name: value for name, value in loaded.state.items() if "seconds" not in name}
    about = json.loads((loaded.path / "manifest.json").read_text())
    checkpoints.save(
        6,
        loaded.adapter,
        loaded.moments,
        adapter_config=json.loads((loaded.path / "adapter_config.json").read_text()),
        state=state,
        identity=about["identity"],
        machine=about["machine"],
    )
    assert adapter_bytes(runs.run(tmp_path / "older", **SMALL)) == adapter_bytes(tmp_path / "run")


@pytest.mark.distributed
def test_a_forced_run_that_is_killed_before_it_saves_leaves_the_one_before_as_it_was(whole, tmp_path):
    """Neither its first steps nor a crash between its checkpoint and its identity take the run away from its own
    command.
    """
    forced = {**SMALL, "lr": 1e-3, "resume": "force"}
    with pytest.raises(ZeroDivisionError):
        runs.run(tmp_path, during=lambda step: step == 4 and fail(ZeroDivisionError()), **SMALL)
    with pytest.raises(ZeroDivisionError):
        runs.run(tmp_path, during=lambda step: step == 4 and fail(ZeroDivisionError()), **forced)
    shutil.copytree(tmp_path / "run", tmp_path / "forced" / "run")
    with pytest.MonkeyPatch.context() as patched, pytest.raises(ZeroDivisionError):
        rename = FileSystem.rename
        patched.setattr(
            FileSystem,
            "rename",
            lambda self, old, new: fail(ZeroDivisionError()) if new.name == IDENTITY else rename(self, old, new),
        )
        runs.run(tmp_path, **forced)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [3, 6]
    runs.run(tmp_path, **SMALL)
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(whole)
    with pytest.raises(ZeroDivisionError):
        runs.run(tmp_path / "forced", during=lambda step: step == 7 and fail(ZeroDivisionError()), **forced)
    finished = runs.run(
        tmp_path / "forced", **{**SMALL, "lr": 1e-3}
    )  # its first checkpoint made it the run of this command
    assert [m["lr"] for m in runs.metrics(finished)][-1] == [m["lr"] for m in runs.metrics(whole)][-1] / 2


@contextlib.contextmanager
def files_up_to(size):
    """No file grows beyond `size` bytes: what the kernel says then differs from a full disk in its number alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("size", "more", "what"),
    [(500_000, {"train_type": "full"}, "model"), (15_000, {"adapter": "lora"}, "tokenizer")],
    ids=["model", "tokenizer"],
)
def test_no_room_for_what_transformers_writes_of_a_finished_run(size, more, what, tmp_path, monkeypatch):
    """Exit code 5 and nothing left; then the same command completes the run, wherever temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "there is no such directory"))
    settings = {
        name: value
        for name, value in {**SMALL, "max_steps": 2, "save_steps": 1, **more}.items()
        if what == "tokenizer" or "lora" not in name
    }
    with (
        pytest.raises(DiskFull, match=f"{what} cannot be written: File too large") as full,
        contextlib.ExitStack() as limited,
    ):
        runs.run(tmp_path, during=lambda step: step == 1 and limited.enter_context(files_up_to(size)), **settings)
    assert full.value.exit_code == 5 and not list((tmp_path / "run").glob("*.staged"))
    directory = runs.run(tmp_path, **settings)
    assert runs.result(directory)["steps"] == 2 and not list(directory.glob("*.staged"))


def test_what_a_killed_run_leaves_is_swept_and_nothing_else(tmp_path, monkeypatch):
    """Every stage that a run makes is known by its name; a person's own files keep theirs."""
    staged, write, make = set(), FileSystem.write, FileSystem.make_directory
    monkeypatch.setattr(FileSystem, "write", lambda self, path, content: (staged.add(path), write(self, path, content)))
    monkeypatch.setattr(FileSystem, "make_directory", lambda self, path: (staged.add(path), make(self, path)))
    with pytest.raises(ZeroDivisionError):
        runs.run(tmp_path, during=lambda step: step == 4 and fail(ZeroDivisionError()), **SMALL)
    monkeypatch.undo()
    directory = tmp_path / "run"
    left = {path.relative_to(directory) for path in staged if path.name.endswith(".staged")} | {
        Path(name)
        for name in (
            "adapter.staged",
            "model.staged",
            "pretrained.staged",
            "result.json.staged",
            "checkpoints/step-000001.removed",
            "checkpoints/step-1000000.staged",
        )
    }
    assert len(left) == 12, left
    own = [
        directory / name
        for name in (
            "notes.old",
            "mine.removed",
            "plan.json.old",
            "a.staged",
            "checkpoints/step-3.mine.old",
            "checkpoints/best.old",
        )
    ]
    for path in [*(directory / name for name in left), *own]:
        path.mkdir()
    runs.run(tmp_path, **SMALL)
    assert all(path.is_dir() for path in own) and not any((directory / name).exists() for name in left)
