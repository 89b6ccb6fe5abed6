"""python -m anyqlora convert DIR --to mlx|hf --out DIR: a model directory between Hugging Face's form and mlx-lm's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from anyqlora.cli import arguments
from anyqlora.core import registry
from anyqlora.core.errors import UsageError
from anyqlora.core.terminal import printable

USAGE = """usage: python -m anyqlora convert DIR --to mlx|hf --out DIR

Writes a model directory in the other form: names, shapes, dtypes, tied weights and
quantization are kept, bit for bit, and what could not be brought back is refused. --to
mlx also puts what transformers 5 writes into config.json into the words that mlx-lm
reads."""
KINDS = ("mlx", "hf")


def main(argv: list[str]) -> int:
    if arguments.wants_help(argv):
        print(USAGE)
        return 0
    name, values = arguments.read(argv, {"to": str, "out": str})
    kind, out = values.pop("to", ""), values.pop("out", "")
    if not (name and kind and out):
        raise UsageError(
            "DIR, --to and --out are needed", where=arguments.WHERE, cure=USAGE.splitlines()[0].removeprefix("usage: ")
        )
    if kind not in KINDS:
        raise UsageError(
            f"--to {kind!r}{registry.nearest(kind, KINDS)}", where=arguments.WHERE, cure=f"one of: {', '.join(KINDS)}"
        )
    if importlib.util.find_spec("mlx_lm") is None:
        raise UsageError(
            "mlx-lm is not installed, and its models say what becomes of each tensor",
            cure="pip install 'mlx[cpu]' mlx-lm (on a Mac: mlx mlx-lm)",
        )
    from anyqlora.export.tensor_moves import check_record

    check_record(Path(name))

    from anyqlora.on_mlx.mlx_lm_bridge.checkpoint_conversion import to_hf, to_mlx

    count = (to_mlx if kind == "mlx" else to_hf)(Path(name), Path(out))
    print(printable(f"{out}: {count} tensors in {'mlx-lm' if kind == 'mlx' else 'Hugging Face'}'s form"))
    return 0
