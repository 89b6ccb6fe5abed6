#!/usr/bin/env python3
"""What does a training step launch on a GPU, how often does it wait for the host, and where does its time go?

    python benchmarks/step_trace.py --shape llama-3-8b --layers 2,4 --batch 4 --length 2048
    python benchmarks/step_trace.py --shape tiny --layers 2,3 --batch 2 --length 64 --precision fp32

A run of each depth is profiled for two steps after its first ones. A layer costs what the deeper run has more, divided
by the layers it has more; the rest is the head, the loss and the optimizer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import harness

WARMUP, RECORDED = 3, 2  # steps
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def measure(settings: dict, warmup: int) -> dict:
    """Of one step of a run with these settings: `launches`, `waits`, `busy_ms` (of the GPU), `seconds` (of a step that
    nobody profiles), `kernels` {name: [launches, milliseconds]}. On a CPU, operators instead of kernels.
    """
    import torch

    from anyqlora.config.resolve import resolve
    from anyqlora.recipes import sft

    profiled = {"profile": True, "profile_wait": warmup, "profile_active": RECORDED, "profile_repeat": 1}
    with tempfile.TemporaryDirectory() as output:
        asked = {**settings, **profiled, "output_dir": output, "run_name": "run", "save_steps": 0, "log_to": "none"}
        result = sft.train(resolve(asked, environ={}))
        run = Path(output) / "run"
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        events = json.loads(next((run / "profiles").glob("*/trace.json")).read_text())["traceEvents"]
    kind = ("kernel", "gpu_memcpy", "gpu_memset") if torch.cuda.is_available() else ("cpu_op",)
    found = [event for event in events if event.get("cat") in kind]
    launches, times = Counter(), Counter()
    for event in found:
        launches[event["name"]] += 1
        times[event["name"]] += event["dur"]
    return {
        "launches": len(found) / RECORDED,
        "waits": sum(event.get("name") in WAITS for event in events) / RECORDED,
        "busy_ms": sum(times.values()) / 1e3 / RECORDED,
        "seconds": min(step["seconds"] for step in steps[1:warmup] if "event" not in step),
        "kernels": {name: [launches[name] / RECORDED, time / 1e3 / RECORDED] for name, time in times.most_common()},
        "peak_memory_bytes": result["peak_memory_bytes"],
        "planned_memory_bytes": result["planned_memory_bytes"],
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", default="llama-3-8b", choices=list(harness.SHAPES))
    p.add_argument("--layers", default="2,4", help="two depths")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--precision", default="bf16")
    p.add_argument("--kernels", default="auto")
    p.add_argument("--products", default="full")
    p.add_argument("--name", default="step-trace")
    p.add_argument("--one", help=argparse.SUPPRESS)  # settings of the one run that this process measures
    a = p.parse_args()
    if a.one:
        print("\n" + json.dumps(measure(json.loads(a.one), WARMUP)))
        return
    work, found = harness.scratch(), {}
    for layers in map(int, a.layers.split(",")):
        directory = harness.make_model(work / f"model-{layers}", a.shape, layers)
        rows = harness.make_rows(work / "rows.jsonl", directory, a.batch * (WARMUP + RECORDED), a.length)
        settings = {
            "model_name": str(directory),
            "dataset": str(rows),
            "precision": a.precision,
            "batch_size": a.batch,
            "gradient_accumulation_steps": 1,
            "max_steps": WARMUP + RECORDED,
            "context_length": a.length,
            "lora_dropout": 0.0,
            "kernels": a.kernels,
            "frozen_matmul": a.products,
            "use_gradient_checkpointing": False,
        }
        command = [sys.executable, __file__, "--one", json.dumps(settings)]
        found[layers] = harness.alternate({"run": command}, 1, quiet=True)["run"][0]
    (few, less), (many, more) = sorted(found.items())
    print(f"{'':12}{'a step of ' + str(few):>16}{'of ' + str(many):>16}{'a layer':>16}{'the rest':>16}")
    for what in ("launches", "waits", "busy_ms", "seconds"):
        layer = (more[what] - less[what]) / (many - few)
        figures = (less[what], more[what], layer, less[what] - few * layer)
        print(f"{what:12}" + "".join(f"{figure:16.4g}" for figure in figures))
    for name, (count, time) in list(more["kernels"].items())[:40]:
        print(f"{time:9.3f} ms {count:6.0f}  {name[:110]}")
    harness.write(a.name, {"question": __doc__.splitlines()[0], "settings": vars(a), "results": found})


if __name__ == "__main__":
    main()
