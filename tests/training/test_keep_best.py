"""What a run with --load_best_model_at_end true ends with, and what it says of it: real runs on the embedded base."""

import errno
import io
import json
import math

import pytest
from rich.console import Console

from anyqlora.core.files import FileSystem, to_json
from anyqlora.core.registry import ADAPTER
from anyqlora.data.readers.sources import DEMO
from anyqlora.reporting.summary import show
from anyqlora.runs.checkpoints import Checkpoints
from anyqlora.training.session import TrainingSession
from anyqlora.training.signals import Interrupted
from anyqlora.training.state import TrainState
from tests.support import runs
from tests.training.test_session import HELD_OUT, fail

BEST = {
    **HELD_OUT,
    "load_best_model_at_end": True,
    "save_steps": 0,
    "eval_steps": 2,
    "num_samples": 1,
    "max_new_tokens": 2,
}
WRECKED = {
    "lr": 0.05,
    "lr_scheduler": "constant",
    "weight_decay": 0,
    "warmup_steps": 8,
    "max_grad_norm": 100,
}  # the loss falls until step 3, and rises


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    """Settings with a few evaluation rows."""
    path = tmp_path_factory.mktemp("rows") / "held_out.jsonl"
    path.write_text("".join((DEMO / "heldout.jsonl").read_text().splitlines(keepends=True)[:8]))
    return {**BEST, "eval_dataset": str(path)}


@pytest.fixture(scope="module")
def wrecked(best):
    """A run that is at its best on the way."""
    return {**best, **WRECKED}


def losses(directory):
    """{step: evaluation loss}"""
    return {e["step"]: e["loss"] for e in runs.evaluations(directory) if e["step"] > 0}


def adapter_bytes(folder):
    return (folder / ADAPTER).read_bytes()


def shown(directory):
    stream = io.StringIO()
    show(directory, Console(file=stream, width=200))
    return stream.getvalue()


def test_the_best_step_is_written_and_named(wrecked, tmp_path, capfd):
    directory = runs.run(tmp_path, **wrecked)
    seen = losses(directory)
    best = min(seen, key=seen.get)
    assert best < 8 and list(seen) == [2, 4, 6, 8] and seen[8] > seen[best], "each step has its own number"
    after = runs.result(directory)["eval"]["after"]
    assert (after["step"], after["loss"]) == (best, seen[best]) and runs.result(directory)["steps"] == 8
    kept = Checkpoints(directory / "checkpoints")
    assert adapter_bytes(directory / "adapter") == adapter_bytes(kept.path(best))
    assert f"| optimizer steps, rows per step | {best}, 4 |" in (directory / "adapter/README.md").read_text()
    assert (
        f"| trained tokens | {kept.read(best).state['tokens_trained']} |"
        in (directory / "adapter/README.md").read_text()
    )
    assert f"after step {best}" in shown(directory)
    assert "no better than it was" not in capfd.readouterr().err, (
        "what is written is the best step, and better than the base"
    )


def test_the_last_step_may_be_the_best(best, tmp_path):
    """The reference is the same run that keeps the last ones."""
    kept, plain = (runs.run(tmp_path, str(of), **{**best, "load_best_model_at_end": of}) for of in (True, False))
    seen = losses(kept)
    assert min(seen, key=seen.get) == 8, "or nothing would have been shown"
    assert adapter_bytes(kept / "adapter") == adapter_bytes(plain / "adapter")
    assert runs.result(kept)["eval"] == runs.result(plain)["eval"] and runs.result(kept)["eval"]["after"]["step"] == 8
    assert "after step" not in shown(kept)


