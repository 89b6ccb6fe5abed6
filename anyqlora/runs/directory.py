"""Where a run lies on disk, whether it is the one that is asked for, and what it continues from - before any framework
is imported.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None

from anyqlora.config import init_adapter
from anyqlora.config.schema import SETTINGS, TrainConfig, current_names, settings_with
from anyqlora.core import hashing
from anyqlora.core.errors import DiskFull, NoCheckpoint, Stopped, UsageError
from anyqlora.core.files import FileSystem, remove_leftovers, to_json
from anyqlora.core.registry import ADAPTER
from anyqlora.data import chat_template
from anyqlora.data.readers import sources
from anyqlora.models.hub import base_directory
from anyqlora.planning.fitting import global_batch
from anyqlora.processes.group import SingleProcess
from anyqlora.runs.checkpoints import Checkpoints, LoadedCheckpoint

RESULT, IDENTITY = "result.json", "identity.json"
RENDERING = "rendering"  # in an identity: how rows become text, a number that grows where that changes
TOKENIZER_FILES = (
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.tiktoken",
)


@dataclass
class RunDirectory:
    """A run directory, which no other process trains in until this one leaves it.

    `restored` is the newest good checkpoint in it, `rejected` what was passed over to find it, `seconds` what that
    took. `is_empty` is whether nothing was in it when this process took it, and no step was trained in it yet.
    `replaces`: a run with other settings is gone on with, by --resume force.
    """

    directory: Path
    identity: dict
    finished: bool = False
    restored: LoadedCheckpoint | None = None
    rejected: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    handle: int | None = None
    is_empty: bool = False
    new_directories: list[Path] = field(
        default_factory=list
    )  # directories around it that were not there, the innermost first
    replaces: bool = False

    def lock(self) -> None:
        """Take the directory, which is there by now.

        Raises UsageError when another process has it; the system gives it back when that ends.
        """
        self._lock()
        self.is_empty = not any(self.directory.iterdir())

    def _lock(self) -> None:
        if self.handle is None and fcntl is not None:
            self.handle = os.open(self.directory, os.O_RDONLY)
            try:
                fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.unlock()
                raise UsageError(
                    "another process is training in this directory",
                    where=str(self.directory),
                    cure="another --run_name, or wait for it",
                ) from None
            except OSError:  # a file system without locks
                self.unlock()

    def check(self, config: TrainConfig, global_batch: int) -> None:
        """Compare the plan's global batch, which the number of devices decides. Raises UsageError."""
        there = self.identity.get("global_batch")
        self.identity["global_batch"] = global_batch
        if self.restored and config.resume != "force" and there != global_batch:
            raise UsageError(
                f"{self.directory} holds a run of {there} rows to a step, and with these devices it would be "
                f"{global_batch}",
                cure="--gradient_accumulation_steps, --batch_size or --world_size so that the global batch stays; or "
                "another --run_name",
            )

    def broadcast(self, ranks: SingleProcess) -> None:
        """All processes hear from the first one where the run lies and what it goes on from."""
        restored = self.restored
        payload = ranks.broadcast(
            {
                "directory": str(self.directory),
                "identity": self.identity,
                "finished": self.finished,
                "restored": {
                    "step": restored.step,
                    "path": str(restored.path),
                    "state": restored.state,
                    "machine": restored.machine,
                }
                if restored
                else None,
            }
        )
        if payload["restored"]:
            adapter = ranks.broadcast_arrays(restored and restored.adapter) or {}
            moments = ranks.broadcast_arrays(restored and restored.moments) or {}
            loaded = {**payload["restored"], "path": Path(payload["restored"]["path"])}
            self.restored = restored or LoadedCheckpoint(adapter=adapter, moments=moments, **loaded)
        self.directory, self.identity, self.finished = (
            Path(payload["directory"]),
            payload["identity"],
            payload["finished"],
        )

    def keep_planned(self, config: TrainConfig, plan) -> TrainConfig:
        """`config` with what the plan chose when the checkpoint was written, where nobody states it now and device and
        strategy are the same: the free memory of today does not change the bytes of a run that goes on.
        """
        config = self._keep_rendering(config)
        before = self.restored.machine if self.restored else {}
        if not before or any(
            before.get(name) != getattr(plan, name) for name in ("backend", "device", "world_size", "strategy")
        ):
            return config
        planned = settings_with("on_resume", "planned")
        decisions = {name: SETTINGS[name].metadata["decided_with"] or name for name in planned}
        stated = {decisions[name] for name in planned if getattr(config, name) != "auto"}
        state = {
            name: before[name]
            for name in planned
            if decisions[name] not in stated and name in before and getattr(plan.config, name) != "auto"
        }  # which some backends leave alone
        return config.with_(**state, sources={**config.sources, **dict.fromkeys(state, "plan")})

    def _keep_rendering(self, config: TrainConfig) -> TrainConfig:
        """A run that began before instruct models' rows went through their chat template goes on without."""
        return config if RENDERING in self.identity else as_before_rendering(config)

    def reopen(self, disk: FileSystem) -> None:
        """A finished run that goes on is an unfinished one from now on: its result.json steps aside, under the number
        of its steps.
        """
        result = read_json(self.directory / RESULT)
        if result is not None:
            aside = [f"result-{result['steps']:06d}{again}.json" for again in ("", *(f"-{n}" for n in range(1, 1000)))]
            disk.rename(
                self.directory / RESULT, next(path for path in map(self.directory.joinpath, aside) if not path.exists())
            )

    def unlock(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None

    @contextlib.contextmanager
    def hand_over(self) -> Iterator[None]:
        """Other processes take the directory now, and read what is in it themselves.

        It goes when they have left it empty, and what they have left in it when one of them has explained why the run
        ends before its first step: the first one may have been ended before it could clear up.
        """
        self.unlock()
        was_empty = self.is_empty or not self.directory.exists()
        self.is_empty, self.restored = False, None
        try:
            yield
        except SystemExit:
            if was_empty and not self._has_steps():
                shutil.rmtree(self.directory, ignore_errors=True)
                self._remove_empty()
            raise
        finally:
            self._remove_empty(self.directory)

    def _has_steps(self) -> bool:
        """Whether a step is recorded, or kept in a checkpoint."""
        try:
            lines = (self.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        return any('"event"' not in line for line in lines) or any(self.directory.glob("checkpoints/*"))

    def _remove_empty(self, *directories: Path) -> None:
        with contextlib.suppress(OSError):  # where something is in one
            for directory in (*directories, *self.new_directories):
                directory.rmdir()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind, error, trace) -> None:
        """A run that fails before its first step leaves nothing; one that is stopped is found again by the same
        command.
        """
        is_stopped = isinstance(error, (Stopped, KeyboardInterrupt)) and (self.directory / IDENTITY).exists()
        if error is not None and self.is_empty and not is_stopped:
            shutil.rmtree(self.directory, ignore_errors=True)
            self._remove_empty()
        self.unlock()


def locate_run(config: TrainConfig, name: str = "") -> RunDirectory:
    """The directory of the run that `config` asks for.

    `run_name` names it, or `name`, which was found for it before; else the newest unfinished run of the same identity
    is continued; else a new directory is made. Raises UsageError when the named directory holds another run,
    NoCheckpoint when it holds checkpoints and none can be used, DiskFull when nothing can be made there.
    """
    began = time.perf_counter()
    identity = run_identity(config)
    root = Path(config.output_dir)
    name = config.run_name or name
    new_directories = [path for path in (root, *root.parents) if not path.exists()]
    directory = (
        _named_run(config, root / name, identity)
        if name
        else _newest_unfinished_run(config, root, identity) or _new_run(config, root)
    )
    old = read_identity(directory) or {}
    identity = _as_compared(config, identity, old)
    has_ended = read_json(directory / RESULT) is not None
    replaces = config.resume == "force" and bool(old) and old != identity
    run_dir = RunDirectory(
        directory, identity, finished=has_ended and not replaces, new_directories=new_directories, replaces=replaces
    )
    if directory.exists() and not run_dir.finished:
        _check_inside(directory)
        run_dir.lock()
        try:
            _restore_run(run_dir, None if config.resume == "force" else identity, has_ended)
        except BaseException:
            run_dir.unlock()
            raise
    run_dir.seconds = time.perf_counter() - began
    return run_dir


def as_before_rendering(config: TrainConfig) -> TrainConfig:
    """The settings by which the rows of an older run are written as they were."""
    then = {"prompt_format": ("auto", "text"), "multi_turn": ("auto", "split")}
    state = {name: old for name, (now, old) in then.items() if getattr(config, name) == now}
    state["on_long_row"] = config.on_long_row  # whatever it cut then
    return config.with_(**state, sources={**config.sources, **dict.fromkeys(state, "the run, which is older")})


def unknown_run_directory() -> RunDirectory:
    """The place of a run on a process that is not the first: it will hear where that is."""
    return RunDirectory(Path(), {})


def _restore_run(run_dir: RunDirectory, identity: dict | None, has_ended: bool) -> None:
    """Find the checkpoint that the run goes on from, and clear away what a killed process left half done.

    Raises NoCheckpoint.

    The last checkpoint of a run that has ended was written before its last evaluation, which is made again.
    """
    checkpoints = Checkpoints(run_dir.directory / "checkpoints")
    run_dir.restored, run_dir.rejected = checkpoints.newest_good(identity)
    if run_dir.rejected and run_dir.restored is None:
        raise NoCheckpoint(
            "no checkpoint of this run is usable:\n"
            + "\n".join(f"  {path}: {reason}" for path, reason in run_dir.rejected),
            cure=f"nothing was changed; another --run_name starts a new run, {run_dir.directory} stays as it is",
        )
    if has_ended and run_dir.restored is None:
        raise NoCheckpoint(
            f"{run_dir.directory} is a finished run, and there is no checkpoint of it left to go on from",
            cure="nothing was changed; another --run_name starts a new run",
        )
    if run_dir.restored and (has_ended or list(run_dir.directory.glob(f"result-{run_dir.restored.step:06d}*.json"))):
        run_dir.restored.state["pending_evaluation"] = True
    if run_dir.restored and run_dir.replaces:
        run_dir.restored.state["after"] = None  # it may have been of other rows
    for swept in (run_dir.directory, checkpoints.directory):
        remove_leftovers(swept, checkpoints.disk)


def _check_inside(directory: Path) -> None:
    """Raises UsageError when what a run writes would be written elsewhere, through a link."""
    for path in [*directory.glob("*"), *directory.glob("checkpoints/*"), *directory.glob("checkpoints/*/*")]:
        if path.is_symlink():
            raise UsageError(
                "a link, where a run writes", where=str(path), cure="another --run_name, or remove the link"
            )


def _named_run(config: TrainConfig, directory: Path, identity: dict) -> Path:
    root, where = Path(config.output_dir), config.sources.get("run_name", "")
    if directory.resolve().parent != root.resolve():
        raise UsageError(f"{directory} leads out of {root}", where=where, cure="another --run_name, or remove the link")
    old = read_identity(directory)
    if old is not None:
        identity = _as_compared(config, identity, old)
    if config.resume == "never" and (old is not None or Checkpoints(directory / "checkpoints").steps()):
        raise UsageError(
            f"{directory} already holds a run", where=where, cure="another --run_name, or leave out --resume never"
        )
    if (
        config.init_adapter
        and config.resume == "force"
        and old is not None
        and old.get("init_adapter") != identity["init_adapter"]
    ):
        raise UsageError(
            f"{directory} did not start from {config.init_adapter}, and --resume force goes on from its own state",
            where=config.sources.get("init_adapter", ""),
            cure="another --run_name, or leave out init_adapter",
        )
    if old is not None and old != identity and config.resume != "force":
        changed = [
            f"  {key}: {old.get(key)!r} there, {identity.get(key)!r} now"
            for key in sorted({*old, *identity})
            if old.get(key) != identity.get(key)
        ]
        raise UsageError(
            f"{directory} holds another run:\n" + "\n".join(changed),
            where=where,
            cure="another --run_name, or --resume force to go on from its state with these settings",
        )
    return directory


def _newest_unfinished_run(config: TrainConfig, root: Path, identity: dict) -> Path | None:
    if config.resume == "never" or not root.is_dir():
        return None
    runs = [path for path in root.iterdir() if (path / IDENTITY).exists() and read_json(path / RESULT) is None]
    same = [
        path
        for path in runs
        if path.resolve().parent == root.resolve() and _is_same_identity(config, identity, read_identity(path))
    ]
    return max(same, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)


def _is_same_identity(config: TrainConfig, identity: dict, old: dict | None) -> bool:
    return old is not None and old == _as_compared(config, identity, old)


def _as_compared(config: TrainConfig, identity: dict, old: dict) -> dict:
    """`identity` with the global batch of `old`, where only the machine can tell how many processes there will be: the
    plan will know, and `Place.check` compares then. And without what a run had no choice of when it began.
    """
    if old and RENDERING not in old:
        identity = {name: value for name, value in identity.items() if name != RENDERING}
    there, here = old.get("global_batch"), identity["global_batch"]
    is_open = config.world_size == -1 and may_have_several_gpus() and isinstance(there, int) and there % here == 0
    return {**identity, "global_batch": there} if is_open else identity


def may_have_several_gpus() -> bool:
    """Whether this machine may start a process for each of several GPUs: a look at Linux's device files, since torch
    takes seconds.
    """
    return any(len(list(Path("/dev").glob(pattern))) > 1 for pattern in ("nvidia[0-9]*", "dri/renderD*"))


def _new_run(config: TrainConfig, root: Path) -> Path:
    model = re.sub(r"[^\w.-]+", "-", Path(config.model_name).name).strip(".-") or "model"
    base = root / f"{datetime.now():%Y%m%d-%H%M%S}-{model}"
    names = itertools.chain([base.name], (f"{base.name}-{again}" for again in itertools.count(1)))
    try:
        root.mkdir(parents=True, exist_ok=True)
        return next(path for path in map(root.joinpath, names) if _make_directory(path))
    except OSError as error:
        raise unwritable(base, error) from None


def _make_directory(directory: Path) -> bool:
    """Make a directory that was not there; false for one that was, such as that of another run which began in the same
    second.
    """
    try:
        directory.mkdir()
    except FileExistsError:
        return False
    return True


def unwritable(directory: Path, error: OSError) -> DiskFull:
    return DiskFull(f"cannot be written: {error.strerror or error}", where=str(directory), cure="another --output_dir")


# ------------------------------------------------------------------------------------------------------- the identity


def run_identity(config: TrainConfig) -> dict:
    """What must be equal for a run to be continued, JSON-able: settings, and hashes of rows, base and tokenizer."""
    directory = base_directory(config)
    tokenizer_files = {path for pattern in TOKENIZER_FILES for path in directory.glob(pattern) if path.is_file()}
    identity = {
        **{name: getattr(config, name) for name in settings_with("on_resume", "identity")},
        "global_batch": global_batch(config),
        "rows": rows_identity(config.dataset, config, held_out=False),
        "held_out": rows_identity(config.eval_dataset, config, held_out=True) if config.eval_dataset else "",
        "base": hashing.hash_named([*directory.glob("*.safetensors"), directory / "config.json"]),
        "tokenizer": hashing.hash_named(tokenizer_files),
        RENDERING: 2,
    }
    chat_template.template_variables(config)
    if template := chat_template.requested_template(config):
        identity["chat_template"] = hashing.hash_text(template)
    identity |= {
        name: getattr(config, name)
        for name in settings_with("on_resume", "stated")
        if getattr(config, name) != SETTINGS[name].default
    }
    if config.init_adapter:
        identity["init_adapter"] = hashing.hash_files([init_adapter.init_adapter_directory(config) / ADAPTER])[0]
    return json.loads(to_json(identity))


def rows_identity(spec: str, config: TrainConfig, *, held_out: bool) -> str:
    """sha256 over the content and the weight of every source file, in order; where they lie does not matter."""
    parts = []
    for name, weight in sources.weighted(spec):
        is_default = not held_out and config.dataset_is_default
        files = sources.files(name, held_out=held_out, offline=config.offline, is_default=is_default)
        parts += [repr(weight), *(hashing.hash_files(files) if files else [name])]
        if meaning := sources.meaning(name):
            parts.append(meaning)
    return hashing.hash_text(*parts)


def read_identity(directory: Path) -> dict | None:
    """The identity of the run in `directory`, by the names that settings have now; None where there is none."""
    stored = read_json(directory / IDENTITY)
    return stored and current_names(stored)


def read_json(path: Path) -> dict | None:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
