"""Where an answer ends, as every reader of the adapter is told: generation_config.json, and the tokenizer's end token.

A base model that is tuned with a chat template learns to end with a token that neither its tokenizer nor its
generation settings name: what goes by these (PEFT with transformers, vLLM, MLX, merged models, GGUF) would never stop.
"""

from __future__ import annotations

import json
from pathlib import Path

from anyqlora.data.end_tokens import learned_ends, stops
from anyqlora.models.architectures import read_config

GENERATION_CONFIG = "generation_config.json"


def base_generation_config(directory: Path) -> dict:
    """The generation settings that a model directory has; without any, the end token of its configuration."""
    path = directory / GENERATION_CONFIG
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    end = read_config(directory).get("eos_token_id")
    return {} if end is None else {"eos_token_id": end}


def generation_config(directory: Path, tokenizer, report: dict) -> dict:
    """The base's settings, with all tokens that end an answer: its own, the tokenizer's, and those of the rows."""
    base = base_generation_config(directory)
    ends = stops(tokenizer, base.get("eos_token_id"), learned_ends(report))
    others = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    named = {name: value for name, value in others.items() if value is not None and name not in base}
    return {**named, **base, "eos_token_id": ends[0] if len(ends) == 1 else ends}


def name_end_token(tokenizer, directory: Path, report: dict) -> None:
    """Make the token that ends most answers the tokenizer's end token, where the model does not stop at it so far."""
    counts = report.get("train", {}).get("end_tokens", {})
    if not counts:
        return
    commonest = max(counts, key=lambda name: counts[name])
    known = stops(tokenizer, base_generation_config(directory).get("eos_token_id"))
    if tokenizer.convert_tokens_to_ids(commonest) not in known:
        tokenizer.eos_token = commonest
