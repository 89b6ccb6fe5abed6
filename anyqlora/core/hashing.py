"""sha256 of files; large ones' are remembered by path, size, times and inode, so that gigabytes are not read again at
each start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LARGE = 1 << 19  # bytes; what is smaller is read in less time than it is looked up
REMEMBERED = 4096  # files; the oldest are forgotten


def cache_directory() -> Path:
    """What may be thrown away at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anyqlora"


def memo_file() -> Path:
    return cache_directory() / "hashes.json"


def hash_files(paths: Iterable[Path]) -> list[str]:
    """The sha256 of each file, in order."""
    paths = [Path(path).resolve() for path in paths]
    stamps = {path: stamp for path in paths if (stamp := _file_stamp(path))[0] >= LARGE}
    known = _read_memo() if stamps else {}
    known_stamps = {path: known.get(str(path), [None])[0] for path in stamps}
    fresh = [path for path in dict.fromkeys(paths) if path not in stamps or known_stamps[path] != stamps[path]]
    with ThreadPoolExecutor(2) as threads:  # hashing leaves the interpreter free
        digests = dict(zip(fresh, threads.map(hash_file, fresh), strict=True))
    if made := {str(path): [stamps[path], digest] for path, digest in digests.items() if path in stamps}:
        known = {path: entry for path, entry in known.items() if path not in made} | made
        _write_memo(known)
    return [digests[path] if path in digests else known[str(path)][1] for path in paths]


def hash_named(paths: Iterable[Path]) -> str:
    """One hash over the names and the contents of files."""
    paths = sorted(paths)
    return hash_text(
        *(part for path, digest in zip(paths, hash_files(paths), strict=True) for part in (path.name, digest))
    )


def hash_text(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def hash_file(path: Path) -> str:
    """The sha256 of what is in a file now."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_stamp(path: Path) -> list[int]:
    stat = path.stat()
    # The change time is the kernel's own: a file that was rewritten and given its old date back is still seen.
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _read_memo() -> dict:
    try:
        known = json.loads(memo_file().read_text(encoding="utf-8"))
        return {k: v for k, v in known.items() if isinstance(v, list) and len(v) == 2 and len(v[1]) == 64}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write_memo(known: dict) -> None:
    """Write it whole or not at all.

    Where the cache cannot be written, files are read again the next time: nothing else changes.
    """
    path = memo_file()
    staged = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        staged.write_text(json.dumps(dict(list(known.items())[-REMEMBERED:])), encoding="utf-8")
        os.replace(staged, path)
