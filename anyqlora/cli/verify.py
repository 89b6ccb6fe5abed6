"""python -m anyqlora verify --resume RUN: proves on a run's own settings that a stopped and resumed run ends like one
that was never stopped.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from anyqlora.cli import arguments, parity
from anyqlora.config.resolve import from_file
from anyqlora.config.schema import AUTO, settings_with
from anyqlora.core.errors import RunError, UsageError
from anyqlora.core.registry import ADAPTER
from anyqlora.core.terminal import printable
from anyqlora.reporting.summary import read_lines
from anyqlora.runs.checkpoints import MOMENTS, Checkpoints

USAGE = """usage: python -m anyqlora verify --resume RUN [--steps N] [--backend NAME]
                                 [--model_name BASE] [--offline true]
                                 [--trust_remote_code true]

Trains N steps (8) with RUN's settings in a temporary directory, twice: whole, and
stopped by SIGTERM on the way and resumed. Compares adapter, optimizer state and
metrics byte for byte. Exit code 0: equal; 1: not."""
SETTINGS = ("backend", "model_name", "offline", "trust_remote_code")
TIMING = ("seconds", "_per_second", "_bytes")  # ends of the names of what differs from run to run


def main(argv: list[str]) -> int:
    if arguments.wants_help(argv):
        print(USAGE, parity.USAGE, sep="\n\n")
        return 0
    if "--parity" in argv:
        return parity.main([word for word in argv if word != "--parity"])
    name, values = arguments.read(argv, {"resume": str, "steps": float}, SETTINGS)
    directory = Path(values.pop("resume", "") or name)
    steps = int(values.pop("steps", 8))
    if not (directory / "config.resolved.yaml").is_file():
        raise UsageError(
            "no run directory: it has no config.resolved.yaml",
            where=str(directory),
            cure="--resume RUN, the directory of a run",
        )
    if steps < 2:
        raise UsageError(
            "a run of one step cannot be stopped on the way", where="command line: --steps", cure="--steps 8"
        )
    with tempfile.TemporaryDirectory(prefix="anyqlora-verify-") as place:
        command = command_of(directory, Path(place), steps, values)
        expect(train(command, "whole"), 0, "the run that is never stopped")
        stopped_at = stop(command, Path(place) / "stopped")
        expect(train(command, "stopped"), 0, "the run that was stopped and resumed")
        different = differences(Path(place) / "whole", Path(place) / "stopped")
    for line in different:
        print(printable(f"differs: {line}"))
    verdict = "NOT equal" if different else "equal, byte for byte"
    print(
        printable(
            f"{directory}: {steps} steps whole, and stopped after {stopped_at} and resumed: adapter, optimizer state "
            f"and "
            f"metrics are {verdict}"
        )
    )
    return 1 if different else 0


def command_of(directory: Path, place: Path, steps: int, values: Mapping) -> list[str]:
    """The command that trains a few steps with the run's settings, without --run_name."""
    stated = from_file(directory / "config.resolved.yaml")
    held_out = stated["eval_dataset"][0] or float(stated["eval_fraction"][0])
    changes = {
        "output_dir": place,
        "max_steps": steps,
        "save_steps": 2,
        "save_total_limit": 2,
        "load_best_model_at_end": False,
        "eval_steps": max(steps // 2, 1) if held_out else 0,
        "early_stopping_patience": 0,
        "profile": False,
        "profile_memory": False,
        "save_model": True,
        "log_to": "none",
        "log_every_n_steps": 1,
        **values,
    }
    if "backend" in values:  # another one has its own ways of computing the same
        changes = {**dict.fromkeys(settings_with("per_backend"), AUTO), **changes}
    flags = [f"--{key}={value}" for key, value in changes.items()]
    return [sys.executable, "-m", "anyqlora", "train", f"--config={directory / 'config.resolved.yaml'}", *flags]


def train(command: list[str], name: str) -> subprocess.CompletedProcess:
    return subprocess.run([*command, f"--run_name={name}"], capture_output=True, text=True)


def stop(command: list[str], directory: Path) -> int:
    """Start the run, and stop it after its first steps. Returns the step that it saved."""
    process = subprocess.Popen(
        [*command, f"--run_name={directory.name}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    metrics = directory / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and b'"lr"' in metrics.read_bytes()):
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate()[1]
    expect(subprocess.CompletedProcess(command, process.returncode, "", stderr), 75, "the run that was to be stopped")
    return Checkpoints(directory / "checkpoints").steps()[-1]


def expect(done: subprocess.CompletedProcess, code: int, what: str) -> None:
    if done.returncode == 0 != code:
        raise RunError(f"{what} was over before it could be", cure="more --steps")
    if done.returncode != code:
        raise RunError(f"{what} ended with {done.returncode}: {done.stderr.strip()}")


def differences(one: Path, other: Path) -> list[str]:
    """What two finished runs differ in, but for times and memory."""
    last = max(Checkpoints(one / "checkpoints").steps())
    here, there = (Checkpoints(run / "checkpoints").path(last) for run in (one, other))
    different = [
        f"{name} of step {last}"
        for name in (ADAPTER, MOMENTS)
        if not (there / name).is_file() or (here / name).read_bytes() != (there / name).read_bytes()
    ]
    folder = "adapter" if (one / "adapter").is_dir() else "model"
    different += [
        f"{folder}/{path.name}"
        for path in sorted((one / folder).glob("*.safetensors"))
        if path.read_bytes() != (other / folder / path.name).read_bytes()
    ]
    lines = [records(run) for run in (one, other)]
    if len(lines[0]) != len(lines[1]):
        different.append(f"metrics.jsonl: {len(lines[0])} lines against {len(lines[1])}")
    return different + [f"metrics.jsonl: {a} against {b}" for a, b in zip(*lines, strict=False) if a != b]


def records(run: Path) -> list[dict]:
    return [
        {name: value for name, value in line.items() if not name.endswith(TIMING)}
        for line in read_lines(run / "metrics.jsonl")
    ]
