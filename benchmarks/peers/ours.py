"""One measurement of ours: a real run in this process. Prints one JSON line last."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

from peers.peak import Peak  # noqa: E402

from anyqlora.config.resolve import resolve  # noqa: E402
from anyqlora.planning import machine  # noqa: E402
from anyqlora.recipes import sft  # noqa: E402

AS_THE_OTHERS = ("bitsandbytes", "peft", "transformers.trainer")  # before memory is read


def main(settings: dict, warmup: int, imports: tuple[str, ...] = AS_THE_OTHERS) -> dict:
    machine.observe()  # torch comes first and in this way in every run: with it comes how threads wait for each other
    for name in imports:
        importlib.import_module(name)
    imported = time.time() - psutil.Process().create_time()
    with tempfile.TemporaryDirectory() as output:
        peak = Peak()
        result = sft.train(
            resolve(
                {**settings, "output_dir": output, "run_name": "run", "save_steps": 0, "log_to": "none"}, environ={}
            )
        )
        lines = [json.loads(line) for line in (Path(output) / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    timed = steps[warmup:]
    seconds = sum(s["seconds"] for s in timed)
    return {
        "losses": [s["loss"] for s in steps],
        "grad_norms": [s["grad_norm"] for s in steps],
        "tokens_per_second": sum(s["tokens"] for s in timed) / seconds,
        "trained_tokens_per_second": sum(s["trained_tokens"] for s in timed) / seconds,
        "peak_rise_bytes": peak.rise(),
        "imports_s": imported,
        "time_to_first_step_s": result["time_to_first_step_s"],
        "planned_memory_bytes": result["planned_memory_bytes"],
        "peak_memory_bytes": result["peak_memory_bytes"],
        "backend": result["backend"],
    }


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]), int(sys.argv[2]), *map(json.loads, sys.argv[3:]))))
