"""The arguments of the verbs that start from a run directory."""

from __future__ import annotations

import math
from collections.abc import Mapping

from anyqlora.config.resolve import canonical_argv
from anyqlora.config.schema import SETTINGS, canonical_settings, parse_value
from anyqlora.core.errors import UsageError
from anyqlora.core.registry import nearest

WHERE = "command line"


def read(argv: list[str], own: Mapping[str, type], settings: tuple[str, ...] = ()) -> tuple[str, dict]:
    """(the one argument that is no flag, or ""; {flag: value}).

    Values of `own` are text or numbers of at least 0, those of `settings` are as train.py takes them. Raises UsageError
    naming the argument.
    """
    name, values, position = "", {}, 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not word.startswith("--"):
            if name:
                raise UsageError(f"unexpected argument {word!r}", where=WHERE, cure="--help shows what is expected")
            name = word
            continue
        flag, equals, raw = word[2:].partition("=")
        key = _key(flag.replace("-", "_"), own, settings)
        if key in values:
            raise UsageError(f"--{flag} is given twice", where=WHERE)
        if not equals and position < len(argv) and not argv[position].startswith("--"):
            raw, position = argv[position], position + 1
        elif not equals:
            if key in own or not isinstance(SETTINGS[key].default, bool):
                raise UsageError(f"--{flag} needs a value", where=WHERE)
            raw = "true"
        values[key] = (
            _number(key, raw)
            if own.get(key) is float
            else raw
            if key in own
            else parse_value(key, raw, f"{WHERE}: --{flag}")
        )
    return name, values


def _key(key: str, own: Mapping[str, type], settings: tuple[str, ...]) -> str:
    if key in own:
        return key
    known = [*own, *settings]
    try:
        setting = next(iter(canonical_settings(key, "", WHERE)))
    except UsageError:
        setting = ""
    if setting in settings:
        return setting
    why = ": it is a setting of train.py, not of this verb" if setting else nearest(key, known)
    raise UsageError(
        f"unknown flag --{key}{why}", where=WHERE, cure="one of: " + ", ".join(f"--{name}" for name in known)
    )


def _number(key: str, raw: str) -> float:
    try:
        number = float(raw)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise UsageError(f"{key}: {raw!r} is not a number of at least 0", where=f"{WHERE}: --{key}")
    return number


def temperature(values: dict) -> float:
    """Take the temperature out of `values`; 0 where none was given.

    Raises UsageError for one that logits cannot be divided by.
    """
    from anyqlora.runs.opened import COLDEST

    value = values.pop("temperature", 0.0)
    if 0 < value < COLDEST:
        raise UsageError(
            f"temperature: {value:g} is neither 0 nor at least {COLDEST:g}",
            where=f"{WHERE}: --temperature",
            cure="0 takes the likeliest token each time",
        )
    return value


def settings(argv: list[str]) -> dict[str, str]:
    """{setting: text} of flags as train.py takes them. Raises UsageError."""
    return dict(flag.removeprefix("--").split("=", 1) for flag in canonical_argv(argv))


def wants_help(argv: list[str]) -> bool:
    return "-h" in argv or "--help" in argv
