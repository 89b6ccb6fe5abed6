"""python -m anyqlora verify --parity: the same tiny job on several backends of this machine, step by step side by
side.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from anyqlora.cli import arguments
from anyqlora.core.errors import RunError, UsageError
from anyqlora.core.terminal import printable
from anyqlora.reporting.summary import read_lines
from anyqlora.training.schedule import uniform_start

USAGE = """usage: python -m anyqlora verify --parity [--backends cpu,mlx]
                                 [--quantizer none|affine4|nf4] [--steps N]

Trains the embedded base on the embedded task for N steps (20) on each backend, in
float32, from the same start: two micro-batches a step, rows of several lengths, dropout
0. Prints the relative differences of each step's loss and gradient norm from the first
backend's, and how far the adapters end from each other, as a part of the way they went
(after a few steps that is mostly AdamW's first ones, which are as long where rounding
alone makes a gradient). Exit code 0: within the bounds; 1: not."""
JOB = {
    "model_name": "demo",
    "dataset": "demo",
    "train_type": "lora",
    "precision": "fp32",
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "lora_dropout": 0.0,
    "lr": 2e-4,
    "warmup_steps": 3,
    "weight_decay": 0.01,
    "context_length": 128,
    "save_steps": 0,
    "log_to": "none",
    "use_gradient_checkpointing": False,
    "spike_guard": 0,
    "strategy": "single",
}
SEED = 42
BOUNDS = {
    "none": {"loss": 1e-6, "grad_norm": 1e-5, "adapter": 1e-4},
    "packed": {"loss": 1e-5, "grad_norm": 1e-4, "adapter": 1e-3},
}


def main(argv: list[str]) -> int:
    _, values = arguments.read(argv, {"backends": str, "quantizer": str, "steps": float})
    backends = [name.strip() for name in values.get("backends", "cpu,mlx").split(",") if name.strip()]
    quantizer, steps = values.get("quantizer", "none"), int(values.get("steps", 20))
    if len(backends) < 2 or len(set(backends)) < len(backends) or steps < 1:
        raise UsageError(
            "two backends or more, each once, and a step or more",
            where=arguments.WHERE,
            cure="--backends cpu,mlx --steps 20",
        )
    settings = {
        **JOB,
        "max_steps": steps,
        "quantizer": quantizer,
        "seed": SEED,
        "train_type": "lora" if quantizer == "none" else "qlora",
    }
    with tempfile.TemporaryDirectory(prefix="anyqlora-parity-") as place:
        for backend in backends:
            train({**settings, "backend": backend, "output_dir": place, "run_name": backend})
        metrics = {backend: read_metrics(Path(place) / backend) for backend in backends}
    first = backends[0]
    agree = True
    for other in backends[1:]:
        far = differences(metrics[first], metrics[other])
        print(*table(first, other, metrics[first][0], metrics[other][0]), sep="\n")
        bounds = BOUNDS["none" if quantizer == "none" else "packed"]
        within = all(far[name] <= bound for name, bound in bounds.items())
        agree &= within
        print(
            f"{first} and {other}: loss within {far['loss']:.1e} ({bounds['loss']:.0e}), gradient norm within "
            f"{far['grad_norm']:.1e} "
            f"({bounds['grad_norm']:.0e}), adapter within {far['adapter']:.1e} ({bounds['adapter']:.0e}) of the way it "
            f"went: "
            f"{'they agree' if within else 'THEY DO NOT AGREE'}\n"
        )
    return 0 if agree else 1


def train(settings: dict) -> None:
    """One run in a process of its own. Raises RunError with what it said when it fails."""
    flags = [f"--{key}={value}" for key, value in settings.items()]
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "anyqlora", "train", *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    if done.returncode:
        kind = UsageError if done.returncode == UsageError.exit_code else RunError
        raise kind(f"{settings['backend']}: {done.stderr.strip().removeprefix('anyqlora train: ')}")


def read_metrics(run: Path) -> tuple[list[dict], dict[str, np.ndarray]]:
    """The steps of a run, and its adapter."""
    return [line for line in read_lines(run / "metrics.jsonl") if "lr" in line], load_file(
        run / "adapter" / "adapter_model.safetensors"
    )


def differences(one: tuple, other: tuple) -> dict[str, float]:
    """The largest relative difference of a step's loss and gradient norm, and |a - b| / |a - start| of the adapters
    (2-norm over all).
    """
    steps = list(zip(one[0], other[0], strict=True))
    worst = {name: max(abs(b[name] / a[name] - 1) for a, b in steps) for name in ("loss", "grad_norm")}
    far = math.sqrt(sum(np.square(one[1][name].astype(np.float64) - other[1][name]).sum() for name in one[1]))
    way = math.sqrt(
        sum(np.square(value.astype(np.float64) - start(name, value.shape)).sum() for name, value in one[1].items())
    )
    return {**worst, "adapter": far / way}


def start(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Where LoRA's tensor of this name starts."""
    owner, is_a, _ = name.partition(".lora_A.")
    return uniform_start(owner, shape, 1 / math.sqrt(shape[1]), SEED) if is_a else np.zeros(shape, np.float32)


def table(first: str, other: str, ours: list[dict], theirs: list[dict]) -> list[str]:
    """A line for each step."""
    lines = [
        f"{'step':>4}  {'loss ' + first:>12}  {'loss ' + other:>12}  {'differs':>8}  {'norm ' + first:>12}  "
        f"{'norm ' + other:>12}  {'differs':>8}"
    ]
    for a, b in zip(ours, theirs, strict=True):
        cells = [
            f"{a[name]:12.6f}  {b[name]:12.6f}  {abs(b[name] / a[name] - 1):8.1e}" for name in ("loss", "grad_norm")
        ]
        lines.append(f"{a['step']:4}  " + "  ".join(cells))
    return list(map(printable, lines))
