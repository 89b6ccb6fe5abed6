"""What contradicts, and what this version refuses, of everything a user can ask for."""

from __future__ import annotations

import re
from pathlib import Path

from anyqlora.config import strategy_options
from anyqlora.config.schema import AUTO, SETTINGS, TrainConfig, parse_value, settings_with
from anyqlora.core import registry
from anyqlora.core.errors import NotSupported, UsageError


def overridden(stated: dict) -> set[str]:
    """The settings of lower layers that no longer count, given what a higher layer has `stated`."""
    is_full = "full" in (stated.get("train_type"), stated.get("adapter"))
    others = {other for name in stated for other in SETTINGS[name].metadata["supersedes"]}
    return others | set(settings_with("needs", "adapter") if is_full else ())


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
        raise UsageError("no model", where=where("dataset"), cure="--model_name DIRECTORY_OR_HUB_ID")
    config = _preset(config, contradiction)
    for name in ("optimizer",):
        registry.lookup(name, getattr(config, name), getattr(registry, name.upper() + "S"), where(name))
    if config.strategy != AUTO:
        registry.strategy_target(config.strategy, where("strategy"))
        strategy_options.strategy_options(config)
    for name in settings_with("only"):
        value, reason = SETTINGS[name].metadata["only"]
        if is_explicit(config, name) and getattr(config, name) != value:
            raise NotSupported(f"{name}: {reason}", where=where(name), cure=f"leave out {name}")
    for need, (other, is_met, why) in NEEDS.items():
        for name in settings_with("needs", need):
            if is_explicit(config, name) and not is_met(config):
                contradiction(name, other, why)
    if config.adapter == "full" and config.quantizer != "none":
        contradiction(
            "quantizer", "adapter", "quantized weights cannot be trained", "--quantizer none, or --adapter lora"
        )
    if config.adapter == "loftq" and config.quantizer == "none":
        contradiction(
            "adapter",
            "quantizer",
            "LoftQ starts from what quantization lost, and nothing is quantized",
            "--adapter pissa, or --quantizer nf4",
        )
    if config.padding_free is True and config.logits_chunk_tokens == 0:
        contradiction("padding_free", "logits_chunk_tokens", "whole logits are made of padded rows")
    if config.fused_lora is True:
        if config.adapter not in registry.FUSED_ADAPTERS:
            contradiction("fused_lora", "adapter", "only what is W x + scale B A x is fused", "--fused_lora auto")
        if config.quantizer not in registry.FUSED_QUANTIZERS:
            contradiction(
                "fused_lora",
                "quantizer",
                f"only products with a dequantized weight are fused: {', '.join(registry.FUSED_QUANTIZERS)}",
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
                f"{name} needs held-out rows", where=where(name), cure="--eval_dataset FILE or --eval_fraction 0.05"
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


def _seen(config: TrainConfig, where) -> None:
    """What is shown, told and profiled. Raises UsageError."""
    places = [name.strip() for name in config.log_to.split(",")]
    for name in places:
        registry.lookup("log_to", name, registry.VIEWS | registry.TRACKERS, where("log_to"))
    views = [name for name in places if name in registry.VIEWS]
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
    "adapter": ("adapter", lambda c: c.adapter != "full", "full fine-tuning has no adapter"),
    "adam": ("optimizer", lambda c: "adam" in c.optimizer, "that update rule has no such term"),
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
        lambda c: c.quantizer in ("nf4", "fp4"),
        "only nf4 and fp4 have scales that are quantized too",
    ),
    "processes": ("world_size", lambda c: c.world_size != 1, "one process has nobody to meet"),
    "quantized_cache": ("quantized_cache", lambda c: c.quantized_cache is not False, "nothing is kept"),
    "synchronization": ("world_size", lambda c: c.world_size != 1, "one process has no gradients to synchronise"),
    "affine": (
        "quantizer",
        lambda c: c.quantizer in registry.AFFINE,
        "only affine quantizers have groups of their own choice",
    ),
    **{
        need: (
            other,
            lambda c, other=other, known=known: c.frozen_matmul == "full" or getattr(c, other) in known,
            "only products of LoRA layers that are fused are rounded",
        )
        for need, other, known in (
            ("fused_lora", "fused_lora", (AUTO, True)),
            ("fused_adapter", "adapter", registry.FUSED_ADAPTERS),
            ("fused_quantizer", "quantizer", registry.FUSED_QUANTIZERS),
        )
    },
    "built_in_rows": (
        "dataset",
        lambda c: any(name in c.dataset for name in ("alpaca_sample", "dummy")),
        "only alpaca_sample and dummy are cut",
    ),
}  # beside these, evaluation_set and profile, which `validate` and `_seen` look at


