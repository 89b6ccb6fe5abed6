"""Stopped anywhere and continued: the same bytes. Rows 1, 2 and 6 of docs/reliability.md."""

import random
import signal
import time

import pytest

from tests.support import counts, faults, trials
from tests.support.counts import quick_and_full
from tests.support.trials import SAVED_EVERY, STEPS, Trial

ONE_STEP_AND_SAVE = 10.0  # seconds: a step takes a twentieth of a second, but the cores may be shared
SLOW_DISK = (faults.slow_disk, 0.005)  # seconds a call: a save takes long enough to be hit


@quick_and_full
def test_stop_after_any_step(job, whole, tmp_path, full):
    """The reference is the run that was never stopped."""

    def stop_and_go(step):
        output = tmp_path / str(step)
        first = trials.run(output, job, faults.signal_at, step - 1, signal.SIGTERM)
        if step == STEPS:  # the last step is over and saved before the stop
            return (
                [] if first.code == 75 and not trials.finished(output, job, whole) else [f"step {step}: {first.said}"]
            )
        problems = [] if first.code == 75 else [f"exit code {first.code}"]
        return [f"step {step}: {p}" for p in problems + trials.finished(output, job, whole)]

    steps = range(1, STEPS + 1) if full else (5, 24)
    failures = trials.each(stop_and_go, steps)
    counts.hold(1, full, "stop at every step, resume", len(failures), failures)


KINDS = {
    "fp16, with a loss scale that overflows": {"precision": "fp16_autocast"},
    "early stopping": {
        "early_stopping_patience": 1,
        "lr": 0.3,
        "lr_scheduler": "constant",
        "warmup_steps": 0,
        "max_grad_norm": 100,
        "eval_steps": 2,
    },
    "keep best": {
        "load_best_model_at_end": True,
        "lr": 0.3,
        "lr_scheduler": "constant",
        "max_grad_norm": 100,
        "eval_steps": 2,
    },
    "packed rows": {"packing": True},
    "another optimizer": {"optimizer": "adam", "lr_scheduler": "cosine_with_restarts", "lr_cycles": 3},
    "plain LoRA": {"train_type": "lora"},
    "a full fine-tune": {"train_type": "full", "lr": 1e-4},
    "DoRA": {"train_type": "bnb_dora"},
    "8 bits": {"bits": 8},
    "bf16": {"precision": "bf16"},
    "checkpointed activations": {"use_gradient_checkpointing": True},
    "a spike guard": {"spike_guard": 4.0, "max_steps": 24},
    "no evaluation rows": {"eval_dataset": "", "eval_steps": 0, "num_samples": 0},
}


@quick_and_full
def test_stop_in_runs_of_other_kinds(job, tmp_path, full):
    """Each kind of run is stopped at three steps, one after the other, and killed at the end while its result is
    written.
    """

    def stop_and_go(item):
        kind, changes = item
        settings = {**job, "max_steps": 24 if full else 9, "num_samples": 0, **changes}
        settings.update(num_samples=0 if not settings["eval_dataset"] else 1)
        for name in [name for name in ("lora_rank", "lora_dropout") if changes.get("train_type") == "full"]:
            del settings[name]
        reference = trials.run(tmp_path / kind / "whole", settings)
        if reference.code != 0:
            return [f"{kind}: {reference.said[-1500:]}"]
        output, problems = tmp_path / kind / "stopped", []
        for step in (1, 10, 17) if full else (3,):
            trials.run(output, settings, faults.signal_at, step, signal.SIGTERM)
        trials.run(output, settings, faults.crash_at_result)
        return [f"{kind}: {p}" for p in problems + trials.finished(output, settings, reference.directory)]

    kinds = list(KINDS.items())
    failures = trials.each(stop_and_go, kinds if full else kinds[:2])
    counts.hold("1b", full, "stop three times and crash once, resume: " + ", ".join(KINDS), len(failures), failures)


@quick_and_full
def test_kill_at_random_moments(job, whole, tmp_path, full):
    """kill -9; every third trial in the middle of a save."""
    drawn = random.Random(2)
    trials_of = [
        (number, number % 3 == 0, drawn.randrange(1, STEPS), drawn.random()) for number in range(50 if full else 4)
    ]
    saving = []

    def kill_and_go(trial_of):
        number, in_save, line, part = trial_of
        output = tmp_path / str(number)
        trial = Trial(output, job, *SLOW_DISK * in_save)
        trial.wait_until(lambda: trial.lines() >= line)
        if in_save:
            trial.hold_in_save(part)
        else:
            time.sleep(part * 0.1)
        trial.signal(signal.SIGKILL)
        if trial.wait().code != -signal.SIGKILL:
            return [f"{number}: it was over before the kill: {trial.code}"]
        saving.append(bool(trials.stale(trial.directory)))
        lost = sum("event" not in line for line in trials.metrics(trial.directory)) - max(
            trials.good_steps(trial.directory), default=0
        )
        problems = [f"{lost} steps lost"] if lost > SAVED_EVERY else []
        return [f"{number}: {p}" for p in problems + trials.finished(output, job, whole)]

    failures = trials.each(kill_and_go, trials_of)
    counts.hold(
        2, full, "kill -9 at random moments, resume until done", len(failures), failures, inside_a_save=sum(saving)
    )
    assert sum(saving) >= (15 if full else 1)


