"""What contradicts, and what this version refuses, of everything a user can ask for."""

from __future__ import annotations

import re
from pathlib import Path

from anyqlora.config import strategy_options
from anyqlora.config.schema import AUTO, SETTINGS, TrainConfig, parse_value, settings_with
from anyqlora.core import registry
from anyqlora.core.descriptors import AdapterInfo, Info, PresetInfo, QuantizerInfo
from anyqlora.core.errors import NotSupported, UsageError


def overridden(stated: dict) -> set[str]:
    """The settings of lower layers that no longer count, given what a higher layer has `stated`."""
    preset = registry.TRAIN_TYPES.get(stated.get("train_type", ""))
    adapters = [registry.ADAPTERS.get(name) for name in (preset.adapter if preset else "", stated.get("adapter", ""))]
    trains_base = any(adapter and adapter.trains_base for adapter in adapters)
    others = {other for name in stated for other in SETTINGS[name].metadata["supersedes"]}
    return others | set(settings_with("needs", "adapter") if trains_base else ())


def validate(config: TrainConfig) -> TrainConfig:
    """The configuration with its preset resolved.

    Raises UsageError for a contradiction, NotSupported for what is refused.
    """

    def where(name):
        return config.sources.get(name, "") if config.asked(name) else ""

    def contradiction(one, other, why, cure=""):
        raise UsageError(
            f"{one} = {getattr(config, one)} contradicts {other} = {getattr(config, other)}: {why}",
            where=where(one),
            cure=cure or f"leave out {one} or {other}",
        )

    for name in SETTINGS:
        parse_value(name, getattr(config, name), where(name))  # what code gives has not been read by anybody
    if not config.model_name:
        raise UsageError(
            "model_name is missing: rows alone are no job",
            where=where("dataset"),
            cure="--model_name DIRECTORY_OR_HUB_ID, or --model_name demo, the embedded one, to try the rows",
        )
    config = _preset(config, contradiction)
    quantizer, adapter = registry.quantizer(config.quantizer), registry.adapter(config.adapter)
    config = _without_sharding(config)
    if config.strategy != AUTO:
        registry.strategy(config.strategy, where("strategy"))
        strategy_options.strategy_options(config)
    for name in settings_with("only"):
        values, reason = SETTINGS[name].metadata["only"]
        if is_explicit(config, name) and getattr(config, name) not in values:
            raise NotSupported(f"{name}: {reason}", where=where(name), cure=f"leave out {name}")
    for need, (other, is_met, why) in NEEDS.items():
        for name in settings_with("needs", need):
            is_idle = need in IDLE_AS_DEFAULT and getattr(config, name) == SETTINGS[name].default
            if is_explicit(config, name) and not is_idle and not is_met(config):
                contradiction(name, other, why)
    if adapter.trains_base and quantizer.is_quantized:
        contradiction(
            "quantizer", "adapter", "quantized weights cannot be trained", "--quantizer none, or --adapter lora"
        )
    if adapter.needs_quantizer and not quantizer.is_quantized:
        contradiction(
            "adapter",
            "quantizer",
            "LoftQ starts from what quantization lost, and nothing is quantized",
            "--adapter pissa, or --quantizer nf4",
        )
    if config.padding_free is True and config.logits_chunk_tokens == 0:
        contradiction("padding_free", "logits_chunk_tokens", "whole logits are made of padded rows")
    if config.fused_lora is True:
        if not adapter.fusable:
            contradiction("fused_lora", "adapter", "only what is W x + scale B A x is fused", "--fused_lora auto")
        if not quantizer.fusable:
            fusable = ", ".join(name for name, row in registry.QUANTIZERS.items() if row.fusable)
            contradiction(
                "fused_lora",
                "quantizer",
                f"only products with a dequantized weight are fused: {fusable}",
                "--fused_lora auto",
            )
    if config.reentrant_checkpointing and config.use_gradient_checkpointing is False:
        contradiction("reentrant_checkpointing", "use_gradient_checkpointing", "there is nothing to recompute")
    if (
        config.checkpointed_layers != "auto"
        and config.use_gradient_checkpointing in (True, False)
        and bool(config.checkpointed_layers) != config.use_gradient_checkpointing
    ):
        contradiction(
            "checkpointed_layers",
            "use_gradient_checkpointing",
            "one says that something is recomputed, the other that nothing is",
        )
    if (
        config.warmup_steps >= 0
        and is_explicit(config, "warmup_ratio")
        and _layer(where("warmup_ratio")) == _layer(where("warmup_steps"))
    ):
        contradiction("warmup_steps", "warmup_ratio", "both state the warm-up")
    if config.max_steps == 0 or config.max_steps < -1:
        raise UsageError(
            f"max_steps: {config.max_steps} is neither -1 nor at least 1",
            where=where("max_steps"),
            cure="--max_steps 100, or leave it out: num_epochs says how long",
        )
    if config.eval_dataset and config.eval_fraction:
        contradiction("eval_fraction", "eval_dataset", "both say what is held out")
    held_out = config.eval_dataset or config.eval_fraction
    for name in settings_with("needs", "evaluation_set"):
        if getattr(config, name) and not held_out:
            raise UsageError(
                f"{name} needs evaluation rows", where=where(name), cure="--eval_dataset FILE or --eval_fraction 0.05"
            )
    if config.early_stopping_patience and not config.eval_steps:
        raise UsageError(
            "early_stopping_patience needs eval_steps", where=where("early_stopping_patience"), cure="--eval_steps 50"
        )
    if config.load_best_model_at_end and not (held_out and config.eval_steps):
        raise UsageError(
            "load_best_model_at_end needs evaluations",
            where=where("load_best_model_at_end"),
            cure="--eval_dataset FILE --eval_steps 50",
        )
    _seen(config, where)
    _confined("run_name", config.run_name, where("run_name"))
    _confined("timeline", config.timeline, where("timeline"))
    _confined("profiling_output", config.profiling_output, where("profiling_output"))
    return config


