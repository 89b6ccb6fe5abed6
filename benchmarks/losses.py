#!/usr/bin/env python3
"""How far are the losses of fifty steps from TRL's in bf16, and how far is either from float32, over several seeds?

    python benchmarks/losses.py               (the embedded base, NF4, rank 16, four rows a step)

One seed is one start of the adapters and one order of the rows, the same for all sides. In bf16 a run's losses leave
those of float32 by chance as much as by fault, and TRL's do, too: a difference means something only beside TRL's own.
Float32 is ours, which `train_speed.py --shape demo --precision fp32` finds equal to TRL's.

PEFT rounds a layer's output twice, the frozen layer's before LoRA's is added, and ours once. Two sides more say what
that makes: ours with PEFT's own modules, which rounds twice, and TRL with layers that round once (`peers/trl_once.py`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import harness
from train_speed import LEARNED, LOSS

OURS = {"anyqlora": "full", "anyqlora int8_backward": "int8_backward", "anyqlora int8": "int8"}  # and its products
MODULES, PEER, ONCE, EXACT = "anyqlora modules", "trl", "trl once", "float32"
PAIRS = [
    *((name, PEER) for name in (*OURS, MODULES)),
    *((name, ONCE) for name in OURS),
    *((name, EXACT) for name in (*OURS, MODULES, PEER, ONCE)),
]


def sides(seed: int, steps: int) -> dict[str, list[str]]:
    """The command of each side."""

    def command(script: str, *arguments: dict, **settings: object) -> list[str]:
        asked = {
            "model_name": str(harness.make_model(harness.ROOT, "demo")),
            "dataset": "demo",
            "quantizer": "nf4",
            "adapter": "lora",
            "precision": "bf16",
            "batch_size": 4,
            "max_steps": steps,
            "lr": 2e-4,
            "lr_scheduler": "constant",
            "warmup_steps": 0,
            "weight_decay": 0.0,
            "lora_rank": 16,
            "lora_alpha": 32,
            "lora_dropout": 0.0,
            "context_length": 512,
            "use_gradient_checkpointing": False,
            "seed": seed,
            **settings,
        }
        return [sys.executable, f"benchmarks/peers/{script}.py", json.dumps(asked), "1", *map(json.dumps, arguments)]

    return {
        **{name: command("ours", frozen_matmul=products) for name, products in OURS.items()},
        MODULES: command("ours", fused_lora=False),
        PEER: command("trl", {}),
        ONCE: command("trl_once", {}),
        EXACT: command("ours", precision="fp32"),
    }


def apart(losses: list[float], others: list[float]) -> dict[str, float]:
    """Relative differences: of the step that differs most, the root of the mean square, and of the means."""
    each = [x / y - 1 for x, y in zip(losses, others, strict=True)]
    return {
        "worst": max(map(abs, each)),
        "rms": statistics.fmean(d * d for d in each) ** 0.5,
        "mean": statistics.fmean(losses) / statistics.fmean(others) - 1,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", type=int, default=8)
    p.add_argument("--steps", type=int, default=50)
    a = p.parse_args()

    losses, found = [], {f"{one} from {other}": [] for one, other in PAIRS}
    for seed in range(a.seeds):
        losses.append(
            {
                name: results[0]["losses"]
                for name, results in harness.alternate(sides(seed, a.steps), 1, quiet=True).items()
            }
        )
        for one, other in PAIRS:
            found[f"{one} from {other}"].append(apart(losses[-1][one], losses[-1][other]))
        print(
            f"seed {seed}: worst step, mean:  "
            + "  ".join(f"{name} {each[-1]['worst']:.2%} {each[-1]['mean']:+.3%}" for name, each in found.items()),
            flush=True,
        )

    tenth = max(1, a.steps // 10)
    left = statistics.median(
        statistics.fmean(run[PEER][-tenth:]) / statistics.fmean(run[PEER][:tenth]) for run in losses
    )
    print(
        f"\n{a.steps} steps, {left:.0%} of TRL's first loss "
        f"left{'' if left <= LEARNED else ': TOO MUCH, nothing was learned'}; over {a.seeds} seeds:"
    )
    per_step, mean = LOSS["bf16"]
    for name, each in found.items():
        worst, means = [d["worst"] for d in each], [abs(d["mean"]) for d in each]
        print(
            f"{name:38} worst step {statistics.median(worst):.2%} ({min(worst):.2%}..{max(worst):.2%}), within "
            f"{per_step:.0%} in {sum(d <= per_step for d in worst)} of {a.seeds}; "
            f"rms {statistics.median(d['rms'] for d in each):.2%}; mean {statistics.median(means):.3%} (at most "
            f"{max(means):.3%}), "
            f"within {mean:.1%} in {sum(d <= mean for d in means)}"
        )
    harness.write(
        "losses-demo-nf4-bf16-seeds",
        {
            "question": __doc__.splitlines()[0],
            "steps": a.steps,
            "left_of_first_loss": left,
            "apart": found,
            "losses": losses,
        },
    )


if __name__ == "__main__":
    main()
