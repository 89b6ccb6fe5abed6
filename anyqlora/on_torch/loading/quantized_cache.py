"""Quantized weights, kept for the next start: directories as `python -m anyqlora quantize` writes them, one for each
base and way of packing it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from anyqlora import __version__
from anyqlora.config.schema import TrainConfig
from anyqlora.core import hashing
from anyqlora.core.errors import DiskFull, NotSupported
from anyqlora.core.files import MANIFEST, REMOVED, STAGED, FileSystem, sealed_manifest
from anyqlora.core.registry import QUANTIZERS
from anyqlora.core.terminal import format_bytes
from anyqlora.models.hub import weight_files
from anyqlora.on_torch.loading import writer
from anyqlora.runs.provenance import processor, versions

FORMAT = 1  # raised when the same settings come to give other bytes
READING = 600  # seconds after its last use for which an entry may still be read
DAY = 24 * 3600  # after which what is not finished was left by a process that was killed
ENTRY = re.compile(rf".+-({'|'.join(name for name, row in QUANTIZERS.items() if row.writes_files)})-[0-9a-f]{{16}}")
UNFINISHED = re.compile(rf"{ENTRY.pattern}\.[0-9a-f]{{8}}({re.escape(STAGED)}|{re.escape(REMOVED)})?")


@dataclass
class QuantizedCache:
    """The kept weights of the base in `source`, packed on `device` as `config` says.

    What is read of them is copied, not left mapped: pages of a file are in nobody's account of memory, and whoever
    removes an entry must not pull the weights from under a run. `news` is what is worth a line afterwards, `notes` is
    what went wrong.
    """

    config: TrainConfig
    source: Path
    device: torch.device
    news: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    disk: FileSystem = field(default_factory=FileSystem)

    @cached_property
    def made_of(self) -> dict:
        """All that the bytes of an entry depend on."""
        files = [*(self.source / name for name in weight_files(self.source)), *writer.copied_files(self.source)]
        is_host = self.device.type in ("cpu", "mps")
        return {
            "format": FORMAT,
            "files": hashing.hash_named(files),
            **{name: getattr(self.config, name) for name in ("quantizer", "double_quant", "affine_group_size")},
            "device": processor() if is_host else getattr(torch, self.device.type).get_device_name(self.device),
            "threads": torch.get_num_threads(),  # each adds up a part of the scales, whose mean is taken
            "version": __version__,
            **versions(),
        }

    @cached_property
    def path(self) -> Path:
        asked, key = self.config.quantized_cache, hashing.hash_text(json.dumps(self.made_of, sort_keys=True))
        root = Path(os.path.expanduser(asked)) if isinstance(asked, str) else hashing.memo_file().with_name("quantized")
        name = re.sub(r"[^\w.-]+", "-", Path(self.config.model_name).name) or "model"
        return root / f"{name}-{self.config.quantizer}-{key[:16]}"

    @property
    def limit(self) -> int:
        """Bytes."""
        return round(self.config.quantized_cache_limit * (1 << 30))

    def entry(self) -> Path | None:
        """The directory of the packed weights, written first where there is none; None where it cannot be had, and why
        is noted.

        Raises NotBuilt where somebody has asked for it, of a model that cannot be written so.
        """
        try:
            if self.path.exists() and (wrong := self.damage()):
                self.notes.append(f"the quantized weights in {self.path} are made again: {wrong}")
                self.remove(self.path)
            is_hit = self.path.exists()
            if not is_hit:
                self.make()
                if wrong := self.damage():
                    raise DiskFull(wrong)
        except NotSupported:
            if self.config.asked("quantized_cache"):
                raise
            return None
        except (DiskFull, OSError) as error:
            self.notes.append(
                f"quantized weights are not kept in {self.path.parent}: {getattr(error, 'message', error)}"
            )
            return None
        with contextlib.suppress(OSError):  # somebody else's cache, which this process may only read
            os.utime(self.path)
            self.prune()
        self.news.append(
            f"quantized weights {'come from' if is_hit else 'are kept in'} {self.path} "
            f"({format_bytes(size_of(self.path))})"
        )
        return self.path

    def make(self) -> None:
        """Write the entry and its manifest beside its place and put it there. Raises NotBuilt, DiskFull, OSError."""
        quantizer = writer.packed_config(self.config, self.device)
        needed = writer.size(self.source, quantizer)
        if needed > self.limit:
            raise DiskFull(f"they take {format_bytes(needed)}, and quantized_cache_limit is {format_bytes(self.limit)}")
        self.disk.make_directory(self.path.parent)
        free = shutil.disk_usage(self.path.parent).free
        if 2 * needed > free:  # the run has things to write, too
            raise DiskFull(
                f"they take {format_bytes(needed)}, more than half of the {format_bytes(free)} that are free"
            )
        staged = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        try:
            writer.write_model(self.source, staged, quantizer, device=self.device, disk=self.disk)
            files = {path.name: hashing.hash_file(path) for path in sorted(staged.iterdir())}
            self.disk.write(staged / MANIFEST, sealed_manifest({"made_of": self.made_of, "files": files}))
            self.disk.sync_directory(staged)
            try:
                self.disk.rename(staged, self.path)
            except OSError:
                if not self.path.exists():  # else another process was faster
                    raise
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def damage(self) -> str:
        """Why the entry is not what was written of this base; "" where it is.

        Contents are read once, and again after a file has changed.
        """
        try:
            content = (self.path / MANIFEST).read_bytes()
            manifest = json.loads(content)
            if sealed_manifest({key: value for key, value in manifest.items() if key != "self"}) != content:
                return f"{MANIFEST}: its own hash is not the one that was written"
            if manifest["made_of"] != self.made_of:
                return f"{MANIFEST}: of other weights"
            paths = sorted(path for path in self.path.iterdir() if path.name != MANIFEST)
            other = {path.name for path in paths} ^ manifest["files"].keys()
            if other:
                return f"{min(other)}: missing, or not of it"
            changed = [
                path.name
                for path, digest in zip(paths, hashing.hash_files(paths), strict=True)
                if digest != manifest["files"][path.name]
            ]
            return f"{changed[0]}: its sha256 is not the one that was written" if changed else ""
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return f"{MANIFEST}: {error}"

    def prune(self) -> None:
        """Remove the entries that were not used for longest until the others are within the limit, and what killed
        processes left.
        """
        now, total = time.time(), 0
        idle = {path: now - path.stat().st_mtime for path in self.path.parent.iterdir()}  # seconds
        for path in sorted(idle, key=idle.get):
            if UNFINISHED.fullmatch(path.name) and idle[path] > DAY:
                self.disk.remove(path)
            elif ENTRY.fullmatch(path.name):
                total += size_of(path)
                if total > self.limit and idle[path] > READING:
                    self.remove(path)
                    self.news.append(
                        f"the quantized weights in {path}, not used for longest, are removed: quantized_cache_limit is "
                        f"{format_bytes(self.limit)}"
                    )

    def remove(self, path: Path) -> None:
        """One rename makes it absent: a kill while its files go leaves no entry with a part of them."""
        gone = path.with_name(f"{path.name}.{secrets.token_hex(4)}{REMOVED}")
        self.disk.rename(path, gone)
        self.disk.remove(gone)


def size_of(directory: Path) -> int:
    """Bytes of the files in it."""
    return sum(path.stat().st_size for path in directory.iterdir())