def is_explicit(config: TrainConfig, name: str) -> bool:
    """Whether somebody means this setting: it was stated, and not merely as its default in a file that may state all."""
    is_file = _layer(config.sources.get(name, "")) == "file"
    return config.asked(name) and not (is_file and getattr(config, name) == SETTINGS[name].default)


def _preset(config: TrainConfig, contradiction) -> TrainConfig:
    """Resolve train_type into quantizer and adapter. What is stated beside it refines it (qlora with fp4 or with dora);
    within one layer (both on the command line, both in the file), quantized against not, or full against an adapter,
    is an error."""
    quantizer, adapter = registry.lookup(
        "train_type", config.train_type, registry.TRAIN_TYPES, config.sources.get("train_type", "")
    )
    sources = dict(config.sources)
    bits = config.bits
    if bits != AUTO and config.quantizer == AUTO and quantizer != "none":
        by_bits = {4: quantizer, 8: "int8"}
        if bits not in by_bits:
            raise NotSupported(
                f"bits: {bits}-bit weights are not built; 4 and 8 are",
                where=sources.get("bits", ""),
                cure="--bits 4 or 8, or --train_type lora for 16",
            )
        quantizer = by_bits[bits]
    for name, preset, pole in (("quantizer", quantizer, "none"), ("adapter", adapter, "full")):
        value = getattr(config, name)
        if value == AUTO:
            config = config.with_(**{name: preset})
            sources[name] = "preset"
        elif (
            (value == pole) != (preset == pole)
            and config.asked("train_type")
            and _layer(sources[name]) == _layer(sources["train_type"])
        ):
            contradiction(name, "train_type", f"{config.train_type} means {name} {preset}")
    poles = (config.quantizer == "none", config.adapter == "full")
    if poles != (quantizer == "none", adapter == "full") and poles in (fitting := _presets_like(config.train_type)):
        # a higher layer has overridden the preset: in a run's directory, where one file states all, the two would contradict
        config = config.with_(train_type=fitting[poles])
        sources["train_type"] = "preset"
    registry.lookup("quantizer", config.quantizer, registry.QUANTIZERS, sources.get("quantizer", ""))
    registry.lookup("adapter", config.adapter, registry.ADAPTERS, sources.get("adapter", ""))
    if config.train_type in registry.FUSED_TYPES and config.fused_lora is not True:
        if config.fused_lora is False:
            contradiction("fused_lora", "train_type", f"{config.train_type} means fused LoRA")
        config = config.with_(fused_lora=True)
        sources["fused_lora"] = "preset"
    if bits != AUTO and registry.BITS[config.quantizer] != bits:
        contradiction("bits", "quantizer", f"{config.quantizer} has {registry.BITS[config.quantizer]} bits")
    return config.with_(bits=registry.BITS[config.quantizer], sources=sources)


def _presets_like(train_type: str) -> dict[tuple[bool, bool], str]:
    """{(nothing is quantized, all is learned): the preset of it}, fused where `train_type` is."""
    fused = "custom_" * (train_type in registry.FUSED_TYPES)
    return {(False, False): f"{fused}qlora", (True, False): f"{fused}lora", (True, True): "full"}


def _layer(source: str) -> str:
    return "file" if re.search(r":\d+$", source) else source.split(":")[0].partition("_")[0]


def _confined(name: str, value: str, where: str) -> None:
    if value and (Path(value).name != value or value in (".", "..") or not re.fullmatch(r"[\w.+ -]+", value)):
        raise UsageError(
            f"{name}: {value!r} is not a plain name", where=where, cure="letters, digits, '.', '_', '-'; no '/'"
        )
