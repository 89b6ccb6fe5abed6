"""What every benchmark shares: made models and rows, one fresh process per measurement, alternation, medians, a JSON
result.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

SHAPES = {  # config.json of Llamas with random weights
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "wide": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}


def of_layers(shape: str, layers: int | None) -> dict:
    """`shape` with so many decoder layers; None: with its own."""
    return SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})


def make_model(directory: Path, shape: str, layers: int | None = None, seed: int = 0) -> Path:
    """A Llama of `shape` with random bf16 weights, drawn on the GPU if there is one, and the embedded base's tokenizer;
    "demo" is the embedded base itself.

    layers: of so many decoder layers; None: of as many as the shape has.
    """
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    from anyqlora.models.architectures import DEMO_BASE

    if shape == "demo":
        return DEMO_BASE
    import torch

    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(
            LlamaConfig(
                **of_layers(shape, layers),
                max_position_embeddings=8192,
                bos_token_id=None,
                eos_token_id=1,
                pad_token_id=0,
            )
        )
    torch.set_default_dtype(torch.float32)
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(DEMO_BASE).save_pretrained(directory)
    return directory


def make_rows(path: Path, tokenizer_directory: Path, count: int, length: int | None, seed: int = 0) -> Path:
    """Rows {"text": ...} of exactly `length` tokens with the end token (None: log-normal, mean 180, at most 512).

    The text is the embedded task's, so that there is something to learn.
    """
    import numpy as np
    from transformers import AutoTokenizer

    from anyqlora.models.architectures import DEMO_BASE

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    rows = [json.loads(line) for line in (DEMO_BASE.parent / "task" / "train.jsonl").read_text().splitlines()]
    generator = np.random.default_rng(seed)
    with open(path, "w") as file:
        for _ in range(count):
            wanted = (length or int(np.clip(generator.lognormal(5.0, 0.62), 16, 512))) - 1
            ids: list[int] = []
            while len(ids) < wanted:
                row = rows[generator.integers(len(rows))]
                ids += tokenizer.encode(row["prompt"] + row["completion"] + " ", add_special_tokens=False)
            text = tokenizer.decode(ids[:wanted])
            file.write(json.dumps({"text": text}) + "\n")
    return path


def attended_length(rows: Path, tokenizer_directory: Path) -> float:
    """The length of equal rows whose attention would cost as much for each token as these rows' does: of squares, not
    of lengths.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    lengths = [
        1 + len(tokenizer.encode(json.loads(line)["text"], add_special_tokens=False))
        for line in rows.read_text().splitlines()
    ]
    return sum(length * length for length in lengths) / sum(lengths)


def alternate(
    sides: dict[str, list[str]],
    rounds: int,
    *,
    timeout: int = 3600,
    quiet: bool = False,
    after: Callable[[], None] = lambda: None,
) -> dict[str, list[dict]]:
    """Run each side's command `rounds` times, A B A B ..., each in a fresh process; a side's last line of output is its
    JSON. `after` each round.
    """
    found: dict[str, list[dict]] = {name: [] for name in sides}
    width = max(map(len, sides))
    for number in range(rounds):
        for name, command in sides.items():
            began = time.perf_counter()
            out = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=timeout,
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
            if out.returncode:
                raise SystemExit(f"{name} failed:\n{out.stdout[-2000:]}\n{out.stderr[-4000:]}")
            result = json.loads(out.stdout.strip().splitlines()[-1])
            found[name].append(result)
            if quiet:
                continue
            print(
                f"round {number + 1} {name:>{width}}: {result['tokens_per_second']:8.0f} tokens/s, "
                f"{result['trained_tokens_per_second']:8.0f} trained"
                f"  {result['peak_rise_bytes'] / 2**20:7.0f} MiB"
                f"  first step after {result['time_to_first_step_s']:.1f} s  ({time.perf_counter() - began:.0f} s)",
                flush=True,
            )
        after()
    return found


def median(results: list[dict], key: str) -> float:
    return statistics.median(r[key] for r in results)


def product_rate(shapes: list[tuple[int, int]], tokens: int, dtype: str, device: str = "cpu") -> float:
    """FLOP/s of plain products [tokens, in] x [in, out] at the model's own shapes, weighted by their share.

    Each at the fastest of 20: a limit is what the machine can do, and a median halves when something else wants a core.
    """
    import torch

    kind = getattr(torch, dtype)
    one = torch.ones((), device=device)
    product = {
        torch.int8: lambda x, w: torch._int_mm(x, w.T),
        torch.float8_e4m3fn: lambda x, w: torch._scaled_mm(x, w.T, one, one, out_dtype=torch.bfloat16),
    }.get(kind, torch.nn.functional.linear)
    total, seconds = 0.0, 0.0
    for inputs, outputs in shapes:
        x = torch.randn(tokens, inputs, device=device).to(kind)
        w = torch.randn(outputs, inputs, device=device).to(kind)
        times = []
        for _ in range(20):
            began = time.perf_counter()
            product(x, w)
            if device != "cpu":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        total += 2 * tokens * inputs * outputs
        seconds += min(times)
    return total / seconds


def train_flops(shape: dict, length: float, rank: int, trained_part: float = 1.0) -> float:
    """FLOP per token of a QLoRA step without recomputation: forward and input gradients of the frozen base, LoRA's
    three products, causal attention forward and backward, and the head on trained tokens (FACTS: floor.py).
    """
    h = shape["hidden_size"]
    lora = sum(2 * rank * (a + b) for a, b in linear_shapes(shape))
    attention = 4 * (length / 2) * h
    return (
        frozen_flops(shape)
        + shape["num_hidden_layers"] * (3 * lora + 3.5 * attention)
        + 4 * h * shape["vocab_size"] * trained_part
    )


def frozen_flops(shape: dict) -> float:
    """Of these, those of the layers' frozen linears, forward and back."""
    return shape["num_hidden_layers"] * sum(4 * a * b for a, b in linear_shapes(shape))


def linear_shapes(shape: dict) -> list[tuple[int, int]]:
    h, f = shape["hidden_size"], shape["intermediate_size"]
    kv = shape["num_key_value_heads"] * (h // shape["num_attention_heads"])
    return [(h, h), (h, kv), (h, kv), (h, h), (h, f), (h, f), (f, h)]


def versions() -> dict[str, str]:
    """Of the packages that this interpreter finds, for what was measured by them."""
    found = {}
    for package in (
        "torch",
        "transformers",
        "peft",
        "bitsandbytes",
        "trl",
        "accelerate",
        "unsloth",
        "unsloth_zoo",
        "triton",
        "mlx",
        "mlx-lm",
    ):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict:
    """Hardware, versions and commit of a result."""
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions(),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next(line for line in lines if line.startswith("flags")).split()
        extra = [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name")) + " " + " ".join(extra)
    except (OSError, StopIteration):
        return platform.processor()


def write(name: str, result: dict) -> Path:
    """benchmarks/results/NAME.json, or $OUT/NAME.json where OUT is set."""
    directory = Path(os.environ.get("OUT") or RESULTS)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps({**result, "machine": machine()}, indent=2, sort_keys=True) + "\n")
    print(f"wrote {path}")
    return path


def scratch() -> Path:
    """A directory for a model and its rows, gigabytes sometimes, which goes when this process ends."""
    directory = tempfile.mkdtemp(prefix="anyqlora-bench-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)
