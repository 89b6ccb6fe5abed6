#!/usr/bin/env python3
"""The table of speed on docs/performance.md, one row for each backend, from benchmarks/results/train-*.json: what was
not measured is left empty.

python benchmarks/table.py
"""

from __future__ import annotations

import json
import re

import harness

from anyqlora.planning.capabilities import CAPABILITIES, Backend

PAGE = harness.ROOT / "docs" / "performance.md"
BETWEEN = re.compile(r"(?<=<!-- speed -->\n).*?(?=\n<!-- /speed -->)", re.DOTALL)
COLUMNS = ("backend", "hardware", "model", "rows", "tokens/s", "trained tokens/s", "peak memory")
MODEL = {
    Backend.CPU: "smollm2-135m",
    Backend.MLX: "demo",
}  # the shape that is shown for a backend (MLX: its Linux CPU build); the others: llama-3-8b


def measured(backend: str) -> dict | None:
    """The result that is shown: rows of one length, every side at its best settings where that was measured."""
    found = [json.loads(path.read_text()) for path in sorted(harness.RESULTS.glob("train-*.json"))]
    found = [
        one
        for one in found
        if one["backend"] == backend
        and one["settings"]["model_name"] == MODEL.get(backend, "llama-3-8b")
        and not one["settings"]["dataset"].startswith("mixed")
    ]
    return max(found, key=lambda one: one["best_settings"], default=None)


def row(backend: str) -> str:
    one = measured(backend)
    if one is None:
        return f"| {backend} |" + " |" * (len(COLUMNS) - 1)
    ours, machine, settings = one["results"][one["fastest"]], one["machine"], one["settings"]
    hardware = machine["gpu"] or f"{machine['processor']}, {machine['cores']} cores"
    cells = (
        backend,
        hardware,
        f"{settings['model_name']}, {settings['quantizer']}, {settings['precision']}, rank {settings['lora_rank']}",
        f"{settings['batch_size']} of {settings['dataset']}",
        f"{harness.median(ours, 'tokens_per_second'):,.0f}",
        f"{harness.median(ours, 'trained_tokens_per_second'):,.0f}",
        f"{harness.median(ours, 'peak_rise_bytes') / 2**30:.1f} GiB",
    )
    return "| " + " | ".join(cells) + " |"


def markdown() -> str:
    return "\n".join(
        [
            "| " + " | ".join(COLUMNS) + " |",
            "|---" * len(COLUMNS) + "|",
            *(row(str(backend)) for backend in CAPABILITIES),
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(BETWEEN.sub(lambda _: markdown(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PAGE.name} has the table")
