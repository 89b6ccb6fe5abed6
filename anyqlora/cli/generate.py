"""python -m anyqlora generate RUN: answers of a finished run to given prompts."""

from __future__ import annotations

import json
from pathlib import Path

from anyqlora.cli import arguments
from anyqlora.core.errors import UsageError
from anyqlora.core.terminal import printable

USAGE = """usage: python -m anyqlora generate [RUN] --prompt TEXT | --file PROMPTS
                                   [--max_new_tokens N] [--temperature T] [--seed N]
                                   [--backend NAME] [--model_name BASE] [--offline true]
                                   [--trust_remote_code true]

RUN is a run directory, or a name in ./runs; without it the newest finished run is
taken. A prompt is put as the run's rows put theirs. The answer to --prompt is printed
as it is; PROMPTS has one prompt in each line, and its answers are printed as JSON
lines. Temperature 0, the default, takes the likeliest token each time; a higher one
(0.0001 at least) draws from all tokens."""
SETTINGS = ("max_new_tokens", "seed", "backend", "model_name", "offline", "trust_remote_code")


def main(argv: list[str]) -> int:
    if arguments.wants_help(argv):
        print(USAGE)
        return 0
    name, values = arguments.read(argv, {"prompt": str, "file": str, "temperature": float}, SETTINGS)
    temperature = arguments.temperature(values)
    prompts = _prompts(values.pop("prompt", None), values.pop("file", None))

    from anyqlora.runs.finished import find_run

    run = find_run(name)

    from anyqlora.runs.opened import load_finetuned

    answers = load_finetuned(run, values).generate(prompts, temperature=temperature)
    if "--prompt" in argv or any(word.startswith("--prompt=") for word in argv):
        print(printable(answers[0]))
    else:
        for prompt, answer in zip(prompts, answers, strict=True):
            print(json_line({"prompt": prompt, "answer": answer}))
    return 0


def _prompts(prompt: str | None, file: str | None) -> list[str]:
    if (prompt is None) == (file is None):
        raise UsageError(
            "one of --prompt and --file is needed" if prompt is None else "--prompt and --file contradict each other",
            where=arguments.WHERE,
            cure='--prompt "..."',
        )
    if prompt is not None:
        prompts = [prompt]
    else:
        try:
            prompts = [line for line in Path(file).read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot be read: {error}", where=file) from None
    if not prompts or not all(prompt.strip() for prompt in prompts):
        raise UsageError("no prompt in it", where=file or arguments.WHERE)
    return prompts


def json_line(value: dict) -> str:
    """One line of JSON in which nothing can steer a terminal."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in json.dumps(value, ensure_ascii=False))
