"""What only the first process of a run does: speak, and write to the run directory.

The others have the same with nothing in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from anyqlora.core.errors import DiskFull
from anyqlora.core.files import (
    Content,
    FileSystem,
    pretrained_files,
    replace_file,
    size_and_sha256,
    to_json,
    write_directory,
)
from anyqlora.data.dataset import DataSplits
from anyqlora.reporting.console import JsonLines, Metrics, NullReporter
from anyqlora.reporting.select import make_reporter
from anyqlora.reporting.trackers import Trackers
from anyqlora.runs.checkpoints import LoadedCheckpoint
from anyqlora.runs.directory import IDENTITY, RESULT, RunDirectory, read_json, unwritable
from anyqlora.runs.provenance import run_files
from anyqlora.runs.saver import CheckpointSaver
from anyqlora.training.state import FinalFiles, Snapshot, TrainState


class RunOutputs:
    """The console, metrics.jsonl, samples.jsonl, checkpoints and final files of one run."""

    def __init__(self, run_directory: RunDirectory, plan, total_steps: int):
        self.run_directory, self.directory, self.plan = run_directory, run_directory.directory, plan
        self.file_system = FileSystem()
        self._exit_stack = contextlib.ExitStack()
        self.console = make_reporter(plan, total_steps)
        self._exit_stack.callback(self.console.close)

    def open(self, machine: dict, data: DataSplits, state: TrainState) -> None:
        """Write what was asked, what was planned and where it runs; open the files that grow with the run.

        Raises DiskFull.
        """
        self._describe(machine, data)
        config, warn, is_resumed = self.plan.config, self.console.warn, self.run_directory.restored is not None
        trackers = Trackers(config, self.directory, is_resumed, warn, state.step)
        self.samples = JsonLines(self.directory / "samples.jsonl", state.lines.get("samples.jsonl", 0), warn)
        self._exit_stack.callback(self.samples.close)
        self.metrics = Metrics(self.directory / "metrics.jsonl", state.lines.get("metrics.jsonl", 0), trackers, warn)
        self._exit_stack.callback(self.metrics.close)
        self.saver = CheckpointSaver(self.run_directory, config, machine, self.file_system, warn, state.saving_seconds)

    def _describe(self, machine: dict, data: DataSplits) -> None:
        run_directory, files = self.run_directory, run_files(self.plan, machine, data.report)
        if not (run_directory.restored and run_directory.replaces):
            # Else the checkpoints there are of another identity, until one is saved. By its identity the run is found
            # again.
            files = {IDENTITY: to_json(run_directory.identity), **files}
        try:
            self.file_system.make_directory(self.directory)
            run_directory.lock()
            # Before its identity is another: a kill in between leaves the old run, short of its end.
            run_directory.reopen(self.file_system)
            for name, content in files.items():
                replace_file(self.directory / name, content, self.file_system)
        except OSError as error:
            raise unwritable(self.directory, error) from None

    def close(self) -> None:
        """Let go of all of it, the last first."""
        self._exit_stack.close()

    # ------------------------------------------------------------------------------------------------ on the way

    @property
    def saving_seconds(self) -> float:
        return self.saver.seconds

    def check_room(self, trained_numbers: int) -> None:
        """Raises DiskFull when what the run will write clearly does not fit."""
        self.saver.check_room(trained_numbers)

    def has_checkpoint(self, evaluation: dict | None) -> bool:
        """Whether there is an evaluation, and its step has a checkpoint."""
        return self.saver.contains(evaluation)

    def write_step(self, record: dict, eta_seconds: float) -> None:
        self.metrics.write(record)
        self.console.step({**record, "eta_seconds": eta_seconds})

    def write_evaluation(self, record: dict, samples: list[dict]) -> None:
        self.metrics.write(record)
        self.console.evaluation(record)
        for sample in samples:
            self.samples.write({"step": record["step"], **sample})

    def line_counts(self) -> dict[str, int]:
        """{file: lines of it that belong to the run so far}, which are on the disk now."""
        for file in (self.metrics, self.samples):
            file.sync()
        return {file.path.name: file.count for file in (self.metrics, self.samples)}

    def save(self, state: TrainState, is_last_chance: bool, snapshot: Callable[[], Snapshot]) -> bool:
        """Write the checkpoint of `state.step` finished steps. Returns whether it stands."""
        return self.saver.write(state.step, state.to_state(), state.best_saved, is_last_chance, snapshot)

    def best_checkpoint(self, step: int) -> LoadedCheckpoint | None:
        """The checkpoint of the best step; None when it is damaged."""
        return self.saver.best(step)

    def describe_saved(self, step: int) -> str:
        """What a stop after `step` leaves on disk."""
        return self.saver.describe(step)

    # ------------------------------------------------------------------------------------------------ at the end

    def pretrained_files(self, name: str, thing, **options) -> dict[str, Content]:
        """{file: content} of what `thing.save_pretrained` writes; nothing on a process that is not the first.

        Raises DiskFull.
        """
        try:
            return dict(pretrained_files(thing, self.directory, self.file_system, **options))
        except OSError as error:
            raise self._unwritten(name, error) from None

    def write_final(self, final: FinalFiles, card: Callable[[], str]) -> str:
        """Write what was learned, with its model card. Returns the sha256 of the weights."""
        final.files["README.md"] = card().encode()
        if self.plan.config.save_model:
            try:
                write_directory(self.directory / final.folder, final.files, self.file_system)
            except OSError as error:
                raise self._unwritten(final.folder, error) from None
        return size_and_sha256(final.files[final.weights])["sha256"]

    def write_result(self, result: Mapping) -> dict:
        """Write result.json, last of all, and show what came of the run. The console is closed by then."""
        try:
            # Its identity, of a forced run that stopped before any checkpoint.
            replace_file(self.directory / IDENTITY, to_json(self.run_directory.identity), self.file_system)
            replace_file(self.directory / RESULT, to_json(result), self.file_system)
            self.file_system.sync_directory(self.directory)
        except OSError as error:
            raise self._unwritten(RESULT, error) from None
        self.console.report(self.directory)
        return dict(result)

    def report_finished(self) -> dict:
        """A finished run is reported and left as it is."""
        self.console.report(self.directory)
        self.console.info(
            f"{self.directory} is a finished run; another --run_name starts a new one, --resume force with more "
            f"--max_steps or "
            "--num_epochs trains it further"
        )
        result = read_json(self.directory / RESULT)
        assert result is not None, "it has one, by which it is known to be finished"
        return result

    def _unwritten(self, name: str, error: OSError) -> DiskFull:
        return DiskFull(
            f"{name} cannot be written: {error.strerror or error}",
            where=str(self.directory),
            cure="make room; the same command goes on from the last checkpoint",
        )


class NullOutputs:
    """Of a process that is not the first: it takes part in what is gathered, and writes nothing."""

    saving_seconds = 0.0

    def __init__(self, run_directory: RunDirectory, plan, total_steps: int):
        self.directory: Path = run_directory.directory
        self.console = NullReporter(plan, total_steps)

    def open(self, machine: dict, data: DataSplits, state: TrainState) -> None:
        pass

    def close(self) -> None:
        self.console.close()

    def check_room(self, trained_numbers: int) -> None:
        pass

    def has_checkpoint(self, evaluation: dict | None) -> bool:
        return True  # the first process knows, and says so at the end

    def write_step(self, record: dict, eta_seconds: float) -> None:
        pass

    def write_evaluation(self, record: dict, samples: list[dict]) -> None:
        pass

    def line_counts(self) -> dict[str, int]:
        return {}

    def save(self, state: TrainState, is_last_chance: bool, snapshot: Callable[[], Snapshot]) -> bool:
        snapshot()
        return True

    def best_checkpoint(self, step: int) -> None:
        return None

    def describe_saved(self, step: int) -> str:
        return "the first process saves"

    def pretrained_files(self, name: str, thing, **options) -> dict[str, Content]:
        return {}

    def write_final(self, final: FinalFiles, card: Callable[[], str]) -> str:
        return ""

    def write_result(self, result: Mapping) -> dict:
        return {}

    def report_finished(self) -> dict:
        return {}
