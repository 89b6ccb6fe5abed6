"""From rows to tokens: one file's rows are understood, written, tokenised, masked and measured, a chunk at a time."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from anyqlora.config.schema import AUTO, TrainConfig
from anyqlora.data import chat_template, columns, formats, meanings, trees
from anyqlora.data.conversations import Conversation
from anyqlora.data.readers import sources
from anyqlora.data.readers.bad_rows import BadRow, LongRow
from anyqlora.data.readers.dataset_index import IndexedSet
from anyqlora.data.rows import Example, batch_of
from anyqlora.data.tokenizer import WHOLE, RenderedText, TokenizedText, tokenize
from anyqlora.data.turns import TurnReader

if TYPE_CHECKING:
    import pyarrow as pa

DIALOGUES = "rows_of_human_and_assistant"  # of raw text
_CHARACTERS = 64  # per token of context: no text that people write has more, and a line of 10 MB costs no time


@dataclass
class TokenizedChunk:
    """What a chunk of rows gave."""

    batch: pa.RecordBatch
    rows: int = 0  # that could be read
    bad: list[BadRow] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)  # what was counted on the way
    unused: Counter = field(default_factory=Counter)  # rows that have a column which nobody reads
    read_as: Counter = field(default_factory=Counter)  # rows whose columns go by other names


class RowReader:
    """Makes tokens of the rows of one file."""

    def __init__(self, config: TrainConfig, tokenizer, *, texts: bool, indexed: IndexedSet | None = None):
        """`texts`: what prompts and answers say is kept, for rows that are evaluated; `indexed` says what the rows call
        their columns.
        """
        self.indexed = indexed
        self.config, self.tokenizer, self.texts = config, tokenizer, texts
        self.format = "" if config.dataset_format == AUTO else config.dataset_format
        template = chat_template.ChatTemplate(tokenizer, chat_template.template_variables(config))
        self.turns = TurnReader(template)
        self.stated = columns.parse(config.columns, config.sources.get("columns", ""))
        self.ignored = frozenset(filter(None, map(str.strip, config.ignore_columns.split(","))))
        special = [name for name, is_special in template.tags.items() if is_special]
        self.special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    @property
    def style(self) -> str:
        """How the rows are written: see formats.style_of."""
        return formats.style_of(self.format, self.config.prompt_format, bool(self.tokenizer.chat_template))

    def choose_format(self, chunks: Iterable[sources.Chunk]) -> list[sources.Chunk]:
        """Know the format by the first row that has one; the chunks that were read for it, to be read again.

        Raises UsageError where no row has one.
        """
        read, first = [], None
        for chunk in chunks:
            read.append(chunk)
            if self.format:
                return read
            rows = self._meant(chunk, TokenizedChunk(batch_of([], texts=False)))
            first = first or next(iter(rows), None)
            self.format = next(filter(None, (formats.detect(row.value) for row in rows)), "")
            if self.format:
                return read
        if first:
            formats.refuse(first.value, first.where)
        return read

    def read(self, chunk: sources.Chunk) -> TokenizedChunk:
        """The rows of a chunk as tokens."""
        result = TokenizedChunk(batch_of([], texts=False))
        documents = []
        for row in self._meant(chunk, result):
            try:
                documents += [(row.where, *pair) for pair in self._written(row, result)]
            except BadRow as bad:
                result.bad.append(bad.at(row.where))
        limit = _CHARACTERS * self.config.context_length
        made = [item for item in documents if isinstance(item[2], TokenizedText)]
        documents = [item for item in documents if not isinstance(item[2], TokenizedText)]
        short = [_shortened(document, limit) for _, _, document in documents]
        examples = []
        for where, key, tokens in made:
            try:
                examples.append(_example(self.config, where, key, None, tokens, False, lambda tokens=tokens: tokens))
            except BadRow as bad:
                result.bad.append(bad.at(where))
        for (where, key, document), shortened, tokens in zip(
            documents, short, tokenize(self.tokenizer, short), strict=True
        ):
            whole = partial(_whole, self.tokenizer, document, tokens if document is shortened else None)
            try:
                examples.append(_example(self.config, where, key, document, tokens, document is not shortened, whole))
                result.counts[tokens.way] += 1
            except BadRow as bad:
                result.bad.append(bad.at(where))
        del result.counts[WHOLE]
        result.batch = batch_of(examples, texts=self.texts)
        return result

    def _meant(self, chunk: sources.Chunk, result: TokenizedChunk) -> list[sources.Row]:
        """The rows that are to be learned from, without the columns that are passed over."""
        config, rows = self.config, []
        for row in chunk.read():
            if isinstance(row, BadRow):
                result.bad.append(row)
                continue
            result.rows += 1
            try:
                value = self.indexed.row(row.value) if self.indexed else row.value
                value = meanings.ignoring(columns.renamed(value, self.stated), self.ignored)
                if not self.stated and trees.is_tree(value):
                    value = trees.best_path(value)
                    result.read_as["conversations of the replies with the best ranks of a tree"] += 1
                if not self.stated and config.dataset_format == AUTO and not formats.detect(value):
                    known = columns.recognised(value)
                    value = columns.renamed(value, known)
                    if known:
                        names = ", ".join(f"{ours} from {theirs!r}" for ours, theirs in known.items())
                        result.read_as[names] += 1
                is_chosen = config.preference_data == "chosen"
                value = meanings.chosen(value) if is_chosen else meanings.refuse_preferences(value)
            except meanings.NotChosen:
                result.counts["rows_that_are_not_chosen"] += 1
            except BadRow as bad:
                result.bad.append(bad.at(row.where))
            else:
                rows.append(row if value is row.value else sources.Row(value, row.where))
        return rows

    def _written(self, row: sources.Row, result: TokenizedChunk) -> Iterator[tuple[str, RenderedText | TokenizedText]]:
        """(the row's key, each text that it becomes). Raises BadRow."""
        parsed = formats.parse_row(row.value, self.format, self.style)
        if isinstance(parsed, formats.TokenRow):
            result.unused.update(formats.unused_columns(row.value, self.format, parsed))
            return iter([(_key_of_tokens(parsed), _tokenized(parsed))])
        is_text = isinstance(parsed, formats.TextRow)
        result.counts[DIALOGUES] += is_text and self.format == "text" and len(parsed.parts) > 1
        result.unused.update(formats.unused_columns(row.value, self.format, parsed))
        if isinstance(parsed, Conversation):
            unread = chat_template.unread(self.tokenizer, parsed.other_keys)
            result.unused.update(f"messages[].{key}" for key in unread)
        texts = [part for part, _ in parsed.parts] if is_text else [m.get("content", "") for m in parsed.messages]
        result.counts["rows_with_special_tokens_in_their_text"] += any(map(self.special.search, texts))
        if is_text:
            eos = self.tokenizer.eos_token
            end = eos if "".join(part for part, _ in parsed.parts).endswith(eos) else ""
            documents = [RenderedText(parsed.parts, parsed.ends_itself, end, parsed.ends_itself)]
        else:
            result.counts.update(parsed.mended)
            documents, done = self.turns.documents(parsed, self.config.multi_turn)
            result.counts.update(done)
        key = _key(documents)
        return ((key, document) for document in documents)


def _key(documents: list[RenderedText]) -> str:
    """The same for rows that the model sees as the same text, whatever else they carry: ids, other columns."""
    return hashlib.sha256(
        json.dumps(["".join(part for part, _ in document.parts) for document in documents]).encode()
    ).hexdigest()


def _key_of_tokens(row: formats.TokenRow) -> str:
    return hashlib.sha256(np.array(row.ids, np.int64).tobytes()).hexdigest()


def _tokenized(row: formats.TokenRow) -> TokenizedText:
    """Tokens that somebody has made, and where their last learned run begins."""
    learned = list(row.learned)
    last = len(learned) - 1 - learned[::-1].index(True) if True in learned else len(learned)
    while last > 0 and learned[last - 1]:
        last -= 1
    return TokenizedText(list(row.ids), learned, last, WHOLE)


def _whole(tokenizer, document: RenderedText, tokens: TokenizedText | None) -> TokenizedText:
    """The tokens of all of a document: those that there are, where it was not shortened."""
    return tokens or tokenize(tokenizer, [document])[0]


def _shortened(document: RenderedText, limit: int) -> RenderedText:
    """The document's first `limit` characters; the document itself where it has no more."""
    if sum(len(part) for part, _ in document.parts) <= limit:
        return document
    parts, left = [], limit
    for part, learned in document.parts:
        if left:
            parts.append((part[:left], learned))
        left -= len(parts[-1][0]) if left else 0
    return RenderedText(tuple(parts), document.rendered)


def _example(
    config: TrainConfig,
    where: str,
    key: str,
    document: RenderedText | None,
    tokens: TokenizedText,
    shortened: bool,
    whole: Callable[[], TokenizedText],
) -> Example:
    """The example, cut to the context; `tokens` are of a document that may be shortened, `whole()` are of all of it.
    Tokens that somebody has made are of no document.

    Raises BadRow where it is too long for the setting, or nothing of it would be learned.
    """
    context = config.context_length
    # A shortened document has got an end token that it must not have.
    count = min(context, len(tokens.ids) - shortened)
    truncated = count < len(tokens.ids)
    if truncated and config.on_long_row != "truncate":
        length = len(whole().ids)
        raise LongRow(
            f"{length} tokens, over the context of {context}", f"--context_length {length}, or --on_long_row truncate"
        )
    learned = np.array(tokens.learned[:count], bool)
    if not learned[1:].any():
        if not truncated:
            raise BadRow("there is no token to learn: nothing is learned from it", "a longer text")
        tokens = whole()
        raise BadRow(
            f"the prompt ({tokens.learned.index(True)} tokens) fills the context of {context}: nothing is learned from "
            f"it",
            f"--context_length {len(tokens.ids)}",
        )
    answer = _answer(document) if document else ("", None)
    characters = sum(len(part) for part, _ in document.parts) if document else 0
    scale = characters / (_CHARACTERS * context) if shortened else 1  # as it goes on as it begins
    return Example(
        np.array(tokens.ids[:count], np.int32),
        learned,
        where,
        np.array(tokens.ids[: tokens.prompt], np.int32),
        answer[0],
        answer[1],
        truncated,
        key,
        max(context + 1, round(len(tokens.ids) * scale)) if truncated else 0,
    )


def _answer(document: RenderedText) -> tuple[str, str | None]:
    """(text before the last learned part, that part without its end token); raw text has no answer."""
    last = max(i for i, (_, learned) in enumerate(document.parts) if learned)
    if len(document.parts) == 1:
        return "", None
    return "".join(part for part, _ in document.parts[:last]), document.parts[last][0].removesuffix(document.end)
