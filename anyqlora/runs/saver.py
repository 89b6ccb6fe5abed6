"""The checkpoints that a run writes on its way: whether they fit, what happens when one does not, and which are
kept.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

import numpy as np

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import DiskFull, NonFinite
from anyqlora.core.files import FileSystem, replace_file, to_json
from anyqlora.core.terminal import format_bytes
from anyqlora.runs.checkpoints import Checkpoints, InvalidCheckpoint, LoadedCheckpoint
from anyqlora.runs.directory import IDENTITY, RunDirectory


class CheckpointSaver:
    """`seconds` is the time that saving took so far."""

    def __init__(
        self,
        place: RunDirectory,
        config: TrainConfig,
        machine: dict,
        disk: FileSystem,
        warn: Callable[[str], None],
        seconds: float = 0.0,
    ):
        self.config, self.warn, self.seconds = config, warn, seconds
        self.tags = {"identity": place.identity, "machine": machine}
        self.identity = place.directory / IDENTITY
        self.checkpoints = Checkpoints(place.directory / "checkpoints", disk)
        self.told_full = False

    def check_room(self, trained_numbers: int) -> None:
        """Raises DiskFull when the checkpoints that will be kept clearly do not fit: adapter and two moments, 4 bytes
        each.
        """
        directory = self.checkpoints.directory
        most = (
            self.config.save_total_limit + self.config.load_best_model_at_end + 1
        )  # the newest is written before the oldest goes
        needed = trained_numbers * 4 * (3 * most + 1)
        there = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        free = shutil.disk_usage(directory.parent).free
        if needed > free + there:
            raise DiskFull(
                f"{most} checkpoints and the result need {format_bytes(needed)}, {format_bytes(free + there)} are free",
                where=str(directory.parent),
                cure="another --output_dir, or make room",
            )

    def contains(self, evaluation: dict | None) -> bool:
        """Whether there is an evaluation, and its step has a checkpoint."""
        return evaluation is not None and evaluation["step"] in self.checkpoints.steps()

    def write(
        self, step: int, state: dict, best: dict | None, is_last_chance: bool, snapshot: Callable[[], tuple]
    ) -> bool:
        """Write the checkpoint of `step` finished steps.

        Returns whether it stands. `snapshot()` gives adapter, moments, adapter_config, loop state; `best` is the
        evaluation whose checkpoint `load_best_model_at_end` keeps, once this one is written.

        A full disk is told once and training goes on, or ends with DiskFull where on_disk_full says so or where it is
        the last chance to keep anything; older checkpoints stay as they are.
        """
        began = time.perf_counter()
        adapter, moments, adapter_config, loop = snapshot()
        broken = [
            name for tensors in (adapter, moments) for name, value in tensors.items() if not np.isfinite(value).all()
        ]
        if broken:
            raise NonFinite(
                f"{broken[0]} is not finite after step {step}; it is not saved",
                cure="the newest checkpoint is from before",
            )
        try:
            self.checkpoints.save(
                step, adapter, moments, adapter_config=adapter_config, state={**state, "loop": loop}, **self.tags
            )
            replace_file(
                self.identity, to_json(self.tags["identity"]), self.checkpoints.disk
            )  # another one with --resume force: before what has the old one goes
            self.told_full = False
        except OSError as error:
            self._not_saved(step, error, is_last_chance)
            return False
        else:
            self._prune(step, best["step"] if self.config.load_best_model_at_end and best else None)
            return True
        finally:
            self.seconds += time.perf_counter() - began

    def _not_saved(self, step: int, error: OSError, is_last_chance: bool) -> None:
        good = self.checkpoints.steps()
        older = f"the checkpoint of step {good[-1]} stands" if good else "there is no older one"
        message = f"the checkpoint of step {step} cannot be written ({error.strerror or error}); {older}"
        if self.config.on_disk_full == "stop" or (is_last_chance and not good):
            raise DiskFull(
                message, where=str(self.checkpoints.directory), cure="make room; the same command continues the run"
            ) from None
        if not self.told_full:
            self.warn(f"{message}; training goes on")
            self.told_full = True

    def _prune(self, step: int, best: int | None) -> None:
        try:
            self.checkpoints.prune(step, self.config.save_total_limit, best)
        except OSError as error:
            self.warn(f"an old checkpoint cannot be removed ({error.strerror or error})")

    def describe(self, step: int) -> str:
        """What a stop after `step` leaves on disk."""
        good = [saved for saved in self.checkpoints.steps() if saved <= step]
        if not good:
            return "nothing is saved yet"
        return f"step {good[-1]} is saved" + (f" of {step}" if good[-1] < step else "")

    def best(self, step: int) -> LoadedCheckpoint | None:
        """The checkpoint of the best step; None when it is damaged."""
        try:
            return self.checkpoints.read(step)
        except InvalidCheckpoint as reason:
            self.warn(
                f"{self.checkpoints.path(step)} is the best step's and cannot be used: {reason}; what the last step "
                f"had learned is written"
            )
            return None
