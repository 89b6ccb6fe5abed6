"""Tokens of large files, kept for the next start: Arrow files that every process of a machine maps.

An entry is made of all that its bytes depend on. It is written beside its place and put there whole; who wants one that
another process is writing waits for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from anyqlora.config.schema import AUTO, TrainConfig
from anyqlora.core import hashing
from anyqlora.core.files import MANIFEST, REMOVED, STAGED, FileSystem, sealed_manifest
from anyqlora.core.terminal import format_bytes
from anyqlora.data.readers.sources import Source
from anyqlora.data.row_reader import TokenizedChunk
from anyqlora.data.rows import TokenTable, schema
from anyqlora.data.workers import LARGE

try:
    import fcntl
except ImportError:  # Windows, where two processes may write the same entry: the first one's is kept
    fcntl = None  # type: ignore[assignment]

FORMAT = 1  # raised when the same rows and settings come to give other tokens
ROWS = "rows.arrow"
READING = 600  # seconds after its last use for which an entry may still be read
DAY = 24 * 3600  # after which what is not finished was left by a process that was killed
ENTRY = re.compile(r"[0-9a-f]{32}")
SETTINGS = (  # on which tokens depend
    *("context_length", "dataset_format", "prompt_format", "chat_template_kwargs", "multi_turn", "on_long_row"),
    *("columns", "preference_data", "ignore_columns"),
)
LIBRARIES = ("transformers", "tokenizers", "jinja2", "numpy")


Progress = Callable[[str], Callable[[int | None], None]]  # (name of a file) -> what is told of rows that are done


def no_progress(name: str) -> Callable[[int | None], None]:
    """Nobody is told."""
    return lambda rows: None


@dataclass
class TokenCache:
    """The kept tokens of files under one tokenizer and the settings of one run.

    `news` is what is worth a line, `notes` is what went wrong.
    """

    config: TrainConfig
    tokenizer: Any
    shows: Progress = no_progress
    news: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    disk: FileSystem = field(default_factory=FileSystem)

    @cached_property
    def root(self) -> Path:
        """Where the entries lie."""
        stated = self.config.token_cache
        is_place = isinstance(stated, str) and stated != AUTO
        return Path(os.path.expanduser(str(stated))) if is_place else hashing.cache_directory() / "tokens"

    def progress(self, source: Source) -> Callable[[int | None], None]:
        """What is told of the rows of a file as they are done."""
        return self.shows(source.name)

    def keeps(self, path: Path | None) -> bool:
        """Whether the tokens of this file are kept."""
        stated = self.config.token_cache
        if path is None or stated is False:
            return False
        return stated != AUTO or path.stat().st_size >= LARGE

    @cached_property
    def _of_tokenizer(self) -> str:
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
        special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
        return hashing.hash_text(
            type(tokenizer).__name__, content, special, json.dumps(tokenizer.chat_template, sort_keys=True)
        )

    def made_of(self, source: Source, *, texts: bool) -> dict:
        """All that the tokens of a file depend on, JSON-able."""
        assert source.path, "only files are kept"
        return {
            "format": FORMAT,
            "file": hashing.hash_files([source.path])[0],
            "kind": source.path.suffixes[-2:],
            "most": source.most,
            "entry": source.indexed.entry if source.indexed else None,
            "tokenizer": self._of_tokenizer,
            "texts": texts,
            **{name: getattr(self.config, name) for name in SETTINGS},
            **{name: version(name) for name in LIBRARIES},
        }

    def entry(self, source: Source, *, texts: bool) -> Entry:
        """The place of the tokens of a file."""
        made_of = self.made_of(source, texts=texts)
        key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]
        return Entry(self, self.root / key, made_of)

    def prune(self) -> None:
        """Remove the entries that were not used for longest until the others are within the limit, and what killed
        processes left.
        """
        limit, now, total = self.config.token_cache_limit * (1 << 30), time.time(), 0
        idle = {path: now - path.stat().st_mtime for path in self.root.iterdir()}
        for path in sorted(idle, key=lambda path: idle[path]):
            if not ENTRY.fullmatch(path.name):
                if idle[path] > DAY:
                    self.disk.remove(path)
                continue
            total += _size(path)
            if total > limit and idle[path] > READING:
                gone = path.with_name(f"{path.name}.{secrets.token_hex(4)}{REMOVED}")
                self.disk.rename(path, gone)
                self.disk.remove(gone)


@dataclass
class Entry:
    """The kept tokens of one file."""

    cache: TokenCache
    path: Path
    made_of: dict

    def read(self, name: str, *, is_locked: bool = False) -> tuple[TokenTable, dict] | None:
        """(the tokens, what was written of the file beside them); None where they are not there or are damaged.

        What is damaged goes, and is noted, by the one who has the lock and will make it anew.
        """
        import pyarrow as pa

        try:
            content = (self.path / MANIFEST).read_bytes()
            manifest = json.loads(content)
            if sealed_manifest({key: value for key, value in manifest.items() if key != "self"}) != content:
                raise ValueError(f"{MANIFEST}: its own hash is not the one that was written")
            if manifest["made_of"] != self.made_of:
                raise ValueError(f"{MANIFEST}: of other rows")
            if hashing.hash_files([self.path / ROWS])[0] != manifest["sha256"]:
                raise ValueError(f"{ROWS}: its sha256 is not the one that was written")
            table = TokenTable.of_file(name, self.path / ROWS)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            if not is_locked:
                return None
            reason = str(error) if str(error).startswith((MANIFEST, ROWS)) else f"{MANIFEST}: {error}"
            self.cache.notes.append(f"the tokens in {self.path} are made again: {reason}")
            with contextlib.suppress(OSError):
                shutil.rmtree(self.path)
            return None
        with contextlib.suppress(OSError):  # somebody else's cache, which this process may only read
            os.utime(self.path)
        return table, manifest["summary"]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time, of those that want this entry."""
        if fcntl is None:
            yield
            return
        self.cache.disk.make_directory(self.path.parent)
        with open(self.path.with_name(f"{self.path.name}.lock"), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def write(self, chunks: Iterator[TokenizedChunk]) -> Staged:
        """Write all chunks beside the place. Raises OSError, and takes back what was written."""
        import pyarrow as pa

        staged = Staged(self, self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}{STAGED}"))
        try:
            self.cache.disk.make_directory(staged.path)
            with open(staged.path / ROWS, "wb") as file, pa.ipc.new_file(file, schema()) as writer:
                for chunk in chunks:
                    if chunk.batch.num_rows:
                        writer.write_batch(chunk.batch)
            self.cache.disk.sync(staged.path / ROWS)
        except BaseException as error:
            staged.take_back()
            if isinstance(error, pa.ArrowException):
                raise OSError(str(error)) from None
            raise
        return staged


@dataclass
class Staged:
    """Tokens that are written and not yet in their place."""

    entry: Entry
    path: Path

    def keep(self, summary: dict) -> None:
        """Put them in their place, with what was found in the file. Raises OSError."""
        disk, limit = self.entry.cache.disk, self.entry.cache.config.token_cache_limit * (1 << 30)
        try:
            if _size(self.path) > limit:
                took = f"they take {format_bytes(_size(self.path))}"
                raise OSError(0, f"{took}, and token_cache_limit is {format_bytes(round(limit))}")
            digest = hashing.hash_files([self.path / ROWS])[0]
            manifest = {"made_of": self.entry.made_of, "sha256": digest, "summary": summary}
            disk.write(self.path / MANIFEST, sealed_manifest(manifest))
            disk.sync_directory(self.path)
            disk.rename(self.path, self.entry.path)
        except OSError:
            self.take_back()
            if not self.entry.path.exists():  # else another process was faster
                raise
        size = format_bytes(_size(self.entry.path))
        self.entry.cache.news.append(f"tokens are kept in {self.entry.path} ({size})")

    def take_back(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _size(directory: Path) -> int:
    """Bytes of the files in it."""
    return sum(path.stat().st_size for path in directory.iterdir())