@quick_and_full
def test_signals_at_random_moments(job, whole, tmp_path, full):
    drawn = random.Random(6)
    trials_of = [
        (n, signal.SIGINT if n % 2 else signal.SIGTERM, n % 4 == 0, drawn.randrange(STEPS - 2), drawn.random())
        for n in range(20 if full else 2)
    ]
    waits, saving = [], []

    def stop_and_go(trial_of):
        number, which, in_save, line, part = trial_of
        output = tmp_path / str(number)
        trial = Trial(output, job, *SLOW_DISK * in_save)
        trial.wait_until(lambda: (trial.directory / "metrics.jsonl").exists() if line == 0 else trial.lines() >= line)
        if in_save:
            saving.append(trial.hold_in_save(part))
        else:
            time.sleep(part * 0.1)
        sent = time.monotonic()
        trial.signal(which)
        trial.signal(signal.SIGCONT)
        trial.wait()
        waits.append(time.monotonic() - sent)
        expected = 130 if which == signal.SIGINT else 75
        problems = [] if trial.code == expected else [f"exit code {trial.code}, not {expected}: {trial.said[-500:]}"]
        problems += ["a traceback"] if "Traceback" in trial.said else []
        problems += [f"{waits[-1]:.1f} s until it ended"] if waits[-1] > ONE_STEP_AND_SAVE else []
        return [f"{number}: {p}" for p in problems + trials.finished(output, job, whole)]

    failures = trials.each(stop_and_go, trials_of)
    counts.hold(
        6,
        full,
        "SIGTERM and SIGINT at random moments, resume",
        len(failures),
        failures,
        inside_a_save=sum(saving),
        slowest_seconds=round(max(waits), 2),
    )


@quick_and_full
def test_second_interrupt_ends_a_long_step_at_once(job, tmp_path, full):
    """The step is one matrix product of several seconds, in which the interpreter calls no handler."""

    def interrupt_twice(number):
        trial = Trial(tmp_path / str(number), job, faults.long_step, 2, 8.0)
        trial.wait_until(lambda: trial.lines() >= 3)  # the first evaluation and two steps
        time.sleep(0.5)
        trial.signal(signal.SIGINT)
        time.sleep(0.3)
        still = trial.code is None
        sent = time.monotonic()
        trial.signal(signal.SIGINT)
        trial.wait()
        took = time.monotonic() - sent
        return (
            []
            if still and trial.code == 130 and took < 0.5
            else [f"{number}: code {trial.code} after {took:.2f} s, running before: {still}"]
        )

    failures = trials.each(interrupt_twice, range(5 if full else 1), at_once=1)
    counts.hold("6b", full, "second SIGINT within 0.5 s, inside a long step", len(failures), failures)


@quick_and_full
def test_sigusr1_saves_and_changes_nothing(job, whole, tmp_path, full):
    times = 5 if full else 2
    trial = trials.run(tmp_path, job, faults.signal_at, 6, signal.SIGUSR1, times, save_total_limit=20)
    saved = trials.good_steps(trial.directory)
    wanted = sorted({*range(SAVED_EVERY, STEPS + 1, SAVED_EVERY), *range(7, 7 + times)})
    problems = trials.differences(trial.directory, whole) + ([] if saved == wanted else [f"saved {saved}"])
    counts.hold("6c", full, "SIGUSR1 saves and changes nothing", times, [[p] for p in problems])


@pytest.mark.parametrize("moment", ["while it is imported", "while data is read"])
def test_signals_before_the_run_are_answered_too(job, tmp_path, moment):
    trial = Trial(tmp_path, job, faults.signal_before, moment, signal.SIGINT)
    assert trial.wait().code == 130 and "Traceback" not in trial.said


@pytest.mark.parametrize("moment", ["while it is imported", "while data is read"])
def test_a_save_that_is_asked_for_before_there_is_anything_to_save(job, tmp_path, moment):
    trial = Trial(tmp_path, job, faults.signal_before, moment, signal.SIGUSR1, max_steps=1)
    assert trial.wait().code == 0, trial.said


def test_two_processes_do_not_share_a_run_directory(job, whole, tmp_path):
    """The second is refused while the first trains, and by kill -9 the directory is free again."""
    first = Trial(tmp_path, job)
    assert first.wait_until(lambda: first.lines() >= 4)
    second = trials.run(tmp_path, job)
    assert second.code == 2 and "another process is training in this directory" in second.said, second.said
    first.signal(signal.SIGKILL)
    first.wait()
    assert trials.finished(tmp_path, job, whole) == []
