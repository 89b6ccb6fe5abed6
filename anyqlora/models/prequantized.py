"""Checkpoints whose weights are quantized already: what config.json says of them, and which plans fit."""

from __future__ import annotations

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.core.registry import AFFINE, BITS, QUANTIZERS
from anyqlora.models.architectures import DEMO_BASE, model_config

NEEDS_FULL_PRECISION = ("pissa", "loftq", "full")
FROM = "quantized_from"  # in the config.json that `quantize` writes: the model that it was given


def loadable(config: TrainConfig) -> str:
    """The base as plain transformers and PEFT load it: the model that it was quantized from, where its weights are in MLX's packing."""
    about = model_config(config)
    stated = about.get(FROM) if is_mlx_packed(about) else None
    return str(DEMO_BASE) if config.is_demo else stated or config.model_name


def is_mlx_packed(about: dict) -> bool:
    """Whether a parsed config.json is of weights that MLX's libraries read, and this one, and plain transformers does not."""
    return bool(about.get("quantization"))


def quantized_as(about: dict) -> str | None:
    """The quantizer of a bitsandbytes checkpoint, from its parsed config.json; None when its weights are not quantized.

    Raises NotBuilt for weights quantized by another method.
    """
    if is_mlx_packed(about):
        return _packed_by_mlx(about["quantization"])
    about = about.get("quantization_config") or about.get("text_config", {}).get("quantization_config")
    if not about:
        return None
    method = about.get(
        "quant_method", "bitsandbytes" if "load_in_4bit" in about or "load_in_8bit" in about else "an unnamed method"
    )
    if method != "bitsandbytes":
        raise NotSupported(
            f"the checkpoint's weights are quantized by {method}, which is not read",
            where="config.json: quantization_config",
            cure="the same model with unquantized (bf16) weights",
        )
    return about.get("bnb_4bit_quant_type", "fp4") if about.get("load_in_4bit") else "int8"


def _packed_by_mlx(about: dict) -> str:
    """The quantizer that mlx-lm's `quantization` describes. Raises NotBuilt for one that is not in the table."""
    mode, bits = about.get("mode", "affine"), about.get("bits")
    name = mode if mode != "affine" else f"affine{bits}"
    single = [key for key, value in about.items() if isinstance(value, (dict, bool))]
    if name not in QUANTIZERS or single:
        what = f"{mode} in {bits} bits" if name not in QUANTIZERS else f"layer by layer ({single[0]})"
        raise NotSupported(
            f"the checkpoint's weights are quantized {what}, which is not read",
            where="config.json: quantization",
            cure="the same model with unquantized (bf16) weights",
        )
    return name


def resolve_quantizer(draft, about: dict) -> None:
    """Make the checkpoint's own quantizer the plan's. Raises UsageError when another was asked for, or an adapter that needs the
    full-precision weights."""
    found, config = quantized_as(about), draft.config
    if found is None:
        return
    if config.adapter in NEEDS_FULL_PRECISION:
        raise UsageError(
            f"adapter {config.adapter} needs the full-precision weights, and this checkpoint's are quantized ({found})",
            where=config.sources.get("adapter", ""),
            cure="--adapter lora, or the same model with unquantized weights",
        )
    group = (about.get("quantization") or {}).get("group_size", config.affine_group_size)
    if found in AFFINE and group != config.affine_group_size:
        if config.asked("affine_group_size"):
            raise UsageError(
                f"affine_group_size = {config.affine_group_size} contradicts the checkpoint, whose groups have {group}",
                where=config.sources["affine_group_size"],
                cure=f"--affine_group_size {group}, or leave it out",
            )
        draft.choose("affine_group_size", group)
    if found != config.quantizer:
        asked = next((name for name in ("quantizer", "bits") if config.asked(name)), None)
        asked = asked or ("train_type" if config.quantizer == "none" and config.asked("train_type") else None)
        if asked:
            raise UsageError(
                f"{asked} = {getattr(config, asked)} contradicts the checkpoint, whose weights are quantized already: {found}",
                where=config.sources.get(asked, ""),
                cure=f"--quantizer {found}, or the same model with unquantized weights",
            )
        draft.adjust("quantizer", found, "the checkpoint's weights are quantized already")
        draft.choose("bits", BITS[found])
