"""Real runs in this process, and what they leave on disk."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from anyqlora.config.resolve import resolve
from anyqlora.recipes import sft
from tests.support.paths import ROOT


def run(output, name="run", during=None, **settings) -> Path:
    """Train for real with these settings; returns the run directory.

    `during(step)` is called in each step, just before its batches are read, as a signal from outside would come.
    """
    config = resolve(
        {"output_dir": str(output), "run_name": name, "backend": "cpu", **settings}, environ={}, origin="test"
    )
    loop = sft.train_loop
    sft.train_loop = lambda session, make_engine: loop(_watched(session, during), make_engine)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            sft.train(config)
    finally:
        sft.train_loop = loop
    return Path(output) / name


def fresh(output, name="run", **settings) -> Path:
    """The same in a process of its own, whose memory nothing else has touched."""
    settings = {"output_dir": output, "run_name": name, "backend": "cpu", **settings}
    flags = [
        word
        for key, value in settings.items()
        for word in (f"--{key}", str(value).lower() if isinstance(value, bool) else str(value))
    ]
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(output) / name


def _watched(run, during):
    if during:
        stream = run.stream

        class Watched(type(stream)):
            def __getitem__(self, step):
                during(step)
                return super().__getitem__(step)

        run.stream = Watched.__new__(Watched)
        run.stream.__dict__.update(stream.__dict__)
    return run


def metrics(directory: Path) -> list[dict]:
    """The steps of metrics.jsonl."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def evaluations(directory: Path) -> list[dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == "evaluation"]


def result(directory: Path) -> dict:
    return json.loads((directory / "result.json").read_text())


def adapter(directory: Path) -> dict:
    return load_file(directory / "adapter" / "adapter_model.safetensors")


def distance(a: dict, b: dict, start: dict) -> float:
    """|a - b| / |a - start|, 2-norm over all tensors (SPEC 8)."""
    assert a.keys() == b.keys() == start.keys()
    far = sum((a[k].double() - b[k].double()).square().sum() for k in a).sqrt()
    return float(far / sum((a[k].double() - start[k].double()).square().sum() for k in a).sqrt())
