"""Where rows come from: files, directories, the hub and built-in names become rows that know their line."""

from __future__ import annotations

import bz2
import contextlib
import csv
import glob
import gzip
import io
import itertools
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from anyqlora.core.errors import UsageError
from anyqlora.core.redaction import redacted
from anyqlora.data.readers import dataset_index, places, strict_json
from anyqlora.data.readers.bad_rows import BadRow
from anyqlora.data.readers.dataset_index import IndexedSet
from anyqlora.data.readers.places import Place

DEMO = Path(__file__).parents[2] / "demo" / "task"
HUB = {  # built-in name -> hub id
    "alpaca": "yahma/alpaca-cleaned",
    "alpaca_sample": "yahma/alpaca-cleaned",
    "guanaco": "timdettmers/openassistant-guanaco",
    "sql": "knowrohit07/know_sql",
    "orca_math": "microsoft/orca-math-word-problems-200k",
}
MADE_HERE = ("dummy", "demo")
BUILT_IN = (*HUB, *MADE_HERE)
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SIGNATURES = {  # first bytes -> (what the file is instead of text, cure)
    b"\xff\xfe": ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
    b"\x1f\x8b": ("gzip", "gunzip it, or name it .gz"),
    b"PK\x03\x04": ("a zip archive", "unzip it"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd it, or name it .zst"),
    b"PAR1": ("Parquet", "name it .parquet"),
}
CHUNK_BYTES, CHUNK_ROWS = 1 << 20, 1000  # of what is read at a time
COMPRESSED = {".gz": "gzip", ".xz": "xz", ".bz2": "bz2", ".zst": "zstd"}
_DESCRIPTIONS = (
    "dataset_info.json",
    "dataset_infos.json",
    "state.json",
)  # what Hugging Face's datasets writes beside the rows
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1f]")
_TRAIN_SPLIT = re.compile(r"(^|[^a-z])train(ing)?(set)?([^a-z]|$)", re.IGNORECASE)
_OTHER_SPLIT = re.compile(
    r"(^|[^a-z])(test(ing)?|valid(ation)?|val|dev(elopment)?|eval(uation)?|h[eo]ld[ _-]?out)(set|s)?([^a-z]|$)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Row:
    """One row as it was read."""

    value: dict
    where: str  # "file:line"; for Parquet "file:number of the row"


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file in turn: read, or a piece of a file with one JSON row per line, which anybody can read."""

    name: str  # of the file
    rows: tuple[Row | BadRow, ...] = ()
    raw: bytes = b""
    line: int = 1  # the first one of `raw`

    def read(self) -> Iterator[Row | BadRow]:
        """The rows, and why others cannot be read."""
        yield from self.rows
        for where, row in strict_json.lines(self.raw, self.name, self.line) if self.raw else ():
            yield row if isinstance(row, BadRow) else Row(row, where)


@dataclass
class Source:
    """One file of rows, with what was passed over; what is in it is read when it is asked for."""

    name: str
    path: Path | None = None  # None: the rows are made here
    most: int | None = None  # rows that are taken of it
    notes: list[str] = field(default_factory=list)
    made: tuple[Row, ...] = ()
    indexed: IndexedSet | None = None  # an entry that says what its columns are called

    def chunks(self) -> Iterator[Chunk]:
        """All of it in turn, which adds to the notes.

        Raises UsageError for a file that is no text, or is empty.
        """
        if self.path is None:
            yield Chunk(self.name, self.made)
            return
        taken = 0
        try:
            for chunk in _chunks(self.path, self):
                if self.most is not None:
                    chunk = Chunk(self.name, tuple(itertools.islice(chunk.read(), self.most - taken)))
                    taken += len(chunk.rows)
                yield chunk
                if self.most is not None and taken >= self.most:
                    return
        except OSError as error:
            raise UsageError(f"cannot be read: {error.strerror or error}", where=self.name) from None

    def refuse_as_json(self, rows: int, bad: list[BadRow]) -> None:
        """Raises UsageError for a .json file of which nothing is a row: it is neither of the forms it may have."""
        if self.path and suffix_of(self.path) == ".json" and not rows and bad and not _is_list(self.path):
            raise UsageError(
                "neither a list of rows nor one row per line",
                where=bad[0].where,
                cure='[{"prompt": "...", "completion": "..."}, ...]',
            )

    @property
    def rows(self) -> list[Row]:
        """All rows that can be read."""
        return [row for chunk in self.chunks() for row in chunk.read() if isinstance(row, Row)]

    @property
    def bad(self) -> list[BadRow]:
        """Why others cannot."""
        return [row for chunk in self.chunks() for row in chunk.read() if isinstance(row, BadRow)]


def weighted(spec: str, where: str = "dataset") -> list[tuple[str, float]]:
    """[(source, weight)] of "a.jsonl=2,b.jsonl=0.5". A spec that is itself a path is one source."""
    if Path(os.path.expanduser(spec)).exists():
        return [(spec, 1.0)]
    parts = []
    for part in filter(None, (part.strip() for part in spec.split(","))):
        name, equals, weight = part.rpartition("=") if not places.has_checksum(part) else (part, "", "")
        try:
            number = float(weight) if equals else 1.0
        except ValueError:
            equals, number = "", 1.0
        if not 0 < number <= 1000:
            raise UsageError(
                f"weight {weight} of {name} is not between 0 and 1000",
                where=where,
                cure="to give a source no weight, leave it out",
            )
        parts.append((name.strip() if equals else part, number))
    if not parts:
        raise UsageError("no source named", where=where, cure="--dataset FILE")
    return parts


def placed(spec: str, otherwise: Callable[[str], str]) -> str:
    """The same specification with whole paths, so that it can be read from anywhere; `otherwise` gives what is no file
    here.
    """

    def whole(name: str) -> str:
        place = Place.of(name)
        path = Path(os.path.expanduser(place.base))
        is_here = path.exists() or bool(_matches(name))
        if not is_here or name in MADE_HERE:
            return otherwise(name)
        base = str(path.absolute()) if path.exists() else str(Path(os.path.expanduser(name)).absolute())
        return str(Place(base, place.config, place.split)) if path.exists() else base

    weighted_names = [(whole(name), weight) for name, weight in weighted(spec)] if spec else []
    if all(weight == 1 for _, weight in weighted_names) and len(weighted_names) < 2:
        return "".join(name for name, _ in weighted_names)
    if any("," in name for name, _ in weighted_names):  # among others such a path is two
        return otherwise(spec)
    return ",".join(f"{name}={weight!r}" for name, weight in weighted_names)


def root(name: str, *, held_out: bool = False, offline: bool = False, is_default: bool = False) -> Path | None:
    """The file or directory behind one source's name, fetched if it is elsewhere; None for dummy, which is generated.

    Raises UsageError for what is no source at all.
    """
    path = Path(os.path.expanduser(name))
    if name == "demo":
        return DEMO / ("heldout.jsonl" if held_out else "train.jsonl")
    if name == "dummy":
        return None
    if path.exists():
        return path
    if places.is_address(name):
        return places.fetched(name, offline)
    if name in HUB or (_HUB_ID.fullmatch(name) and suffix_of(path) not in READERS):
        return download(name, offline, is_default)
    raise UsageError(
        "no file has such a name" if glob.has_magic(name) else "no such file or directory",
        where=name,
        cure=f"a path, a hub id (owner/name), an address or one of: {', '.join(BUILT_IN)}",
    )


def files(name: str, *, held_out: bool = False, offline: bool = False, is_default: bool = False) -> list[Path]:
    """The files that one source is read from, in order. `held_out` chooses the split of a directory; `is_default`:
    nobody has named it.
    """
    return _found(name, held_out=held_out, offline=offline, is_default=is_default)[0]


def read(
    name: str, *, held_out: bool = False, samples: int = 512, offline: bool = False, is_default: bool = False
) -> list[Source]:
    """The files of one source.

    `held_out` chooses the split, `samples` the rows of alpaca_sample and dummy.

    Raises UsageError for what is no source at all.
    """
    if name == "dummy":
        return [dummy(samples)]
    paths, left, indexed = _found(name, held_out=held_out, offline=offline, is_default=is_default)
    sources = [file(path) for path in paths]
    if name == "alpaca_sample":
        sources[0].most = samples
    elif left:
        sources[0].notes.append(f"left out, by their names another split or a description: {', '.join(left)}")
    if indexed:
        for source in sources:
            source.indexed, source.most = indexed, indexed.entry.get("num_samples")
    return sources


def meaning(name: str) -> str:
    """What else than its files a source's rows depend on, as text: the entry of an index; "" for most."""
    indexed = _indexed(Place.of(name))
    return json.dumps(indexed.entry, sort_keys=True) if indexed else ""


def _found(
    name: str, *, held_out: bool, offline: bool, is_default: bool
) -> tuple[list[Path], list[str], IndexedSet | None]:
    """(files in order, names of those that are left out, the entry of an index that led to them)."""
    if matches := _matches(name):
        return matches, [], None
    place = Place.of(name)
    if indexed := _indexed(place):
        inner = Place.of(indexed.place)
        paths, left, _ = _found(str(inner), held_out=held_out, offline=offline, is_default=False)
        return paths, left, indexed
    path = root(
        place.base if place.config or place.split else name, held_out=held_out, offline=offline, is_default=is_default
    )
    if path is None:
        return [], [], None
    if not path.is_dir():
        if place.config or place.split:
            raise UsageError("a file has no configurations and no splits", where=name, cure=f"--dataset {place.base}")
        return [path], [], None
    chosen, others = _chosen(path, place, held_out)
    is_sample = name == "alpaca_sample"
    left = [] if is_sample else [str(p.relative_to(path)) for p in others]
    return chosen[:1] if is_sample else chosen, left, None


def _indexed(place: Place) -> IndexedSet | None:
    """The entry of a dataset_info.json of LLaMA-Factory's that a name leads to. Raises UsageError where it has none."""
    path = Path(os.path.expanduser(place.base))
    index = path / dataset_index.NAME if path.is_dir() else path
    sets = dataset_index.read(index) if index.name == dataset_index.NAME and index.is_file() else {}
    return sets[places.choose(sets, place.config, "set", place)] if sets else None


def _chosen(directory: Path, place: Place, held_out: bool) -> tuple[list[Path], list[Path]]:
    """(chosen, left out) of the files of a directory: those of a configuration and a split, where it has such."""
    configs = places.configurations(directory)
    if not configs:
        inner = directory / place.config if place.config else directory
        if not inner.is_dir():
            names = sorted(p.name for p in directory.iterdir() if p.is_dir() and not p.name.startswith("."))
            places.choose(names, place.config, "configuration", place)
        _refuse_several(inner, place)
        return split(inner, held_out, place.split)
    splits = configs[places.choose(configs, place.config, "configuration", place)]
    if place.split or not held_out:
        names = [name for name in splits if _TRAIN_SPLIT.search(name)]
        of_split = places.choose(splits, place.split or (names or list(splits))[0], "split", place)
    else:
        others = [name for name in splits if _OTHER_SPLIT.search(name)]
        of_split = places.choose(splits, (others or list(splits))[0], "split", place)
    paths = sorted({path for pattern in splits[of_split] for path in directory.glob(pattern) if path.is_file()})
    if not paths:
        raise UsageError(
            f"no file is {' or '.join(splits[of_split])}", where=str(place), cure="another configuration or split"
        )
    known = [p for p in sorted(directory.rglob("*")) if p.is_file() and suffix_of(p) in READERS and p.suffix != ".txt"]
    return paths, [p for p in known if p not in paths and p.name not in _DESCRIPTIONS]


def _refuse_several(directory: Path, place: Place) -> None:
    """Raises UsageError for a set of the hub whose directories are configurations, and none is named: gsm8k has its
    rows twice.
    """
    if Path(os.path.expanduser(place.base)).exists():  # somebody's own directory is what it holds
        return
    named = [
        p.name
        for p in sorted(directory.iterdir())
        if p.is_dir()
        and not p.name.startswith(".")
        and not _TRAIN_SPLIT.search(p.name)
        and not _OTHER_SPLIT.search(p.name)
        and any(suffix_of(f) in READERS and _TRAIN_SPLIT.search(f.stem) for f in p.rglob("*") if f.is_file())
    ]
    if len(named) > 1:
        places.choose(named, "", "configuration", place)


def _matches(name: str) -> list[Path]:
    """The files that a pattern such as rows/*.jsonl or rows/**/part-[0-9].json names, in order; [] for a plain name."""
    if not glob.has_magic(name) or Path(os.path.expanduser(name)).exists():
        return []
    return sorted(path for path in map(Path, glob.glob(os.path.expanduser(name), recursive=True)) if path.is_file())


def suffix_of(path: Path) -> str:
    """What kind of file it is, ".jsonl" of rows.jsonl.gz, too."""
    *_, before, last = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    return before if last in COMPRESSED else last


def dummy(count: int) -> Source:
    """Rows that mean nothing, to try the machinery with."""
    rows = [
        {"prompt": f"Question {i}: what is {i} plus {i + 1}?\nAnswer:", "completion": f" {2 * i + 1}"}
        for i in range(count)
    ]
    return Source("dummy", made=tuple(Row(row, f"dummy:{i}") for i, row in enumerate(rows, 1)))


def split(path: Path, held_out: bool = False, stated: str = "") -> tuple[list[Path], list[Path]]:
    """(chosen, left out) of the files of known kind below `path`, in the order of their names: those of the train
    split, or if `held_out` of a test split, or of the `stated` one, where the names tell; else all that hold rows.
    """
    paths = sorted(
        p
        for p in path.rglob("*")
        if p.is_file()
        and suffix_of(p) in READERS
        and not any(part.startswith(".") for part in p.relative_to(path).parts)
        and not (p.suffix == ".arrow" and p.name.startswith(("cache-", "tmp")))  # what datasets.map has left
    )
    paths = [p for p in paths if suffix_of(p) != ".txt"] or paths  # beside rows, text is about them
    if not paths:
        raise UsageError(
            "no file of rows in this directory", where=str(path), cure=f"files that end in {', '.join(READERS)}"
        )

    rows = [p for p in paths if p.name not in _DESCRIPTIONS] or paths

    def named(pattern):
        return [p for p in rows if pattern.search(str(p.relative_to(path).with_suffix("")))]

    if stated:
        chosen = named(re.compile(rf"(^|[^a-z]){re.escape(stated)}([^a-z]|$)", re.IGNORECASE))
        if not chosen:
            raise UsageError(
                f"no file of split {stated!r}", where=str(path), cure=f"one of {', '.join(p.name for p in rows[:20])}"
            )
        return chosen, [p for p in paths if p not in chosen]
    train, other = named(_TRAIN_SPLIT), named(_OTHER_SPLIT)
    wanted, unwanted = (other, train) if held_out else (train, other)
    chosen = wanted or [p for p in rows if p not in unwanted] or rows
    return chosen, [p for p in paths if p not in chosen]


def download(name: str, offline: bool, is_default: bool = False) -> Path:
    """The directory of a hub dataset's files of rows, from the cache where they are there; `name` is built in, or the
    hub's.

    Raises UsageError saying why it cannot be had.
    """
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download

    repository, wanted = (
        HUB.get(name, name),
        [
            "README.md",
            *(f"*{suffix}{compressed}" for suffix in READERS if suffix != ".txt" for compressed in ("", *COMPRESSED)),
        ],
    )
    try:
        return Path(snapshot_download(repository, repo_type="dataset", allow_patterns=wanted, local_files_only=offline))
    except hub.GatedRepoError:
        why, cure = "its owner wants you to accept its terms", "accept them on its page, then `hf auth login`"
    except hub.RepositoryNotFoundError:
        why, cure = "it is neither a path here nor a data set on the hub, or it is private", "check the spelling"
    except Exception as error:  # the hub's client raises a dozen kinds, some of them httpx's own
        reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
        why = "and --offline true fetches nothing" if offline else f"and the hub does not answer ({redacted(reason)})"
        why, cure = f"it is not on this machine whole, {why}", "a path, or a run with a connection first"
    called = f"{name} (the hub's {repository})" if name in HUB else name
    if is_default:
        called = f"{called}, the default data set, which is taken where nobody names one,"
        cure = f"--dataset FILE with your own rows, --dataset dummy to try the machinery; or {cure}"
    raise UsageError(f"{called} cannot be read: {why}", cure=cure)


def file(path: str | Path) -> Source:
    """One file, to be read by its suffix. Raises UsageError for one of unknown kind."""
    path = Path(path)
    if suffix_of(path) not in READERS:
        kind = "".join(path.suffixes[-2:]) if path.suffix.lower() in COMPRESSED else path.suffix
        cure = f"one of {', '.join(READERS)}, each perhaps with {', '.join(COMPRESSED)} behind it"
        raise UsageError(f"unknown kind of file {kind!r}", where=str(path), cure=cure)
    return Source(str(path), path)


def _chunks(path: Path, source: Source) -> Iterator[Chunk]:
    """The file in turn. Raises UsageError where it is empty."""
    is_empty = True
    is_lines = READERS[suffix_of(path)] is _json and not _is_list(path)
    for chunk in _line_chunks(path, source) if is_lines else _row_chunks(path, source):
        is_empty = False
        yield chunk
    if is_empty:
        raise UsageError("no rows: the file is empty", where=str(path), cure="one row per line, or leave the file out")


def _row_chunks(path: Path, source: Source) -> Iterator[Chunk]:
    rows = READERS[suffix_of(path)](path, source)
    while some := tuple(itertools.islice(rows, CHUNK_ROWS)):
        yield Chunk(source.name, some)


def _line_chunks(path: Path, source: Source) -> Iterator[Chunk]:
    """Pieces that end where lines do."""
    line, left, is_first = 1, [], True
    with _opened(path) as stream:
        while block := stream.read(CHUNK_BYTES):
            if is_first:
                block, is_first = _text_begins(block, path, source), False
            whole, end, rest = block.rpartition(b"\n")
            if not end:
                left.append(block)
                continue
            raw = b"".join([*left, whole, end])
            left = [rest]
            if raw.strip():
                yield Chunk(source.name, raw=raw, line=line)
            line += raw.count(b"\n")
    raw = b"".join(left)
    if raw.strip():
        yield Chunk(source.name, raw=raw, line=line)


def _content(path: Path, source: Source) -> bytes:
    """The file's bytes without a UTF-8 byte order mark. Raises UsageError for what is visibly no text."""
    return _text_begins(_whole(path), path, source)


def _arrow(path: Path, source: Source) -> Iterator[Row | BadRow]:
    """Arrow's stream or file, as Hugging Face's datasets saves them."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as content:
            try:
                batches: Any = pyarrow.ipc.open_stream(content)
            except pyarrow.ArrowInvalid:
                content.seek(0)
                opened = pyarrow.ipc.open_file(content)
                batches = (opened.get_batch(number) for number in range(opened.num_record_batches))
            read = 0
            for batch in batches:
                for start in range(0, batch.num_rows, CHUNK_ROWS):
                    yield from _rows_of_batch(batch.slice(start, CHUNK_ROWS), path, read + start)
                read += batch.num_rows
    except pyarrow.ArrowException as error:
        raise UsageError(
            f"not Arrow: {str(error).splitlines()[0]}", where=str(path), cure="save it anew, or name it by what it is"
        ) from None


def _whole(path: Path) -> bytes:
    with _opened(path) as stream:
        return stream.read()


def _text_begins(content: bytes, path: Path, source: Source) -> bytes:
    """The beginning of a file without a UTF-8 byte order mark. Raises UsageError for what is visibly no text."""
    for signature, (what, cure) in _SIGNATURES.items():
        if content.startswith(signature):
            raise UsageError(f"not UTF-8 text but {what}", where=str(path), cure=cure)
    head = content[:4096].split(b"\n")[0]
    if head.strip(b"\0") and len(_CONTROL.findall(head)) > len(head) // 8:
        raise UsageError(
            "not UTF-8 text: a binary file, or UTF-16", where=str(path), cure="UTF-16: iconv -f UTF-16 -t UTF-8"
        )
    if content.startswith(b"\xef\xbb\xbf"):
        note = "a byte order mark was passed over"
        source.notes += [note] * (note not in source.notes)
        content = content[3:]
    return content


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """What is in a file, without its compression. Raises UsageError for a file that breaks off or is something else."""
    kind = COMPRESSED.get(path.suffix.lower())
    if not kind:
        with open(path, "rb") as file:
            yield file
        return
    try:
        if kind == "zstd":
            import pyarrow

            opened: Any = pyarrow.input_stream(str(path), compression="zstd")
        else:
            opened = {"gzip": gzip.open, "xz": lzma.open, "bz2": bz2.open}[kind](path)
        with opened:
            yield opened
    except (FileNotFoundError, UsageError):
        raise
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"not whole as {kind}: {reason}", where=str(path), cure="compress it anew") from None


def _text(path: Path, source: Source) -> Iterator[Row | BadRow]:
    """Documents with blank lines between them."""
    content, first, lines = _content(path, source), 1, []
    for number, raw in enumerate([*content.split(b"\n"), b""], 1):
        if raw.strip():
            first = first if lines else number
            lines.append(raw.rstrip(b"\r"))
            continue
        if lines:
            try:
                yield Row({"text": strict_json.text_of(b"\n".join(lines), str(path), first)}, f"{path}:{first}")
            except BadRow as bad:
                yield bad
        lines = []


def _is_list(path: Path) -> bool:
    """Whether a .json file is a list of rows, as its first character says; both forms are found under both suffixes."""
    if suffix_of(path) != ".json":
        return False
    with _opened(path) as stream:
        while block := stream.read(4096):
            if text := block.removeprefix(b"\xef\xbb\xbf").lstrip():
                return text[:1] == b"["
    return False


def _json(path: Path, source: Source) -> Iterator[Row | BadRow]:
    """A list of rows."""
    for where, row in strict_json.items(_content(path, source), str(path)):
        yield row if isinstance(row, BadRow) else Row(row, where)


def _csv(path: Path, source: Source) -> Iterator[Row | BadRow]:
    """The first line names the columns. Every cell is text."""
    content = _content(path, source)
    if b"\0" in content:
        raise UsageError("a NUL byte", where=f"{path}:{content[: content.index(0)].count(10) + 1}", cure="delete it")
    try:
        text = strict_json.text_of(content, str(path), 1)
    except BadRow as bad:
        raise UsageError(bad.reason, where=bad.where, cure=bad.cure) from None
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter="\t" if suffix_of(path) == ".tsv" else ",", strict=True
    )
    names: list[str] = []
    while True:
        where = f"{path}:{reader.line_num + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:  # the reader has lost its place: nothing after this can be trusted
            yield BadRow(f"not CSV: {error}", "put quotes around cells, and double those inside", where)
            return
        if cells and not names:
            names = cells
            if len(set(names)) < len(names) or "" in names:
                raise UsageError(
                    f"the header names a column twice or not at all: {', '.join(map(repr, names))}",
                    where=where,
                    cure="one name for each column",
                )
        elif len(cells) == len(names):
            yield Row(dict(zip(names, cells, strict=True)), where)
        elif cells:
            yield BadRow(
                f"{len(cells)} cells, but the header has {len(names)}",
                "put quotes around a cell that holds a comma or a line break",
                where,
            )


def _parquet(path: Path, source: Source) -> Iterator[Row | BadRow]:
    import pyarrow
    from pyarrow import parquet

    try:
        content = io.BytesIO(_whole(path)) if path.suffix.lower() in COMPRESSED else path
        with parquet.ParquetFile(content) as table:
            names = table.schema_arrow.names
            if len(set(names)) < len(names):
                raise UsageError(
                    f"a column is there twice: {', '.join(map(repr, names))}",
                    where=str(path),
                    cure="one name for each column",
                )
            read = 0
            for batch in table.iter_batches(batch_size=CHUNK_ROWS):
                yield from _rows_of_batch(batch, path, read)
                read += batch.num_rows
    except pyarrow.ArrowException as error:
        raise UsageError(
            f"not Parquet: {str(error).splitlines()[0]}",
            where=str(path),
            cure="write it anew, or name it by what it is",
        ) from None


def _rows_of_batch(batch, path: Path, before: int) -> Iterator[Row | BadRow]:
    """`before` rows were read already."""
    try:
        values = batch.to_pylist()
    except (ValueError, OverflowError):  # one that Python cannot have, of which the error does not say the row
        values = [_alone(batch.slice(number, 1)) for number in range(batch.num_rows)]
    for number, value in enumerate(values, before + 1):
        where = f"{path}:{number}"
        yield value.at(where) if isinstance(value, BadRow) else Row(_without_nulls(value), where)


def _alone(batch) -> dict | BadRow:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return BadRow(
            f"text that is not UTF-8: byte 0x{error.object[error.start]:02x}", "write the file anew from UTF-8 text"
        )
    except (ValueError, OverflowError) as error:
        return BadRow(f"a value that cannot be read: {error}", "a value that fits, or leave the column out")


def _without_nulls(value: Any, inside: bool = False) -> Any:
    """Without the nulls that Parquet puts into tools and tool calls: all of a column have the keys of each.

    A null that somebody wrote there looks the same, and is left out, too.
    """
    if isinstance(value, list):
        return [_without_nulls(item, inside) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_nulls(item, inside or key in ("tools", "tool_calls"))
        for key, item in value.items()
        if not inside or item is not None
    }


READERS = {
    ".jsonl": _json,
    ".json": _json,
    ".ndjson": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".txt": _text,
}
