"""A finished run, found again and read from its directory alone."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anyqlora.config.resolve import from_environment, from_file
from anyqlora.config.schema import AUTO, SETTINGS, TrainConfig, parse_value, settings_with
from anyqlora.core import registry
from anyqlora.core.errors import UsageError
from anyqlora.core.registry import nearest
from anyqlora.core.terminal import printable
from anyqlora.data import audit, formats
from anyqlora.data.conversations import Conversation
from anyqlora.data.dataset import DataSplits, load_data, read_held_out
from anyqlora.data.readers.bad_rows import BadRow
from anyqlora.data.row_reader import DIALOGUES
from anyqlora.data.rows import Example
from anyqlora.data.tokenizer import ending_with
from anyqlora.processes.group import SingleProcess
from anyqlora.reporting.console import ConsoleReporter
from anyqlora.runs.directory import as_before_rendering

WEIGHTS = {"adapter": "adapter_model.safetensors", "model": "model.safetensors"}


@dataclass(frozen=True)
class FinishedRun:
    """`config` is what the run was planned to do, `result` its result.json, `report` its data_report.json."""

    directory: Path
    config: TrainConfig
    result: dict
    report: dict

    @property
    def folder(self) -> Path:
        """Where the weights and the tokenizer are."""
        return self.directory / ("model" if registry.adapter(self.config.adapter).trains_base else "adapter")

    @property
    def style(self) -> str:
        """How its rows were written: chat, alpaca or plain."""
        return formats.FORMATS[self.format].style if self._written in (AUTO, "text") else self._written

    @property
    def _written(self) -> str:
        """How its rows were written, with "text" where each format has its own words."""
        return self.report["sources"][0].get("style") or self.config.prompt_format

    @property
    def format(self) -> str:
        """The format of its rows: of the first source, where there are several."""
        return self.report["sources"][0].get("format", "text")

    @property
    def is_dialogue(self) -> bool:
        """Whether most of its rows of text are dialogues as Guanaco's."""
        first = self.report["sources"][0]
        return 2 * first.get(DIALOGUES, 0) > first.get("rows", 0)

    def format_prompt(self, question: str) -> str | list[dict]:
        """The question as the run's rows would put it: text before an answer, or messages for a chat template.

        Raises UsageError.
        """
        info, row = formats.FORMATS[self.format], None
        if info.question:
            row = info.question_row(question)
        elif self.format == "text" and self.is_dialogue:
            row = {"text": f"### Human: {question}### Assistant: -"}
        try:
            parsed = formats.parse_row(row, self.format, self._written) if row else None
        except BadRow as bad:
            raise UsageError(f"this cannot be asked: {bad}", cure=bad.cure) from None
        if isinstance(parsed, Conversation) or self.style == "chat":
            return [{"role": "user", "content": question}]
        return "".join(part for part, _ in parsed.parts[:-1]) if isinstance(parsed, formats.TextRow) else question

    def held_out(
        self, tokenizer, dataset: str = "", warn: Callable[[str], None] = lambda text: None
    ) -> Sequence[Example]:
        """The rows of `dataset`, or those that the run held out itself; `warn` is told what was found in `dataset`.

        Raises UsageError.
        """
        with ending_with(tokenizer, self.report.get("end_token")):  # the saved one may end with what the answers do
            return self._held_out(tokenizer, dataset, warn)

    def _held_out(self, tokenizer, dataset: str, warn: Callable[[str], None]) -> Sequence[Example]:
        if dataset:
            rows, report = read_held_out(self.config, dataset, tokenizer)
            for finding in audit.warnings(report):
                warn(finding)
            return rows
        if not (self.config.eval_dataset or self.config.eval_fraction):
            raise UsageError(f"{self.directory} held no rows out", cure="--dataset FILE")
        rows = load_data(self.config, tokenizer)
        if rows.identity != self.report["identity"]:
            raise UsageError(
                "the rows are not those that the run was trained with: their files have changed",
                where=self.config.dataset,
                cure="--dataset FILE evaluates on other rows",
            )
        return rows.held_out


