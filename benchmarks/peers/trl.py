"""One measurement of TRL's SFTTrainer (transformers + PEFT + bitsandbytes). Prints one JSON line last."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[0] = str(
    Path(__file__).resolve().parents[1]
)  # not this directory, in which this file has the package's own name

from peers import sft  # noqa: E402


def load(config, dtype, device):
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = None
    if config.quantizer in ("nf4", "fp4"):
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=config.quantizer,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=config.double_quant,
        )
    model = AutoModelForCausalLM.from_pretrained(
        config.model_name, dtype=dtype, quantization_config=quantization, device_map={"": device}
    )
    return model, LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


if __name__ == "__main__":
    print("\n" + json.dumps(sft.measure(json.loads(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), load)))
