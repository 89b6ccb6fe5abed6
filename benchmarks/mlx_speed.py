#!/usr/bin/env python3
"""How fast do we train on MLX, and on torch, against mlx-lm on the same 4-bit weights and rows?

    python benchmarks/mlx_speed.py                                   (MLX's Linux CPU build: the embedded base)
    python benchmarks/mlx_speed.py --shape smollm2-135m --length 512      (a Mac)

All read one directory in MLX's own 4 bits (affine4), and compute in bf16, the dtype of its other weights; rank 16 on
all linears with float32 adapters, AdamW, no recomputation, each side with its own start of the adapter and its own
order of the rows. Each side is a fresh process, the sides alternate, and a figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

import harness
import torch


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", default="demo", choices=["demo", *harness.SHAPES])
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--length", type=int, default=128, help="tokens of every row")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--warmup", type=int, default=4, help="steps that are not timed")
    p.add_argument("--rounds", type=int, default=5)
    a = p.parse_args()

    work = harness.scratch()
    whole, packed = harness.make_model(work / "model", a.shape), work / "affine4"
    rows = harness.make_rows(work / "rows.jsonl", whole, a.batch * a.steps, a.length)
    subprocess.run(
        [sys.executable, "-m", "anyqlora", "quantize", str(whole), "--to", "affine4", "--out", str(packed)],
        check=True,
        cwd=harness.ROOT,
    )
    settings = {
        "model_name": str(packed),
        "dataset": str(rows),
        "precision": "bf16",
        "adapter": "lora",
        "batch_size": a.batch,
        "max_steps": a.steps,
        "lr": 2e-4,
        "lr_scheduler": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "lora_rank": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "context_length": a.length,
        "use_gradient_checkpointing": False,
    }

    def ours(backend: str) -> list[str]:
        return [
            sys.executable,
            "benchmarks/peers/ours.py",
            json.dumps({**settings, "backend": backend}),
            str(a.warmup),
            json.dumps(["transformers", "mlx_lm"]),
        ]

    found = harness.alternate(
        {
            "anyqlora": ours("mlx"),
            "anyqlora on torch": ours("mps" if torch.backends.mps.is_available() else "cpu"),
            "mlx-lm": [sys.executable, "benchmarks/peers/mlx_lora.py", json.dumps(settings), str(a.warmup)],
        },
        a.rounds,
    )
    print()
    ratios = {}
    for name in ("anyqlora", "anyqlora on torch"):
        rounds = [
            x["trained_tokens_per_second"] / y["trained_tokens_per_second"]
            for x, y in zip(found[name], found["mlx-lm"], strict=True)
        ]
        ratios[name] = statistics.median(rounds)
        memory, own = (
            harness.median(found[name], key) / harness.median(found["mlx-lm"], key)
            for key in ("peak_rise_bytes", "peak_memory_bytes")
        )
        print(
            f"{name}: {ratios[name]:.2f} times the speed of mlx-lm (rounds {min(rounds):.2f}..{max(rounds):.2f}), "
            f"{memory:.2f} of its process's "
            f"memory{f', {own:.2f} of what MLX counts' if name == 'anyqlora' else ''}"
        )
    print("losses of the last step:", *(f"{name} {sides[0]['losses'][-1]:.3f}" for name, sides in found.items()))
    harness.write(
        f"train-mlx-{a.shape}-affine4-bf16-{a.length}",
        {
            "question": __doc__.splitlines()[0],
            "results": found,
            "backend": "mlx",
            "fastest": "anyqlora",
            "best_settings": False,
            "ratios": ratios,
            "settings": {**settings, "model_name": a.shape, "dataset": f"{a.length} tokens", "quantizer": "affine4"},
        },
    )


if __name__ == "__main__":
    main()
