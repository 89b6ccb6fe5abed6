"""wandb, tensorboard and trackio: fed from the records of metrics.jsonl, imported only when asked for."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import netrc
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from anyqlora.config.schema import SETTINGS, TrainConfig, settings_with
from anyqlora.core import registry
from anyqlora.core.errors import UsageError
from anyqlora.core.redaction import redacted

WANDB_SECONDS = 30  # to reach the server before the run goes on offline


def tracker_names(config: TrainConfig) -> list[str]:
    """The trackers that log_to names, once each."""
    asked = [name.strip() for name in config.log_to.split(",")]
    return [name for name in dict.fromkeys(asked) if name in registry.TRACKERS]


def installed_trackers() -> list[str]:
    """Those of the trackers that are installed. Imports none."""
    return [name for name in registry.TRACKERS if importlib.util.find_spec(name) is not None]


def check_trackers(config: TrainConfig) -> None:
    """Raises UsageError for a tracker that is not installed, with the command that installs it. Imports none."""
    for name in tracker_names(config):
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"log_to {name}: {name} is not installed",
                where=config.sources.get("log_to", ""),
                cure=f"pip install {name}",
            )
    if config.offline and "trackio" in tracker_names(config) and any(os.environ.get(name) for name in Trackio.REMOTE):
        raise UsageError(
            f"offline, and {' or '.join(Trackio.REMOTE)} makes trackio send to a server",
            where=config.sources.get("offline", ""),
            cure="unset them, or leave out --offline",
        )


def numeric_values(record: Mapping) -> dict[str, float]:
    """What of a record can be plotted; an evaluation's numbers are named eval/..."""
    prefix = "eval/" if record.get("event") == "evaluation" else ""
    values = {}
    for name, value in record.items():
        if value in ("nan", "inf", "-inf"):  # as metrics.jsonl spells what JSON has no number for
            value = float(value)
        if name != "step" and isinstance(value, (int, float)):
            values[prefix + name] = value
    return values


@dataclass(frozen=True)
class TrackerContext:
    """What a tracker is told of the run; `settings` hold no secrets."""

    config: TrainConfig
    settings: dict
    directory: Path
    resumed: bool
    warn: Callable[[str], None]
    finished_steps: int = 0  # that the run goes on from

    @property
    def about(self) -> dict:
        """Where the run belongs, in the words that wandb and trackio share."""
        return {
            "project": self.settings["project_name"],
            "name": self.settings["tracker_name"] or redacted(self.directory.name),
            "group": self.settings["tracker_group"] or None,
            "config": self.settings,
        }


class Trackers:
    """All trackers of a run; none at all is the usual case.

    One that fails on the way is given up: training does not depend on it.
    """

    def __init__(
        self,
        config: TrainConfig,
        directory: Path,
        resumed: bool,
        warn,
        finished_steps: int = 0,
        settings: Mapping | None = None,
    ):
        """`resumed`: the run goes on, there as here, after so many steps. `warn(text)` is told of trackers that fail.
        `settings` are shown with the run: else the config's.

        Raises UsageError for one that cannot start.
        """
        self.warn, self.trackers = warn, []
        for name in settings_with("trackers"):
            readers = SETTINGS[name].metadata["trackers"]
            if getattr(config, name) != SETTINGS[name].default and not set(readers) & set(tracker_names(config)):
                warn(f"{name} does nothing here: it is for log_to {' or '.join(readers)}")
        for name in tracker_names(config):
            shown = redacted(config.settings() if settings is None else dict(settings))
            run = TrackerContext(config, shown, directory, resumed, warn, finished_steps)
            try:
                self.trackers.append(registry.load(registry.TRACKERS[name])(run))
            except Exception as error:  # whatever it is: what was asked for is not in effect
                self.close()
                raise UsageError(
                    f"log_to {name}: it does not start: {unavailable_reason(error)}",
                    where=config.sources.get("log_to", ""),
                    cure=f"mend it, or leave {name} out",
                ) from error

    def record(self, record: Mapping) -> None:
        self._each(lambda tracker: tracker.record(record["step"], numeric_values(record)))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self.trackers = []

    def _each(self, act: Callable) -> None:
        for tracker in list(self.trackers):
            try:
                act(tracker)
            except Exception as error:  # whatever it is: the run goes on, and metrics.jsonl has every record
                self.warn(f"{tracker.name} is given up: {unavailable_reason(error)}")
                self.trackers.remove(tracker)


