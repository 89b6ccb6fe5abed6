"""python -m anyqlora VERB, and the installed command `anyqlora VERB`: training and everything beside it."""

from __future__ import annotations

import sys

from anyqlora import __version__
from anyqlora.core.errors import RunError, UsageError
from anyqlora.core.registry import load, nearest

VERBS = {  # verb -> (late-bound main(argv), help)
    "train": ("anyqlora.cli.train:main", "tune a model: the same as python train.py"),
    "plan": ("anyqlora.cli.plan:main", "what a run would do, and the memory it takes, without loading a model"),
    "doctor": ("anyqlora.cli.doctor:main", "a real tiny QLoRA step on each backend, and how to mend what fails"),
    "data": ("anyqlora.cli.data:main", "what is trained on, token by token, and an audit of all rows"),
    "chat": ("anyqlora.cli.chat:main", "talk to a finished run"),
    "generate": ("anyqlora.cli.generate:main", "answer prompts with a finished run"),
    "eval": ("anyqlora.cli.eval:main", "loss, perplexity and exact match of a finished run"),
    "config": ("anyqlora.cli.config:main", "config explain [flags]: each value and where it came from"),
    "backends": ("anyqlora.cli.backends:main", "what each backend can do, and what this machine does"),
    "export": ("anyqlora.cli.export:main", "an adapter in the form that mlx-lm or PEFT takes"),
    "merge": ("anyqlora.cli.export:merge", "base and adapter in one: not built yet, but it says how PEFT does it"),
    "convert": ("anyqlora.cli.convert:main", "a model directory between Hugging Face's form and mlx-lm's"),
    "report": ("", "the HTML report is not built yet; metrics.jsonl in the run directory has every step"),
    "runs": ("", "the local page of runs is not built yet"),
    "verify": (
        "anyqlora.cli.verify:main",
        "verify --resume RUN: a resumed run ends like a whole one; verify --parity: backends agree, step by step",
    ),
    "strategies": (
        "anyqlora.cli.strategies:main",
        "how processes share the work: strategies list, strategies show NAME",
    ),
    "quantize": ("anyqlora.cli.quantize:main", "write a model directory with quantized weights, once"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one verb. Returns its exit code; an explained failure is printed, without a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m anyqlora VERB [flags]\n")
        for verb, (target, about) in VERBS.items():
            if target:
                print(f"  {verb:10} {about}")
        print("\nVERB --help explains one; --version says which version this is.")
        return 0
    if argv == ["--version"]:
        print(f"anyqlora {__version__}")
        return 0
    verb, *rest = argv
    try:
        if verb not in VERBS:
            raise UsageError(
                f"unknown verb {verb!r}{nearest(verb, VERBS)}", cure="python -m anyqlora --help lists them"
            )
        target, about = VERBS[verb]
        if not target:
            raise UsageError(f"{verb}: {about}")
        return load(target)(rest) or 0
    except RunError as error:
        print(f"anyqlora {verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
