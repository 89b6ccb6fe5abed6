"""python -m anyqlora train [flags]: the same as python train.py."""

from __future__ import annotations

from anyqlora.cli import arguments
from anyqlora.config.resolve import print_help, resolve
from anyqlora.core.errors import stoppable


def main(argv: list[str]) -> int:
    if arguments.wants_help(argv):
        print_help("python -m anyqlora train")
        return 0
    config = resolve(arguments.settings(argv))
    from anyqlora.recipes.sft import train

    with stoppable():
        train(config)
    return 0