def find_run(name: str = "") -> FinishedRun:
    """The finished run `name` (a directory, or a name in ./runs); the newest one without a name. Raises UsageError.

    ANYQLORA_OUTPUT_DIR takes the place of ./runs, as it does when training.
    """
    root = Path(str(from_environment(os.environ).get("output_dir", (SETTINGS["output_dir"].default, ""))[0]))
    there = [path.parent for path in root.glob("*/result.json")]
    if not name:
        if not there:
            raise UsageError(
                f"no finished run in {root}", cure="python train.py makes one; or name the run's directory"
            )
        return read_run(max(there, key=lambda path: (path / "result.json").stat().st_mtime))
    for directory in (Path(os.path.expanduser(name)), root / name):
        if directory.is_dir():
            return read_run(directory)
    raise UsageError(
        f"no run {name!r}{nearest(name, [path.name for path in there])}",
        where="command line",
        cure=f"a run directory, or the name of one in {root}",
    )


def read_run(directory: Path) -> FinishedRun:
    """The finished run in `directory`, its weights checked against result.json. Raises UsageError."""
    stated = directory / "config.resolved.yaml"
    if not stated.exists():
        raise UsageError(
            f"{directory} is not a run directory: it has no {stated.name}",
            cure="the directory that train.py named at its end",
        )
    if not (directory / "result.json").exists():
        raise UsageError(
            f"{directory} is not finished: it has no result.json", cure="the command that started it continues it"
        )
    settings = from_file(stated)
    config = TrainConfig(
        **{name: parse_value(name, raw, where) for name, (raw, where) in settings.items()},
        sources={name: where for name, (_, where) in settings.items()},
    )
    if "multi_turn" not in settings:
        config = as_before_rendering(config)
    try:
        result, report = (json.loads((directory / name).read_bytes()) for name in ("result.json", "data_report.json"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory} cannot be read: {error}") from None
    run = FinishedRun(directory, config, result, report)
    weights = run.folder / WEIGHTS[run.folder.name]
    if not weights.exists():
        raise UsageError(
            f"{directory} has no {run.folder.name}: it ran with save_model false, or {weights.name} was taken away"
        )
    with open(weights, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != result["adapter_sha256"]:
            raise UsageError(
                "its sha256 is not the one that was written",
                where=str(weights),
                cure=f"a checkpoint of {directory / 'checkpoints'}",
            )
    return run


def plan_here(run: FinishedRun, changed: dict):
    """The run's plan on this machine: its own backend where that is here, else the one that auto takes, which is
    said.
    """
    from anyqlora.planning.backends import BackendManager  # not for reading a run

    is_whole = registry.adapter(run.config.adapter).trains_base  # it needs no base
    own = {"model_name": str(run.folder)} if is_whole else {}
    together = {name: SETTINGS[name].default for name in settings_with("several")}
    sources = {**run.config.sources, **dict.fromkeys(together, "default")}
    config = run.config.with_(
        strict=False,
        sources=sources,
        **{**together, "strategy": "single", "world_size": 1, "frozen_matmul": "full", **changed, **own},
    )
    if "backend" not in changed and config.backend not in BackendManager().available():
        print(
            f"backend {printable(config.backend)} is not here: another one computes, with slightly other numbers",
            file=sys.stderr,
        )
        config = config.with_(backend="auto")
    manager = BackendManager(config.backend, where=config.sources.get("backend", ""))
    if manager.backend != run.config.backend:  # which has its own ways of computing the same
        ways = dict.fromkeys(settings_with("per_backend"), AUTO)
        config = config.with_(**ways, sources={**config.sources, **dict.fromkeys(ways, "default")})
    plan = manager.plan(config)
    for adjustment in plan.adjustments:
        if adjustment.field in ("precision", "quantizer"):  # the rest is about training
            print(printable(str(adjustment)), file=sys.stderr)
    return plan


@dataclass
class EvalContext:
    """What `evaluator` reads of a run."""

    config: object
    data: DataSplits
    tokenizer: object
    console: ConsoleReporter
    process_group = SingleProcess()

    def check_signals(self) -> None:
        """Nothing has to be saved: Ctrl-C ends it."""