def _without_sharding(config: TrainConfig) -> TrainConfig:
    """Under FSDP's NO_SHARD: copies, which are ddp's."""
    if (config.strategy, config.sharding_strategy) != ("fsdp", "ddp"):
        return config
    sources = {**config.sources, "strategy": config.sources.get("sharding_strategy", "")}
    return config.with_(strategy="ddp", sources=sources)


def _seen(config: TrainConfig, where) -> None:
    """What is shown, told and profiled. Raises UsageError."""
    places = [name.strip() for name in config.log_to.split(",")]
    for name in places:
        registry.lookup("log_to", name, registry.REPORTERS | registry.TRACKERS, where("log_to"))
    views = [name for name in places if name in registry.REPORTERS]
    if len(views) > 1:
        raise UsageError(
            f"log_to: {' and '.join(views)} contradict each other",
            where=where("log_to"),
            cure="one of them, and any trackers",
        )
    if (
        config.profile
        and config.profile_wait + config.profiler_warmup_steps + config.profile_active > config.profiling_frequency
    ):
        raise UsageError(
            "a profiler cycle (wait, warm-up, active) is longer than profiling_frequency",
            where=where("profiling_frequency"),
            cure="a larger --profiling_frequency, or fewer --profile_active",
        )
    for name in settings_with("needs", "profile"):
        if not config.profile and getattr(config, name) != SETTINGS[name].default:
            raise UsageError(f"{name} needs profile", where=where(name), cure="--profile true")


