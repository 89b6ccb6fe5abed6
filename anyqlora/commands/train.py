"""python -m anyqlora train [flags]: the same as python train.py."""

from __future__ import annotations

from ..config import resolve
from ..errors import stoppable
from . import arguments


def main(argv: list[str]) -> int:
    config = None if arguments.wants_help(argv) else resolve(arguments.settings(argv))
    import train

    if config is None:
        from fastcore.script import anno_parser

        anno_parser(train.main, prog="python -m anyqlora train").print_help()
    else:
        with stoppable():
            train.train(config)
    return 0
