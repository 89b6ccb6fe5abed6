"""Experiment trackers and loggers for loops of people's own: Accelerate's init_trackers, log and get_logger."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from anyqlora.core.errors import UsageError
from anyqlora.reporting.trackers import Trackers, check_trackers

NAMES = {"name": "tracker_name", "group": "tracker_group", "entity": "tracker_entity"}  # of init_kwargs -> settings


class Logging:
    """Of a `Runtime`: the trackers that the setting log_to (Accelerate's log_with) names."""

    plan: Any
    _trackers: Trackers | None = None
    _logged = 0

    def init_trackers(
        self, project_name: str, config: Mapping | None = None, init_kwargs: Mapping | None = None
    ) -> None:
        """Start the trackers, on the first process. `config` is shown with the run; init_kwargs is
        {"wandb": {"name": ..., "group": ...}}.
        """
        asked = {key: value for options in (init_kwargs or {}).values() for key, value in options.items()}
        if unknown := set(asked) - set(NAMES):
            raise UsageError(
                f"init_trackers: {', '.join(sorted(unknown))} is not handed on",
                cure=f"init_kwargs of {', '.join(NAMES)}",
            )
        settings = {NAMES[key]: str(value) for key, value in asked.items()}
        own = self.plan.config.with_(project_name=project_name, **settings)
        check_trackers(own)
        if self.is_main_process:
            directory = Path(own.output_dir) / project_name
            directory.mkdir(parents=True, exist_ok=True)
            shown = {**(config or {}), **{name: getattr(own, name) for name in ("project_name", *NAMES.values())}}
            self._trackers = Trackers(own, directory, False, print, settings=shown)

    def log(self, values: Mapping[str, float], step: int | None = None, log_kwargs: Mapping | None = None) -> None:
        """Give numbers to the trackers, on the first process. `step` goes on by itself where it is left out."""
        self._logged = self._logged + 1 if step is None else step
        if self._trackers is not None:
            self._trackers.record({**values, "step": self._logged})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of this name, or with `unwrap` its library's own object; None on other processes."""
        for tracker in self._trackers.trackers if self._trackers else ():
            if tracker.name == name:
                return tracker.run if unwrap else tracker
        if self.is_main_process:
            raise UsageError(f"get_tracker: no tracker {name!r} was started", cure="log_to, and init_trackers before")
        return None

    def close_trackers(self) -> None:
        if self._trackers is not None:
            self._trackers.close()
            self._trackers = None


class ProcessLogger(logging.LoggerAdapter):
    """Accelerate's MultiProcessAdapter: a line comes from the first process alone, unless it says
    main_process_only=False; with in_order=True from each, one after another.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        is_everybodys = not kwargs.pop("main_process_only", True)
        is_in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for turn in range(size if is_in_order else 1):
            if self.isEnabledFor(level) and (turn == rank if is_in_order else is_everybodys or rank == 0):
                self.logger.log(level, msg, *args, **kwargs)
            if is_in_order and size > 1:
                dist.barrier()


def get_logger(name: str, log_level: str | None = None) -> ProcessLogger:
    """Python's logger of this name, for loops of people's own: see ProcessLogger."""
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return ProcessLogger(logger, {})
