#!/usr/bin/env python3
"""How fast do we train, and in how much memory, against TRL and Unsloth on the same weights, rows and settings?

    python benchmarks/train_speed.py --settings equal              (512 tokens each, SmolLM2-135M's shape)
    python benchmarks/train_speed.py --settings best --checkpointing both --shape wide
    python benchmarks/train_speed.py --settings best --length 0    (a chat-like mix, and packed rows)
    python benchmarks/train_speed.py --shape demo --precision fp32 --steps 50 --rounds 1    (losses, step by step)

Each side is a fresh process, the sides alternate, and a figure is the median of the rounds. `best` gives every peer
each of its documented settings that might be its fastest, and compares with the fastest; `equal` has float32 adapters
and the same recomputation on all sides.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import harness

FASTER = {  # shape, kind of rows -> peer: how many times its trained tokens/s are wanted
    ("smollm2-135m", "fixed"): {"trl": 3.0, "unsloth": 1.5},
    ("wide", "fixed"): {"trl": 1.6, "unsloth": 1.6},
    ("smollm2-135m", "mixed"): {"trl": 4.0, "trl packed": 3.0, "unsloth": 2.2},
}
OF_THE_LIMIT = 0.6
LOSS = {
    "bf16": (0.01, 0.003),
    "fp32": (1e-5, 1e-5),
}  # precision -> largest relative difference of a step from TRL's, and of the mean
LEARNED = 0.75  # of the first losses must be left at most: random weights on random words agree whatever one does


@dataclass
class Side:
    peer: str  # what it is compared as: "anyqlora", "anyqlora int8", "trl", "trl packed", "unsloth"
    settings: dict = field(default_factory=dict)  # beside those of all sides
    options: dict = field(default_factory=dict)  # of a peer's trainer (peers/sft.py)
    recompute: bool = False

    def command(self, settings: dict, warmup: int, unsloth: str) -> list[str]:
        asked = json.dumps({**settings, **self.settings})
        script = self.peer.split()[0].replace("anyqlora", "ours")
        python = unsloth if script == "unsloth" else sys.executable
        return [
            python,
            f"benchmarks/peers/{script}.py",
            asked,
            str(warmup),
            *([json.dumps(self.options)] if script != "ours" else []),
        ]


def our_sides(settings: dict, ways: list[str], products: list[str]) -> dict[str, Side]:
    """Ours on each set of kernels, and in fewer bits as somebody else: what is in 8 bits is another arithmetic, and
    compared by itself.
    """
    sides = {
        f"anyqlora {way}" if number else "anyqlora": Side("anyqlora", {**settings, "kernels": way})
        for number, way in enumerate(ways)
    }
    return sides | {
        f"anyqlora {kind}": Side(f"anyqlora {kind}", {**settings, "kernels": ways[0], "frozen_matmul": kind})
        for kind in products
        if kind != "full"
    }


def equal_sides(recompute: bool, ways: list[str], products: list[str]) -> dict[str, Side]:
    checkpointing = {"use_gradient_checkpointing": recompute}
    return {
        **our_sides(checkpointing, ways, products),
        "trl": Side("trl", checkpointing),
        "unsloth": Side("unsloth", checkpointing),
    }


def best_sides(recompute: bool, mixed: bool, batch: int, ways: list[str], products: list[str]) -> dict[str, Side]:
    """Ours as the plan chooses, theirs with adapters in the dtype that they choose, in bf16 and under autocast (their
    default); all with torch's fused AdamW.

    With recomputation, where memory is what counts, one side of each.
    """
    checkpointing = {"use_gradient_checkpointing": recompute}
    own = {"adapters": "own", "optim": "adamw_torch_fused"}
    fused = {"optimizer": "fused_adamw"}
    sides = our_sides({**fused, **(checkpointing if recompute else {})}, ways, products)
    sides |= {"trl": Side("trl", checkpointing, own), "unsloth": Side("unsloth", checkpointing, own)}
    if recompute:
        return sides
    for peer in ("trl", "unsloth"):
        sides[f"{peer} autocast"] = Side(peer, checkpointing, {**own, "bf16": True})
    sides["unsloth compiled"] = Side("unsloth", checkpointing, {**own, "compile": True})
    # TRL lays the packed rows of a batch one after another under one mask: one at a time may be faster. Unsloth has no
    # packing on a CPU
    if mixed:
        packed, one = {**own, "packing": True}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": batch}
        sides |= {
            f"{name} packed": Side(side.peer, {**side.settings, "packing": True})
            for name, side in our_sides(fused, ways[:1], products).items()
        }
        sides |= {
            "trl packed": Side("trl packed", checkpointing, packed),
            "trl packed, one at a time": Side("trl packed", checkpointing, {**packed, **one}),
        }
    return sides


class Figures:
    """What was wanted and what was found: printed as it is noted."""

    def __init__(self):
        self.noted: list[dict] = []

    def note(self, what: str, value: float, bound: float, met: bool, detail: str) -> None:
        print(f"{'PASS' if met else 'MISS'}  {what}: {value:.4g}, wanted {bound:.4g}  ({detail})")
        self.noted.append({"figure": what, "value": value, "bound": bound, "met": met, "detail": detail})


def fastest(found: dict[str, list[dict]], sides: dict[str, Side], peer: str, recompute: bool = False) -> str | None:
    """The name of a peer's fastest side."""
    names = [
        name for name, side in sides.items() if side.peer == peer and side.recompute == recompute and name in found
    ]
    return max(names, key=lambda name: harness.median(found[name], "trained_tokens_per_second"), default=None)


