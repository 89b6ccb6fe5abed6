"""The adapter that a run starts from: where it is, and what it settles."""

from __future__ import annotations

import json
from pathlib import Path

from . import tables
from .errors import NotBuilt, UsageError
from .settings import AUTO, TrainConfig, parsed
from .tables import ADAPTER, ADAPTER_CONFIG

# What adapter_config.json may say without changing what is computed here, beside what `_brought` reads and what is false, empty or none.
NEUTRAL = {"peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "inference_mode", "init_lora_weights", "auto_mapping", "r", "lora_alpha",
           "lora_dropout", "target_modules", "use_dora", "use_rslora", "megatron_core", "qalora_group_size", "bias", "exclude_modules"}


def directory(config: TrainConfig) -> Path:
    """Where the adapter is: a directory of PEFT's, that of a run or of its checkpoint, or the local Hugging Face cache's. Raises UsageError."""
    name, where = config.init_adapter, config.sources.get("init_adapter", "")
    local = Path(name).expanduser()
    if not local.is_dir():
        local = _cached(name, where)
    found = next((path for path in (local, local / "adapter") if (path / ADAPTER_CONFIG).is_file()), None)
    if found is None:
        whole = next((path for path in (local / "model", local) if (path / "config.json").exists()), None)
        raise UsageError(f"init_adapter: no {ADAPTER_CONFIG} in {local}", where=where,
                         cure=f"a whole model is started from by --model_name {whole}" if whole else "the directory of a finished run or of its adapter")
    if not (found / ADAPTER).is_file():
        raise UsageError(f"init_adapter: no {ADAPTER} in {found}", where=where, cure="an adapter in safetensors form")
    return found


def _cached(name: str, where: str) -> Path:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, ADAPTER_CONFIG)
    except HFValidationError:
        raise UsageError(f"init_adapter: no such directory: {name}", where=where, cure="the directory of a finished run or of its adapter") from None
    if not isinstance(found, str):
        raise UsageError(f"init_adapter: {name} is no directory, and no adapter that has been downloaded", where=where, cure=f"hf download {name}")
    return Path(found).parent


def settled(config: TrainConfig) -> TrainConfig:
    """`config` with what the adapter that it starts from decides: its kind, rank, alpha, targets and, where none is stated, dropout.

    Raises UsageError where another value was asked for and for what is no adapter, NotBuilt for one that learns otherwise than ours.
    """
    described = directory(config) / ADAPTER_CONFIG
    brought = _brought(config, _described(described), str(described))
    for name, value in brought.items():
        stated = getattr(config, name)
        if config.asked(name) and stated != value and name not in ("lora_dropout", "lora_target_modules"):  # of the targets the tensors tell
            raise UsageError(f"{name}: {stated} was asked for, and the adapter that the run starts from has {value}", where=config.sources[name],
                             cure=f"leave out {name} or init_adapter")
    brought = {name: value for name, value in brought.items() if not config.asked(name)}
    return config.with_(**brought, sources={**config.sources, **dict.fromkeys(brought, str(described))})


def _described(path: Path) -> dict:
    """What is in an adapter_config.json that describes a LoRA as ours are. Raises UsageError, NotBuilt."""
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
