"""What signals do to a run of several processes, in worlds that are set up as torchrun does it."""

import os
import signal
import time

import runs
from test_train import SETTINGS

from anyqlora.checkpoint import Checkpoints, Disk
from anyqlora.errors import Stopped
from anyqlora.run import Run
from anyqlora.testing import world

SHORT = {**SETTINGS, "strategy": "ddp", "batch_size": 2, "max_steps": 8, "save_steps": 0, "eval_fraction": 0.0, "exact_match": "auto"}


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
    write = Disk.write

    def slowly(self, path, content):
        if path.name == "optimizer.safetensors":
            time.sleep(1)
        write(self, path, content)

    Disk.write = slowly
    return stopped(output, SHORT, lambda step: step == 3 and own_rank() == 1 and os.kill(os.getpid(), signal.SIGTERM))


def test_no_process_ends_before_the_first_one_has_saved(tmp_path):
    """Whoever watches them ends all soon after the first one that ends."""
    (first, first_ended), (other, other_ended) = world(2, stopped_with_a_slow_disk, tmp_path)
    assert (first, other) == (75, 75) and other_ended > first_ended - 0.3
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [4]


def asked_to_save_early(output):
    """The second process alone hears of it, when the first step has not begun."""
    ready = Run.steps

    def signalled(self):
        if own_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return ready(self)

    Run.steps = signalled
    return stopped(output, {**SHORT, "max_steps": 3}, None)[0]


def test_a_save_that_one_process_was_asked_for_is_made_by_all(tmp_path):
    assert world(2, asked_to_save_early, tmp_path) == [0, 0]
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [1, 3]