def us(sides: dict[str, Side]) -> list[str]:
    """Those whom the others are compared with."""
    return list(dict.fromkeys(side.peer for side in sides.values() if side.peer.startswith("anyqlora")))


def compare_speed(found: dict, sides: dict[str, Side], wanted: dict[str, float], figures: Figures) -> None:
    for recompute, own in itertools.product(sorted({side.recompute for side in sides.values()}), us(sides)):
        ours = fastest(found, sides, own, recompute)
        for peer in dict.fromkeys(side.peer for side in sides.values() if side.peer not in us(sides)):
            theirs = fastest(found, sides, peer, recompute)
            if theirs is None:  # packed rows are not measured with recomputation
                continue
            rounds = [
                x["trained_tokens_per_second"] / y["trained_tokens_per_second"]
                for x, y in zip(found[ours], found[theirs], strict=True)
            ]
            ratio = statistics.median(rounds)
            detail = (
                f"{harness.median(found[ours], 'trained_tokens_per_second'):.0f} for "
                f"{harness.median(found[theirs], 'trained_tokens_per_second'):.0f} "
                f"trained tokens/s; rounds {min(rounds):.2f}..{max(rounds):.2f}"
            )
            if peer in wanted and not recompute:
                figures.note(f"{ours}: times the speed of {theirs}", ratio, wanted[peer], ratio >= wanted[peer], detail)
            else:
                print(f"      {ours}: {ratio:.2f} times the speed of {theirs}  ({detail})")


def compare_memory(found: dict, sides: dict[str, Side], figures: Figures) -> None:
    """At full speed no more than TRL takes at its; with recomputation no more than the smallest of the peers takes."""

    def memory(name: str) -> float:
        return harness.median(found[name], "peak_rise_bytes") / 2**20

    for recompute, own in itertools.product(sorted({side.recompute for side in sides.values()}), us(sides)):
        ours = fastest(found, sides, own, recompute)
        peers = [name for name, side in sides.items() if side.peer not in us(sides) and side.recompute]
        theirs = min(peers, key=memory, default=None) if recompute else fastest(found, sides, "trl")
        if theirs is None:
            continue
        what = f"peak memory of {ours} as a part of {theirs}'s"
        figures.note(
            what,
            memory(ours) / memory(theirs),
            1.0,
            memory(ours) <= memory(theirs),
            f"{memory(ours):.0f} MiB for {memory(theirs):.0f} MiB",
        )


