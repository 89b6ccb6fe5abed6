"""The adapter that a run starts from: where it is, and what it settles."""

from __future__ import annotations

import json
import os
from pathlib import Path

from anyqlora.config.schema import AUTO, TrainConfig, parse_value
from anyqlora.config.validate import is_explicit
from anyqlora.core import registry
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.core.registry import ADAPTER, ADAPTER_CONFIG

# What adapter_config.json may say without changing what is computed here, beside what `_brought` reads and what is
# false, empty or none.
NEUTRAL = {
    "peft_type",
    "peft_version",
    "task_type",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "init_lora_weights",
    "auto_mapping",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "use_dora",
    "use_rslora",
    "megatron_core",
    "qalora_group_size",
    "bias",
    "exclude_modules",
    "fan_in_fan_out",
}
REBASED = (
    "pissa",
    "olora",
    "corda",
    "lora_ga",
    "loftq",
)  # starts for which PEFT changes the base, too, whenever it reads the adapter
CURE = "the directory of a finished run or of its adapter"


def init_adapter_directory(config: TrainConfig) -> Path:
    """Where the adapter is: a directory of PEFT's, that of a run or of its checkpoint, or the local Hugging Face
    cache's. Raises UsageError.
    """
    name, where = config.init_adapter, config.sources.get("init_adapter", "")
    local = Path(os.path.expanduser(name))
    if not os.path.isdir(local):
        local = _cached_snapshot(name, where)
    directory = next((path for path in (local, local / "adapter") if (path / ADAPTER_CONFIG).is_file()), None)
    trained = _adapter_of_run(directory / "manifest.json") if directory else ""
    if trained in registry.ADAPTERS and registry.ADAPTERS[trained].moves_base:  # what is beside it does not describe it
        raise UsageError(
            f"init_adapter: {directory} is a checkpoint of a run with adapter {trained}",
            where=where,
            cure="--model_name RUN/model of the finished run"
            if registry.ADAPTERS[trained].trains_base
            else "the directory of the finished run",
        )
    if directory is None:
        whole = next((path for path in (local / "model", local) if (path / "config.json").exists()), None)
        raise UsageError(
            f"init_adapter: no {ADAPTER_CONFIG} in {local}",
            where=where,
            cure=f"a whole model is started from by --model_name {whole}" if whole else CURE,
        )
    if not (directory / ADAPTER).is_file():
        is_from_mlx = (directory / "adapters.safetensors").is_file()
        raise UsageError(
            f"init_adapter: no {ADAPTER} in {directory}",
            where=where,
            cure=f"python -m anyqlora export {directory} --to peft --out OUT, and OUT"
            if is_from_mlx
            else "an adapter in safetensors form",
        )
    return directory


def _adapter_of_run(manifest: Path) -> str:
    """The kind of adapter whose checkpoint the manifest describes; "" where there is none."""
    try:
        return json.loads(manifest.read_bytes())["identity"]["adapter"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _cached_snapshot(name: str, where: str) -> Path:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, ADAPTER_CONFIG)
    except HFValidationError:
        cached = None
    if not isinstance(cached, str):
        raise UsageError(
            f"init_adapter: no such directory: {name}",
            where=where,
            cure=f"{CURE}; of one of the hub: hf download {name}",
        )
    return Path(cached).parent


def apply_init_adapter(config: TrainConfig) -> TrainConfig:
    """`config` with what the adapter that it starts from decides: its kind, rank, alpha and targets, and, where none is
    stated, dropout and the chat template that is saved with it.

    Raises UsageError where another value was asked for and for what is no adapter, NotBuilt for one that learns
    otherwise than ours.
    """
    path = init_adapter_directory(config) / ADAPTER_CONFIG
    brought = _adapter_settings(config, _adapter_config(path), path)
    explicit = {name for name in brought if is_explicit(config, name) and getattr(config, name) != AUTO}
    for name in sorted(
        explicit - {"lora_dropout", "lora_target_modules", "chat_template"}
    ):  # of the targets the tensors tell
        if getattr(config, name) != brought[name]:
            raise UsageError(
                f"{name}: {getattr(config, name)} was asked for, and the adapter that the run starts from has "
                f"{brought[name]}",
                where=config.sources[name],
                cure=f"leave out {name} or init_adapter",
            )
    brought = {name: value for name, value in brought.items() if name not in explicit}
    return config.with_(**brought, sources={**config.sources, **dict.fromkeys(brought, str(path))})


def _adapter_config(path: Path) -> dict:
    """What is in an adapter_config.json that describes a LoRA as ours are. Raises UsageError, NotBuilt."""
    try:
        peft_config = json.loads(path.read_bytes())
        kind = peft_config["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"not the description of a PEFT adapter: {error or type(error).__name__}",
            where=str(path),
            cure="an adapter that PEFT or this program wrote",
        ) from None
    if kind != "LORA":
        raise NotSupported(f"to start from a {kind} adapter", where=str(path), cure="a LoRA adapter")
    strange = sorted(name for name, value in peft_config.items() if value and name not in NEUTRAL)
    strange += [name for name in ("bias", "exclude_modules") if peft_config.get(name) not in (None, "none", [])]
    strange += ["init_lora_weights"] if str(peft_config.get("init_lora_weights")).lower().startswith(REBASED) else []
    strange += ["use_dora", "use_rslora"] if peft_config.get("use_dora") and peft_config.get("use_rslora") else []
    if strange:
        raise NotSupported(
            "to start from an adapter with "
            + ", ".join(f"{name} {json.dumps(peft_config[name])}" for name in strange[:3]),
            where=str(path),
            cure="an adapter of plain LoRA, rsLoRA or DoRA",
        )
    return peft_config


def _adapter_settings(config: TrainConfig, peft_config: dict, path: Path) -> dict:
    kind = "dora" if peft_config.get("use_dora") else "rslora" if peft_config.get("use_rslora") else "lora"
    if config.adapter == AUTO and is_explicit(config, "train_type"):
        preset = registry.lookup(
            "train_type", config.train_type, registry.TRAIN_TYPES, config.sources["train_type"]
        ).adapter
        if preset not in ("lora", kind):
            raise UsageError(
                f"train_type: {config.train_type} means adapter {preset}, and the adapter that the run starts from is "
                f"{kind}",
                where=config.sources["train_type"],
                cure="leave out train_type or init_adapter",
            )
    values = {
        "adapter": kind,
        "lora_rank": peft_config.get("r", 8),
        "lora_alpha": peft_config.get("lora_alpha", 8),
        "lora_dropout": peft_config.get("lora_dropout", 0.0),
        "lora_target_modules": _is_present(peft_config.get("target_modules"), path.with_name(ADAPTER)),
    }
    template = path.with_name("chat_template.jinja")
    if template.is_file() and not template.with_name("additional_chat_templates").exists():
        values["chat_template"] = str(template)
    return {name: parse_value(name, value, str(path)) for name, value in values.items()}


def _is_present(targets: object, file: Path) -> object:
    """Of a list of names those that are in the adapter's `file`: PEFT passes by the ones that a model does not have."""
    if not isinstance(targets, list):
        return targets
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as tensors:
            layers = {name.partition(".lora_A.")[0] for name in tensors.keys()}  # noqa: SIM118 - no dictionary
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"not a safetensors file: {error}", where=str(file), cure="the adapter once more from where it came"
        ) from None
    return [name for name in targets if any(layer.endswith(f".{name}") for layer in layers)] or targets
