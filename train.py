#!/usr/bin/env python3
"""Fine-tune a language model: this is the command; the loop stands whole in anyqlora/recipes/sft.py.

flags      config/resolve.py      command line > environment > file > default, each value with its source
plan       planning/backends.py   the BackendManager asks its table and the machine, and says what it changed and why
data       data/dataset.py        rows -> conversations -> tokens and loss mask -> batches, a function of the step
engine     on_torch/ or on_mlx/   the quantized base model, its adapter, its optimizer
loop       recipes/sft.py         gradients, step, report, evaluate, save
adapter    runs/                  checkpoints on the way, PEFT's files in the end
"""

from __future__ import annotations

import sys

from fastcore.script import call_parse

from anyqlora import __version__
from anyqlora.config.resolve import add_flags, canonical_argv, print_help, resolve
from anyqlora.core.errors import explained

if __name__ == "__main__":
    if sys.argv[1:] == ["--version"]:
        print(f"anyqlora {__version__}")
        sys.exit()
    if {"-h", "--help"} & {*sys.argv}:
        print_help("train.py")
        sys.exit()
    with explained("train.py"):
        sys.argv[1:] = canonical_argv(sys.argv[1:])


@call_parse
@add_flags
def main(**flags):
    """Fine-tune a language model with QLoRA on the machine it finds; without flags, the embedded first job."""
    with explained("train.py"):
        config = resolve(flags)
        from anyqlora.recipes.sft import train  # not for help and usage errors

        train(config)
