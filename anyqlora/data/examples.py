"""The rows that a run is asked to read, as tokens; a row that cannot be used is named."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import UsageError
from anyqlora.core.terminal import printable
from anyqlora.data import chat_template, formats
from anyqlora.data.readers import sources
from anyqlora.data.readers.bad_rows import BadRow, LongRow
from anyqlora.data.row_reader import RowReader, TokenizedChunk
from anyqlora.data.rows import Rows, TokenTable
from anyqlora.data.token_cache import TokenCache
from anyqlora.data.tokenizer import RenderedText, tokenize
from anyqlora.data.workers import CAN_FORK, read_chunks

LISTED = 20  # bad rows, or reasons, in one message


@dataclass
class LoadedSource:
    """What one `dataset` or `eval_dataset` gave."""

    spec: str
    tables: list[TokenTable] = field(default_factory=list)  # of each file
    numbers: list[int] = field(default_factory=list)  # of the source that each is of
    weights: list[float] = field(default_factory=list)  # of each source
    sources: list[dict] = field(default_factory=list)  # JSON-able, one per file
    bad: list[BadRow] = field(default_factory=list)

    @property
    def rows(self) -> Rows:
        """All examples, in order."""
        return Rows.all_of(self.tables)

    @property
    def source(self) -> np.ndarray:
        """int64 [tables]: the number of the source that each is of."""
        return np.array(self.numbers, np.int64)


def read_examples(config: TrainConfig, spec: str, cache: TokenCache, *, held_out: bool) -> LoadedSource:
    """All examples of a specification, in order.

    Raises UsageError for a source that is none; bad rows are in the result.
    """
    part = LoadedSource(spec)
    for number, (name, weight) in enumerate(sources.weighted(spec, config.sources.get("dataset", "")) if spec else ()):
        part.weights.append(weight)
        for source in sources.read(
            name,
            held_out=held_out,
            samples=config.dataset_samples,
            offline=config.offline,
            is_default=not held_out and config.dataset_is_default,
        ):
            part.numbers.append(number)
            _read(part, config, source, cache, weight, texts=held_out or bool(config.eval_fraction))
    return part


def _read(
    part: LoadedSource, config: TrainConfig, source: sources.Source, cache: TokenCache, weight: float, *, texts: bool
) -> None:
    """Add one file to what was read."""
    is_cached = cache.keeps(source.path)
    table, summary = (_kept if is_cached else _made)(config, source, cache, texts=texts or not is_cached)
    part.tables.append(table)
    part.bad += [
        (LongRow if is_long else BadRow)(reason, cure, f"{source.name}{place}" if is_own else place)
        for place, is_own, reason, cure, is_long in summary.pop("bad")
    ]
    source.notes = summary.pop("notes")
    part.sources.append(
        {"name": source.name, "rows": summary.pop("rows"), "weight": weight, "notes": source.notes, **summary}
    )


def _kept(config: TrainConfig, source: sources.Source, cache: TokenCache, *, texts: bool) -> tuple[TokenTable, dict]:
    """The tokens of a file from the cache, where they are put first if they are not there.

    Where they cannot be written they are made and held in memory, and why is noted.
    """
    assert source.path, "only files are kept"
    entry = cache.entry(source, texts=texts)
    if cached := entry.read(source.name):
        return cached
    try:
        with entry.locked():
            if cached := entry.read(source.name, is_locked=True):  # another process was faster
                return cached
            total = _Summary()
            reader = RowReader(config, cache.tokenizer, texts=texts, indexed=source.indexed)
            chunks = read_chunks(reader, source, _processes(config, cache), cache.progress(source))
            staged = entry.write(total.watching(chunks))
            try:
                source.refuse_as_json(total.rows, total.bad)
                staged.keep(total.described(reader, source))
            finally:
                staged.take_back()
        cached = entry.read(source.name)
        with contextlib.suppress(OSError):  # another process removes the same entries
            cache.prune()
    except OSError as error:
        cache.notes.append(f"the tokens of {source.name} are not kept in {cache.root}: {error.strerror or error}")
    return cached or _made(config, source, cache, texts=texts)


def _made(config: TrainConfig, source: sources.Source, cache: TokenCache, *, texts: bool) -> tuple[TokenTable, dict]:
    """The tokens of a file, held in memory."""
    reader, total = RowReader(config, cache.tokenizer, texts=texts, indexed=source.indexed), _Summary()
    chunks = total.watching(read_chunks(reader, source, _processes(config, cache), cache.progress(source)))
    table = TokenTable(source.name, [chunk.batch for chunk in chunks])
    source.refuse_as_json(total.rows, total.bad)
    return table, total.described(reader, source)


def _processes(config: TrainConfig, cache: TokenCache) -> int:
    """The stated number, or one for each core that this process may use; one where processes cannot be forked."""
    if not CAN_FORK:
        note = "dataset_num_proc: one process makes the tokens on this system, which cannot fork others safely"
        cache.notes += [note] * (config.dataset_num_proc > 1 and note not in cache.notes)
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return config.dataset_num_proc or cores


@dataclass
class _Summary:
    """What was found in all chunks of a file."""

    rows: int = 0
    bad: list[BadRow] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    unused: Counter = field(default_factory=Counter)
    read_as: Counter = field(default_factory=Counter)

    def watching(self, chunks: Iterator[TokenizedChunk]) -> Iterator[TokenizedChunk]:
        """The chunks, each counted."""
        for chunk in chunks:
            self.rows += chunk.rows
            self.bad += chunk.bad
            self.counts.update(chunk.counts)
            self.unused.update(chunk.unused)
            self.read_as.update(chunk.read_as)
            yield chunk

    def described(self, reader: RowReader, source: sources.Source) -> dict:
        """JSON-able, for the report and the cache."""
        renamed = [f"{count} rows are read as {names}" for names, count in self.read_as.items()]
        summary = {
            "rows": self.rows,
            "notes": source.notes + renamed,
            "bad": [_described(bad, source.name) for bad in self.bad],
        }
        if reader.format:
            summary |= {"format": reader.format, "style": reader.style}
        summary |= +self.counts
        return summary | ({"unused_columns": dict(self.unused)} if reader.format else {})


def _described(bad: BadRow, name: str) -> tuple[str, bool, str, str, bool]:
    """A bad row as JSON has it; its place without the file's name, which may be another one next time."""
    is_own = bad.where.startswith(name)
    place = bad.where.removeprefix(name) if is_own else bad.where
    return place, is_own, bad.reason, bad.cure, isinstance(bad, LongRow)


