"""python -m anyqlora plan [flags]: what a run would do, and the memory it takes, without loading a model."""

from __future__ import annotations

from anyqlora.config.resolve import canonical_argv, resolve

USAGE = """usage: python -m anyqlora plan [--name value ...]

Every setting of train.py is taken (python train.py --help lists them). Nothing is loaded, downloaded or written."""


def main(argv: list[str]) -> int:
    flags = canonical_argv(argv)
    if "-h" in flags or "--help" in flags:
        print(USAGE)
        return 0
    given = {}
    for flag in flags:
        name, _, value = flag.removeprefix("--").partition("=")
        given[name] = value
    config = resolve(given)
    from anyqlora.planning.backends import BackendManager

    print(*BackendManager(config.backend, verbose=config.verbose).plan(config).explain(), sep="\n")
    return 0
