"""Rows that are sent to standard input."""

from __future__ import annotations

import hashlib
import os
import sys

from anyqlora.core.errors import UsageError
from anyqlora.core.hashing import cache_directory

STANDARD_INPUT = "-"
_BLOCK = 1 << 20


def from_standard_input(spec: str) -> str:
    """The specification with a file in the place of "-": what is read there, kept under its hash, so that the run can
    be continued. Raises UsageError where nothing comes.
    """
    parts = spec.split(",")
    if not any(part.partition("=")[0].strip() == STANDARD_INPUT for part in parts):
        return spec  # a file whose name begins so
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("nothing is sent to standard input", where="--dataset -", cure="cat rows.jsonl | ...")
    digest, directory = hashlib.sha256(), cache_directory() / "standard_input"
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f"{os.getpid()}.part"
    try:
        with open(part, "wb") as file:
            while block := sys.stdin.buffer.read(_BLOCK):
                digest.update(block)
                file.write(block)
        path = directory / f"{digest.hexdigest()[:16]}.jsonl"
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return ",".join(
        part.replace(STANDARD_INPUT, str(path), 1) if part.partition("=")[0].strip() == STANDARD_INPUT else part
        for part in parts
    )
