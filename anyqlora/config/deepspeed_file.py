"""A DeepSpeed configuration as it is: what it says of a run, by the names of our settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from anyqlora.core.errors import NotSupported, UsageError

Stated = Mapping[str, tuple[object, str]]  # {key of the file: (value, "file:line")}

KEYS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")  # by which such a file is known
NUMBERS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_clipping": "max_grad_norm",
}
OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd"}  # its Adam decays weights as AdamW does
OPTIMIZER_PARAMETERS = {"lr": "lr", "eps": "adam_eps", "weight_decay": "weight_decay"}
SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
SCHEDULE_PARAMETERS = {
    "warmup_max_lr": "lr",
    "warmup_num_steps": "warmup_steps",
    "cos_min_ratio": "cosine_min_lr_ratio",
}
HARMLESS = ("steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "train_batch_size")
OFFLOADS = ("offload_optimizer", "offload_param")
AUTO, LINEAR = "auto", "warm-up is linear here; DeepSpeed's is logarithmic where warmup_type does not say linear"


def is_deepspeeds(keys: Mapping[str, object]) -> bool:
    """Whether a file with these keys is a DeepSpeed configuration."""
    return any(key in keys for key in KEYS)


def settings(stated: Stated, notes: list[str] | None = None) -> dict[str, tuple[object, str]]:
    """{setting: (value, "file:line")} of what the file decides; what it leaves "auto" is ours.

    What it says and changes nothing goes to `notes`. Raises UsageError for what cannot be done as it says.
    """
    result: dict[str, tuple[object, str]] = {}
    for key, (value, where) in stated.items():
        if key in NUMBERS:
            result |= {NUMBERS[key]: (value, where)} if value != AUTO else {}
        elif key in SECTIONS:
            if not isinstance(value, Mapping):
                raise UsageError(f"{key} is not a map", where=where, cure=f'"{key}": {{...}}, or take it out')
            for name, part in _section(key, value, where, [] if notes is None else notes):
                if name in result and result[name][0] != part:
                    raise UsageError(
                        f"{key}: {name} {part} contradicts {result[name][0]} of {result[name][1]}",
                        where=where,
                        cure="take one of them out",
                    )
                result[name] = (part, where)
        elif key not in HARMLESS:
            raise NotSupported(f"{key} of a DeepSpeed configuration is not built", where=where, cure="take it out")
    if (stage := zero(stated)) and stage["zero_stage"] != AUTO:
        result["deepspeed_zero_stage"] = (stage["zero_stage"], stated["zero_optimization"][1])
    if stage and stage["offload_param"]:
        result["use_cpu_offload"] = (True, stated["zero_optimization"][1])
    _rows(stated)
    return result


def zero(stated: Stated) -> dict:
    """{option of the strategy: value} of zero_optimization; {} where the file has none."""
    value, where = stated.get("zero_optimization", ({}, ""))
    if not isinstance(value, Mapping):
        raise UsageError("zero_optimization is not a map", where=where, cure='"zero_optimization": {"stage": 2}')
    if not value:
        return {}
    rest = dict(value)
    options: dict[str, object] = {"zero_stage": rest.pop("stage", 0)}
    for name in OFFLOADS:
        part = rest.pop(name, None) or {}
        device = part.get("device", "none") if isinstance(part, Mapping) else part
        if device not in (None, "none", "cpu", AUTO):
            raise NotSupported(f"{name} to {device!r}", where=where, cure='"device": "cpu"')
        if isinstance(part, Mapping) and part.get("ratio", 1) != 1:
            raise NotSupported(f"{name}: ratio {part['ratio']}: all of it or nothing", where=where, cure='"ratio": 1')
        options[name] = device == "cpu"
    return {**options, "zero_options": {key: value for key, value in rest.items() if value != AUTO}}


def check_rows(stated: Stated, world_size: int) -> None:
    """Raises UsageError where train_batch_size is not what the file's other numbers and the processes make."""
    rows, where = stated.get("train_batch_size", (AUTO, ""))
    if rows != AUTO and world_size > 0 and rows != (step := _step(stated) * world_size):
        raise UsageError(
            f"train_batch_size {rows} is not micro-batch x accumulation x processes: {step} on {world_size}",
            where=where,
            cure='"train_batch_size": "auto"',
        )


def _rows(stated: Stated) -> None:
    """Raises UsageError for a train_batch_size from which the micro-batch would have to be guessed."""
    rows, where = stated.get("train_batch_size", (AUTO, ""))
    if rows != AUTO and not _step(stated):
        raise UsageError(
            f"train_batch_size {rows}: how many rows are in memory at a time is not said",
            where=where,
            cure='"train_micro_batch_size_per_gpu" and "gradient_accumulation_steps" as numbers, or '
            '"train_batch_size": "auto" and --batch_size',
        )


