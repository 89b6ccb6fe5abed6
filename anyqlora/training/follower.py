"""A process of a run that is not the first: it takes every step with the others and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from anyqlora.reporting.console import NullReporter
from anyqlora.training.session import TrainingSession


class NullJsonLines:
    """A file that only the first process writes."""

    path, count = Path(), 0

    def write(self, record: dict) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


class NullSaver:
    """Checkpoints that only the first process writes. What they hold is gathered by all."""

    seconds = 0.0

    def check_room(self, trained_numbers: int) -> None:
        pass

    def write(
        self, step: int, state: dict, best: dict | None, is_last_chance: bool, snapshot: Callable[[], tuple]
    ) -> bool:
        snapshot()
        return True

    def describe(self, step: int) -> str:
        return "the first process saves"

    def best(self, step: int) -> None:
        return None


class WorkerSession(TrainingSession):
    def _view(self) -> NullReporter:
        return NullReporter(self.plan, self.total_steps)

    def _describe(self) -> None:
        pass

    def _open(self) -> None:
        self.samples, self.metrics, self.saver = NullJsonLines(), NullJsonLines(), NullSaver()

    def pretrained_files(self, name: str, thing, **options) -> dict:
        return {}

    def write_finished(self, folder: str, files: dict, weights: str) -> str:
        return ""

    def finish(self, adapter_sha256: str, peak_memory_bytes: int) -> dict:
        self._exit_stack.close()
        return {}

    def already_finished(self) -> dict:
        return {}
