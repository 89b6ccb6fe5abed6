"""The adapter that a run starts from: what it settles, and what it has learned."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize

from . import tables
from .checkpoint import ADAPTER, ADAPTER_CONFIG
from .errors import NotBuilt, UsageError
from .hub import adapter_directory
from .settings import AUTO, TrainConfig, parsed

# What adapter_config.json may say without changing what is computed here, beside what `_brought` reads and what is false, empty or none.
NEUTRAL = {"peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "inference_mode", "init_lora_weights", "auto_mapping", "r", "lora_alpha",
           "lora_dropout", "target_modules", "use_dora", "use_rslora", "megatron_core", "qalora_group_size", "bias", "exclude_modules"}
TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def settled(config: TrainConfig) -> TrainConfig:
    """`config` with what the adapter that it starts from decides: its kind, rank, alpha, targets and, where none is stated, dropout.

    Raises UsageError where another value was asked for and for what is no adapter, NotBuilt for one that learns otherwise than ours.
    """
    directory = adapter_directory(config)
    where = str(directory / ADAPTER_CONFIG)
    brought = _brought(config, _described(directory), where)
    for name, value in brought.items():
        stated = getattr(config, name)
        if config.asked(name) and stated != value and name not in ("lora_dropout", "lora_target_modules"):  # of the targets the tensors tell
            raise UsageError(f"{name}: {stated} was asked for, and the adapter that the run starts from has {value}", where=config.sources[name],
                             cure=f"leave out {name} or init_adapter")
    brought = {name: value for name, value in brought.items() if not config.asked(name)}
    return config.with_(**brought, sources={**config.sources, **dict.fromkeys(brought, where)})


def _described(directory: Path) -> dict:
    """adapter_config.json, where it describes a LoRA as ours are. Raises UsageError, NotBuilt."""
    path = directory / ADAPTER_CONFIG
    try:
        about = json.loads(path.read_bytes())
        kind = about["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"not the description of a PEFT adapter: {error or type(error).__name__}", where=str(path), cure="an adapter that PEFT or this program wrote") from None
    if kind != "LORA":
        raise NotBuilt(f"to start from a {kind} adapter", where=str(path), cure="a LoRA adapter")
    strange = sorted(name for name, value in about.items() if value and name not in NEUTRAL)
    strange += [name for name in ("bias", "exclude_modules") if about.get(name) not in (None, "none", [])]
    if strange:
        raise NotBuilt(f"to start from an adapter with {', '.join(f'{name} {json.dumps(about[name])}' for name in strange[:3])}", where=str(path),
                       cure="an adapter of plain LoRA, rsLoRA or DoRA")
    return about


def _brought(config: TrainConfig, about: dict, where: str) -> dict:
    kind = "dora" if about.get("use_dora") else "rslora" if about.get("use_rslora") else "lora"
    if config.adapter == AUTO and config.asked("train_type"):
        _, preset = tables.choose("train_type", config.train_type, tables.TRAIN_TYPES, config.sources["train_type"])
        if preset not in ("lora", kind):
            raise UsageError(f"train_type: {config.train_type} means adapter {preset}, and the adapter that the run starts from is {kind}",
                             where=config.sources["train_type"], cure="leave out train_type or init_adapter")
    values = {"adapter": kind, "lora_rank": about.get("r", 8), "lora_alpha": about.get("lora_alpha", 8), "lora_dropout": about.get("lora_dropout", 0.0),
              "lora_target_modules": about.get("target_modules")}
    return {name: parsed(name, value, where) for name, value in values.items()}


def read(config: TrainConfig) -> dict[str, np.ndarray]:
    """What the adapter has learned, {name in the file: float32 array}. Raises UsageError for what is damaged or not finite."""
    path = adapter_directory(config) / ADAPTER
    try:
        tensors = dict(deserialize(path.read_bytes()))
    except (OSError, SafetensorError) as error:
        raise UsageError(f"not a safetensors file: {error}", where=str(path), cure="the adapter once more from where it came") from None
    return {name: _array(name, about, str(path)) for name, about in tensors.items()}


def _array(name: str, about: dict, where: str) -> np.ndarray:
    if about["dtype"] not in TYPES:
        raise UsageError(f"{name} is of type {about['dtype']}", where=where, cure=f"an adapter in {', '.join(TYPES)}")
    array = np.frombuffer(about["data"], TYPES[about["dtype"]])
    array = (array.astype(np.uint32) << 16).view(np.float32) if about["dtype"] == "BF16" else array.astype(np.float32)
    if not np.isfinite(array).all():
        raise UsageError(f"{name} has numbers that are not finite", where=where, cure="an adapter of a run that went well")
    return array.reshape(about["shape"])
