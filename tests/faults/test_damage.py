"""Checkpoints that were damaged on disk. Rows 4 and 5 of docs/reliability.md."""

import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys

import pytest

from anyqlora.core.files import MANIFEST, sealed_manifest
from anyqlora.runs.checkpoints import Checkpoints
from tests.support import counts, trials
from tests.support.counts import quick_and_full
from tests.support.paths import ROOT

NEWEST, BEFORE, STOPPED = 20, 18, 20  # the run was stopped at 20, and has 18 and 20
FILES = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json", "manifest.json")


def damages(drawn: random.Random, other, flips: int):
    """(name, damage(path of the checkpoint)) of every way to damage one of its files."""

    def flip(name, at):
        def damage(path):
            content = bytearray((path / name).read_bytes())
            content[int(at * len(content))] ^= 1 << drawn.randrange(8)
            (path / name).write_bytes(content)

        return damage

    def cut(name, part):
        return lambda path: os.truncate(path / name, int(part * (path / name).stat().st_size))

    def swap(one, two):
        def damage(path):
            (path / one).rename(path / "aside")
            (path / two).rename(path / one)
            (path / "aside").rename(path / two)

        return damage

    for name in FILES:
        yield from ((f"{name}: a flipped bit", flip(name, drawn.random())) for _ in range(flips))
        yield from ((f"{name}: cut to {part:.0%}", cut(name, part)) for part in (0.1, 0.5, 0.999))
        yield f"{name}: empty", cut(name, 0)
        yield f"{name}: gone", lambda path, name=name: (path / name).unlink()
        yield f"{name}: a directory", lambda path, name=name: ((path / name).unlink(), (path / name).mkdir())
        if name != "adapter_config.json":  # which is the same in both
            yield f"{name}: of another run", lambda path, name=name: shutil.copy(other / name, path / name)
        for second in FILES[FILES.index(name) + 1 :]:
            yield f"{name} and {second}: swapped", swap(name, second)


@pytest.fixture(scope="module")
def other(job, tmp_path_factory):
    """The checkpoint of the same step of a run with another seed."""
    trial = trials.run(tmp_path_factory.mktemp("other"), job, seed=43, save_total_limit=24, save_steps=NEWEST)
    return trial.directory / "checkpoints" / f"step-{NEWEST:06d}"


@quick_and_full
def test_every_damage_to_the_newest_checkpoint(job, whole, stopped, other, tmp_path, full):
    """Each is found and named by the reader.

    Runs continued with one of each kind (all of them in full) fall back and end alike.
    """
    identity = json.loads((stopped(STOPPED) / "identity.json").read_text())
    drawn = random.Random(4)
    several = list(damages(drawn, other, 20 if full else 4))
    trained = several if full else [several[0], several[-9]]

    def damage_and_go(item):
        number, (name, damage) = item
        output = tmp_path / str(number)
        directory = trials.copied(stopped(STOPPED), output)
        checkpoints = Checkpoints(directory / "checkpoints")
        damage(checkpoints.path(NEWEST))
        restored, rejected = checkpoints.newest_good(identity)
        problems = [] if restored and restored.step == BEFORE and len(rejected) == 1 else ["not detected"]
        problems += (
            []
            if rejected and any(file in rejected[0][1] for file in FILES if file in name or file == MANIFEST)
            else [f"not named: {rejected}"]
        )
        if item[1] in trained:
            trial = trials.run(output, job)
            problems += (
                [] if trial.code == 0 and f"step-{NEWEST:06d} is not used: " in trial.said else [trial.said[-1000:]]
            )
            problems += trials.differences(directory, whole) if trial.code == 0 else []
        shutil.rmtree(output)
        return [f"{name}: {p}" for p in problems]

    failures = trials.each(damage_and_go, enumerate(several))
    counts.hold(
        4,
        full,
        "damage to each file of the newest checkpoint",
        len(failures),
        failures,
        continued_to_the_end=len(trained),
    )


def test_a_damaged_checkpoint_is_no_reason_to_remove_a_good_one(job, whole, stopped, tmp_path):
    """Two rejected checkpoints are newer than what the run saves next: they are not among the two that are kept."""
    directory = trials.copied(stopped(STOPPED), tmp_path)
    checkpoints = Checkpoints(directory / "checkpoints")
    for later in (22, 23):
        shutil.copytree(checkpoints.path(BEFORE), checkpoints.path(later))
    (checkpoints.path(NEWEST) / "state.json").unlink()
    import signal

    from tests.support import faults

    trial = trials.run(tmp_path, job, faults.signal_at, 18, signal.SIGTERM)
    assert trial.code == 75 and trials.good_steps(directory) == [BEFORE, 19], trial.said
    assert trials.finished(tmp_path, job, whole) == []


def test_a_forged_manifest_over_something_else(stopped, tmp_path):
    """Hashes that are right say who wrote a file last, not what it is: a file that is no safetensors is refused all the
    same.
    """
    directory = trials.copied(stopped(STOPPED), tmp_path)
    path = Checkpoints(directory / "checkpoints").path(NEWEST)
    manifest = json.loads((path / MANIFEST).read_text())
    for name in ("adapter_model.safetensors", "state.json"):
        content = b"\x80\x04K\x01."
        (path / name).write_bytes(content)
        manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.pop("self")
    (path / MANIFEST).write_bytes(sealed_manifest(manifest))
    restored, rejected = Checkpoints(directory / "checkpoints").newest_good(None)
    assert restored.step == BEFORE and "not what they are called" in rejected[0][1]


@quick_and_full
def test_all_checkpoints_bad(job, stopped, tmp_path, full):
    """Exit code 3 within 2 s of start-up, of a process that has nothing warm; each is named, and nothing is changed.

    Processor seconds, so that a busy machine does not show.
    """
    failures = []
    for number, damage in enumerate((b"", b"{", None) if full else (b"",)):
        output = tmp_path / str(number)
        directory = trials.copied(stopped(STOPPED), output)
        for path in (directory / "checkpoints").iterdir():
            if damage is None:
                (path / "optimizer.safetensors").unlink()
            else:
                (path / MANIFEST).write_bytes(damage)
        before = {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in output.rglob("*")}
        flags = [f"--{name}={value}" for name, value in job.items()]
        done, took = _train(*flags, f"--output_dir={output}")
        problems = [] if done.returncode == 3 else [f"exit code {done.returncode}: {done.stderr}"]
        problems += [f"{step} is not named" for step in (BEFORE, NEWEST) if f"step-{step:06d}: " not in done.stderr]
        problems += (
            []
            if {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in output.rglob("*")} == before
            else ["something changed"]
        )
        problems += [f"it took {took:.1f} s"] if took > 2.0 + _train("--help")[1] else []
        failures.append(problems)
    counts.hold(5, full, "all checkpoints bad: exit code 3", len(failures), failures)


def _train(*flags: str) -> tuple[subprocess.CompletedProcess, float]:
    """What came of train.py, and the processor seconds that it took."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *flags], capture_output=True, text=True)
    return done, spent() - before
