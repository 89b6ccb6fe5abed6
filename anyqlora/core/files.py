"""Files that are complete or absent: staged, synced, hashed and renamed; every call of the file system can be made to
fail.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


FULL_FLUSH = getattr(fcntl, "F_FULLFSYNC", None)  # macOS's: its fsync leaves what was written in the drive's own cache


FORMAT = 1


MANIFEST = "manifest.json"


STAGED, OLD, REMOVED = ".staged", ".old", ".removed"


PRETRAINED = f"pretrained{STAGED}"  # what transformers has written of a finished run, before it goes where it belongs


HALF_DONE = re.compile(
    r"(adapter|model|step-\d+)\.(staged|old)|step-\d+\.removed|pretrained\.staged"
    r"|((identity|plan|env|data_report|result)\.json|config\.resolved\.yaml)\.staged"
)  # names that a killed run leaves


Content = bytes | list  # of a file: bytes, or pieces of bytes that lie elsewhere, such as a model's own tensors


SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "float64": "F64",
}  # numpy's names -> the format's


class FileSystem:
    """Every file-system call that changes a run directory's checkpoints and results, so that a test can make each one
    of them fail.
    """

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, content: Content) -> None:
        with open(path, "wb") as file:
            file.writelines(chunks(content))
            file.flush()
            flush_to_disk(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def sync_directory(self, path: Path) -> None:
        self.sync(path)

    def sync(self, path: Path) -> None:
        """Bring to the disk what is in a file that a library wrote, or the names in a directory."""
        handle = os.open(path, os.O_RDONLY)
        try:
            flush_to_disk(handle)
        finally:
            os.close(handle)

    def remove(self, path: Path) -> None:
        """A file, or a directory with all that is in it."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def flush_to_disk(handle: int) -> None:
    """Bring what was written to the medium. Raises OSError."""
    if fcntl is not None and FULL_FLUSH is not None:
        with contextlib.suppress(OSError):  # a file system that cannot, such as a network's: fsync is what there is
            fcntl.fcntl(handle, FULL_FLUSH)
            return
    os.fsync(handle)


def chunks(content: Content) -> Iterable[bytes]:
    return [content] if isinstance(content, bytes) else content


def tensors_to_bytes(
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> list:
    """A safetensors file, as pieces: a header, then the tensors' own memory, which is not copied.

    The library's own `save` makes one block of all: of a whole model and its moments that is three times the model. The
    bytes are the same for tensors of one dtype (https://github.com/huggingface/safetensors#format). `dtypes` names the
    format's type of tensors whose bits numpy holds as another: it has no bf16.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, value in ordered:
        start, end = end, end + value.nbytes
        header[name] = {
            "dtype": (dtypes or {}).get(name) or SAFETENSORS[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [
        len(text).to_bytes(8, "little") + text,
        *(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data for _, value in ordered),
    ]


def pretrained_files(thing, directory: Path, disk: FileSystem, **options) -> dict[str, bytes]:
    """{name: content} of what `thing.save_pretrained` writes: into a stage in `directory`, since the system's place for
    temporary files may be memory. Raises OSError.
    """
    staged = directory / PRETRAINED
    try:
        disk.make_directory(staged)
        thing.save_pretrained(staged, **options)
        return {
            str(path.relative_to(staged)): path.read_bytes() for path in sorted(staged.rglob("*")) if path.is_file()
        }
    except Exception as error:
        raise as_os_error(error) from None
    finally:
        _remove_directory(staged, disk)


def as_os_error(error: Exception) -> Exception:
    """The OSError that `error` tells of.

    Rust's libraries give the system's number in words alone: safetensors in a SafetensorError, tokenizers in a bare
    Exception. Anything else stays what it is.
    """
    code = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(code[1]), os.strerror(int(code[1]))) if code and not isinstance(error, OSError) else error


def size_and_sha256(content: Content) -> dict:
    """What a manifest says of a file."""
    digest, size = hashlib.sha256(), 0
    for piece in chunks(content):
        digest.update(piece)
        size += len(piece)
    return {"size": size, "sha256": digest.hexdigest()}


def to_json(value: object) -> bytes:
    return (json.dumps(json_safe(value), indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def json_safe(value):
    """The same with every number that JSON does not have as text: "nan", "inf", "-inf"; never as 0."""
    if isinstance(value, Mapping):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def sealed_manifest(manifest: dict) -> bytes:
    """The manifest with its own hash in it, so that a flipped bit of the manifest is found too."""
    return to_json({**manifest, "self": hashlib.sha256(to_json(manifest)).hexdigest()})


def replace_file(path: Path, content: bytes, disk: FileSystem) -> None:
    """Write a file whole or not at all; one that has this content already is left alone."""
    if path.is_file() and path.read_bytes() == content:
        return
    staged = path.with_name(path.name + STAGED)
    try:
        disk.write(staged, content)
        disk.rename(staged, path)
    except OSError:
        _remove_directory(staged, disk)
        raise


def write_directory(
    path: Path, files: Mapping[str, Content], disk: FileSystem, *, manifest: dict | None = None
) -> None:
    """Write `files` as directory `path`, whole or not at all.

    With `manifest`, a manifest of sizes and hashes is added.
    """
    staged, old = path.with_name(path.name + STAGED), path.with_name(path.name + OLD)
    try:
        if staged.exists():
            disk.remove(staged)
        disk.make_directory(staged)
        for name, content in files.items():
            disk.write(staged / name, content)
        if manifest is not None:
            listed = {name: size_and_sha256(content) for name, content in files.items()}
            disk.write(staged / MANIFEST, sealed_manifest({"format": FORMAT, "files": listed, **manifest}))
        disk.sync_directory(staged)
        if path.exists():  # written again: the old one steps aside until the new one stands
            disk.rename(path, old)
        disk.rename(staged, path)
        disk.sync_directory(path.parent)
    except OSError:
        _remove_directory(staged, disk)
        if old.exists() and not path.exists():
            disk.rename(old, path)
        raise
    if old.exists():
        disk.remove(old)


def remove_leftovers(directory: Path, disk: FileSystem) -> list[str]:
    """Take away what a killed process left half done in `directory`, and nothing that somebody else has put there.

    Returns the names of what was there.
    """
    left = sorted(path for path in directory.glob("*") if HALF_DONE.fullmatch(path.name))
    for path in left:
        if path.suffix == OLD and not path.with_suffix("").exists():
            disk.rename(path, path.with_suffix(""))  # killed between the two renames
        else:
            disk.remove(path)
    return [path.name for path in left]


def _remove_directory(staged: Path, disk: FileSystem) -> None:
    """Take a stage away after a failure, as far as that goes: the next start sweeps what is left."""
    with contextlib.suppress(OSError):
        disk.remove(staged)
