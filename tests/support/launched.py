"""Runs that train.py starts as several processes, and what is done to those processes from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.support.paths import ROOT

JOB = {
    "backend": "cpu",
    "strategy": "ddp",
    "world_size": 2,
    "precision": "fp32",
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "context_length": 128,
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "lora_target_modules": "q_proj,v_proj",
    "max_steps": 30,
    "save_steps": 3,
    "eval_dataset": "",
    "log_to": "stdout",
    "model_name": "demo",
    "dataset": "demo",
    "run_name": "run",
}


def command(output, **settings) -> list[str]:
    flags = [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in {**JOB, **settings}.items()
        if value != ""
    ]
    return [sys.executable, str(ROOT / "train.py"), f"--output_dir={output}", *flags]


def environment() -> dict[str, str]:
    """As on a machine where nobody has set anything of a launcher."""
    return {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        "OMP_NUM_THREADS": "1",
    }


class Launched:
    """A run under way. Its output goes to files, so that nothing waits for a reader."""

    def __init__(self, output: Path, **settings):
        output.mkdir(parents=True, exist_ok=True)
        self.output, self.paths = output, (output / "out.txt", output / "err.txt")
        with open(self.paths[0], "w") as out, open(self.paths[1], "w") as err:
            self.process = subprocess.Popen(
                command(output, **settings), stdout=out, stderr=err, env=environment(), cwd=ROOT
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait()

    @property
    def directory(self) -> Path:
        """The only one that the run has made, whatever its name; it may not have yet."""
        return next((path for path in self.output.iterdir() if path.is_dir()), self.output / "run")

    def process_group(self) -> list[psutil.Process]:
        """The processes of the run, in the order of their ranks."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = [
                child
                for child in psutil.Process(self.process.pid).children()
                if "anyqlora.recipes.worker" in child.cmdline()
            ]
            return sorted(found, key=lambda child: int(child.environ()["RANK"]))
        return []

    def steps(self) -> int:
        """Steps that are logged."""
        path = self.directory / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def reach(self, step: int, within: float = 90) -> None:
        until = time.monotonic() + within
        while self.steps() < step:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < until, f"{self.steps()} steps: {self.said()}"
            time.sleep(0.02)

    def end(self, within: float = 120) -> int:
        return self.process.wait(within)

    def said(self) -> str:
        """What came on standard error."""
        return self.paths[1].read_text()

    def wait_for(self, words: str, within: float) -> float:
        """Seconds until `words` are on standard error."""
        began = time.monotonic()
        while words not in self.said():
            assert time.monotonic() - began < within, self.said()
            time.sleep(0.02)
        return time.monotonic() - began


INT, KILL, STOP, TERM, USR1 = signal.SIGINT, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGUSR1
