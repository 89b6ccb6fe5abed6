"""python -m anyqlora strategies list | show NAME: how processes can share the work, and each way's options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING

from anyqlora.config import strategy_options
from anyqlora.config.option_values import choices_of, hints_of, kind_name, option_fields
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
    if cls is None or not option_fields(cls):
        yield "no options"
        return
    hints = hints_of(cls)
    for f in option_fields(cls).values():
        about, values = f.metadata, choices_of(f, hints[f.name])
        default = "" if f.default is MISSING else f.default
        shown_default = str(default).lower() if isinstance(default, bool) or default is None else str(default)
        choices = f" [{'|'.join(map(str, values))}]" if values else ""
        setting = f"; --{about['setting']} says the same" if about.get("setting") else ""
        shown_help = f": {about['help']}" if about.get("help") else ""
        yield f"  {f.name} ({kind_name(hints[f.name])}, {shown_default}){choices}{shown_help}{setting}"
    yield (
        f"as --strategy_opt NAME=VALUE,..., in a --strategy_config FILE, or as "
        f"{strategy_options.variable_of(name, 'NAME')} in the environment"
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