def report_skipped(config: TrainConfig, *parts: LoadedSource, can_skip: bool = True) -> list[BadRow]:
    """The bad rows of all parts, which are passed over.

    Raises UsageError where they are not to be, and for a part that has no others.

    `can_skip` is whether the one who reads the error has --on_bad_row and --on_long_row.
    """
    bad = [row for part in parts for row in part.bad]
    refused = [row for row in bad if (config.on_long_row if isinstance(row, LongRow) else config.on_bad_row) == "error"]
    if refused:
        flags = dict.fromkeys(
            "--on_long_row skip" if isinstance(row, LongRow) else "--on_bad_row skip" for row in refused
        )
        raise refusal(refused, f"; or {' and '.join(flags)}" if can_skip else "")
    for part in parts:
        if part.spec and not sum(map(len, part.tables)):
            raise UsageError(
                "no row can be used",
                where=part.spec,
                cure=printable(f"mend them; the first is {bad[0].where}: {bad[0].reason} ({bad[0].cure})")
                if bad
                else "rows",
            )
    return bad


def prompt_ids(tokenizer, asked: str | list[dict], style: str, variables: dict | None = None) -> list[int]:
    """The tokens with which a model is asked that was trained on rows of this style (chat, alpaca or plain).

    `asked` is a question, or for chat perhaps the messages so far, and `variables` what the chat template is told.
    Raises UsageError without a chat template, and for what it refuses.
    """
    if style == "chat":
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        try:
            prompt = chat_template.ChatTemplate(tokenizer, variables).render(messages, generation=True)
        except BadRow as bad:
            raise UsageError(f"this cannot be asked: {bad}", cure=bad.cure) from None
        document = RenderedText(((prompt, False), ("", True)), rendered=True)
    else:
        assert isinstance(asked, str), "messages are for a chat template"
        document = RenderedText(
            ((formats.ALPACA.format(instruction=asked) if style == "alpaca" else asked, False), ("", True))
        )
    tokens = tokenize(tokenizer, [document])[0]
    return tokens.ids[: tokens.prompt]


def refusal(bad: list[BadRow], way_out: str) -> UsageError:
    """The error that names the bad rows, those of one reason together."""
    if len(bad) == 1:
        return UsageError(printable(bad[0].reason), where=printable(bad[0].where), cure=f"{bad[0].cure}{way_out}")
    places: dict[tuple[str, str], list[str]] = {}
    for row in bad:
        places.setdefault((printable(row.reason), printable(row.cure)), []).append(printable(row.where))
    if len(places) == 1:
        (((reason, cure), place),) = places.items()
        return UsageError(
            f"{len(bad)} rows cannot be used: {reason}\n  {_named(place, LISTED)}", cure=f"{cure}{way_out}"
        )
    most = max(1, LISTED // len(places))
    lines = [
        f"{place[0]}: {reason} (cure: {cure})"
        if len(place) == 1
        else f"{len(place)} rows: {reason} (cure: {cure}): {_named(place, most)}"
        for (reason, cure), place in list(places.items())[:LISTED]
    ]
    left = sum(map(len, list(places.values())[LISTED:]))
    return UsageError(
        "\n  ".join([f"{len(bad)} rows cannot be used", *lines, *[f"and {left} more"] * bool(left)]),
        cure=f"mend them{way_out}",
    )


def _named(places: list[str], most: int) -> str:
    more = len(places) - most
    return ", ".join(places[:most]) + (f" and {more} more" if more > 0 else "")
