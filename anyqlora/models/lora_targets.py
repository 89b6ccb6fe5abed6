"""Which linear layers an adapter goes on, and how PEFT's files name them: strings, the same on every framework."""

from __future__ import annotations

import re
from collections.abc import Iterable

from anyqlora.core.errors import UsageError

PREFIX = "base_model.model."  # what PEFT puts before every name
ALL = ("all", "all-linear")


def select_targets(stated: str, model_type: str, layers: Iterable[str], where: str = "") -> set[str]:
    """The names among `layers` that `lora_target_modules`, stated at `where`, states: all of them, PEFT's choice for the architecture,
    a comma-separated list of last parts of names, or a regex of whole names. Raises UsageError."""
    layers = set(layers)
    if stated in ALL:
        return layers
    if stated == "default":
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

        names = [name for name in DEFAULTS.get(model_type, ()) if any(last(layer) == name for layer in layers)]
        if not names:
            raise UsageError(
                f"lora_target_modules: PEFT has no default for {model_type} models",
                where=where,
                cure="--lora_target_modules all",
            )
        stated = ",".join(names)
    if pattern := regex(stated, where):
        return {name for name in layers if pattern.fullmatch(name)}
    found = {w: {name for name in layers if name == w or name.endswith(f".{w}")} for w in listed_names(stated)}
    _refuse([w for w, names in found.items() if not names], layers, where)
    return set().union(*found.values())


def check_targets(stated: str, layers: Iterable[str], where: str) -> None:
    """Refuse what no model with `layers`, names whose last parts alone are known, can have. Raises UsageError."""
    if stated in (*ALL, "default") or regex(stated, where):
        return
    lasts = set(map(last, layers))
    _refuse([w for w in listed_names(stated) if last(w) not in lasts], lasts, where)


def regex(stated: str, where: str) -> re.Pattern | None:
    """What is stated as a regex; None where it is a list of names. Raises UsageError."""
    if not re.search(r"[\\^$*+?(){}\[\]|]", stated):
        return None
    try:
        return re.compile(stated)
    except re.error as error:
        raise UsageError(
            f"lora_target_modules: {stated!r} is not a regex: {error}",
            where=where,
            cure="all, default, a comma-separated list, or a regex",
        ) from None


def listed_names(stated: str) -> list[str]:
    return [name.strip() for name in stated.split(",") if name.strip()]


def _refuse(unknown: list[str], layers: Iterable[str], where: str) -> None:
    if unknown:
        raise UsageError(
            f"lora_target_modules: no linear layer is called {', '.join(unknown)}",
            where=where,
            cure="names among: " + ", ".join(sorted(set(map(last, layers)))),
        )


def shortest(taken: set[str], modules: Iterable[str]) -> list[str]:
    """What to tell PEFT, and every other reader of adapter_config.json, of the `taken` among all `modules`: last parts of names where
    they say it, else whole names."""
    others = {last(name) for name in modules if name not in taken}
    return sorted({name if last(name) in others else last(name) for name in taken})


def last(name: str) -> str:
    return name.rpartition(".")[2]


def is_whole_regex(number: float) -> float | int:
    """32 for 32.0: readers of adapter_config.json expect a whole alpha."""
    return int(number) if number == int(number) else number


def is_plain_name(value):
    """`value` as JSON with sets sorted, so that PYTHONHASHSEED does not show."""
    if isinstance(value, dict):
        return {str(k): is_plain_name(v) for k, v in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, (set, frozenset)):
        return sorted(is_plain_name(v) for v in value)
    if isinstance(value, (list, tuple)):
        return [is_plain_name(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(getattr(value, "value", value))
