"""The one writer and the one reader of checkpoints: a checkpoint is complete or absent.

    checkpoints/step-000120/   adapter_model.safetensors  adapter_config.json  optimizer.safetensors  state.json  manifest.json

A directory is staged beside its place, every file is written and synced, the manifest (size and sha256 of each file) goes last,
then one rename makes it visible. The reader goes from the newest to the oldest, verifies, and says what it rejected and why.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import load as tensors_from_bytes

from anyqlora.core.errors import UsageError
from anyqlora.core.registry import ADAPTER, ADAPTER_CONFIG

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FULL_FLUSH = getattr(fcntl, "F_FULLFSYNC", None)  # macOS's: its fsync leaves what was written in the drive's own cache
FORMAT = 1
ADAPTER_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # of numpy's, bfloat16's bits
SHOWN = 50  # tensors that a message names
MANIFEST = "manifest.json"
MOMENTS, STATE = "optimizer.safetensors", "state.json"
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


class Disk:
    """Every file-system call that changes a run directory's checkpoints and results, so that a test can make each one of them fail."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, content: Content) -> None:
        with open(path, "wb") as file:
            file.writelines(pieces(content))
            file.flush()
            to_disk(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def sync_directory(self, path: Path) -> None:
        self.sync(path)

    def sync(self, path: Path) -> None:
        """Bring to the disk what is in a file that a library wrote, or the names in a directory."""
        handle = os.open(path, os.O_RDONLY)
        try:
            to_disk(handle)
        finally:
            os.close(handle)

    def remove(self, path: Path) -> None:
        """A file, or a directory with all that is in it."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def to_disk(handle: int) -> None:
    """Bring what was written to the medium. Raises OSError."""
    if FULL_FLUSH is not None:
        with contextlib.suppress(OSError):  # a file system that cannot, such as a network's: fsync is what there is
            fcntl.fcntl(handle, FULL_FLUSH)
            return
    os.fsync(handle)


def pieces(content: Content) -> Iterable[bytes]:
    return [content] if isinstance(content, bytes) else content


def tensors_to_bytes(
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> list:
    """A safetensors file, as pieces: a header, then the tensors' own memory, which is not copied.

    The library's own `save` makes one block of all: of a whole model and its moments that is three times the model. The bytes are
    the same for tensors of one dtype (https://github.com/huggingface/safetensors#format). `dtypes` names the format's type of tensors
    whose bits numpy holds as another: it has no bf16.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header, end = {"__metadata__": dict(metadata)} if metadata else {}, 0
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


def read_adapter(path: Path) -> dict[str, np.ndarray]:
    """What is in an adapter's file, in whatever type, as {name: float32 array}. Raises UsageError for what is damaged or not finite."""
    try:
        tensors = dict(deserialize(path.read_bytes()))
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"not a safetensors file: {error}", where=str(path), cure="the adapter once more from where it came"
        ) from None
    return {name: _numbers(name, about, str(path)) for name, about in tensors.items()}


def _numbers(name: str, about: dict, where: str) -> np.ndarray:
    if about["dtype"] not in ADAPTER_TYPES:
        raise UsageError(
            f"{name} is of type {about['dtype']}", where=where, cure=f"an adapter in {', '.join(ADAPTER_TYPES)}"
        )
    array = np.frombuffer(about["data"], ADAPTER_TYPES[about["dtype"]])
    array = (array.astype(np.uint32) << 16).view(np.float32) if about["dtype"] == "BF16" else array.astype(np.float32)
    if not np.isfinite(array).all():
        raise UsageError(
            f"{name} has numbers that are not finite", where=where, cure="an adapter of a run that went well"
        )
    return array.reshape(about["shape"])


def check_shapes(tensors: Mapping[str, np.ndarray], here: Mapping[str, tuple], where: str) -> None:
    """Raises UsageError naming tensors, of what was learned at `where`, that are not of the run's names and shapes, `here`."""
    there = {name: tuple(array.shape) for name, array in tensors.items()}
    other = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
    if other:
        shown = [f"  {name} is {there.get(name, 'not')} there, {here.get(name, 'not')} here" for name in other[:SHOWN]]
        raise UsageError(
            "\n".join([f"its tensors are not those of this run: {len(other)} differ", *shown]),
            where=where,
            cure="the base, quantizer, adapter, rank and targets that it was written with",
        )


def saved_by(thing, directory: Path, disk: Disk, **options) -> dict[str, bytes]:
    """{name: content} of what `thing.save_pretrained` writes: into a stage in `directory`, since the system's place for temporary files may
    be memory. Raises OSError."""
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
        _clear(staged, disk)


def as_os_error(error: Exception) -> Exception:
    """The OSError that `error` tells of. Rust's libraries give the system's number in words alone: safetensors in a SafetensorError,
    tokenizers in a bare Exception. Anything else stays what it is."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found and not isinstance(error, OSError) else error


def size_and_hash(content: Content) -> dict:
    """What a manifest says of a file."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces(content):
        digest.update(piece)
        size += len(piece)
    return {"size": size, "sha256": digest.hexdigest()}


def to_json(value: object) -> bytes:
    return (json.dumps(finite(value), indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def finite(value):
    """The same with every number that JSON does not have as text: "nan", "inf", "-inf"; never as 0."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def sealed(manifest: dict) -> bytes:
    """The manifest with its own hash in it, so that a flipped bit of the manifest is found too."""
    return to_json({**manifest, "self": hashlib.sha256(to_json(manifest)).hexdigest()})


def replace(path: Path, content: bytes, disk: Disk) -> None:
    """Write a file whole or not at all; one that has this content already is left alone."""
    if path.is_file() and path.read_bytes() == content:
        return
    staged = path.with_name(path.name + STAGED)
    try:
        disk.write(staged, content)
        disk.rename(staged, path)
    except OSError:
        _clear(staged, disk)
        raise


def write_directory(path: Path, files: Mapping[str, Content], disk: Disk, *, manifest: dict | None = None) -> None:
    """Write `files` as directory `path`, whole or not at all. With `manifest`, a manifest of sizes and hashes is added."""
    staged, old = path.with_name(path.name + STAGED), path.with_name(path.name + OLD)
    try:
        if staged.exists():
            disk.remove(staged)
        disk.make_directory(staged)
        for name, content in files.items():
            disk.write(staged / name, content)
        if manifest is not None:
            listed = {name: size_and_hash(content) for name, content in files.items()}
            disk.write(staged / MANIFEST, sealed({"format": FORMAT, "files": listed, **manifest}))
        disk.sync_directory(staged)
        if path.exists():  # written again: the old one steps aside until the new one stands
            disk.rename(path, old)
        disk.rename(staged, path)
        disk.sync_directory(path.parent)
    except OSError:
        _clear(staged, disk)
        if old.exists() and not path.exists():
            disk.rename(old, path)
        raise
    if old.exists():
        disk.remove(old)


def sweep(directory: Path, disk: Disk) -> list[str]:
    """Take away what a killed process left half done in `directory`, and nothing that somebody else has put there. Returns the names of
    what was there."""
    left = sorted(path for path in directory.glob("*") if HALF_DONE.fullmatch(path.name))
    for path in left:
        if path.suffix == OLD and not path.with_suffix("").exists():
            disk.rename(path, path.with_suffix(""))  # killed between the two renames
        else:
            disk.remove(path)
    return [path.name for path in left]


def _clear(staged: Path, disk: Disk) -> None:
    """Take a stage away after a failure, as far as that goes: the next start sweeps what is left."""
    with contextlib.suppress(OSError):
        disk.remove(staged)


@dataclass
class Loaded:
    """A verified checkpoint. adapter, moments: {name: array}; state, machine: what `save` was given."""

    step: int
    path: Path
    adapter: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    state: dict
    machine: dict


class Rejected(Exception):
    """Why one checkpoint is not used."""


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, directory: Path, disk: Disk | None = None):
        self.directory, self.disk = directory, disk or Disk()

    def steps(self) -> list[int]:
        """Steps that have a complete-looking directory, ascending."""
        found = (re.fullmatch(r"step-(\d+)", p.name) for p in self.directory.glob("step-*"))
        return sorted(int(m.group(1)) for m in found if m)

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
        """Write the checkpoint of `step` finished optimizer steps. Raises OSError and leaves every older one as it was."""
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

    def newest_good(self, identity: dict | None) -> tuple[Loaded | None, list[tuple[str, str]]]:
        """The newest checkpoint that verifies and is of this run (None: of any), and what was rejected before it was found."""
        rejected = []
        for step in reversed(self.steps()):
            try:
                return self.read(step, identity), rejected
            except Rejected as reason:
                rejected.append((str(self.path(step)), str(reason)))
        return None, rejected

    def read(self, step: int, identity: dict | None = None) -> Loaded:
        """Raises Rejected naming the file and what is wrong with it."""
        path = self.path(step)
        manifest = self._manifest(path, step, identity)
        content = {}
        for name, about in manifest["files"].items():
            try:
                content[name] = (path / name).read_bytes()
            except OSError as error:
                raise Rejected(f"{name}: {error.strerror or error}") from None
            if len(content[name]) != about["size"]:
                raise Rejected(f"{name}: {len(content[name])} bytes, {about['size']} were written")
            if hashlib.sha256(content[name]).hexdigest() != about["sha256"]:
                raise Rejected(f"{name}: its sha256 is not the one that was written")
        try:
            return Loaded(
                step,
                path,
                tensors_from_bytes(content[ADAPTER]),
                tensors_from_bytes(content[MOMENTS]),
                json.loads(content[STATE]),
                manifest["machine"],
            )
        except (SafetensorError, ValueError, KeyError, RecursionError) as error:
            raise Rejected(f"its files are not what they are called: {error}") from None

    def _manifest(self, path: Path, step: int, identity: dict | None) -> dict:
        try:
            content = (path / MANIFEST).read_bytes()
            manifest = json.loads(content)
            if manifest["format"] != FORMAT:
                raise Rejected(f"{MANIFEST}: format {manifest['format']}, this version reads {FORMAT}")
            if sealed({key: value for key, value in manifest.items() if key != "self"}) != content:
                raise Rejected(f"{MANIFEST}: its own hash is not the one that was written")
            if manifest["step"] != step or set(manifest["files"]) != {ADAPTER, ADAPTER_CONFIG, MOMENTS, STATE}:
                raise Rejected(f"{MANIFEST}: describes step {manifest['step']}")
        except OSError as error:
            raise Rejected(f"{MANIFEST}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Rejected(f"{MANIFEST}: not a manifest: {error}") from None
        if identity is not None and manifest["identity"] != identity:
            other = sorted(
                k for k in {*identity, *manifest["identity"]} if identity.get(k) != manifest["identity"].get(k)
            )
            raise Rejected(f"{MANIFEST}: of another run: {', '.join(other)} differ")
        return manifest

    def prune(self, newest: int, keep: int, best: int | None = None) -> None:
        """Of the checkpoints up to the step `newest`, remove all but the last `keep` and the step `best`.

        Later ones were rejected when the run was continued: they are not counted, and the run will write those steps again.
        """
        for step in [step for step in self.steps() if step <= newest][:-keep]:
            if step != best:
                # One rename makes it absent: a kill while its files go leaves no checkpoint with a part of them.
                gone = self.path(step).with_name(self.path(step).name + REMOVED)
                self.disk.rename(self.path(step), gone)
                self.disk.remove(gone)