def compare_losses(found: dict, own: str, precision: str, figures: Figures) -> float:
    """The largest relative difference of a step's loss of our side `own` from that of TRL's first side."""
    ours, theirs = (found[name][0]["losses"] for name in (own, "trl"))
    differences = [x / y - 1 for x, y in zip(ours, theirs, strict=True)]
    of_the_mean = statistics.mean(ours) / statistics.mean(theirs) - 1
    print(f"\nstep   {own}        trl   difference")
    for step, (x, y, d) in enumerate(zip(ours, theirs, differences, strict=True), 1):
        if step <= 5 or step % 10 == 0:
            print(f"{step:4} {x:10.6f} {y:10.6f}   {d:+.2e}")
    largest, (per_step, mean) = max(map(abs, differences)), LOSS[precision]
    tenth = max(1, len(theirs) // 10)
    left = statistics.mean(theirs[-tenth:]) / statistics.mean(theirs[:tenth])
    detail = f"{len(theirs)} steps; {left:.0%} of the first loss are left"
    if len(theirs) >= 50 and left <= LEARNED:
        figures.note(
            f"{own}: largest difference of a step's loss from TRL's", largest, per_step, largest <= per_step, detail
        )
        figures.note(
            f"{own}: difference of the mean loss from TRL's", abs(of_the_mean), mean, abs(of_the_mean) <= mean, detail
        )
    else:
        print(f"      losses differ by {largest:.2e} at most, their mean by {of_the_mean:+.2e}  ({detail})")
    return largest


def limit(
    shape: dict, tokens: int, length: float, rank: int, precision: str, products: str = "full"
) -> tuple[float, float]:
    """(FLOP/s of plain products of the frozen weights' kind at the model's own shapes, the tokens/s that these
    allow).
    """
    import torch

    def rate(dtype: str) -> float:
        return harness.product_rate(
            harness.linear_shapes(shape), tokens, dtype, "cuda" if torch.cuda.is_available() else "cpu"
        )

    whole = rate("float32" if precision == "fp32" else "bfloat16")
    kind, _, direction = products.partition("_")
    rounded = whole if kind == "full" else rate({"int8": "int8", "fp8": "float8_e4m3fn"}[kind])
    frozen = 2 / (1 / whole + 1 / rounded) if direction else rounded  # as much is multiplied forward as back
    of_frozen, of_head = (
        harness.frozen_flops(shape),
        2 * shape["hidden_size"] * shape["vocab_size"],
    )  # of its gradient, which is in 8 bits where those are
    return frozen, 1 / (
        of_frozen / frozen
        + of_head / rounded
        + (harness.train_flops(shape, length, rank) - of_frozen - of_head) / whole
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", default="smollm2-135m", choices=["demo", *harness.SHAPES])
    p.add_argument("--layers", type=int, help="decoder layers, if fewer than the shape has")
    p.add_argument("--settings", default="equal", choices=["equal", "best"])
    p.add_argument("--checkpointing", default="false", choices=["false", "true", "both"], help="recompute activations")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--accumulation", type=int, default=1)
    p.add_argument(
        "--length",
        type=int,
        default=512,
        help="tokens of every row; 0: a chat-like mix, each row once, --steps steps of padded rows",
    )
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--warmup", type=int, default=1, help="steps that are not timed")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--precision", default="bf16", choices=list(LOSS))
    p.add_argument("--quantizer", default="nf4")
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--lr", type=float, default=2e-4)
    p.add_argument(
        "--kernels", default="auto", help="ours runs once for each of these (settings.kernels), comma-separated"
    )
    p.add_argument("--products", default="full", help="and for each of these (settings.frozen_matmul), comma-separated")
    p.add_argument("--without", default="", help="sides to leave out, comma-separated")
    p.add_argument(
        "--unsloth-python",
        default=sys.executable if importlib.util.find_spec("unsloth") else "",
        help="of an environment with Unsloth",
    )
    p.add_argument("--name", default="")
    a = p.parse_args()

    work = harness.scratch()
    directory = harness.make_model(work / "model", a.shape, a.layers)
    per_step = a.batch * a.accumulation
    dataset = (
        "demo"
        if a.shape == "demo"
        else str(harness.make_rows(work / "rows.jsonl", directory, per_step * a.steps, a.length or None))
    )
    settings = {
        "model_name": str(directory),
        "dataset": dataset,
        "quantizer": a.quantizer,
        "adapter": "lora",
        "precision": a.precision,
        "batch_size": a.batch,
        "gradient_accumulation_steps": a.accumulation,
        "max_steps": a.steps if a.length else -1,
        "lr": a.lr,
        "lr_scheduler": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "lora_rank": a.rank,
        "lora_alpha": 2 * a.rank,
        "lora_dropout": 0.0,
        "context_length": a.length or 512,
    }
    sides: dict[str, Side] = {}
    for recompute in {"false": [False], "true": [True], "both": [False, True]}[a.checkpointing]:
        ways = a.kernels.split(","), a.products.split(",")
        made = (
            equal_sides(recompute, *ways)
            if a.settings == "equal"
            else best_sides(recompute, not a.length, per_step, *ways)
        )
        for name, side in made.items():
            side.recompute = recompute
            sides[f"{name}, recomputing" if recompute and a.checkpointing == "both" else name] = side
    if not a.unsloth_python:
        print("Unsloth is left out: it is not installed here (--unsloth-python PATH)")
    left_out = {name.strip() for name in a.without.split(",")}
    sides = {
        name: side
        for name, side in sides.items()
        if name not in left_out and (a.unsloth_python or side.peer != "unsloth")
    }
    limits: dict[str, list[tuple[float, float]]] = {own: [] for own in us(sides)} if a.shape in harness.SHAPES else {}

    def take_limits() -> None:
        """Of each round: the machine's speed moves by a fifth within an hour."""
        # rows of any length fill a batch when they are packed
        attended = a.length or harness.attended_length(Path(dataset), directory)
        for own, taken in limits.items():
            kind = own.removeprefix("anyqlora").strip() or "full"
            taken.append(
                limit(
                    harness.of_layers(a.shape, a.layers),
                    a.batch * settings["context_length"],
                    attended,
                    a.rank,
                    a.precision,
                    kind,
                )
            )

    found = harness.alternate(
        {name: side.command(settings, a.warmup, a.unsloth_python) for name, side in sides.items()},
        a.rounds,
        after=take_limits,
    )

    print()
    figures = Figures()
    kind = "fixed" if a.length else "mixed"
    compare_speed(found, sides, FASTER.get((a.shape, kind), {}), figures)
    if a.shape != "demo" and a.length:
        compare_memory(found, sides, figures)
    result = {
        "question": __doc__.splitlines()[0],
        "results": found,
        "sides": {name: vars(side) for name, side in sides.items()},
        "settings": {
            **settings,
            "model_name": f"{a.shape}{f', {a.layers} layers' * bool(a.layers)}",
            "dataset": f"{a.length or 'mixed'} tokens",
        },
    }
    ours = fastest(found, sides, "anyqlora") or fastest(found, sides, "anyqlora", True)
    result |= {"backend": found[ours][0]["backend"], "fastest": ours, "best_settings": a.settings == "best"}
    for own, taken in limits.items():
        name = fastest(found, sides, own) or fastest(found, sides, own, True)
        part = statistics.median(r["tokens_per_second"] / most for r, (_, most) in zip(found[name], taken, strict=True))
        rate, most = map(statistics.median, zip(*taken, strict=True))
        if own == "anyqlora":
            result |= {"product_flops_per_second": rate, "limit_tokens_per_second": most, "fraction_of_limit": part}
        figures.note(
            f"part of the computed limit that {name} reaches",
            part,
            OF_THE_LIMIT,
            OF_THE_LIMIT <= part <= 1,  # over 1: a busy machine
            f"{most:.0f} tokens/s at {rate / 1e9:.0f} G(FL)OP/s of frozen weights, after each round",
        )
    if a.settings == "equal" and "trl" in found:
        result["largest_loss_difference"] = max(
            compare_losses(found, name, a.precision, figures) for name, side in sides.items() if side.peer in us(sides)
        )
    harness.write(
        a.name or f"train-{a.shape}-{a.quantizer}-{a.precision}-{a.length or 'mixed'}-{a.settings}",
        {**result, "figures": figures.noted},
    )
    print(f"{sum(figure['met'] for figure in figures.noted)} of {len(figures.noted)} figures are met")
    if result.get("largest_loss_difference", 0.0) > 0.01:
        sys.exit("the losses differ by more than 1 %: this is not the same work")


if __name__ == "__main__":
    main()
