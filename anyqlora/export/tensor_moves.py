"""Model directories between Hugging Face's form and mlx-lm's: every tensor bit for bit, its other name or place
remembered for the way back.

mlx-lm's model of an architecture says itself what it makes of Hugging Face's tensors (`sanitize`). What came of each is
found by its content: kept, renamed, stacked (experts), or left out as a copy (a tied head). Anything else is refused:
it could not be undone.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from anyqlora.core.errors import DiskFull, NotSupported, UsageError
from anyqlora.core.files import STAGED, FileSystem, to_json
from anyqlora.models.hub import INDEX, SINGLE, check_weights

RECORD = "conversion.json"  # in mlx-lm's directory: where each of Hugging Face's tensors is
COPIED = (
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
)
Array = object  # of the framework that `Tensors` works with


def tensor_moves(
    given: Mapping[str, Array],
    converted: Mapping[str, Array],
    digest: Callable[[Array], str],
    parts: Callable[[Array], list],
) -> dict[str, list]:
    """{name given: [name made, number in it or None]}, from what is bit for bit the same.

    Raises NotBuilt naming what is not.
    """
    digests = {name: digest(value) for name, value in given.items()}
    by_mark: dict[str, list[str]] = defaultdict(list)
    for name, mark in digests.items():
        by_mark[mark].append(name)
    moves: dict[str, list] = {}

    def place(name: str, number: int | None, mark: str) -> bool:
        same = [other for other in by_mark.get(mark, ()) if other not in moves]
        best = next((other for other in same if other == name), same[0] if same else None)
        if best is not None:
            moves[best] = [name, number]
        return best is not None

    changed = []
    for name in sorted(converted, key=lambda name: name not in digests):  # what has kept its name first
        if place(name, None, digest(converted[name])):
            continue
        pieces = parts(converted[name])
        if not (len(pieces) > 1 and all(place(name, number, digest(piece)) for number, piece in enumerate(pieces))):
            changed.append(name)
    if changed:
        raise NotSupported(
            f"{len(changed)} tensors of mlx-lm's model are none of the checkpoint's, {changed[0]} is the first: it "
            f"computes with others, "
            "which could not be undone",
            cure="use the directory as it is: --model_name takes it on MLX too",
        )
    for name in given.keys() - moves.keys():
        twin = next((other for other in by_mark[digests[name]] if other in moves), None)
        if twin is None:
            raise NotSupported(
                f"mlx-lm's model leaves out {name}, which could not be brought back", cure="use the directory as it is"
            )
        moves[name] = moves[twin]
    return dict(sorted(moves.items()))


def digest(content: bytes, dtype: str, shape: list[int]) -> str:
    return hashlib.sha256(repr((dtype, shape)).encode() + content).hexdigest()


def write_record(
    out: Path,
    source: Path,
    config: dict,
    shards: Callable[[Path], Mapping[str, str]],
    extra: Mapping[str, bytes],
    disk: FileSystem | None = None,
) -> None:
    """The directory `out`, complete or absent: `shards(directory)` writes weight files there and returns {tensor:
    file}.
    """
    disk, staged = disk or FileSystem(), out.with_name(out.name + STAGED)
    if out.exists():
        raise UsageError("it is there already", where=str(out), cure="another --out")
    try:
        shutil.rmtree(staged, ignore_errors=True)
        disk.make_directory(staged)
        index = shards(staged)
        for file in sorted(set(index.values())):
            disk.sync(staged / file)
        if set(index.values()) != {SINGLE}:
            disk.write(staged / INDEX, to_json({"metadata": {}, "weight_map": dict(index)}))
        for path in sorted({path for pattern in COPIED for path in source.glob(pattern) if path.is_file()}):
            disk.write(staged / path.name, path.read_bytes())
        disk.write(staged / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        for name, content in extra.items():
            disk.write(staged / name, content)
        disk.sync_directory(staged)
        disk.rename(staged, out)
        disk.sync_directory(out.parent)
    except OSError as error:
        raise DiskFull(
            f"cannot be written: {error.strerror or error}", where=str(out), cure="room there, or another --out"
        ) from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def read_record(directory: Path) -> dict | None:
    """What was remembered when mlx-lm's directory was written; None where it was written by another tool."""
    path = directory / RECORD
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError as error:
        raise UsageError(f"cannot be read: {error}", where=str(path), cure="convert the original again") from None


def check_record(source: Path) -> None:
    if not (source / "config.json").is_file():
        raise UsageError(
            "it has no config.json: not a model directory",
            where=str(source),
            cure="a directory with config.json and weights",
        )
    check_weights(source)