NEEDS = {  # what settings need -> (the setting that decides it, whether it is there, why they do nothing without)
    "adapter": ("adapter", lambda c: not registry.adapter(c.adapter).trains_base, "full fine-tuning has no adapter"),
    "adam": ("optimizer", lambda c: registry.OPTIMIZERS[c.optimizer].is_adam, "that update rule has no such term"),
    "fp16": ("precision", lambda c: c.precision in (AUTO, "fp16_autocast"), "only fp16 scales the loss"),
    "fsdp": (
        "strategy",
        lambda c: c.strategy in (AUTO, "fsdp") or (c.strategy, c.sharding_strategy) == ("ddp", "ddp"),
        "only fsdp shards",
    ),
    "deepspeed": ("strategy", lambda c: c.strategy in (AUTO, "deepspeed"), "only deepspeed has stages"),
    "ddp": ("strategy", lambda c: c.strategy in (AUTO, "ddp", "accelerate"), "only ddp looks for them"),
    "cosine_with_restarts": (
        "lr_scheduler",
        lambda c: c.lr_scheduler == "cosine_with_restarts",
        "only cosine_with_restarts has restarts",
    ),
    "polynomial": ("lr_scheduler", lambda c: c.lr_scheduler == "polynomial", "only polynomial has an exponent"),
    "exponential": ("lr_scheduler", lambda c: c.lr_scheduler == "exponential", "only exponential decays by a factor"),
    "lr_falls": ("lr_scheduler", lambda c: c.lr_scheduler != "constant", "a constant rate has no floor"),
    "clipping": ("apply_gradient_clipping", lambda c: c.apply_gradient_clipping, "nothing is clipped"),
    "bnb_4bit": (
        "quantizer",
        lambda c: registry.quantizer(c.quantizer).double_quant,
        f"only {' and '.join(name for name, row in registry.QUANTIZERS.items() if row.double_quant)} have scales that "
        "are quantized too",
    ),
    "processes": ("world_size", lambda c: c.world_size != 1, "one process has nobody to meet"),
    "quantized_cache": ("quantized_cache", lambda c: c.quantized_cache is not False, "nothing is kept"),
    "token_cache": ("token_cache", lambda c: c.token_cache is not False, "nothing is kept"),
    "synchronization": ("world_size", lambda c: c.world_size != 1, "one process has no gradients to synchronise"),
    "affine": (
        "quantizer",
        lambda c: registry.quantizer(c.quantizer).group == "affine_group_size",
        "only affine quantizers have groups of their own choice",
    ),
    **{
        need: (
            other,
            lambda c, fits=fits: fits(c) or not registry.FROZEN_MATMULS[c.frozen_matmul].is_rounded,
            "only products of LoRA layers that are fused are rounded",
        )
        for need, other, fits in (
            ("fused_lora", "fused_lora", lambda c: c.fused_lora is not False),
            ("fused_adapter", "adapter", lambda c: registry.adapter(c.adapter).fusable),
            ("fused_quantizer", "quantizer", lambda c: registry.quantizer(c.quantizer).fusable),
        )
    },
    "built_in_rows": (
        "dataset",
        lambda c: any(name in c.dataset for name in ("alpaca_sample", "dummy")),
        "only alpaca_sample and dummy are cut; --dataset alpaca_sample, or --max_steps for other rows",
    ),
}  # beside these, evaluation_set and profile, which `validate` and `_seen` look at
IDLE_AS_DEFAULT = ("processes", "synchronization", "built_in_rows")  # commands of fsdp_qlora state such defaults


def is_explicit(config: TrainConfig, name: str) -> bool:
    """Whether somebody means this setting: it was stated, and not merely as its default in a file that may state
    all.
    """
    is_file = _layer(config.sources.get(name, "")) == "file"
    return config.asked(name) and not (is_file and getattr(config, name) == SETTINGS[name].default)


