"""PEFT's adapter files as mlx-lm's, and back: numpy alone, so that a machine without MLX writes what a Mac reads.

mlx-lm keeps the transposes (lora_a [in, r], lora_b [r, out]), one rank and one scale for all layers, and DoRA's
magnitude as `m`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.core.files import Content, tensors_to_bytes, to_json
from anyqlora.core.registry import ADAPTER, ADAPTER_CONFIG
from anyqlora.models.lora_targets import PREFIX, as_plain_json, as_whole_number, last

MLX_ADAPTER = "adapters.safetensors"
KEPT = "peft"  # key of mlx-lm's adapter_config.json, which it passes over: PEFT's own, for the way back
KINDS = {".lora_A.weight": "lora_a", ".lora_B.weight": "lora_b", ".lora_magnitude_vector": "m"}
NOT_KEPT = (
    "bias",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "exclude_modules",
)  # of PEFT: what mlx-lm has no place for


def to_mlx(directory: Path) -> dict[str, Content]:
    """{file: content} of the adapter in `directory` (PEFT's) for `mlx_lm.load(..., adapter_path=)`.

    Raises UsageError, NotBuilt.
    """
    config, tensors = _read(directory, ADAPTER)
    _refuse_what_is_lost(config, tensors, directory)
    modules = sorted({_split(name, directory)[0] for name in tensors})
    dora = bool(config.get("use_dora"))
    scales = {module: _scale(config, module) for module in modules}
    ranks = {module: tensors[f"{PREFIX}{module}.lora_A.weight"].shape[0] for module in modules}
    rank, scale = max(ranks.values()), scales[modules[0]]
    renamed = {}
    for name, value in tensors.items():
        module, kind = _split(name, directory)
        if kind == "m":
            renamed[f"{module}.m"] = value
            continue
        value = value.T  # [in, r] or [r, out]
        if kind == "lora_b":
            value = value * np.float32(scales[module] / scale)
        missing = rank - ranks[module]  # mlx-lm has one rank: the rest is zero
        widths = [(0, 0), (0, missing)] if kind == "lora_a" else [(0, missing), (0, 0)]
        renamed[f"{module}.{kind}"] = np.ascontiguousarray(np.pad(value, widths))
    mlx_config = {
        "fine_tune_type": "dora" if dora else "lora",
        **_keys(modules),
        "model": config.get("base_model_name_or_path"),
        KEPT: {"config": config, "ranks": ranks},
    }
    mlx_config["lora_parameters"] |= {"rank": rank, "scale": scale, "dropout": config.get("lora_dropout", 0.0)}
    return {MLX_ADAPTER: tensors_to_bytes(renamed, {"format": "mlx"}), ADAPTER_CONFIG: to_json(mlx_config)}


def to_peft(directory: Path) -> dict[str, Content]:
    """{file: content} of the adapter in `directory` (mlx-lm's) as PEFT's. Raises UsageError, NotBuilt."""
    mlx_config, tensors = _read(directory, MLX_ADAPTER)
    kind = mlx_config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise NotSupported(
            f"fine_tune_type {kind!r} is a whole model, not an adapter",
            where=str(directory / ADAPTER_CONFIG),
            cure="convert DIR --to hf",
        )
    parameters, stored = mlx_config.get("lora_parameters") or {}, mlx_config.get(KEPT) or {}
    rank, scale = parameters.get("rank"), parameters.get("scale")
    if not isinstance(rank, int) or not isinstance(scale, (int, float)):
        raise UsageError(
            "lora_parameters lacks rank or scale",
            where=str(directory / ADAPTER_CONFIG),
            cure="the directory that mlx-lm wrote",
        )
    modules = sorted({name.rpartition(".")[0] for name in tensors})
    _check_shapes(tensors, modules, directory)
    config = stored.get("config") or _peft_config(mlx_config, modules, rank, scale)
    ranks = stored.get("ranks") or {}
    back = {kind: suffix for suffix, kind in KINDS.items()}
    renamed = {}
    for name, value in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf != "m":
            own = ranks.get(module, rank)
            value = (value[:, :own] if leaf == "lora_a" else value[:own] / np.float32(_scale(config, module) / scale)).T
        renamed[f"{PREFIX}{module}{back[leaf]}"] = np.ascontiguousarray(value.astype(np.float32))
    return {ADAPTER: tensors_to_bytes(renamed, {"format": "pt"}), ADAPTER_CONFIG: to_json(config)}


def _read(directory: Path, name: str) -> tuple[dict, dict[str, np.ndarray]]:
    try:
        config = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        return config, {key: value.astype(np.float32) for key, value in load_file(directory / name).items()}
    except (OSError, ValueError, SafetensorError, TypeError) as error:
        raise UsageError(
            f"no adapter is read there: {str(error).splitlines()[0]}",
            where=str(directory / name),
            cure="a directory with adapter_config.json and its weights",
        ) from None


def _split(name: str, directory: Path) -> tuple[str, str]:
    for suffix, kind in KINDS.items():
        if name.startswith(PREFIX) and name.endswith(suffix):
            return name.removeprefix(PREFIX).removesuffix(suffix), kind
    raise NotSupported(
        f"{name} is no LoRA tensor of a linear layer, and mlx-lm has no place for it", where=str(directory / ADAPTER)
    )


def _refuse_what_is_lost(config: Mapping, tensors: Mapping, directory: Path) -> None:
    lost = [f"{key} = {config[key]}" for key in NOT_KEPT if config.get(key) not in (None, "none", [], {}, False)]
    lost += ["lora_bias"] * bool(config.get("lora_bias"))
    if lost or config.get("peft_type", "LORA") != "LORA":
        raise NotSupported(
            f"mlx-lm has no place for {', '.join(lost) or config.get('peft_type')}",
            where=str(directory / ADAPTER_CONFIG),
            cure="export --to merged",
        )
    if not tensors:
        raise UsageError("no tensor is in it", where=str(directory / ADAPTER))


def _scale(config: Mapping, module: str) -> float:
    """alpha / rank of one module, as PEFT takes it: patterns are regexes of the ends of names."""

    def of(pattern: str, default):
        return next(
            (value for key, value in (config.get(pattern) or {}).items() if re.match(rf"(.*\.)?({key})$", module)),
            default,
        )

    rank, alpha = of("rank_pattern", config["r"]), of("alpha_pattern", config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _keys(modules: list[str]) -> dict:
    """num_layers and keys: names within a layer where every layer has the same, else whole names."""
    split = [match for match in (re.fullmatch(r"(.*\.)?layers\.(\d+)\.(.*)", module) for module in modules) if match]
    if len(split) == len(modules):
        layers = {int(match[2]) for match in split}
        keys = sorted({match[3] for match in split})
        if layers == set(range(max(layers) + 1)) and len(modules) == len(layers) * len(keys):
            return {"num_layers": len(layers), "lora_parameters": {"keys": keys}}
    return {"num_layers": 0, "lora_parameters": {"keys": modules}}


def _check_shapes(tensors: Mapping[str, np.ndarray], modules: list[str], directory: Path) -> None:
    """Raises UsageError naming every layer whose two factors do not belong together."""
    wrong = []
    for module in modules:
        a, b, m = (tensors.get(f"{module}.{leaf}") for leaf in ("lora_a", "lora_b", "m"))
        if a is None or b is None:
            wrong.append(f"{module} has only one of lora_a and lora_b")
        elif a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or (m is not None and m.shape != b.shape[1:]):
            wrong.append(
                f"{module}: lora_a {list(a.shape)}, lora_b {list(b.shape)}"
                + (f", m {list(m.shape)}" if m is not None else "")
            )
    if wrong:
        raise UsageError(
            f"{len(wrong)} layers do not fit:\n  " + "\n  ".join(wrong),
            where=str(directory / MLX_ADAPTER),
            cure="the file that mlx-lm wrote",
        )


def _peft_config(config: Mapping, modules: list[str], rank: int, scale: float) -> dict:
    """adapter_config.json of an adapter that mlx-lm has trained."""
    from peft import LoraConfig

    peft_config = LoraConfig(
        r=rank,
        lora_alpha=cast(int, as_whole_number(scale * rank)),  # PEFT takes a float, too
        lora_dropout=config["lora_parameters"].get("dropout", 0.0),
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=modules if len({last(module) for module in modules}) == len(modules) else _common(modules),
        use_dora=config.get("fine_tune_type") == "dora",
    )
    return as_plain_json(
        {**peft_config.to_dict(), "inference_mode": True, "base_model_name_or_path": config.get("model")}
    )


def _common(modules: list[str]) -> list[str]:
    """Last parts of names where all layers have them, else whole names."""
    keys = _keys(modules)
    return sorted({last(key) for key in keys["lora_parameters"]["keys"]}) if keys["num_layers"] else modules
