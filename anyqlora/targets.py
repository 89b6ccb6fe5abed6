"""Which linear layers an adapter goes on, and how PEFT's files name them: strings, the same on every framework."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .errors import UsageError

PREFIX = "base_model.model."  # what PEFT puts before every name
ALL = ("all", "all-linear")


def chosen(stated: str, model_type: str, layers: Iterable[str]) -> set[str]:
    """The names among `layers` that `lora_target_modules` states: all of them, PEFT's choice for the architecture, a
    comma-separated list of last parts of names, or a regex of whole names. Raises UsageError."""
    layers = set(layers)
    if stated in ALL:
        return layers
    if stated == "default":
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

        names = [name for name in DEFAULTS.get(model_type, ()) if any(last(layer) == name for layer in layers)]
        if not names:
            raise UsageError(f"lora_target_modules: PEFT has no default for {model_type} models", cure="--lora_target_modules all")
        stated = ",".join(names)
    if re.search(r"[\\^$*+?(){}\[\]|]", stated):
        try:
            return {name for name in layers if re.fullmatch(stated, name)}
        except re.error as error:
            raise UsageError(f"lora_target_modules: {stated!r} is not a regex: {error}") from None
    wanted = [name.strip() for name in stated.split(",") if name.strip()]
    found = {w: {name for name in layers if name == w or name.endswith(f".{w}")} for w in wanted}
    unknown = [w for w, names in found.items() if not names]
    if unknown:
        raise UsageError(f"lora_target_modules: no linear layer is called {', '.join(unknown)}",
                         cure="names among: " + ", ".join(sorted({last(name) for name in layers})))
    return set().union(*found.values())


def shortest(taken: set[str], modules: Iterable[str]) -> list[str]:
    """What to tell PEFT, and every other reader of adapter_config.json, of the `taken` among all `modules`: last parts of names where
    they say it, else whole names."""
    others = {last(name) for name in modules if name not in taken}
    return sorted({name if last(name) in others else last(name) for name in taken})


def last(name: str) -> str:
    return name.rpartition(".")[2]


def whole(number: float) -> float | int:
    """32 for 32.0: readers of adapter_config.json expect a whole alpha."""
    return int(number) if number == int(number) else number


def plain(value):
    """`value` as JSON with sets sorted, so that PYTHONHASHSEED does not show."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(v) for v in value)
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(getattr(value, "value", value))
