#!/usr/bin/env python3
"""How fast do we train, and in how much memory, against TRL's SFTTrainer on the same weights, rows and settings?

    python benchmarks/train_speed.py --shape smollm2-135m --batch 4 --length 512 --steps 6 --rounds 3

Prints the ratio of tokens/s, of peak memory, the fraction of the machine's own product rate, and the loss of each step side by side.
"""

from __future__ import annotations

import argparse
import json
import sys

import harness


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--shape", default="smollm2-135m", choices=["demo", *harness.SHAPES])
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--accumulation", type=int, default=1)
    p.add_argument("--length", type=int, default=512, help="tokens of every row; 0: a chat-like mix")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--warmup", type=int, default=1, help="steps that are not timed")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--precision", default="bf16")
    p.add_argument("--quantizer", default="nf4")
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--lr", type=float, default=2e-4)
    p.add_argument("--checkpointing", default="false", choices=["true", "false"])
    p.add_argument("--kernels", default="auto", help="ours runs once for each of these (settings.kernels), comma-separated; the first is compared")
    p.add_argument("--name", default="")
    a = p.parse_args()

    work = harness.scratch()
    directory = harness.make_model(work / "model", a.shape)
    if a.shape == "demo":
        dataset = "demo"
    else:
        dataset = str(harness.make_rows(work / "rows.jsonl", directory, a.batch * a.accumulation * a.steps, a.length or None))
    settings = {"model_name": str(directory), "dataset": dataset, "quantizer": a.quantizer, "adapter": "lora", "precision": a.precision,
                "batch_size": a.batch, "gradient_accumulation_steps": a.accumulation, "max_steps": a.steps, "lr": a.lr,
                "lr_scheduler": "constant", "warmup_steps": 0, "wd": 0.0, "lora_rank": a.rank, "lora_alpha": 2 * a.rank, "lora_dropout": 0.0,
                "context_length": a.length or 512, "use_gradient_checkpointing": a.checkpointing == "true"}
    ways = a.kernels.split(",")
    ours = {f"anyqlora {way}" if number else "anyqlora": {**settings, "kernels": way} for number, way in enumerate(ways)}
    sides = {**{side: [sys.executable, "benchmarks/peers/ours.py", json.dumps(asked), str(a.warmup)] for side, asked in ours.items()},
             "trl": [sys.executable, "benchmarks/peers/trl.py", json.dumps(settings), str(a.warmup), "{}"]}
    found = harness.alternate(sides, a.rounds)

    ours, theirs = found["anyqlora"], found["trl"]
    speed = harness.median(ours, "tokens_per_second") / harness.median(theirs, "tokens_per_second")
    memory = harness.median(ours, "peak_rise_bytes") / harness.median(theirs, "peak_rise_bytes")
    print("\nstep   anyqlora        trl   difference")
    differences = [x / y - 1 for x, y in zip(ours[0]["losses"], theirs[0]["losses"], strict=True)]
    for step, (x, y, d) in enumerate(zip(ours[0]["losses"], theirs[0]["losses"], differences, strict=True), 1):
        print(f"{step:4} {x:10.6f} {y:10.6f}   {d:+.2e}")
    result = {"question": __doc__.splitlines()[0], "settings": {**settings, "model_name": a.shape, "dataset": f"{a.length or 'mixed'} tokens", "kernels": ways},
              "results": found, "tokens_per_second_ratio": speed, "peak_memory_ratio": memory,
              "largest_loss_difference": max(map(abs, differences))}
    if a.shape in harness.SHAPES:
        shape = harness.SHAPES[a.shape]
        rate = harness.product_rate(harness.linear_shapes(shape), a.batch * (a.length or 180), "float32" if a.precision == "fp32" else "bfloat16")
        limit = rate / harness.train_flops(shape, a.length or 180, a.rank)
        result |= {"product_flops_per_second": rate, "limit_tokens_per_second": limit,
                   "fraction_of_limit": harness.median(ours, "tokens_per_second") / limit}
        print(f"\nlimit at the measured product rate ({rate / 1e9:.0f} GFLOP/s): {limit:.0f} tokens/s; ours {100 * result['fraction_of_limit']:.0f} %")
    for side in list(found)[1:-1]:
        print(f"{side}: {harness.median(found[side], 'tokens_per_second') / harness.median(theirs, 'tokens_per_second'):.2f} x TRL's tokens/s, "
              f"{harness.median(found[side], 'peak_rise_bytes') / harness.median(theirs, 'peak_rise_bytes'):.2f} x its memory")
    print(f"tokens/s ratio {speed:.2f} (ours {harness.spread(ours, 'tokens_per_second')}, TRL {harness.spread(theirs, 'tokens_per_second')})")
    print(f"peak memory ratio {memory:.2f} (ours {harness.median(ours, 'peak_rise_bytes') / 2**20:.0f} MiB, TRL "
          f"{harness.median(theirs, 'peak_rise_bytes') / 2**20:.0f} MiB above the interpreter)")
    print(f"largest loss difference {100 * result['largest_loss_difference']:.3f} %")
    harness.write(a.name or f"train-{a.shape}-{a.quantizer}-{a.precision}-{a.length or 'mixed'}", result)
    if result["largest_loss_difference"] > 0.01:
        sys.exit("the losses differ by more than 1 %: this is not the same work")


if __name__ == "__main__":
    main()
