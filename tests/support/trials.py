"""Real runs in children of a warm server, so that hundreds of them can be killed, crashed and starved in minutes."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors.torch import load_file, save_file

from anyqlora.core.files import OLD, REMOVED, STAGED
from anyqlora.data.readers.sources import DEMO as DEMO_ROWS
from anyqlora.models.architectures import DEMO_BASE
from anyqlora.runs.checkpoints import Checkpoints
from anyqlora.testing import server

STEPS, SAVED_EVERY = 24, 3
JOB = {
    "context_length": 128,
    "batch_size": 2,
    "gradient_accumulation_steps": 4,
    "precision": "fp32",
    "max_steps": STEPS,
    "lr": 2e-3,
    "lora_rank": 4,
    "lora_dropout": 0.1,
    "save_steps": SAVED_EVERY,
    "eval_steps": 5,
    "exact_match": False,
    "num_samples": 1,
    "max_new_tokens": 2,
    "backend": "cpu",
    "run_name": "run",
}
ROWS, HELD_OUT = 88, 8  # 11 steps to an epoch: 24 steps end within the third
TIMING = ("seconds", "_per_second", "_bytes")  # ends of the names of what differs from run to run

_lock = threading.Lock()  # multiprocessing's bookkeeping of children is not made for threads
_numbers = itertools.count()


def job(directory: Path) -> dict:
    """Settings of the small job: the embedded base cut to its first layer, some rows of the embedded task.

    Made once, in `directory`.
    """
    base = directory / "base"
    shutil.copytree(DEMO_BASE, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    weights = load_file(base / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, base / "model.safetensors", metadata={"format": "pt"})
    for name, source, count in (("rows.jsonl", "train.jsonl", ROWS), ("held_out.jsonl", "heldout.jsonl", HELD_OUT)):
        lines = (DEMO_ROWS / source).read_text().splitlines(keepends=True)
        (directory / name).write_text("".join(lines[:count]))
    return {
        **JOB,
        "model_name": str(base),
        "dataset": str(directory / "rows.jsonl"),
        "eval_dataset": str(directory / "held_out.jsonl"),
    }


# ------------------------------------------------------------------------------------------------------------- children


class Trial:
    """One run in a child of its own. `fault(*arguments)` is called there before the run begins."""

    def __init__(self, output: Path, settings: dict, fault=None, *arguments, **changes):
        output.mkdir(parents=True, exist_ok=True)
        self.directory, self.log = output / "run", output / f"log-{next(_numbers)}.txt"
        settings = {**settings, "output_dir": str(output), **changes}
        with _lock:
            threads = os.environ["OMP_NUM_THREADS"]  # the server has one
            self.process = server().Process(target=_child, args=(str(self.log), settings, threads, fault, arguments))
            self.process.start()
        self.pid, self.began = self.process.pid, time.monotonic()

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        with _lock:
            return self.process.exitcode

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait(self, seconds: float = 300) -> "Trial":
        until = time.monotonic() + seconds
        while self.code is None:
            if time.monotonic() > until:
                self.process.kill()
                raise TimeoutError(f"after {seconds} s still running:\n{self.said}")
            time.sleep(0.004)
        return self

    def wait_until(self, seen, seconds: float = 120) -> bool:
        """Until `seen()` is true; False when the run ended before."""
        until = time.monotonic() + seconds
        while not seen():
            if self.code is not None or time.monotonic() > until:
                return False
            time.sleep(0.0005)
        return True

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def lines(self) -> int:
        """Complete lines of metrics.jsonl."""
        with contextlib.suppress(OSError):
            return (self.directory / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def is_saving(self) -> bool:
        return any((self.directory / "checkpoints").glob(f"step-*{STAGED}"))

    def hold_in_save(self, part: float) -> bool:
        """Stop the process inside a save, a `part` (0..1) of 30 ms after it began; False when the run ended before."""
        while self.wait_until(self.is_saving):
            time.sleep(part * 0.03)
            self.signal(signal.SIGSTOP)
            if self.is_saving():
                return True
            self.signal(signal.SIGCONT)  # it was over already: the next one
        return False


def _child(log: str, settings: dict, threads: str, fault, arguments) -> None:
    """In the child: as `python train.py` would, with everything that is said in a file."""
    os.environ["OMP_NUM_THREADS"] = threads
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # also where a shell started these tests in the background, and had them ignore it
    from anyqlora.config.resolve import resolve
    from anyqlora.core.errors import explained
    from anyqlora.recipes import sft

    with explained("train.py"):
        if fault:
            fault(*arguments)
        sft.train(resolve(settings, environ={}, origin="test"))


def run(output: Path, settings: dict, fault=None, *arguments, **changes) -> Trial:
    """A trial from its beginning to its end."""
    return Trial(output, settings, fault, *arguments, **changes).wait()


def each(work, items, at_once: int = 2) -> list:
    """`work(item)` of each, some at a time; what each returned, in order."""
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(work, items))


def copied(directory: Path, output: Path) -> Path:
    """A copy of a run directory, to be continued elsewhere."""
    output.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copytree(directory, output / "run"))


# ------------------------------------------------------------------------------------------------------- what they left


def finished(output: Path, settings: dict, whole: Path, **changes) -> list[str]:
    """Continue the run in `output` to its end. Returns what is not as in the run `whole` that was never disturbed."""
    trial = run(output, settings, **changes)
    if trial.code != 0:
        return [f"exit code {trial.code}: {trial.said[-2000:]}"]
    return differences(trial.directory, whole) + (["a traceback"] if "Traceback" in trial.said else [])


def differences(directory: Path, whole: Path) -> list[str]:
    """In what a finished run differs from another: bytes of adapter, moments and samples, fields of metrics and result;
    and what is left.
    """
    checkpoints = Checkpoints(whole / "checkpoints")
    last = checkpoints.path(checkpoints.steps()[-1]).relative_to(whole)
    names = [
        path.relative_to(whole) for folder in ("adapter", "model") for path in sorted((whole / folder).glob("*.*"))
    ]
    names += [last / "adapter_model.safetensors", last / "optimizer.safetensors"] + ["samples.jsonl"] * (
        whole / "samples.jsonl"
    ).exists()
    found = [f"{name} differs" for name in names if (directory / name).read_bytes() != (whole / name).read_bytes()]
    if metrics(directory) != metrics(whole):
        found.append("metrics.jsonl differs")
    if without_times(json.loads((directory / "result.json").read_text())) != without_times(
        json.loads((whole / "result.json").read_text())
    ):
        found.append("result.json differs")
    return found + [f"{path.name} is left" for path in stale(directory)]


def metrics(directory: Path) -> list[dict]:
    return [without_times(json.loads(line)) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def without_times(record: dict) -> dict:
    return {
        name: value for name, value in record.items() if not name.endswith(TIMING) and name != "time_to_first_step_s"
    }


def stale(directory: Path) -> list[Path]:
    """What only a killed process leaves."""
    return [path for path in directory.rglob("*") if path.suffix in (STAGED, OLD, REMOVED)]


def good_steps(directory: Path) -> list[int]:
    """Steps whose checkpoint verifies."""
    checkpoints = Checkpoints(directory / "checkpoints")
    good = []
    for step in checkpoints.steps():
        with contextlib.suppress(Exception):
            checkpoints.read(step)
            good.append(step)
    return good