def _preset(config: TrainConfig, contradiction) -> TrainConfig:
    """Resolve train_type into quantizer and adapter. What is stated beside it refines it (qlora with fp4 or with dora);
    within one layer (both on the command line, both in the file), quantized against not, or full against an adapter,
    is an error."""
    preset = registry.lookup(
        "train_type", config.train_type, registry.TRAIN_TYPES, config.sources.get("train_type", "")
    )
    sources = dict(config.sources)
    bits, quantizer, adapter = config.bits, registry.quantizer(preset.quantizer), registry.adapter(preset.adapter)
    if bits != AUTO and config.quantizer == AUTO and quantizer.is_quantized:
        quantizer = _quantizer_of_bits(int(bits), quantizer, sources.get("bits", ""))
    preset_rows, chosen = {"quantizer": quantizer, "adapter": adapter}, {}
    for name, row in preset_rows.items():
        value = getattr(config, name)
        if value == AUTO:
            config = config.with_(**{name: row.name})
            sources[name], chosen[name] = "preset", row
            continue
        chosen[name] = (registry.quantizer if name == "quantizer" else registry.adapter)(value, sources.get(name, ""))
        is_other = _is_pole(chosen[name]) != _is_pole(row)
        if is_other and config.asked("train_type") and _layer(sources[name]) == _layer(sources["train_type"]):
            contradiction(name, "train_type", f"{config.train_type} means {name} {row.name}")
    poles = [_is_pole(row) for row in chosen.values()]
    if poles != [_is_pole(row) for row in preset_rows.values()] and (like := _preset_like(preset, poles)):
        # a higher layer has overridden the preset: in a run's directory, where one file states all, the two would
        # contradict
        config = config.with_(train_type=like)
        sources["train_type"] = "preset"
    if registry.TRAIN_TYPES[config.train_type].fused and config.fused_lora is not True:
        if config.fused_lora is False:
            contradiction("fused_lora", "train_type", f"{config.train_type} means fused LoRA")
        config = config.with_(fused_lora=True)
        sources["fused_lora"] = "preset"
    quantizer = chosen["quantizer"]
    if bits != AUTO and quantizer.bits != bits:
        other = "train_type" if sources["quantizer"] == "preset" else "quantizer"
        contradiction(
            "bits",
            other,
            f"its weights have {quantizer.bits} bits",
            f"leave out bits, or --train_type qlora --bits {bits}",
        )
    return config.with_(bits=quantizer.bits, sources=sources)


def _is_pole(row: Info) -> bool:
    """Whether it is the end of its axis that a preset is known by: weights as they are, or all of them learned."""
    return not row.is_quantized if isinstance(row, QuantizerInfo) else isinstance(row, AdapterInfo) and row.trains_base


def _preset_like(preset: PresetInfo, poles: list[bool]) -> str:
    """The first preset with these poles, fused where `preset` is unless all weights learn; "" where there is none."""
    for row in registry.TRAIN_TYPES.values():
        if row.refused or (row.fused != preset.fused and row.adapter != registry.ALL_WEIGHTS):
            continue
        if poles == [_is_pole(registry.QUANTIZERS[row.quantizer]), _is_pole(registry.ADAPTERS[row.adapter])]:
            return row.name
    return ""


def _quantizer_of_bits(bits: int, preset: QuantizerInfo, where: str) -> QuantizerInfo:
    """What --bits means: the preset's quantizer, else the first of so many bits that torch has."""
    rows = [preset, *(registry.QUANTIZERS[name] for name in registry.offered(registry.QUANTIZERS, "torch"))]
    known = sorted({row.bits for row in rows if row.is_quantized})
    if bits not in known:
        raise NotSupported(
            f"bits: {bits}-bit weights are not built; {' and '.join(map(str, known))} are",
            where=where,
            cure="--bits 4 or 8, or --train_type lora for 16",
        )
    return next(row for row in rows if row.bits == bits)


def _layer(source: str) -> str:
    return "file" if re.search(r":\d+$", source) else source.split(":")[0].partition("_")[0]


def _confined(name: str, value: str, where: str) -> None:
    if value and (Path(value).name != value or value in (".", "..") or not re.fullmatch(r"[\w.+ -]+", value)):
        raise UsageError(
            f"{name}: {value!r} is not a plain name", where=where, cure="letters, digits, '.', '_', '-'; no '/'"
        )