def _step(stated: Stated) -> int:
    """Rows of a process's step; 0 where the file does not say them."""
    parts = [
        stated.get(key, (AUTO, ""))[0] for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    ]
    numbers = [part for part in parts if isinstance(part, int)]
    return numbers[0] * numbers[1] if len(numbers) == 2 else 0


# ----------------------------------------------------------------------- the maps of the file: (map, where) -> settings


def _section(key: str, section: Mapping, where: str, notes: list[str]) -> list[tuple[str, object]]:
    """[(setting, value)] of one map. Raises UsageError for what is no such map."""
    try:
        return list(SECTIONS[key](section, where, notes))
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{key} is not as DeepSpeed has it: {error}", where=where, cure='mend it, or write "auto" for its values'
        ) from None


def _bf16(section: Mapping, where: str, notes: list[str]) -> Iterator[tuple[str, object]]:
    if section.get("enabled", False) is True:
        yield "precision", "bf16"


def _fp16(section: Mapping, where: str, notes: list[str]) -> Iterator[tuple[str, object]]:
    if section.get("enabled", False) is not True:
        return
    yield "precision", "fp16_autocast"
    for name, value in section.items():
        if name == "initial_scale_power":
            yield "initial_loss_scale", 2.0 ** float(value)
        elif name == "loss_scale_window":
            yield "loss_scale_growth_interval", value
        elif name == "loss_scale" and value not in (0, AUTO):
            raise NotSupported(
                f"fp16: loss_scale {value}: the loss scale is found while training", where=where, cure='"loss_scale": 0'
            )
        elif name not in ("enabled", "loss_scale", "auto_cast") and value != AUTO:
            notes.append(f"{where}: fp16: {name} changes nothing here: the loss scale halves at each overflow")


def _torch_autocast(section: Mapping, where: str, notes: list[str]) -> Iterator[tuple[str, object]]:
    if section.get("enabled", False) is True:
        half = "bf16" if "bfloat16" in str(section.get("dtype", "bfloat16")) else "fp16"
        yield "precision", f"{half}_autocast"


def _optimizer(section: Mapping, where: str, notes: list[str]) -> Iterator[tuple[str, object]]:
    kind, parameters = str(section.get("type", "")), dict(section.get("params") or {})
    if kind.lower() not in OPTIMIZERS:
        raise NotSupported(
            f"optimizer {kind} is not taken from this file", where=where, cure="take it out; --optimizer adamw"
        )
    name = OPTIMIZERS[kind.lower()]
    yield "optimizer", "adam" if parameters.pop("adam_w_mode", True) is False and name == "adamw" else name
    parameters.pop("torch_adam", None)  # whose loop computes it
    for key, value in parameters.items():
        if value == AUTO:
            continue
        if key == "betas":
            yield from zip(("adam_beta1", "adam_beta2"), value, strict=True)
        elif key in OPTIMIZER_PARAMETERS:
            yield OPTIMIZER_PARAMETERS[key], value
        else:
            raise NotSupported(f"optimizer: {key} is not taken from this file", where=where, cure="take it out")


def _scheduler(section: Mapping, where: str, notes: list[str]) -> Iterator[tuple[str, object]]:
    kind, parameters = str(section.get("type", "")), dict(section.get("params") or {})
    if kind.lower() not in SCHEDULES:
        raise NotSupported(
            f"scheduler {kind} is not taken from this file", where=where, cure="take it out; --lr_scheduler cosine"
        )
    yield "lr_scheduler", SCHEDULES[kind.lower()]
    shape = parameters.pop("warmup_type", "")
    if shape == "" or shape == AUTO:
        notes.append(f"{where}: scheduler {kind}: {LINEAR}")
    elif shape != "linear":
        raise NotSupported(f"scheduler: warmup_type {shape}: warm-up is linear", where=where, cure='"linear"')
    for key, value in parameters.items():
        if value == AUTO:
            continue
        if key in SCHEDULE_PARAMETERS:
            yield SCHEDULE_PARAMETERS[key], value
        elif key not in ("warmup_min_lr", "warmup_min_ratio", "last_batch_iteration") or value not in (0, -1):
            cure = f"--max_steps {value}" if key == "total_num_steps" else "take it out"
            raise NotSupported(f"scheduler: {key} {value} is not taken from this file", where=where, cure=cure)


SECTIONS = {
    "zero_optimization": lambda section, where, notes: iter(()),  # options of the strategy: see `zero`
    "bf16": _bf16,
    "fp16": _fp16,
    "torch_autocast": _torch_autocast,
    "optimizer": _optimizer,
    "scheduler": _scheduler,
}
