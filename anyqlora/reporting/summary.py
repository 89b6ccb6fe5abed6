"""What came of a finished run, from its directory: before and after, time, memory, where things are, what to do
next.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from anyqlora.core.terminal import duration, format_bytes, printable, sparkline

WIDTH = 120  # where the output is no terminal
LONGEST = 400  # characters of a sample's cell
HELD_OUT = {"loss": "{:.4f}", "perplexity": "{:.4g}", "exact_match": "{:.1%}"}


def show(directory: Path, console: Console | None = None) -> None:
    """Print the outcome of the run in `directory`."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDTH)
    result = read_json(directory / "result.json")
    console.print()
    for table in (evaluations(result), samples(directory, result)):
        if table:
            console.print(table)
            console.print()
    for name, text in facts(directory, result, console.encoding):
        line = Text(f"{name:11} ", style="dim")
        console.print(line.append(printable(text), style="default not dim"), soft_wrap=True)
    for number, command in enumerate(next_commands(directory)):
        line = Text(f"{'' if number else 'next':11} ", style="dim")
        console.print(line.append(printable(command), style="bold not dim"), soft_wrap=True)


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON-lines file; none where there is no file.

    Lines of bytes: text has more line ends, which may stand in an answer.
    """
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def cell(text: str) -> Text:
    """Somebody's text for a table: no control characters, no markup, cut where it is very long."""
    text = printable(text.strip())
    return Text(text if len(text) <= LONGEST else text[:LONGEST] + " ...")


def evaluations(result: dict) -> Table | None:
    """Loss, perplexity and exact match on the evaluation rows, before and after."""
    evaluation = result.get("eval")
    if not evaluation:
        return None
    table = Table(box=box.SIMPLE_HEAD, title=None)
    table.add_column("evaluation rows")
    for name in ("before", "after" if learned_at(result) == result["steps"] else f"after step {learned_at(result)}"):
        table.add_column(name, justify="right")
    for name, form in HELD_OUT.items():
        values = [(evaluation[side] or {}).get(name) for side in ("before", "after")]
        if any(value is not None for value in values):
            table.add_row(name.replace("_", " "), *("" if value is None else form.format(value) for value in values))
    return table


def learned_at(result: dict) -> int:
    """The step whose weights were written: with load_best_model_at_end it may be an earlier one than the last."""
    return ((result.get("eval") or {}).get("after") or {}).get("step", result["steps"])


def samples(directory: Path, result: dict) -> Table | None:
    """The same evaluation prompts before and after, side by side."""
    answers: dict[str, dict[int, dict]] = {}
    for line in read_lines(directory / "samples.jsonl"):
        answers.setdefault(line["prompt"], {})[line["step"]] = line
    if not answers:
        return None
    table = Table(box=box.SIMPLE_HEAD, show_lines=True)
    for name in ("prompt", "before", "after", "expected"):
        table.add_column(name, ratio=1, overflow="fold")
    for prompt, by_step in answers.items():
        after = by_step.get(learned_at(result)) or by_step[max(by_step)]
        right = after["answer"].strip() == after["expected"].strip()
        before = by_step[0]["answer"] if 0 in by_step else ""
        answer = Text(cell(after["answer"]).plain, style="green" if right else "red")
        table.add_row(cell(prompt), cell(before), answer, cell(after["expected"]))
    return table


def facts(directory: Path, result: dict, encoding: str) -> Iterator[tuple[str, str]]:
    """(name, what there is to say) of everything but the evaluations."""
    losses = [
        line["loss"]
        for line in read_lines(directory / "metrics.jsonl")
        if "event" not in line and not isinstance(line["loss"], str)
    ]
    if losses:
        trend = f"loss {losses[0]:.4f} {sparkline(losses, encoding)} {losses[-1]:.4f}"
        yield "training", f"{trend} in {result['steps']} steps, {result['epochs']:g} epochs"
    first = result["time_to_first_step_s"]
    yield (
        "time",
        (
            f"{duration(result['seconds'])} ({'' if first is None else f'first step after {first:.1f} s, '}"
            f"{result['trained_tokens_per_second']:.0f} trained tokens/s, {result['tokens_per_second']:.0f} in all)"
        ),
    )
    planned = result["planned_memory_bytes"]
    yield (
        "memory",
        f"{format_bytes(planned) if planned else 'nothing'} planned, {format_bytes(result['peak_memory_bytes'])} "
        f"measured at most",
    )
    for adjustment in result["adjustments"]:
        yield "adjusted", "{field}: asked {asked}, got {got}: {why}".format(**adjustment)
    for folder in ("adapter", "model"):
        if (directory / folder).is_dir():
            yield folder, f"{directory / folder}  (sha256 {result['adapter_sha256'][:16]})"
    yield (
        "run",
        f"{directory}  (result.json, metrics.jsonl, "
        f"{'samples.jsonl, ' * (directory / 'samples.jsonl').exists()}checkpoints)",
    )
    for name, command in (
        ("wandb", "wandb sync {}/wandb/*run-*"),
        ("tensorboard", "tensorboard --logdir {}/tensorboard"),
    ):
        if (directory / name).is_dir():
            yield name, command.format(shlex.quote(str(directory)))


def next_commands(directory: Path) -> list[str]:
    """What to do with the run: commands that work as they stand. None where no weights were written."""
    if not any((directory / folder).is_dir() for folder in ("adapter", "model")):
        return []
    start, place = f"{python()} -m anyqlora", shlex.quote(str(directory))
    evaluate = (
        [f"{start} eval {place}"] if read_json(directory / "result.json")["eval"] else []
    )  # it has rows of its own to evaluate on
    return [
        f"{start} chat {place}",
        *evaluate,
        f"{start} generate {place} --prompt {shlex.quote(example_prompt(directory))}",
    ]


def example_prompt(directory: Path) -> str:
    """A evaluation prompt where prompts are asked as they stand, else a question that anybody might ask."""
    asked = [line["prompt"] for line in read_lines(directory / "samples.jsonl")]
    formats = {source.get("format") for source in read_json(directory / "data_report.json")["sources"]}
    fits = asked and formats == {"prompt_completion"} and asked[0].isprintable() and len(asked[0]) <= WIDTH
    return asked[0] if fits else "Name three colours."


def python() -> str:
    """How this interpreter is called from here: python, a path below this directory, or its whole path."""
    own = Path(sys.executable)
    executable = shutil.which("python")
    if executable and Path(executable) == own:
        return "python"
    return shlex.quote(str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own))
