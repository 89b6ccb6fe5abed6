"""Experiment trackers for loops of people's own: Accelerate's init_trackers and log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
