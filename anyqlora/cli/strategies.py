"""python -m anyqlora strategies list | show NAME: how processes can share the work, and each way's options."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields

from anyqlora.config import strategy_options
from anyqlora.core import registry
from anyqlora.core.entry_points import entry_points_of
from anyqlora.core.errors import RunError, UsageError

USAGE = "python -m anyqlora strategies list | show NAME"


def listed() -> Iterator[str]:
    """Every registered strategy, the package that it comes from, and why one cannot be used."""
    for name, row in registry.STRATEGIES.items():
        yield f"{name:12} anyqlora: " + (f"no: {row.refused}" if row.refused else row.torch or row.mlx)
    seen: dict[str, str] = dict.fromkeys(registry.STRATEGIES, "anyqlora")
    for name, target, package in entry_points_of("strategies"):
        if name in seen:
            yield f"{name:12} {package}: no: {seen[name]} registers the same name; --strategy {target}"
            continue
        seen[name] = package
        try:
            registry.strategy_class(name)
            yield f"{name:12} {package}: {target}"
        except RunError as error:
            yield f"{name:12} {package}: no: {error.message}"


def shown(name: str) -> Iterator[str]:
    """A strategy's options: name, kind, default, values and help. Raises UsageError for one that is not there."""
    row = registry.strategy(name)
    yield f"{name}: {row.torch or row.mlx}"
    cls = strategy_options.options_class(name)
    if cls is None or not fields(cls):
        yield "no options"
        return
    kinds = typing.get_type_hints(cls)
    for f in fields(cls):
        about = f.metadata
        default = f.default if f.default is not MISSING else ""
        choices = f" [{'|'.join(map(str, about['choices']))}]" if about.get("choices") else ""
        setting = f"; --{about['setting']} says the same" if about.get("setting") else ""
        yield (
            f"  {f.name} ({kinds[f.name].__name__}, "
            f"{str(default).lower() if isinstance(default, bool) else default}){choices}: "
            f"{about.get('help', '')}{setting}"
        )
    yield (
        f"as --strategy_opt NAME=VALUE,..., in a --strategy_config FILE, or as "
        f"ANYQLORA_{name.upper().replace('-', '_')}_NAME in the environment"
    )


def main(argv: list[str]) -> int:
    if argv in (["-h"], ["--help"]):
        print(f"usage: {USAGE}")
    elif argv in ([], ["list"]):
        print(*listed(), sep="\n")
    elif len(argv) == 2 and argv[0] == "show":
        print(*shown(argv[1]), sep="\n")
    else:
        raise UsageError(f"unexpected argument {argv[-1]!r}", where="command line", cure=USAGE)
    return 0
