"""python -m anyqlora quantize MODEL --to affine4|nf4 --out DIR: a directory with quantized weights, written once."""

from __future__ import annotations

import os
from pathlib import Path

from anyqlora.cli import arguments
from anyqlora.core import registry
from anyqlora.core.errors import UsageError
from anyqlora.core.terminal import format_bytes, printable

USAGE = """usage: python -m anyqlora quantize MODEL --to affine4|nf4 --out DIR
                                   [--affine_group_size 32|64|128]
                                   [--double_quant true|false] [--revision R]
                                   [--offline true]

Writes DIR with MODEL's linear weights quantized and everything else as it is, reading
one tensor at a time. affine4 (scale and bias, MLX's packing) is read by every backend
here and by mlx-lm; nf4 by every backend here, transformers and bitsandbytes."""
KINDS = [name for name, row in registry.QUANTIZERS.items() if row.writes_files]
SETTINGS = ("affine_group_size", "double_quant", "revision", "offline")


def main(argv: list[str]) -> int:
    if arguments.wants_help(argv):
        print(USAGE)
        return 0
    model, values = arguments.read(argv, {"to": str, "out": str}, SETTINGS)
    kind, out = values.pop("to", ""), values.pop("out", "")
    if not (model and kind and out):
        raise UsageError(
            "MODEL, --to and --out are needed",
            where=arguments.WHERE,
            cure=USAGE.splitlines()[0].removeprefix("usage: "),
        )
    if kind not in KINDS:
        raise UsageError(
            f"--to {kind!r}{registry.nearest(kind, KINDS)}", where=arguments.WHERE, cure=f"one of: {', '.join(KINDS)}"
        )
    from anyqlora.config.resolve import resolve
    from anyqlora.models.hub import base_directory

    config = resolve({"model_name": model, "dataset": "demo", "quantizer": kind, **values})
    directory = base_directory(config)

    from anyqlora.on_torch.loading.writer import packed_config, write_model

    original = str(directory.absolute()) if config.is_demo or Path(os.path.expanduser(model)).is_dir() else model
    base = (
        original if registry.quantizer(kind).is_mlx_packed else ""
    )  # the others PEFT and transformers read themselves
    done = write_model(directory, Path(out), packed_config(config), base=base)
    print(
        printable(
            f"{out}: {done['packed']} linear weights in {kind}, {done['kept']} other tensors as they were, "
            f"{format_bytes(done['bytes'])}"
        )
    )
    return 0
