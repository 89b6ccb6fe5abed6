#!/usr/bin/env python3
"""How often runs were killed, starved and damaged, and how often they ended as if nothing had happened.

python benchmarks/faults.py              every trial (python -m pytest -m slow tests/faults), then the document
python benchmarks/faults.py --document   docs/reliability.md from the counts in benchmarks/results/faults-*.json
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCUMENT = ROOT / "benchmarks" / "results", ROOT / "docs" / "reliability.md"
ALSO = {
    "inside_a_save": "{} of them inside a save",
    "slowest_seconds": "the slowest answered in {} s",
    "continued_to_the_end": "{} of them trained on to the end",
    "clean_steps": "{} clean steps",
    "false_skips": "{} of those skipped",
    "files_searched": "{} files searched",
    "percent": "{} %",
    "resident_growth_mib": "resident memory grew by {} MiB",
    "most_checkpoint_directories": "at most {} checkpoint directories",
    "open_files": "open files between {}",
}
MUST = {
    "1": "adapter, optimizer state, metrics and samples equal byte for byte, but for times, rates and memory",
    "1b": "the same, for each kind",
    "2": "the same final adapter; at most one save interval lost; no stage left; no traceback",
    "3": "the checkpoint before verifies, the next start resumes, the end is identical",
    "3b": "the same, with a second crash at the first call of the next start",
    "4": "detected and named; the run falls back; the end is identical",
    "5": "exit code 3 within 2 s of start-up, each named, nothing changed",
    "6": "exit code 75 or 130 within one step and save; the end is identical",
    "6b": "exit code 130 at once",
    "6c": "a checkpoint for each; the end is identical",
    "7": "one warning; training goes on; older checkpoints intact; no partial file left",
    "7b": "exit code 5; older checkpoints intact; the same command ends identically",
    "7c": "exit code 5; the same command completes the run",
    "8": "caught before the update, rows named, nothing of it saved, never shown as 0",
    "8b": "exit code 4",
    "9": "skipped, and no clean step is",
    "10": "the whole step is run again; identical to a run with the smaller micro-batch from that step on; the new "
    "size is in the checkpoint",
    "10b": "the same",
    "10c": "goes on with the smaller micro-batch; the end is identical",
    "11": "the same adapter, byte for byte",
    "12": "the same adapter, configuration and identity, byte for byte",
    "13": "none is run, none ends in a traceback",
    "13a": "none is run, none ends in a traceback",
    "13b": "none is found",
    "14": "less than 20 MiB of growth after warm-up, open files flat, never more than 3 directories",
    "15": "at most 2 %",
}
TEXT = """# Reliability

A run that is stopped, killed, out of memory, out of disk or damaged on disk goes on and ends in the same bytes: {held}
of {trials} trials did what they must.

Every line was counted by one command, `python -m pytest -m slow tests/faults`, and this page was written from its
counts by `python benchmarks/faults.py --document`. A trial is a real run in a process of its own: NF4 weights (the
embedded model, cut to its first layer), LoRA with dropout 0.1, shuffled rows, 4 micro-batches to a step, 24 steps over
three epochs, evaluated every 5 steps and saved every 3. What it must equal is the run that was never disturbed.

| # | what is done to a run | held | must hold |
|---|---|---|---|
{rows}

On your own run: `python -m anyqlora verify --resume RUN` trains a few steps with its settings, whole, and stopped and
resumed, and compares.

## The limits of "byte for byte"

- It holds on the same machine, with the same versions, the same number of threads, the same precision and the same
  micro-batch. What of these has changed since a checkpoint was written is printed when a run goes on from it: it goes
  on with the same rows, schedule and random numbers, but floating-point sums in another order differ in their last
  bits.
- Another micro-batch splits the sums of a step otherwise. So a run that ran out of memory and went on with half the
  rows at a time equals, byte for byte, one that had half of them from that step on, and one that never ran out within
  rounding.
- Everything above was counted on CPUs. On GPUs `deterministic true` (the default) asks torch for deterministic
  algorithms only, attention's backward among them; where an operation has none, torch warns, and two runs may differ.
  {gpu}
- A checkpoint is synced file by file, then its directory, then its name, so that a power failure leaves it whole or
  absent; that order is tested, real power failures are not. Disks that lie about what they have written are beyond
  this.
- metrics.jsonl is synced when a checkpoint is saved. After a power failure the lines since then are gone, and so are
  the steps.
- `load_best_model_at_end true` ends with the best step that has a checkpoint. Where the disk was full for that one, or
  it was damaged since, a warning says so and another step is what the run ends with.
- SIGKILL loses what was trained since the last checkpoint: at most `save_steps` steps. SIGTERM and SIGINT lose nothing.
- A bit that flips in memory before it is hashed is saved as it is. Non-finite numbers are refused; other wrong ones
  look like any other.
"""
GPU = "It was not counted there."


def document() -> str:
    """docs/reliability.md."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob("faults-*.json")]
    found.sort(key=lambda one: (int(re.match(r"\d+", one["row"]).group()), one["row"]))
    rows = []
    for one in found:
        more = [
            form.format(" and ".join(map(str, value)) if isinstance(value, list) else value)
            for name, form in ALSO.items()
            if (value := one.get(name)) is not None
        ]
        rows.append(
            f"| {one['row']} | {'; '.join([one['trial'], *more])} | {one['held']} of {one['trials']} | "
            f"{MUST[one['row']]} |"
        )
    held, trials = (sum(one[name] for one in found) for name in ("held", "trials"))
    return TEXT.format(rows="\n".join(rows), gpu=GPU, held=held, trials=trials)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--document", action="store_true", help="only write the document from the counts that are there")
    code = (
        0
        if asked.parse_args().document
        else subprocess.call([sys.executable, "-m", "pytest", "-m", "slow", "tests/faults"], cwd=ROOT)
    )
    DOCUMENT.write_text(document(), encoding="utf-8")
    print(f"{DOCUMENT.relative_to(ROOT)} is written")
    return code


if __name__ == "__main__":
    sys.exit(main())
