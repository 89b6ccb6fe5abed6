"""Checkpoints whose weights are quantized already: what config.json says of them, and which plans fit."""

from __future__ import annotations

from anyqlora.config.schema import TrainConfig
from anyqlora.core import registry
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.models.architectures import DEMO_BASE, model_config

FROM = "quantized_from"  # in the config.json that `quantize` writes: the model that it was given


def loadable(config: TrainConfig) -> str:
    """The base as plain transformers and PEFT load it: what it was quantized from, where its weights are in MLX's
    packing.
    """
    about = model_config(config)
    stated = about.get(FROM) if is_mlx_packed(about) else None
    return str(DEMO_BASE) if config.is_demo else stated or config.model_name


def is_mlx_packed(described: dict) -> bool:
    """Whether a parsed config.json is of weights that MLX's libraries read, and this one, and plain transformers does
    not.
    """
    return bool(described.get("quantization"))


def quantized_as(about: dict) -> str | None:
    """The quantizer of a checkpoint, from its parsed config.json; None when its weights are not quantized.

    Raises NotSupported for weights quantized as no quantizer here does.
    """
    if is_mlx_packed(about):
        about, where = about["quantization"], "config.json: quantization"
        mode, bits = about.get("mode", "affine"), about.get("bits")
        kind, what = f"mlx {mode}{bits if mode == 'affine' else ''}", f"{mode} in {bits} bits"
        single = [key for key, value in about.items() if isinstance(value, (dict, bool))]
    else:
        about = about.get("quantization_config") or about.get("text_config", {}).get("quantization_config")
        if not about:
            return None
        is_bnb, where, single = (
            "load_in_4bit" in about or "load_in_8bit" in about,
            "config.json: quantization_config",
            [],
        )
        method = about.get("quant_method", "bitsandbytes" if is_bnb else "an unnamed method")
        form = about.get("bnb_4bit_quant_type", "4bit") if about.get("load_in_4bit") else "8bit"
        kind, what = f"{method} {form}", f"by {method}"
    name = next((name for name, row in registry.QUANTIZERS.items() if kind in row.checkpoints), None)
    if name is None or single:
        what = f"layer by layer ({single[0]})" if name else what
        raise NotSupported(
            f"the checkpoint's weights are quantized {what}, which is not read",
            where=where,
            cure="the same model with unquantized (bf16) weights",
        )
    return name


def resolve_quantizer(draft, about: dict) -> None:
    """Make the checkpoint's own quantizer the plan's.

    Raises UsageError when another was asked for, or an adapter that needs the full-precision weights.
    """
    quantizer, config = quantized_as(about), draft.config
    if quantizer is None:
        return
    row = registry.quantizer(quantizer)
    if registry.adapter(config.adapter).needs_full_weights:
        raise UsageError(
            f"adapter {config.adapter} needs the full-precision weights, and this checkpoint's are quantized "
            f"({quantizer})",
            where=config.sources.get("adapter", ""),
            cure="--adapter lora, or the same model with unquantized weights",
        )
    group = (about.get("quantization") or {}).get("group_size", config.affine_group_size)
    if row.group == "affine_group_size" and group != config.affine_group_size:
        if config.asked("affine_group_size"):
            raise UsageError(
                f"affine_group_size = {config.affine_group_size} contradicts the checkpoint, whose groups have {group}",
                where=config.sources["affine_group_size"],
                cure=f"--affine_group_size {group}, or leave it out",
            )
        draft.choose("affine_group_size", group)
    if quantizer != config.quantizer:
        asked = next((name for name in ("quantizer", "bits") if config.asked(name)), None)
        is_unquantized = not registry.quantizer(config.quantizer).is_quantized
        asked = asked or ("train_type" if is_unquantized and config.asked("train_type") else None)
        if asked:
            raise UsageError(
                f"{asked} = {getattr(config, asked)} contradicts the checkpoint, whose weights are quantized already: "
                f"{quantizer}",
                where=config.sources.get(asked, ""),
                cure=f"--quantizer {quantizer}, or the same model with unquantized weights",
            )
        draft.adjust("quantizer", quantizer, "the checkpoint's weights are quantized already")
        draft.choose("bits", row.bits)
