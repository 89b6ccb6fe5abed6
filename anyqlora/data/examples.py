"""Rows as examples: read, understood, tokenised, masked and measured; a row that cannot be used is named."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from anyqlora.config.schema import AUTO, TrainConfig
from anyqlora.core.errors import UsageError
from anyqlora.core.terminal import printable
from anyqlora.data import chat_template, columns, formats, meanings
from anyqlora.data.conversations import Conversation
from anyqlora.data.readers import sources
from anyqlora.data.readers.bad_rows import BadRow, LongRow
from anyqlora.data.tokenizer import WHOLE, RenderedText, TokenizedText, tokenize
from anyqlora.data.turns import TurnReader

LISTED = 20  # bad rows, or reasons, in one message
DIALOGUES = "rows_of_human_and_assistant"  # of raw text
_CHUNK = 1000  # rows tokenised at a time: enough for the tokenizer's threads
_CHARACTERS = 64  # per token of context: no text that people write has more, and a line of 10 MB costs no time


@dataclass(frozen=True, eq=False)
class Example:
    """One document as tokens."""

    ids: np.ndarray  # int32 [n]
    trained: np.ndarray  # bool [n]: token i is one to be learned
    where: str  # "file:line"
    prompt_ids: np.ndarray  # int32 [m]: what the model is given before the last answer
    prompt: str
    answer: str | None  # text of the last answer; None for raw text
    truncated: bool = False
    key: str = ""  # hash of the row's text: equal for duplicates
    length: int = 0  # tokens before it was cut; 0: as many as there are


@dataclass
class LoadedSource:
    """What one `dataset` or `eval_dataset` gave."""

    spec: str
    examples: list[tuple[Example, int]] = field(default_factory=list)  # with the number of its source
    weights: list[float] = field(default_factory=list)  # of each source
    sources: list[dict] = field(default_factory=list)  # JSON-able, one per file
    bad: list[BadRow] = field(default_factory=list)


def read_examples(config: TrainConfig, spec: str, tokenizer, *, held_out: bool) -> LoadedSource:
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
            examples, counts = _examples(config, source, tokenizer)
            part.examples += [(example, number) for example in examples]
            part.bad += source.bad
            part.sources.append(
                {"name": source.name, "rows": len(source.rows), "weight": weight, "notes": source.notes, **counts}
            )
    return part


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
        if part.spec and not part.examples:
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


def _examples(config: TrainConfig, source: sources.Source, tokenizer) -> tuple[list[Example], dict]:
    """The examples of one file, and what was counted on the way; what cannot be used is added to `source.bad`."""
    if not source.rows:
        return [], {}
    rows, counts = _meant(config, source)
    values = [row.value for row in rows]
    if not values:
        return [], dict(counts)
    name = formats.choose(values, rows[0].where) if config.dataset_format == AUTO else config.dataset_format
    template = chat_template.ChatTemplate(tokenizer, chat_template.template_variables(config))
    examples, unused, reader = [], Counter(), TurnReader(template)
    style = formats.style_of(name, config.prompt_format, bool(tokenizer.chat_template))
    for start in range(0, len(rows), _CHUNK):
        documents = []
        for row in rows[start : start + _CHUNK]:
            try:
                parsed = formats.parse_row(row.value, name, style)
                counts[DIALOGUES] += isinstance(parsed, formats.TextRow) and name == "text" and len(parsed.parts) > 1
                unused.update(formats.unused_columns(row.value, name, parsed))
                if isinstance(parsed, Conversation):
                    unused.update(f"messages[].{key}" for key in chat_template.unread(tokenizer, parsed.other_keys))
                texts = _documents(reader, parsed, counts, config.multi_turn)
                documents += [(row.where, _key(texts), document) for document in texts]
            except BadRow as bad:
                source.bad.append(bad.at(row.where))
        limit = _CHARACTERS * config.context_length
        short = [_shortened(document, limit) for _, _, document in documents]
        for (where, key, document), shortened, tokens in zip(documents, short, tokenize(tokenizer, short), strict=True):
            try:
                whole = partial(_whole, tokenizer, document, tokens if document is shortened else None)
                examples.append(_example(config, where, key, document, tokens, document is not shortened, whole))
                counts[tokens.way] += 1
            except BadRow as bad:
                source.bad.append(bad.at(where))
    del counts[WHOLE]
    return examples, {"format": name, "style": style, **+counts, "unused_columns": dict(unused)}


def _meant(config: TrainConfig, source: sources.Source) -> tuple[list[sources.Row], Counter]:
    """The rows that are to be learned from, without the columns that are passed over."""
    rows, counts, ignored = [], Counter(), frozenset(filter(None, map(str.strip, config.ignore_columns.split(","))))
    stated, read_as = columns.parse(config.columns, config.sources.get("columns", "")), Counter()
    for row in source.rows:
        try:
            value = meanings.ignoring(columns.renamed(row.value, stated), ignored)
            if not stated and config.dataset_format == AUTO and not formats.detect(value):
                known = columns.recognised(value)
                value = columns.renamed(value, known)
                if known:
                    read_as[", ".join(f"{ours} from {theirs!r}" for ours, theirs in known.items())] += 1
            value = meanings.chosen(value) if config.preference_data == "chosen" else meanings.refuse_preferences(value)
        except meanings.NotChosen:
            counts["rows_that_are_not_chosen"] += 1
            continue
        except BadRow as bad:
            source.bad.append(bad.at(row.where))
            continue
        rows.append(row if value is row.value else sources.Row(value, row.where))
    source.notes += [f"{count} rows are read as {names}" for names, count in read_as.items()]
    return rows, counts


def _documents(
    reader: TurnReader, parsed: formats.TextRow | Conversation, counts: Counter, multi_turn: str
) -> list[RenderedText]:
    texts = (
        [part for part, _ in parsed.parts]
        if isinstance(parsed, formats.TextRow)
        else [m.get("content", "") for m in parsed.messages]
    )
    counts["rows_with_special_tokens_in_their_text"] += any(
        name in text for name, special in reader.template.tags.items() if special for text in texts
    )
    if isinstance(parsed, formats.TextRow):
        eos = reader.template.tokenizer.eos_token
        return [RenderedText(parsed.parts, end=eos if parsed.parts[-1][0].endswith(eos) else "")]
    counts.update(parsed.mended)
    documents, done = reader.documents(parsed, multi_turn)
    counts.update(done)
    return documents


def _key(documents: list[RenderedText]) -> str:
    """The same for rows that the model sees as the same text, whatever else they carry: ids, other columns."""
    return hashlib.sha256(
        json.dumps(["".join(part for part, _ in document.parts) for document in documents]).encode()
    ).hexdigest()


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
    document: RenderedText,
    tokens: TokenizedText,
    shortened: bool,
    whole: Callable[[], TokenizedText],
) -> Example:
    """The example, cut to the context; `tokens` are of a document that may be shortened, `whole()` are of all of it.

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
    answer = _answer(document)
    told = sum(len(part) for part, _ in document.parts)
    scale = told / (_CHARACTERS * context) if shortened else 1  # as it goes on as it begins
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
