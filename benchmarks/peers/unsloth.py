"""One measurement of Unsloth, by its documented calls. Prints one JSON line last.

It pins older transformers, TRL and datasets than we do, so it is mostly run by another environment's Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

sys.path[0] = str(
    Path(__file__).resolve().parents[1]
)  # not this directory, in which this file has the package's own name


def load(config, dtype, device):
    from unsloth import FastLanguageModel

    recompute = "unsloth" if config.use_gradient_checkpointing is True else False
    model, _ = FastLanguageModel.from_pretrained(
        config.model_name,
        max_seq_length=config.context_length,
        dtype=dtype,
        load_in_4bit=config.quantizer == "nf4",
        use_gradient_checkpointing=recompute,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        bias="none",
        random_state=config.seed,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        use_gradient_checkpointing=recompute,
    )
    return model, None


def main(settings: dict, warmup: int, options: dict) -> dict:
    os.environ["UNSLOTH_CPU_COMPILE"] = str(
        int(options.pop("compile", False))
    )  # its CPU backend's only switch for speed
    import torch
    import unsloth  # noqa: F401 - asks to be imported before what it patches
    from peers import sft

    if not torch.cuda.is_available() and unsloth.DEVICE_TYPE != "cpu":
        raise SystemExit(f"Unsloth's backend is {unsloth.DEVICE_TYPE}")
    return sft.measure(settings, warmup, options, load)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = main(json.loads(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
    print("\n" + json.dumps(result))
