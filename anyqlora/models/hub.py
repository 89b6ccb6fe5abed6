"""A model's files on this machine: a local directory as it is, or a snapshot from the hub; complete, or an error that
says what lacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import UsageError
from anyqlora.core.redaction import redacted
from anyqlora.models.architectures import model_directory

WANTED = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
    "*.py",
]  # code is run only when asked for
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
UNWANTED = ["*/*", "consolidated*"]  # the same weights once more, in their makers' own form


def base_directory(config: TrainConfig) -> Path:
    """The directory of the base model, its weight files checked.

    Raises UsageError naming the file that lacks or is damaged.
    """
    if config.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for whatever else would ask the hub: transformers, peft
    directory = model_directory(config)
    if directory is None or not (config.is_demo or Path(os.path.expanduser(config.model_name)).is_dir()):
        directory = _snapshot(config)
    check_weights(directory)
    return directory


def _snapshot(config: TrainConfig) -> Path:
    """The hub's files of a model: from this machine where all of them are here, else downloaded, from where a download
    stopped.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked = {
        "repo_id": config.model_name,
        "revision": config.revision,
        "allow_patterns": WANTED,
        "ignore_patterns": UNWANTED,
    }
    try:
        directory = Path(snapshot_download(**asked, local_files_only=True))
        check_weights(directory)
        return directory
    except (LocalEntryNotFoundError, UsageError) as lacking:
        if config.offline and isinstance(lacking, UsageError):
            raise
    with _explained(config):
        directory = Path(snapshot_download(**asked, local_files_only=config.offline))
    if not (directory / "config.json").exists():
        raise UsageError(
            f"{config.model_name} has no config.json on the hub: not a model that transformers reads",
            where=config.sources.get("model_name", ""),
            cure="the original model, in place of a conversion of it",
        )
    return directory


@contextlib.contextmanager
def _explained(config: TrainConfig) -> Iterator[None]:
    """What the hub's client raises, as UsageError in words."""
    from huggingface_hub import errors as hub

    name, where = config.model_name, config.sources.get("model_name", "")
    try:
        yield
    except hub.GatedRepoError:
        raise UsageError(
            f"{name} is gated: its owner wants you to accept its terms",
            where=where,
            cure=f"accept them on the model's page, then `hf auth login`, or set HF_TOKEN; page: {name}",
        ) from None
    except hub.RepositoryNotFoundError:
        raise UsageError(
            f"{name} is neither a directory here nor a model on the hub (or it is private)",
            where=where,
            cure="check the spelling; for a private model `hf auth login` or HF_TOKEN",
        ) from None
    except hub.RevisionNotFoundError:
        raise UsageError(
            f"{name} has no revision {config.revision!r}",
            where=config.sources.get("revision", ""),
            cure="--revision main",
        ) from None
    except hub.LocalEntryNotFoundError as error:
        cause = (
            "--offline true" if config.offline else f"the hub does not answer ({_first_line(error.__cause__ or error)})"
        )
        raise UsageError(
            f"{name} is not on this machine whole, and {cause}",
            where=where,
            cure="a directory as --model_name, or a run with a connection first",
        ) from None
    except (
        hub.HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of the library through which this version connects
        OSError,
    ) as error:
        raise UsageError(
            f"{name} could not be downloaded: {_first_line(error)}",
            where=where,
            cure="run again: files that have arrived are kept",
        ) from None


def check_weights(directory: Path) -> None:
    """Raises UsageError when a weight file is missing, cut short or not safetensors. Reads headers only."""
    for name in weight_files(directory):
        check_safetensors(directory / name)


def weight_files(directory: Path) -> list[str]:
    """The files that transformers reads: one, or those that the index names. Raises UsageError."""
    if (directory / SINGLE).exists():
        return [SINGLE]
    if not (directory / INDEX).exists():
        others = sorted(
            p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors") for p in directory.glob(pattern)
        )
        raise UsageError(
            f"no weights in safetensors form: neither {SINGLE} nor {INDEX}"
            + (f"; {others[0]} is not read" if others else ""),
            where=str(directory),
            cure="download the model again, as safetensors; pickled weights can run code and are not read",
        )
    try:
        names = sorted(set(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (directory / name).exists()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"not an index of weights: {_first_line(error)}",
            where=str(directory / INDEX),
            cure="download the model again",
        ) from None
    if missing:
        raise UsageError(
            f"{len(missing)} of {len(names)} weight files are missing, {missing[0]} is the first",
            where=str(directory),
            cure="download the model again: the download was not finished",
        )
    return names


def check_safetensors(path: Path) -> dict:
    """The header {tensor: {dtype, shape, data_offsets}} of a file whose size is what the header says.

    Raises UsageError.
    """
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, 100 << 20):
                raise ValueError(f"its header would have {length} bytes, the file has {size}")
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UsageError(
            f"not a safetensors file: {_first_line(error)}", where=str(path), cure="delete it and download it again"
        ) from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise UsageError(
            f"{size} bytes, but its header describes {expected}: the file is cut short or damaged",
            where=str(path),
            cure="delete it and download it again",
        )
    return header


def _first_line(error: BaseException) -> str:
    return redacted((str(error).strip().splitlines() or [type(error).__name__])[0])
