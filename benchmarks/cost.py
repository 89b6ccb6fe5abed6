#!/usr/bin/env python3
"""What does a training step cost as rows get longer, the rank higher, the batch larger and the model deeper?

    python benchmarks/cost.py                                                     (a CPU)
    python benchmarks/cost.py --shape llama-3-8b --length 2048 --batch 2          (a GPU)

One of the four is varied at a time, each value in a fresh process. Writes the numbers, and a plot of each, to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import sys
from html import escape

import harness

FACTORS = (0.25, 0.5, 1, 2)
RANKS = (4, 16, 64, 128)


def cases(a: argparse.Namespace) -> dict[str, list[dict]]:
    """What is varied -> (length, rank, batch, layers) of each run."""
    base = {
        "length": a.length,
        "rank": a.rank,
        "batch": a.batch,
        "layers": harness.SHAPES[a.shape]["num_hidden_layers"],
    }
    varied = {
        name: sorted({max(1, int(base[name] * factor)) for factor in FACTORS}) for name in ("length", "batch", "layers")
    } | {"rank": RANKS}
    return {name: [{**base, name: value} for value in values] for name, values in varied.items()}


def measure(a: argparse.Namespace, case: dict) -> dict:
    work = harness.scratch()
    harness.SHAPES["cut"] = {**harness.SHAPES[a.shape], "num_hidden_layers": case["layers"]}
    directory = harness.make_model(work / "model", "cut")
    dataset = harness.make_rows(work / "rows.jsonl", directory, case["batch"] * a.steps, case["length"])
    settings = {
        "model_name": str(directory),
        "dataset": str(dataset),
        "quantizer": "nf4",
        "adapter": "lora",
        "precision": "bf16",
        "lora_rank": case["rank"],
        "lora_dropout": 0.0,
        "batch_size": case["batch"],
        "context_length": case["length"],
        "max_steps": a.steps,
    }
    found = harness.alternate(
        {"ours": [sys.executable, "benchmarks/peers/ours.py", json.dumps(settings), "1"]}, 1, quiet=True
    )["ours"][0]
    return {**case, **{key: found[key] for key in ("tokens_per_second", "peak_rise_bytes", "backend")}}


def svg(title: str, xs: list[float], panels: dict[str, list[float]]) -> str:
    """A drawing of one panel for each series, from 0 up; the values of x stand at equal distances."""
    width, height, left, top = 320, 160, 30, 50
    parts = [f'<text x="{left}" y="22" font-size="15">{escape(title)}</text>']
    for number, (name, ys) in enumerate(panels.items()):
        x0 = left + number * (width + 50)
        at = [(x0 + (i + 0.5) * width / len(xs), top + 20 + height * (1 - y / max(ys))) for i, y in enumerate(ys)]
        parts += [
            f'<text x="{x0}" y="{top - 6}" fill="#555">{escape(name)}</text>',
            f'<path d="M{x0} {top + 20 + height}h{width}" stroke="#999"/>',
            f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}" fill="none" stroke="#1f6feb" '
            f'stroke-width="2"/>',
        ]
        for (x, y), shown, value in zip(at, xs, ys, strict=True):
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#1f6feb"/>',
                f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle">{value:,.0f}</text>',
                f'<text x="{x:.1f}" y="{top + height + 38}" text-anchor="middle">{shown:g}</text>',
            ]
    size = f"{left + len(panels) * (width + 50)} {top + height + 50}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", default="smollm2-135m", choices=list(harness.SHAPES))
    p.add_argument("--length", type=int, default=512)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--steps", type=int, default=4, help="the first is not timed")
    a = p.parse_args()
    done: dict[tuple, dict] = {}  # the middle of the four is the same run
    found: dict[str, list[dict]] = {}
    for name, varied in cases(a).items():
        found[name] = []
        for case in varied:
            key = tuple(case.values())
            done[key] = one = done.get(key) or measure(a, case)
            found[name].append(one)
            print(
                f"{name:>6} {case[name]:5}: {one['tokens_per_second']:8.0f} tokens/s  "
                f"{one['peak_rise_bytes'] / 2**20:7.0f} MiB",
                flush=True,
            )
    backend = found["length"][0]["backend"]
    path = harness.write(
        f"cost-{backend}", {"question": __doc__.splitlines()[0], "shape": a.shape, "steps": a.steps, "results": found}
    )
    for name, results in found.items():
        fixed = ", ".join(f"{key} {value}" for key, value in results[0].items() if key in found and key != name)
        panels = {
            "tokens/s": [one["tokens_per_second"] for one in results],
            "peak memory, MiB": [one["peak_rise_bytes"] / 2**20 for one in results],
        }
        path.with_name(f"cost-{backend}-{name}.svg").write_text(
            svg(f"{a.shape} by {name} ({fixed})", [one[name] for one in results], panels)
        )


if __name__ == "__main__":
    main()
