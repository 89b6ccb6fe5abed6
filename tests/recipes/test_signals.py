"""What signals do to a run of several processes, in worlds that are set up as torchrun does it."""

import os
import signal
import time

import pytest

from anyqlora.core.errors import Stopped
from anyqlora.core.files import FileSystem
from anyqlora.runs.checkpoints import Checkpoints
from anyqlora.testing import world
from anyqlora.training.session import TrainingSession
from tests.recipes.test_distributed_runs import SETTINGS
from tests.support import runs

SHORT = {
    **SETTINGS,
    "strategy": "ddp",
    "batch_size": 2,
    "max_steps": 8,
    "save_steps": 0,
    "eval_fraction": 0.0,
    "exact_match": "auto",
}


def stopped(output, settings, during):
    """Train until a signal ends it. Returns (exit code, when this process ended)."""
    try:
        runs.run(output, during=during, **settings)
    except Stopped as end:
        return end.exit_code, time.monotonic()
    return 0, time.monotonic()


def own_rank() -> int:
    return int(os.environ["RANK"])


def stopped_with_a_slow_disk(output):
    """The first process needs a second to write the moments. SIGTERM comes to the other one."""
    write = FileSystem.write

    def slowly(self, path, content):
        if path.name == "optimizer.safetensors":
            time.sleep(1)
        write(self, path, content)

    FileSystem.write = slowly
    return stopped(output, SHORT, lambda step: step == 3 and own_rank() == 1 and os.kill(os.getpid(), signal.SIGTERM))


@pytest.mark.slow
def test_no_process_ends_before_the_first_one_has_saved(tmp_path):
    """Whoever watches them ends all soon after the first one that ends."""
    (first, first_ended), (other, other_ended) = world(2, stopped_with_a_slow_disk, tmp_path)
    assert (first, other) == (75, 75) and other_ended > first_ended - 0.3
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [4]


def asked_to_save_early(output):
    """The second process alone hears of it, when the first step has not begun."""
    ready = TrainingSession.steps

    def signalled(self):
        if own_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return ready(self)

    TrainingSession.steps = signalled
    return stopped(output, {**SHORT, "max_steps": 3}, None)[0]


def test_a_save_that_one_process_was_asked_for_is_made_by_all(tmp_path):
    assert world(2, asked_to_save_early, tmp_path) == [0, 0]
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [1, 3]


def stopped_in_an_evaluation(output):
    """SIGTERM comes to the second process in the third batch of the evaluation after step 2.

    Returns the exit code and the batches begun there.
    """
    begun, between = [], TrainingSession.check_signals

    def counted(self):
        if self.last_step == 2:
            begun.append(self.last_step)
            if own_rank() == 1 and len(begun) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
        between(self)

    TrainingSession.check_signals = counted
    code, _ = stopped(output, {**SHORT, "eval_fraction": 0.02, "eval_steps": 2, "eval_batch_size": 1}, None)
    return code, len(begun)


def test_an_evaluation_is_left_by_all_at_the_same_batch(tmp_path):
    assert world(2, stopped_in_an_evaluation, tmp_path) == [(75, 3), (75, 3)]
    saved = Checkpoints(tmp_path / "run" / "checkpoints")
    assert saved.steps() == [2] and saved.read(2).state["pending_evaluation"]


def stopped_in_the_last_save(output):
    save = TrainingSession.save

    def signalled(self, step, snapshot):
        if own_rank() == 1 and step == self.total_steps:
            os.kill(os.getpid(), signal.SIGTERM)
        save(self, step, snapshot)

    TrainingSession.save = signalled
    return stopped(output, {**SHORT, "max_steps": 2}, None)[0]


def test_a_stop_that_comes_after_the_last_agreement_is_answered(tmp_path):
    assert world(2, stopped_in_the_last_save, tmp_path) == [75, 75]
    assert not (tmp_path / "run" / "result.json").exists()
