"""One measurement of mlx-lm's own LoRA training, by the calls that its command makes. Prints one JSON line last."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import mlx.core as mx  # noqa: E402
import mlx.optimizers  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm import load  # noqa: E402
from mlx_lm.tuner.callbacks import TrainingCallback  # noqa: E402
from mlx_lm.tuner.datasets import CacheDataset, TextDataset  # noqa: E402
from mlx_lm.tuner.trainer import TrainingArgs, train  # noqa: E402
from mlx_lm.tuner.utils import linear_to_lora_layers  # noqa: E402
from peers.peak import Peak  # noqa: E402

LINEARS = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]


class Steps(TrainingCallback):
    """What it reports of each step."""

    def __init__(self):
        self.seen: list[dict] = []
        self.first: float | None = None

    def on_train_loss_report(self, train_info: dict) -> None:
        self.first = self.first or time.perf_counter()
        self.seen.append(train_info)


def main(settings: dict, warmup: int) -> dict:
    peak, began = Peak(), time.perf_counter()
    mx.random.seed(0)
    model, tokenizer = load(settings["model_name"])
    rows = [json.loads(line) for line in Path(settings["dataset"]).read_text().splitlines()]
    np.random.seed(0)  # of the order of the rows
    model.freeze()
    linear_to_lora_layers(
        model,
        len(model.layers),
        {
            "rank": settings["lora_rank"],
            "scale": settings["lora_alpha"] / settings["lora_rank"],
            "dropout": 0.0,
            "keys": LINEARS,
        },
    )
    steps = Steps()
    with tempfile.TemporaryDirectory() as directory:
        asked = TrainingArgs(
            batch_size=settings["batch_size"],
            iters=settings["max_steps"],
            steps_per_report=1,
            steps_per_save=settings["max_steps"] + 1,
            max_seq_length=settings["context_length"],
            adapter_file=f"{directory}/adapters.safetensors",
        )
        train(
            model,
            mlx.optimizers.AdamW(settings["lr"], weight_decay=0.0, bias_correction=True),
            CacheDataset(TextDataset(rows, tokenizer)),
            args=asked,
            training_callback=steps,
        )
    timed = steps.seen[warmup:]
    seconds = sum(1 / step["iterations_per_second"] for step in timed)
    trained = steps.seen[-1]["trained_tokens"] - (steps.seen[warmup - 1]["trained_tokens"] if warmup else 0)
    tokens = trained + len(timed) * settings["batch_size"]  # each row's first token has no label
    return {
        "losses": [step["train_loss"] for step in steps.seen],
        "tokens_per_second": tokens / seconds,
        "trained_tokens_per_second": trained / seconds,
        "peak_rise_bytes": peak.rise(),
        "peak_memory_bytes": mx.get_peak_memory(),
        "time_to_first_step_s": steps.first - began,
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = main(json.loads(sys.argv[1]), int(sys.argv[2]))
    print("\n" + json.dumps(result))
