"""The one writer and the one reader of checkpoints: a checkpoint is complete or absent.

    checkpoints/step-000120/   adapter_model.safetensors  adapter_config.json  optimizer.safetensors  state.json
                               manifest.json

A directory is staged beside its place, every file is written and synced, the manifest (size and sha256 of each file)
goes last, then one rename makes it visible. The reader goes from the newest to the oldest, verifies, and says what it
rejected and why.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import load as tensors_from_bytes

from anyqlora.config.schema import current_names
from anyqlora.core.errors import UsageError
from anyqlora.core.files import (
    FORMAT,
    MANIFEST,
    REMOVED,
    FileSystem,
    sealed_manifest,
    tensors_to_bytes,
    to_json,
    write_directory,
)
from anyqlora.core.registry import ADAPTER, ADAPTER_CONFIG

ADAPTER_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # of numpy's, bfloat16's bits
SHOWN = 50  # tensors that a message names
MOMENTS, STATE = "optimizer.safetensors", "state.json"


def read_adapter(path: Path) -> dict[str, np.ndarray]:
    """What is in an adapter's file, in whatever type, as {name: float32 array}.

    Raises UsageError for what is damaged or not finite.
    """
    try:
        tensors = dict(deserialize(path.read_bytes()))
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"not a safetensors file: {error}", where=str(path), cure="the adapter once more from where it came"
        ) from None
    return {name: _array(name, entry, str(path)) for name, entry in tensors.items()}


def _array(name: str, entry: dict, where: str) -> np.ndarray:
    if entry["dtype"] not in ADAPTER_TYPES:
        raise UsageError(
            f"{name} is of type {entry['dtype']}", where=where, cure=f"an adapter in {', '.join(ADAPTER_TYPES)}"
        )
    array = np.frombuffer(entry["data"], ADAPTER_TYPES[entry["dtype"]])
    array = (array.astype(np.uint32) << 16).view(np.float32) if entry["dtype"] == "BF16" else array.astype(np.float32)
    if not np.isfinite(array).all():
        raise UsageError(
            f"{name} has numbers that are not finite", where=where, cure="an adapter of a run that went well"
        )
    return array.reshape(entry["shape"])


def check_shapes(tensors: Mapping[str, np.ndarray], here: Mapping[str, tuple], where: str) -> None:
    """Raises UsageError naming tensors, of what was learned at `where`, that are not of the run's names and shapes,
    `here`.
    """
    there = {name: tuple(array.shape) for name, array in tensors.items()}
    other = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
    if other:
        shown = [f"  {name} is {there.get(name, 'not')} there, {here.get(name, 'not')} here" for name in other[:SHOWN]]
        raise UsageError(
            "\n".join([f"its tensors are not those of this run: {len(other)} differ", *shown]),
            where=where,
            cure="the base, quantizer, adapter, rank and targets that it was written with",
        )


@dataclass
class LoadedCheckpoint:
    """A verified checkpoint. adapter, moments: {name: array}; state, machine: what `save` was given."""

    step: int
    path: Path
    adapter: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    state: dict
    machine: dict


class InvalidCheckpoint(Exception):
    """Why one checkpoint is not used."""


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, directory: Path, disk: FileSystem | None = None):
        self.directory, self.disk = directory, disk or FileSystem()

    def steps(self) -> list[int]:
        """Steps that have a complete-looking directory, ascending."""
        matches = (re.fullmatch(r"step-(\d+)", p.name) for p in self.directory.glob("step-*"))
        return sorted(int(m.group(1)) for m in matches if m)

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def save(
        self,
        step: int,
        adapter: dict[str, np.ndarray],
        moments: dict[str, np.ndarray],
        *,
        adapter_config: dict,
        state: dict,
        identity: dict,
        machine: dict,
    ) -> Path:
        """Write the checkpoint of `step` finished optimizer steps.

        Raises OSError and leaves every older one as it was.
        """
        files = {
            ADAPTER: tensors_to_bytes(adapter, {"format": "pt"}),
            ADAPTER_CONFIG: to_json(adapter_config),
            MOMENTS: tensors_to_bytes(moments),
            STATE: to_json({**state, "step": step}),
        }
        write_directory(
            self.path(step), files, self.disk, manifest={"step": step, "identity": identity, "machine": machine}
        )
        return self.path(step)

    def newest_good(self, identity: dict | None) -> tuple[LoadedCheckpoint | None, list[tuple[str, str]]]:
        """The newest checkpoint that verifies and is of this run (None: of any), and what was rejected before it was
        found.
        """
        rejected = []
        for step in reversed(self.steps()):
            try:
                return self.read(step, identity), rejected
            except InvalidCheckpoint as reason:
                rejected.append((str(self.path(step)), str(reason)))
        return None, rejected

    def read(self, step: int, identity: dict | None = None) -> LoadedCheckpoint:
        """Raises Rejected naming the file and what is wrong with it."""
        path = self.path(step)
        manifest = self._manifest(path, step, identity)
        content = {}
        for name, entry in manifest["files"].items():
            try:
                content[name] = (path / name).read_bytes()
            except OSError as error:
                raise InvalidCheckpoint(f"{name}: {error.strerror or error}") from None
            if len(content[name]) != entry["size"]:
                raise InvalidCheckpoint(f"{name}: {len(content[name])} bytes, {entry['size']} were written")
            if hashlib.sha256(content[name]).hexdigest() != entry["sha256"]:
                raise InvalidCheckpoint(f"{name}: its sha256 is not the one that was written")
        try:
            return LoadedCheckpoint(
                step,
                path,
                tensors_from_bytes(content[ADAPTER]),
                tensors_from_bytes(content[MOMENTS]),
                json.loads(content[STATE]),
                manifest["machine"],
            )
        except (SafetensorError, ValueError, KeyError, RecursionError) as error:
            raise InvalidCheckpoint(f"its files are not what they are called: {error}") from None

    def _manifest(self, path: Path, step: int, identity: dict | None) -> dict:
        try:
            content = (path / MANIFEST).read_bytes()
            manifest = json.loads(content)
            if manifest["format"] != FORMAT:
                raise InvalidCheckpoint(f"{MANIFEST}: format {manifest['format']}, this version reads {FORMAT}")
            if sealed_manifest({key: value for key, value in manifest.items() if key != "self"}) != content:
                raise InvalidCheckpoint(f"{MANIFEST}: its own hash is not the one that was written")
            if manifest["step"] != step or set(manifest["files"]) != {ADAPTER, ADAPTER_CONFIG, MOMENTS, STATE}:
                raise InvalidCheckpoint(f"{MANIFEST}: describes step {manifest['step']}")
            manifest |= {key: current_names(manifest[key]) for key in ("identity", "machine")}
            manifest["machine"].setdefault("dropout_masks", "process")  # the only ones before there was a choice
        except OSError as error:
            raise InvalidCheckpoint(f"{MANIFEST}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidCheckpoint(f"{MANIFEST}: not a manifest: {error}") from None
        if identity is not None and manifest["identity"] != identity:
            other = sorted(
                k for k in {*identity, *manifest["identity"]} if identity.get(k) != manifest["identity"].get(k)
            )
            raise InvalidCheckpoint(f"{MANIFEST}: of another run: {', '.join(other)} differ")
        return manifest

    def prune(self, newest: int, keep: int, best: int | None = None) -> None:
        """Of the checkpoints up to the step `newest`, remove all but the last `keep` and the step `best`.

        Later ones were rejected when the run was continued: they are not counted, and the run will write those steps
        again.
        """
        for step in [step for step in self.steps() if step <= newest][:-keep]:
            if step != best:
                # One rename makes it absent: a kill while its files go leaves no checkpoint with a part of them.
                gone = self.path(step).with_name(self.path(step).name + REMOVED)
                self.disk.rename(self.path(step), gone)
                self.disk.remove(gone)
