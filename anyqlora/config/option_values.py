"""One option of a strategy: what kind of value its field is annotated with, and a text or a value as that kind."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import PurePath
from typing import Any

from anyqlora.config.schema import known_value
from anyqlora.core import registry
from anyqlora.core.errors import UsageError
from anyqlora.core.plugin_errors import place_of_class

_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_SEQUENCES = (list, tuple, set, frozenset)
KINDS = "bool, int, float, str, Path, an Enum, Literal[...], dict, list, or one of them `| None`"


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The kinds that an annotation allows, one by one: str and NoneType of `str | None`, each Literal as it stands."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return kinds_of(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(kind for part in typing.get_args(hint) for kind in kinds_of(part))
    return (hint if origin in (None, typing.Literal) else origin,)


def choices_of(f: Field, hint: Any) -> tuple[Any, ...]:
    """The only values that a field may have; () where nothing lists them."""
    literals = [typing.get_args(kind) for kind in kinds_of(hint) if typing.get_origin(kind) is typing.Literal]
    return tuple(f.metadata.get("choices") or ()) or tuple(value for values in literals for value in values)


def kind_name(hint: Any) -> str:
    """The kinds of an annotation as `strategies show` prints them."""
    names = [
        dict.fromkeys(type(value).__name__ for value in typing.get_args(kind))
        if typing.get_origin(kind) is typing.Literal
        else ["none" if kind is types.NoneType else getattr(kind, "__name__", str(kind))]
        for kind in kinds_of(hint)
    ]
    return "|".join(dict.fromkeys(name for some in names for name in some))


def option_fields(cls: type) -> dict[str, Field]:
    """{name: field} of what can be stated of an options class: those that its constructor takes."""
    return {f.name: f for f in fields(cls) if f.init}


def hints_of(cls: type) -> dict[str, Any]:
    """{name: annotation} of an options class. Raises UsageError for an annotation that names nothing."""
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except Exception as error:  # an annotation may be any expression of somebody else's
        raise UsageError(
            f"the annotations of {cls.__name__} cannot be read: {type(error).__name__}: {error}",
            where=place_of_class(cls),
            cure="import what they name where the class is defined",
        ) from error


def missing_options(cls: type, values: Mapping[str, object]) -> list[str]:
    """The options that have no default and are not among `values`."""
    return [
        name
        for name, f in option_fields(cls).items()
        if f.default is MISSING and f.default_factory is MISSING and name not in values
    ]


def parse_option(f: Field, raw: object, where: str, hint: Any) -> object:
    """`raw` (text, or a value) as what field `f` is annotated with. Raises UsageError saying what fits."""
    kinds, choices = kinds_of(hint), choices_of(f, hint)
    text = _as_text(raw)
    if types.NoneType in kinds and (raw is None or (text.lower() in ("none", "null") and text not in choices)):
        return None
    literals = [value for kind in kinds if typing.get_origin(kind) is typing.Literal for value in typing.get_args(kind)]
    for value in literals:
        if (type(value), value) == (type(raw), raw) or (isinstance(raw, str) and _as_text(value) == text):
            return value
    expected, others = "", [kind for kind in kinds if typing.get_origin(kind) is not typing.Literal]
    for kind in sorted(others, key=lambda kind: kind is str):  # everything is a str
        value, expected = _as_kind(f, raw, text, kind)
        if not expected and (literals or not choices or value in choices):
            return value
        if not expected:
            break
    shown = [_as_text(value) for value in choices]
    if shown:
        expected = "one of " + ", ".join(shown) + registry.nearest(text, shown)
    help = f.metadata.get("help")
    cure = f"{f.name} is: {help}" if help else f"{f.name}={'|'.join(shown) or kind_name(hint)}"
    raise UsageError(f"{f.name}: {raw!r} is not {expected}", where=where, cure=cure)


def _as_kind(f: Field, raw: object, text: str, kind: Any) -> tuple[object, str]:
    """(`raw` as a `kind`, "") or (None, what it would have to be)."""
    if kind is bool:
        value = _BOOLEANS.get(text.lower())
        return value, "" if value is not None else "true or false"
    if kind in (int, float):
        return _as_number(f, raw, text, kind)
    if kind is dict or kind is Mapping:
        if raw is not None and not isinstance(raw, Mapping):
            return None, "a map, which only a file can state"
        return dict(raw or {}), ""
    if kind in _SEQUENCES:
        is_list = isinstance(raw, _SEQUENCES)
        return (kind(raw), "") if is_list else (None, "a list, which only a file can state")
    if isinstance(kind, type) and issubclass(kind, Enum):
        member = next((one for one in kind if raw is one or text in (one.name, str(one.value))), None)
        return member, "" if member is not None else f"one of {', '.join(one.name for one in kind)}"
    if kind is str:
        value = known_value(f.metadata["setting"], text) if f.metadata.get("setting") else text
        return next((choice for choice in f.metadata.get("choices", ()) if choice == value.lower()), value), ""
    if isinstance(kind, type) and issubclass(kind, PurePath):
        return kind(text), ""
    if kind in (Any, object) or (isinstance(kind, type) and isinstance(raw, kind)):
        return raw, ""
    return None, f"{kind_name(kind)}, which no text states; an option is {KINDS}"


def _as_number(f: Field, raw: object, text: str, kind: type) -> tuple[object, str]:
    try:
        value = float(text) if not isinstance(raw, bool) else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (kind is int and value != int(value)):
        return None, "a whole number" if kind is int else "a number"
    low = f.metadata.get("low")
    return (kind(value), "") if low is None or value >= low else (None, f"at least {low}")


def _as_text(raw: object) -> str:
    return str(raw).lower() if isinstance(raw, bool) else str(raw).strip()  # a file's true is true in any case
