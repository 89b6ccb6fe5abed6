"""The class of a strategy's options, a StrategyOptions or any dataclass: filled with what is stated, each value held to
its annotation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass
from typing import Any, Literal, get_origin

from anyqlora.config.option_values import hints_of, kinds_of, missing_options, option_fields, parse_option
from anyqlora.core import registry
from anyqlora.core.errors import UsageError
from anyqlora.core.plugin_errors import described, place_of_class

CONFIG_FILE = "config_file"  # an option by this name is a file that the class itself reads


def check_options_class(cls: Any, strategy: str) -> None:
    """Raises UsageError for the `plugin_cls` of a strategy that cannot hold options."""
    if isinstance(cls, type) and is_dataclass(cls):
        hints_of(cls)
        return
    if not isinstance(cls, type):
        raise UsageError(
            f"strategy {strategy!r}: plugin_cls is an object, {cls!r}, no class",
            where=place_of_class(type(cls)),
            cure=f"plugin_cls = {type(cls).__name__}, the class itself; its options are stated by strategy_opt",
        )
    raise UsageError(
        f"strategy {strategy!r}: plugin_cls is {cls.__name__}, no dataclass",
        where=place_of_class(cls),
        cure="write @dataclass above it, or derive it from anyqlora.extend.StrategyOptions",
    )


def check_known(cls: type, name: str, where: str = "") -> None:
    """Raises UsageError for a name that is no option of `cls`."""
    names = list(option_fields(cls))
    if name not in names:
        raise UsageError(
            f"unknown option {name!r} of {cls.__name__}{registry.nearest(name, names)}",
            where=where,
            cure=f"one of: {', '.join(names) or 'none, it has no options'}",
        )


def options_from_dict(cls: type, values: Mapping[str, object], where: str | Mapping[str, str] = "") -> Any:
    """An object of `cls` with `values`, each as its field is annotated. `where` says where they come from, each or all.

    What is stated here counts more than what the class reads from its `config_file`. Raises UsageError for a name that
    is no option, for a value that a field cannot have, and for what the class itself refuses.
    """
    sources = {name: where if isinstance(where, str) else where.get(name, "") for name in values}
    for name in values:
        check_known(cls, name, sources[name])
    hints, known = hints_of(cls), option_fields(cls)
    parsed = {name: parse_option(known[name], raw, sources[name], hints[name]) for name, raw in values.items()}
    if missing := missing_options(cls, parsed):
        raise UsageError(
            f"{cls.__name__}: {', '.join(missing)} has no default and is not stated",
            where=place_of_class(cls),
            cure=f"--strategy_opt {missing[0]}=VALUE",
        )
    path = str(parsed.get(CONFIG_FILE) or "")
    options = _with_config_file(cls, parsed, sources, path) if path else _made(cls, parsed, sources)
    for name, f in known.items():  # what the class has put there itself, from a file mostly
        value = getattr(options, name, None)
        is_own = value is not f.default and value != parsed.get(name, MISSING)
        if is_own and _is_scalar(value) and _is_held(hints[name]):
            where = _line(path, name) if path else place_of_class(cls)
            object.__setattr__(options, name, parse_option(f, value, where, hints[name]))
    return options


def _is_held(hint: Any) -> bool:
    """Whether what a class makes of such a field is still of that kind; a path or a text may have become anything."""
    return any(kind in (bool, int, float) or get_origin(kind) is Literal for kind in kinds_of(hint))


def _is_scalar(value: object) -> bool:
    """Whether a file can have stated it."""
    return value is None or isinstance(value, (bool, int, float, str))


def options_to_dict(options: Any) -> dict[str, Any]:
    """{option: value}, of which `options_from_dict` makes the same: by the class's own `to_dict`, or its fields."""
    if hasattr(options, "to_dict"):
        return dict(options.to_dict())
    return {name: getattr(options, name) for name in option_fields(type(options))}


def _with_config_file(cls: type, parsed: dict[str, Any], sources: Mapping[str, str], path: str) -> Any:
    """What the class has read from its file, under what is stated.

    A class sets its fields from the file in `__post_init__`, whatever it was given: so it is made with the file for
    what that says, and without it for what it makes of the stated values.
    """
    stated = {name: value for name, value in parsed.items() if name != CONFIG_FILE}
    try:
        options = _made(cls, parsed, sources, path)
    except UsageError:
        if not missing_options(cls, stated):
            _made(cls, stated, sources)  # raises where what is stated is what is wrong, and not the file
        raise
    try:
        bare = _made(cls, stated, sources)
    except UsageError:  # it needs what the file says
        bare = None
    own = {name: value if bare is None else getattr(bare, name) for name, value in stated.items()}
    if any(getattr(options, name) != value for name, value in own.items()):
        rest = {name: getattr(options, name) for name in option_fields(cls) if name not in (CONFIG_FILE, *own)}
        _made(cls, {**rest, **own}, {**dict.fromkeys(rest, path), **sources})  # one may not go with the other
        for name, value in own.items():
            object.__setattr__(options, name, value)
    return options


def _made(cls: type, values: Mapping[str, Any], sources: Mapping[str, str], path: str = "") -> Any:
    """`cls(**values)`. Raises UsageError naming the fields, their sources and the line for whatever it raises."""
    own = {name: sources.get(name, "") for name in values}
    try:
        return cls(**values)
    except UsageError as error:
        error.where = error.where or _sources_of(error, cls, own, path)
        raise
    except (Exception, SystemExit) as error:  # somebody else's code: whatever is wrong with it is the finding
        if path and isinstance(error, json.JSONDecodeError):
            where = f"{path}:{error.lineno}:{error.colno}"
            raise UsageError(f"{CONFIG_FILE}: not JSON: {error.msg}", where=where, cure="mend the file") from error
        if path and isinstance(error, OSError) and error.filename == path:
            why = error.strerror or type(error).__name__
            raise UsageError(
                f"{CONFIG_FILE}: cannot be read: {why}", where=path, cure=f"{CONFIG_FILE}=FILE that can be read"
            ) from error
        shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise UsageError(
            f"{cls.__name__}({shown}): {described(error, cls.__module__)}",
            where=_sources_of(error, cls, own, path),
            cure="what the class takes; `python -m anyqlora strategies show NAME` lists it",
        ) from error


def _sources_of(error: BaseException, cls: type, sources: Mapping[str, str], path: str) -> str:
    """Where the values come from that an error speaks of; all of them, where it names none."""
    named = [name for name in option_fields(cls) if re.search(rf"\b{re.escape(name)}\b", str(error))]
    if path:
        places = [_line(path, name) for name in named] or [path]
    else:
        places = [sources[name] for name in named if name in sources] or list(sources.values())
    return ", ".join(dict.fromkeys(filter(None, places))) or place_of_class(cls)


def _line(path: str, name: str) -> str:
    """`path:line` of the key `name` in a JSON file; the path where it is not to be found."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError):
        return path
    return next((f"{path}:{n}" for n, line in enumerate(lines, 1) if f'"{name}"' in line), path)
