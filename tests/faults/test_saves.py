"""Crashes and full disks at every file-system call. Rows 3 and 7 of docs/reliability.md."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess

import pytest

from anyqlora.core import files
from anyqlora.reporting.console import JsonLines
from tests.support import counts, faults, trials
from tests.support.counts import quick_and_full

STOPPED, SAVED = 20, 21  # a run that was stopped at one step goes on and saves at the other, with 18 and 20 before it


@pytest.fixture(scope="module")
def calls(job, stopped, tmp_path_factory):
    """Every file-system call of the run that goes on from step 20 to its end: [number, name, of what, where]."""
    output = tmp_path_factory.mktemp("calls")
    trials.copied(stopped(STOPPED), output)
    assert trials.run(output, job, faults.record_calls, str(output / "calls")).code == 0
    return [json.loads(line) for line in (output / "calls").read_text().splitlines()]


def of_save(calls, step=SAVED):
    """The calls of one save: from its stage to the last removal."""
    first = next(n for n, name, of, _ in calls if of == f"step-{step:06d}.staged")
    after = next(n for n, name, of, _ in calls if n > first and of == "step-000024.staged") if step < 24 else len(calls)
    return calls[first:after]


def test_what_must_be_on_disk_is_synced_before_what_names_it(calls):
    """The order that a power failure asks for: files, their directory, the name, its directory; only then is an older
    one removed.
    """
    names = [(name, of) for _, name, of, _ in of_save(calls)]
    staged, older = f"step-{SAVED:06d}.staged", "step-000018"
    assert names == [
        ("make_directory", staged),
        *(
            ("write", f)
            for f in (
                "adapter_model.safetensors",
                "adapter_config.json",
                "optimizer.safetensors",
                "state.json",
                "manifest.json",
            )
        ),
        ("sync_directory", staged),
        ("rename", staged),
        ("sync_directory", "checkpoints"),
        ("rename", older),
        ("remove", older + ".removed"),
    ]


def test_macos_flushes_the_drives_own_cache(tmp_path, monkeypatch):
    """Of files, directories and logs by its own command; where a file system refuses that (as Linux does, which has
    none of its number), by fsync.
    """
    asked, synced, sync = [], [], os.fsync
    lines = JsonLines(tmp_path / "log", 0, print)
    lines.write({})

    def write():
        files.FileSystem().write(tmp_path / "file", b"x")
        files.FileSystem().sync_directory(tmp_path)
        lines.sync()

    monkeypatch.setattr(files, "FULL_FLUSH", 51)
    monkeypatch.setattr(os, "fsync", lambda handle: (sync(handle), synced.append(os.fstat(handle).st_ino)))
    with monkeypatch.context() as here:
        here.setattr(fcntl, "fcntl", lambda handle, command: asked.append((os.fstat(handle).st_ino, command)))
        write()
    inodes = [path.stat().st_ino for path in (tmp_path / "file", tmp_path, tmp_path / "log")]
    assert asked == [(inode, 51) for inode in inodes] and not synced
    write()
    assert synced == inodes


@quick_and_full
def test_crash_at_every_call_of_a_save(job, whole, stopped, calls, tmp_path, full):
    moments = [
        (n, moment)
        for n, name, _, _ in of_save(calls)
        for moment in ("before", "middle", "after")
        if moment != "middle" or name in ("write", "remove")
    ]
    moments = moments if full else moments[::9]

    def crash_and_go(point):
        call, moment = point
        output = tmp_path / f"{call}-{moment}"
        directory = trials.copied(stopped(STOPPED), output)
        crashed = trials.run(output, job, faults.crash_at, call, moment)
        good = trials.good_steps(directory)
        problems = [] if crashed.code == faults.CRASHED else [f"exit code {crashed.code}: {crashed.said[-500:]}"]
        problems += [] if STOPPED in good and set(good) <= {18, STOPPED, SAVED} else [f"good checkpoints: {good}"]
        return [f"{calls[call]} {moment}: {p}" for p in problems + trials.finished(output, job, whole)]

    failures = trials.each(crash_and_go, moments)
    counts.hold(3, full, "crash at every file-system call of a save", len(failures), failures)


@quick_and_full
def test_crash_at_every_other_call(job, whole, stopped, calls, tmp_path, full):
    """While the run is described, while its result is written, and while what an earlier crash left is swept."""
    others = [n for n, *_ in calls if calls[n] not in of_save(calls)]
    points = [(n, moment) for n in others for moment in ("before", "middle")]
    points = [(n, moment) for n, moment in points if moment == "before" or calls[n][1] in ("write", "remove")]
    points = points if full else points[-4::2]

    def crash_and_go(point):
        output = tmp_path / "-".join(map(str, point))
        trials.copied(stopped(STOPPED), output)
        crashed = trials.run(output, job, faults.crash_at, *point)
        problems = [] if crashed.code == faults.CRASHED else [f"exit code {crashed.code}"]
        is_over = (crashed.directory / "result.json").exists()  # then the next start has nothing to write
        again = trials.run(output, job, faults.crash_at, 0, "middle")  # and again, at the first call of the next start
        problems += [] if again.code == (0 if is_over else faults.CRASHED) else [f"then exit code {again.code}"]
        return [f"{calls[point[0]]} {point[1]}: {p}" for p in problems + trials.finished(output, job, whole)]

    failures = trials.each(crash_and_go, points)
    counts.hold("3b", full, "crash at every other file-system call of a run, twice", len(failures), failures)


# ----------------------------------------------------------------------------------------------------------- full disks


@quick_and_full
def test_full_at_every_write_of_a_save(job, whole, stopped, calls, tmp_path, full):
    """Training goes on, the older checkpoint stands, no part of the new one is left, and the next save succeeds."""
    points = [n for n, name, *_ in of_save(calls) if name in ("make_directory", "write", "rename")]
    points = points if full else points[2::4]

    def fill_and_go(call):
        output = tmp_path / str(call)
        trials.copied(stopped(STOPPED), output)
        trial = trials.run(output, job, faults.full_at, call, call)
        pruning = calls[call][2] == "step-000018"
        warning = (
            "an old checkpoint cannot be removed"
            if pruning
            else f"the checkpoint of step {SAVED} cannot be written (No space left on device)"
        )
        problems = [] if trial.code == 0 else [f"exit code {trial.code}: {trial.said[-500:]}"]
        problems += [] if trial.said.count("warning: ") == 1 and warning in trial.said else [trial.said]
        return [
            f"{calls[call]}: {p}" for p in problems + ([] if trial.code else trials.differences(trial.directory, whole))
        ]

    failures = trials.each(fill_and_go, points)
    counts.hold(7, full, "ENOSPC at every write of a save", len(failures), failures)


@quick_and_full
def test_full_and_told_to_stop(job, whole, stopped, calls, tmp_path, full):
    points = [n for n, name, *_ in of_save(calls) if name in ("make_directory", "write")]
    points = points if full else points[3:4]

    def fill_and_stop(call):
        output = tmp_path / str(call)
        directory = trials.copied(stopped(STOPPED), output)
        trial = trials.run(output, job, faults.full_at, call, 10**9, on_disk_full="stop")
        problems = (
            []
            if trial.code == 5 and "Traceback" not in trial.said
            else [f"exit code {trial.code}: {trial.said[-500:]}"]
        )
        problems += (
            []
            if trials.good_steps(directory) == [18, STOPPED]
            else [f"good checkpoints: {trials.good_steps(directory)}"]
        )
        return [f"{calls[call]}: {p}" for p in problems + trials.finished(output, job, whole, on_disk_full="stop")]

    failures = trials.each(fill_and_stop, points)
    counts.hold("7b", full, "ENOSPC and on_disk_full stop: exit code 5, then continued", len(failures), failures)


@quick_and_full
def test_full_when_the_result_is_written(job, whole, stopped, calls, tmp_path, full):
    """Exit code 5, and the same command completes the run."""
    last = calls.index(of_save(calls, 24)[-1])
    first = next(n for n, name, of, _ in calls if of == "adapter.staged")
    points = [n for n in range(first, last + 1) if calls[n][1] in ("make_directory", "write", "rename")]
    points = points if full else points[-1:]

    def fill_and_go(call):
        output = tmp_path / str(call)
        trials.copied(stopped(STOPPED), output)
        trial = trials.run(output, job, faults.full_at, call, 10**9)
        problems = (
            []
            if trial.code == 5 and "Traceback" not in trial.said
            else [f"exit code {trial.code}: {trial.said[-500:]}"]
        )
        return [f"{calls[call]}: {p}" for p in problems + trials.finished(output, job, whole)]

    failures = trials.each(fill_and_go, points)
    counts.hold("7c", full, "ENOSPC while the result is written: exit code 5, then completed", len(failures), failures)


def test_files_that_may_not_grow(job, whole, tmp_path):
    """RLIMIT_FSIZE: the kernel refuses the moments' file from step 13 on, and in the end the run is completed without
    the limit.
    """
    trial = trials.run(tmp_path, job, faults.limit_files, 50_000, 12)
    assert trial.code == 0, trial.said
    assert (
        trial.said.count("warning: ") == 1
        and "the checkpoint of step 15 cannot be written (File too large)" in trial.said
    )
    assert trials.good_steps(trial.directory) == [9, 12] and not trials.stale(trial.directory)
    assert (trial.directory / "adapter/adapter_model.safetensors").read_bytes() == (
        whole / "adapter/adapter_model.safetensors"
    ).read_bytes()
    assert trials.metrics(trial.directory) == trials.metrics(whole)


def test_a_small_file_system_that_somebody_fills(job, whole, tmp_path):
    """A real tmpfs: full from step 8 to step 15; the checkpoints between are not written, nothing else is lost."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        trial = trials.run(place, job, faults.fill_disk, str(place), 7, 15, 6000)
        assert trial.code == 0 and not trials.differences(trial.directory, whole), trial.said
        assert (
            "the checkpoint of step 9 cannot be written (No space left on device); the checkpoint of step 6 stands; "
            "training goes on" in trial.said
        )
        assert (
            trial.said.count("cannot be written") == 1 + trial.said.count("metrics.jsonl cannot")
            and "Traceback" not in trial.said
        )
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_no_room_is_refused_before_the_first_step(job, tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        trial = trials.run(place, job)
        assert trial.code == 5 and "3 checkpoints and the result need 3" in trial.said and "Traceback" not in trial.said
        assert not (trial.directory / "metrics.jsonl").exists()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_run_directory_that_cannot_be_made(job, tmp_path):
    (tmp_path / "file").write_text("")
    trial = trials.run(tmp_path / "output", job, output_dir=str(tmp_path / "file"))
    assert trial.code in (2, 5) and "Traceback" not in trial.said, trial.said


@contextlib.contextmanager
def read_only(path):
    path.chmod(0o500)
    yield
    path.chmod(0o700)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place(job, tmp_path):
    with read_only(tmp_path):
        trial = trials.run(tmp_path / "output", job)
    assert trial.code == 5 and "Traceback" not in trial.said


def test_output_onto_a_full_device_does_not_end_the_run(job, whole, tmp_path):
    trial = trials.run(tmp_path, job, faults.say_to, "/dev/full")
    assert trial.code == 0 and not trials.differences(trial.directory, whole), trial.said
    shutil.rmtree(tmp_path / "run")
