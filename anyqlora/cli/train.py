"""python -m anyqlora train [flags]: the same as python train.py."""

from __future__ import annotations

from anyqlora.cli import arguments
from anyqlora.config.resolve import add_flags, resolve
from anyqlora.core.errors import stoppable


@add_flags
def flags(**flags):
    """Fine-tune a language model with QLoRA on the machine it finds; without flags, the embedded first job."""


def main(argv: list[str]) -> int:
    config = None if arguments.wants_help(argv) else resolve(arguments.settings(argv))
    if config is None:
        from fastcore.script import anno_parser

        anno_parser(flags, prog="python -m anyqlora train").print_help()
    else:
        from anyqlora.recipes.sft import train

        with stoppable():
            train(config)
    return 0
