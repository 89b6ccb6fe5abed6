"""python -m anyqlora config explain [flags]: each setting's value and where it came from."""

from __future__ import annotations

from anyqlora.cli import arguments
from anyqlora.config.resolve import resolve
from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import UsageError
from anyqlora.core.terminal import printable

USAGE = """usage: python -m anyqlora config explain [--name value ...]

Prints `name = value where it came from` for every setting of train.py: the command
line, an environment variable, a line of a file, the preset of train_type, or the
default. What is auto is chosen by the plan: python -m anyqlora plan shows it."""


def main(argv: list[str]) -> int:
    if not argv or arguments.wants_help(argv):
        print(USAGE)
        return 0
    if argv[0] != "explain":
        raise UsageError(
            f"unexpected argument {argv[0]!r}", where="command line", cure="python -m anyqlora config explain [flags]"
        )
    print(*explained(resolve(arguments.settings(argv[1:]))), sep="\n")
    return 0


def explained(config: TrainConfig) -> list[str]:
    """`name = value  source` of each setting."""
    return [
        printable(f"{name} = {shown(value)}  {config.sources.get(name, 'default')}")
        for name, value in config.settings().items()
    ]


def shown(value: object) -> str:
    """A value as a file states it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or "''"