def test_a_best_step_that_could_not_be_saved_leaves_the_best_before_it(wrecked, tmp_path, monkeypatch, capfd):
    """The disk is full for the best step's checkpoint alone: the one before it is not pruned for it, and the run ends
    with the best that is there.
    """
    whole = runs.run(tmp_path, "whole", **{**wrecked, "eval_steps": 1})
    seen = losses(whole)
    best = min(seen, key=seen.get)
    second = min(seen.keys() - {best}, key=seen.get)
    assert second < best <= 5, "else nothing would have pruned it"
    write = FileSystem.write
    monkeypatch.setattr(
        FileSystem,
        "write",
        lambda self, path, content: (
            fail(OSError(errno.ENOSPC, "No space left"))
            if f"step-{best:06d}" in str(path)
            else write(self, path, content)
        ),
    )
    directory = runs.run(tmp_path, **{**wrecked, "eval_steps": 1})
    said = capfd.readouterr().err
    assert said.count("cannot be written") == 1 and losses(directory) == seen
    assert runs.result(directory)["eval"]["after"]["step"] == second
    assert adapter_bytes(directory / "adapter") == adapter_bytes(Checkpoints(directory / "checkpoints").path(second))


def test_a_best_step_that_was_pruned_before_keep_best_was_asked_for_is_left_out(wrecked, tmp_path, capfd):
    """What is kept is no part of a run's identity, so it may change on the way."""
    with pytest.raises(ZeroDivisionError):
        runs.run(
            tmp_path,
            during=lambda step: step == 6 and fail(ZeroDivisionError()),
            **{**wrecked, "load_best_model_at_end": False, "save_steps": 1},
        )
    directory = runs.run(tmp_path, **wrecked)
    seen = losses(directory)
    assert min(seen, key=seen.get) == 2 and "the best step so far, 2, has no checkpoint" in capfd.readouterr().err
    assert runs.result(directory)["eval"]["after"] == {
        "step": 8,
        **{k: v for k, v in runs.evaluations(directory)[-1].items() if k not in ("step", "event")},
    }


def test_a_best_step_that_cannot_be_read_in_the_end_leaves_the_last_one(wrecked, tmp_path, capfd):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    directory = runs.run(
        tmp_path, during=lambda step: step == 7 and (checkpoints.path(2) / ADAPTER).write_bytes(b""), **wrecked
    )
    assert "step-000002 is the best step's and cannot be used" in capfd.readouterr().err
    assert runs.result(directory)["eval"]["after"]["step"] == 8
    assert adapter_bytes(directory / "adapter") == adapter_bytes(checkpoints.path(8))


def test_an_evaluation_that_is_pending_may_be_the_best(wrecked, tmp_path, monkeypatch):
    """A signal drops the evaluation of the best step, whose checkpoint is there: it is made first by the run that goes
    on.
    """
    evaluate, interrupted = TrainingSession.evaluate, []

    def dropped(self, step, evaluation):
        interrupted.extend([step] * (step == 2))
        evaluate(self, step, lambda: fail(Interrupted()) if step == 2 else evaluation())

    monkeypatch.setattr(TrainingSession, "evaluate", dropped)
    with pytest.raises(ZeroDivisionError):
        runs.run(tmp_path, during=lambda step: interrupted and fail(ZeroDivisionError()), **wrecked)
    monkeypatch.undo()
    directory = runs.run(tmp_path, **wrecked)
    assert runs.result(directory)["eval"]["after"]["step"] == 2 == min(losses(directory), key=losses(directory).get)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_never_the_best(value):
    progress = TrainState()
    for step, loss in ((1, value), (2, 3.0), (3, value)):
        progress.evaluated({"step": step, "loss": loss})
    assert progress.best == {"step": 2, "loss": 3.0} and progress.without_improvement == 1


def test_numbers_that_are_not_finite_come_back_from_a_checkpoint():
    """As they were written before they were refused as the best, too; such a checkpoint has no `kept` either."""
    state = json.loads(
        to_json({"step": 2, "before": {"loss": 3.0, "perplexity": math.inf}, "best": {"step": 2, "loss": math.nan}})
    )
    progress = TrainState.from_state(state)
    assert (
        progress.before == {"loss": 3.0, "perplexity": math.inf}
        and math.isnan(progress.best["loss"])
        and math.isnan(progress.best_saved["loss"])
    )
    progress.evaluated({"step": 4, "loss": 9.0})
    assert progress.best == {"step": 4, "loss": 9.0}