def unavailable_reason(error: Exception) -> str:
    """The first line of what an error says, without secrets."""
    return redacted((str(error).strip().splitlines() or [type(error).__name__])[0])


class Wandb:
    """Weights & Biases: online with a key, else offline into the run directory, for `wandb sync`."""

    name = "wandb"

    def __init__(self, run: TrackerContext):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports to Sentry, which nobody asked for
        import wandb
        from wandb.errors import CommError

        quiet = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            init_timeout=WANDB_SECONDS,
        )
        identity = (
            run.directory / "wandb-id"
        )  # a run that goes on is one run there too; the same name elsewhere is another
        if not identity.exists():
            identity.write_text(secrets.token_hex(8))
        options = {
            **run.about,
            "entity": run.settings["tracker_entity"] or None,
            "dir": str(run.directory),
            "id": identity.read_text(),
            "resume": "allow",
            "reinit": "create_new",
            "settings": quiet,
        }
        mode = os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "offline")
        mode = "offline" if run.config.offline and mode == "online" else mode
        try:
            self.run = wandb.init(mode=cast(Any, mode), **options)  # wandb refuses what is none of its modes
        except CommError as error:
            run.warn(f"wandb does not answer, so it is kept offline: {unavailable_reason(error)}")
            wandb.teardown()  # else the id is taken by the run that did not start
            self.run = wandb.init(mode="offline", **options)

    def record(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


def has_wandb_key() -> bool:
    """Whether wandb would find a key: in the environment or for its server in the netrc file, where `wandb login` puts
    it.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    files = [Path(os.environ["NETRC"])] if os.environ.get("NETRC") else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(file).authenticators(host):
                return True
    return False


class Tensorboard:
    """Event files in the run directory, for `tensorboard --logdir`. Written without torch, so that every loop can."""

    name = "tensorboard"

    def __init__(self, run: TrackerContext):
        # What these modules hold is made while they are imported, so that no type checker sees it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import (
            Summary,  # pyright: ignore[reportAttributeAccessIssue]
            SummaryMetadata,  # pyright: ignore[reportAttributeAccessIssue]
        )
        from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.Event, self.Summary = Event, Summary
        self.writer = EventFileWriter(str(run.directory / "tensorboard"))
        again = (
            run.finished_steps + 1 if run.resumed else 0
        )  # what a killed process wrote of this step and later ones, TensorBoard drops
        self.writer.add_event(Event(wall_time=time.time(), step=again, session_log=SessionLog(status=SessionLog.START)))
        rows = "".join(f"| {name} | {value} |\n" for name, value in run.settings.items())
        text = TensorProto(dtype="DT_STRING", string_val=[f"| setting | value |\n|---|---|\n{rows}".encode()])
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._add(0, Summary(value=[Summary.Value(tag="settings/text_summary", metadata=metadata, tensor=text)]))

    def _add(self, step: int, summary) -> None:
        self.writer.add_event(self.Event(wall_time=time.time(), step=step, summary=summary))

    def record(self, step: int, values: dict[str, float]) -> None:
        self._add(
            step,
            self.Summary(value=[self.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]),
        )
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Trackio:
    """trackio, into its own local database (TRACKIO_DIR), for `trackio show`."""

    name = "trackio"
    REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")

    def __init__(self, run: TrackerContext):
        import trackio

        self.trackio = trackio
        with contextlib.redirect_stdout(io.StringIO()):  # it greets
            trackio.init(
                **run.about,
                resume="allow" if run.resumed else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def record(self, step: int, values: dict[str, float]) -> None:
        self.trackio.log(
            {name: value if math.isfinite(value) else str(value) for name, value in values.items()}, step=step
        )

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.trackio.finish()
