"""python -m anyqlora export RUN --to mlx|peft --out DIR: an adapter in the form that another tool takes."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path

from anyqlora.cli import arguments
from anyqlora.core import registry
from anyqlora.core.errors import DiskFull, NotSupported, UsageError
from anyqlora.core.files import FileSystem, write_directory
from anyqlora.core.terminal import printable

USAGE = """usage: python -m anyqlora export RUN|DIR --to mlx|peft --out DIR [--model_name BASE]

--to mlx writes the adapter of a finished run (or of a PEFT directory) as
mlx_lm.load(..., adapter_path=DIR) takes it, and, where MLX is installed and RUN is a
run, compares the logits of plain mlx-lm with ours. --to peft writes an mlx-lm adapter
directory as PEFT's."""
KINDS = ("mlx", "peft")
WHOLE = ("merged", "gguf")
MERGE = """PEFT merges it:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer
    AutoPeftModelForCausalLM.from_pretrained({adapter}).merge_and_unload().save_pretrained({out})
    AutoTokenizer.from_pretrained({adapter}).save_pretrained({out})"""
NEAR = 1e-3  # of the largest logit: beyond, what was written is not what was trained


def main(argv: list[str]) -> int:
    if arguments.wants_help(argv):
        print(USAGE)
        return 0
    name, values = arguments.read(argv, {"to": str, "out": str}, ("model_name",))
    kind, out = values.pop("to", ""), values.pop("out", "")
    if kind in WHOLE:
        raise not_built(kind, name, out)
    if not (name and kind and out):
        raise UsageError(
            "RUN, --to and --out are needed", where=arguments.WHERE, cure=USAGE.splitlines()[0].removeprefix("usage: ")
        )
    if kind not in KINDS:
        raise UsageError(
            f"--to {kind!r}{registry.nearest(kind, KINDS)}", where=arguments.WHERE, cure=f"one of: {', '.join(KINDS)}"
        )
    if Path(out).exists():
        raise UsageError("it is there already", where=out, cure="another --out")

    from anyqlora.export.mlx_adapter import to_mlx, to_peft

    run, directory = None, Path(name)
    if kind == "mlx" and not (directory / "adapter_config.json").is_file():
        from anyqlora.runs.finished import find_run

        run = find_run(name)
        directory = run.folder
        if registry.adapter(run.config.adapter).trains_base:
            raise UsageError(
                "a whole model was trained, not an adapter",
                where=str(run.directory),
                cure=f"python -m anyqlora convert {run.folder} --to mlx",
            )
    files = to_mlx(directory) if kind == "mlx" else to_peft(directory)
    try:
        write_directory(Path(out), files, FileSystem())
    except OSError as error:
        raise DiskFull(
            f"cannot be written: {error.strerror or error}", where=out, cure="room there, or another --out"
        ) from None
    print(printable(f"{out}: {', '.join(files)}"))
    return compare(run, Path(out), values) if run else 0


def merge(argv: list[str]) -> int:
    """The verb merge, by which others call --to merged."""
    return main([*argv, "--to", "merged"])


def not_built(kind: str, name: str, out: str) -> NotSupported:
    """The refusal of an export of base and adapter in one, with what does it elsewhere."""
    directory = Path(name or "runs/NAME")
    convert = "llama.cpp's: python convert_hf_to_gguf.py "
    if (directory / "model" / "config.json").is_file():
        whole = directory / "model"
        return NotSupported(
            f"--to {kind} is not built yet",
            where=arguments.WHERE,
            cure=f"{whole} is a whole model, which has nothing to merge"
            + f"; {convert}{shlex.quote(str(whole))}" * (kind == "gguf"),
        )
    adapter = directory if (directory / "adapter_config.json").is_file() else directory / "adapter"
    lines = MERGE.format(adapter=json.dumps(str(adapter)), out=json.dumps(out or "OUT"))
    then = f"\n  then {convert}{shlex.quote(out or 'OUT')}" if kind == "gguf" else ""
    return NotSupported(f"--to {kind} is not built yet", where=arguments.WHERE, cure=lines + then)


def compare(run, out: Path, changed: dict) -> int:
    """Print how far the logits of plain mlx-lm with the exported adapter are from ours."""
    if importlib.util.find_spec("mlx_lm") is None:
        print("not compared with our logits: mlx-lm is not installed here")
        return 0
    from anyqlora.on_mlx.logits_check import against_mlx_lm

    far, largest, note = against_mlx_lm(run, out, changed)
    print(f"logits of plain mlx-lm and ours differ by {far:.1e} at most, of {largest:.1f}, in float32")
    if note:
        print(printable(f"note: {note}"))
    return 0 if far <= NEAR * largest else 1
