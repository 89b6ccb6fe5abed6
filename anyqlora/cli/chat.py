"""python -m anyqlora chat RUN: talk to a finished run."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from anyqlora.cli import arguments
from anyqlora.core.errors import UsageError
from anyqlora.core.terminal import printable

if TYPE_CHECKING:
    from anyqlora.runs.opened import FineTunedModel

USAGE = """usage: python -m anyqlora chat [RUN] [--max_new_tokens N] [--temperature T] [--seed N]
                               [--backend NAME] [--model_name BASE] [--offline true]
                               [--trust_remote_code true]

RUN is a run directory, or a name in ./runs; without it the newest finished run is
taken. A run that was trained on conversations goes on in one, through the tokenizer's
chat template; any other answers one question at a time, put as its rows put theirs."""
SETTINGS = ("max_new_tokens", "seed", "backend", "model_name", "offline", "trust_remote_code")
PLACE = 512  # tokens of an answer, unless the run or a flag allows more


def main(argv: list[str]) -> int:
    if arguments.wants_help(argv):
        print(USAGE)
        return 0
    name, values = arguments.read(argv, {"temperature": float}, SETTINGS)
    temperature = arguments.temperature(values)

    from anyqlora.runs.finished import find_run

    run = find_run(name)
    values.setdefault("max_new_tokens", max(run.config.max_new_tokens, PLACE))

    from anyqlora.runs.opened import load_finetuned

    model = load_finetuned(run, values)
    print(printable(f"{run.directory} on {run.config.model_name}; an empty line starts anew, Ctrl-D ends"))
    return converse(model, temperature)


def converse(model: FineTunedModel, temperature: float) -> int:
    """Answer each line. Returns 2 where one of them could not be asked, else 0."""
    talk: list[dict] = []
    code = 0
    for line in questions():
        if not line:
            talk = []
            continue
        try:
            put = model.run.format_prompt(line)
            asked = talk + put if isinstance(put, list) else line
            answer = model.generate(asked, temperature=temperature, streamer=streamer(model.tokenizer))
        except KeyboardInterrupt:
            print("\n(stopped)")
            continue
        except UsageError as error:  # the next question may be another one
            print(error, file=sys.stderr)
            code = error.exit_code
            continue
        if isinstance(asked, list):
            talk = [*asked, {"role": "assistant", "content": answer}]
    return code


def questions():
    """The lines that somebody types, or that come through a pipe; until their end, or Ctrl-C."""
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() a history and a cursor
    while True:
        try:
            yield input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return


def streamer(tokenizer):
    """Prints an answer while it is made; nothing in it can steer the terminal."""
    from transformers import TextStreamer

    class Printable(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False):
            super().on_finalized_text(printable(text), stream_end)

    return Printable(tokenizer, skip_prompt=True, clean_up_tokenization_spaces=False)
