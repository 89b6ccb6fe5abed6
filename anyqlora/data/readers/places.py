"""Where rows lie when a name is more than a path: a configuration and a split of a set, an address."""

from __future__ import annotations

import base64
import os
import re
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyqlora.core.errors import UsageError
from anyqlora.core.hashing import cache_directory, hash_file, hash_text
from anyqlora.core.redaction import redacted
from anyqlora.core.registry import nearest

if TYPE_CHECKING:
    from urllib.request import Request

_NAME = re.compile(r"(?P<base>.+?)(?::(?P<config>[\w.-]+))?(?:\[(?P<split>[\w.-]+)\])?")
_ADDRESS = re.compile(r"(?P<scheme>https?|s3|gs|gcs|az|abfs|hf)://.+")
_CHECKSUM = re.compile(r"#sha256=(?P<digest>[0-9a-fA-F]{64})$")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Place:
    """A source's name, taken apart: base:config[split]."""

    base: str
    config: str = ""
    split: str = ""

    @classmethod
    def of(cls, name: str) -> Place:
        """A name that is a path is one, whatever characters it has."""
        match = _NAME.fullmatch(name)
        if is_address(name) or not match or Path(os.path.expanduser(name)).exists():
            return cls(name)
        return cls(match["base"], match["config"] or "", match["split"] or "")

    def __str__(self) -> str:
        return self.base + f":{self.config}" * bool(self.config) + f"[{self.split}]" * bool(self.split)


def is_address(name: str) -> bool:
    """Whether it names a file that is elsewhere."""
    return bool(_ADDRESS.fullmatch(name))


def has_checksum(name: str) -> bool:
    """Whether it says what the sha256 of the file is."""
    return bool(_CHECKSUM.search(name))


# ---------------------------------------------------------------------------------------------------------- addresses


def fetched(address: str, offline: bool = False) -> Path:
    """The file at an address: the copy on this machine, made where there is none.

    https://host/rows.jsonl, perhaps with #sha256=..., hf://datasets/owner/name/rows.jsonl, s3://bucket/rows.jsonl.

    Raises UsageError saying why it cannot be had, and for one with another checksum.
    """
    checksum = _CHECKSUM.search(address)
    url = _CHECKSUM.sub("", address)
    shown = redacted(url)
    name = Path(urllib.parse.urlsplit(url).path).name
    if not name:
        raise UsageError("an address that names no file", where=shown, cure="the address of one file of rows")
    path = cache_directory() / "downloads" / hash_text(url)[:16] / name
    if not path.exists():
        if offline:
            raise UsageError(
                "it is not on this machine, and --offline true fetches nothing",
                where=shown,
                cure="a path, or a run with a connection first",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{name}.{os.getpid()}.part")
        try:
            _download(url, part)
            _check(part, checksum, shown)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    _check(path, checksum, shown)
    return path


def _check(path: Path, checksum: re.Match | None, shown: str) -> None:
    if checksum and hash_file(path) != checksum["digest"].lower():
        raise UsageError(
            f"its sha256 is {hash_file(path)}, not the stated one",
            where=shown,
            cure="the right checksum, or the right file" + f"; the copy here is {path}" * (path.suffix != ".part"),
        )


def _download(url: str, path: Path) -> None:
    from urllib.request import urlopen

    scheme, shown = urllib.parse.urlsplit(url).scheme, redacted(url)
    try:
        if scheme in ("http", "https"):
            with urlopen(_request(url), timeout=60) as answer, open(path, "wb") as file:
                _copy(answer, file)
            return
        import fsspec

        with fsspec.open(url, "rb") as answer, open(path, "wb") as file:
            _copy(answer, file)
    except ImportError as error:
        raise UsageError(
            f"{scheme} needs a library that is not here: {error}",
            where=shown,
            cure={"s3": "pip install s3fs", "hf": "pip install huggingface_hub"}.get(scheme, "a path, or an address"),
        ) from None
    except (OSError, ValueError) as error:  # urllib's own are among the first
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"cannot be fetched: {redacted(reason)}", where=shown, cure="check the address") from None
    except Exception as error:  # the clients of s3 and the hub raise dozens of kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"cannot be fetched: {redacted(reason)}", where=shown, cure="check the address") from None


def _request(url: str) -> Request:
    """The request for an address; a user and a password in it are sent as they ought to be, and are in no message."""
    from urllib.request import Request

    parts = urllib.parse.urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    request = Request(urllib.parse.urlunsplit(parts._replace(netloc=host)))
    if user:
        given = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {given}")
    return request


def _copy(source: Any, target: Any) -> None:
    while block := source.read(_BLOCK):
        target.write(block)


# ------------------------------------------------------------------------------------------------------ configurations


def configurations(directory: Path) -> dict[str, dict[str, list[str]]]:
    """{configuration: {split: patterns of files}} that the front of a set's README names; {} without any."""
    import yaml

    try:
        text = (directory / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    front = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        content = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError:
        return {}
    configs = content.get("configs") if isinstance(content, dict) else None
    by_name = {}
    for config in configs if isinstance(configs, list) else ():
        if isinstance(config, dict) and config.get("data_files") and config.get("config_name"):
            by_name[str(config["config_name"])] = _splits(config["data_files"])
    return by_name


def _splits(data_files: object) -> dict[str, list[str]]:
    if isinstance(data_files, str):
        return {"train": [data_files]}
    splits: dict[str, list[str]] = {}
    for item in data_files if isinstance(data_files, list) else ():
        if isinstance(item, str):
            splits.setdefault("train", []).append(item)
        elif isinstance(item, dict) and "path" in item:
            paths = item["path"] if isinstance(item["path"], list) else [item["path"]]
            splits.setdefault(str(item.get("split", "train")), []).extend(map(str, paths))
    return splits


def choose(names: dict[str, Any] | list[str], stated: str, kind: str, place: Place) -> str:
    """The one of `names` that is stated, or the only one, or the default one. Raises UsageError for what is none."""
    known = list(names)
    if stated:
        if stated not in names:
            raise UsageError(
                f"no {kind} {stated!r}{nearest(stated, known)}", where=str(place), cure=f"one of {', '.join(known)}"
            )
        return stated
    if len(known) == 1 or "default" in names:
        return "default" if "default" in names else known[0]
    shown = ", ".join(known[:20]) + ", ..." * (len(known) > 20)
    raise UsageError(
        f"several {kind}s, and none is named: {shown}", where=str(place), cure=f"--dataset {place.base}:{known[0]}"
    )
