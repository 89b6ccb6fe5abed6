"""python -m anyqlora plan [flags]: what a run would do, and the memory it takes, without loading a model."""

from __future__ import annotations

from anyqlora.cli import arguments
from anyqlora.config.resolve import resolve

USAGE = """usage: python -m anyqlora plan [--name value ...]

Every setting of train.py is taken (python train.py --help lists them). Nothing is loaded, downloaded or written."""


def main(argv: list[str]) -> int:
    if arguments.wants_help(argv):
        print(USAGE)
        return 0
    config = resolve(arguments.settings(argv))
    from anyqlora.planning.backends import BackendManager

    manager = BackendManager(config.backend, config.verbose, where=config.sources.get("backend", ""))
    print(*manager.plan(config).explain(), sep="\n")
    return 0
