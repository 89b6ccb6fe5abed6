"""Between text and tokens: the model's own tokenizer and chat template, and which tokens of a text are learned."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from anyqlora.core.errors import UsageError
from anyqlora.core.lazy_imports import uncollected

DEMO = Path(__file__).parents[1] / "demo" / "base"
_LEADS = ("", "\n", "a")  # what may stand before a part so that a tokenizer adds no space of its own


def load_tokenizer(name: str, trust_remote_code: bool = False, revision: str = "main", offline: bool = False):
    """The tokenizer (transformers') of a model directory or hub id; "demo" is the embedded base. Raises UsageError."""
    with uncollected("transformers"):
        from transformers import AutoTokenizer

    local = DEMO if name == "demo" else Path(os.path.expanduser(name))
    here = local.exists()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(local) if here else name,
            trust_remote_code=trust_remote_code,
            revision=revision,
            local_files_only=offline or here,
        )
    except (
        Exception
    ) as error:  # a missing file, a broken JSON, an unknown class and a network failure all come as other kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"no tokenizer: {reason}", where=name, cure="a directory with tokenizer.json, or the hub id of a model"
        ) from None
    for template in tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else ():
        if not re.fullmatch(r"[\w-]+", template):  # each is saved with the adapter as a file of its name
            raise UsageError(
                f"a chat template is called {template!r}", where=name, cure="a plain name in tokenizer_config.json"
            )
    return tokenizer


@contextlib.contextmanager
def ending_with(tokenizer, end: str | None) -> Iterator[None]:
    """Texts end with this token meanwhile; with the tokenizer's own where it is None."""
    own = tokenizer.eos_token
    tokenizer.eos_token = end or own
    try:
        yield
    finally:
        tokenizer.eos_token = own


@dataclass(frozen=True)
class RenderedText:
    """Text that becomes one example: parts in order, each with whether it is learned."""

    parts: tuple[tuple[str, bool], ...]
    rendered: bool = False  # by a chat template, which writes the begin token itself
    end: str = ""  # the end token that the last learned part has of its own
    ends_itself: bool = False  # nothing is put behind it


@dataclass(frozen=True)
class TokenizedText:
    """A document as tokens."""

    ids: list[int]
    learned: list[bool]  # of each token
    prompt: int  # tokens before the last learned part
    way: str  # one of the following


WHOLE = "whole"  # as the text is tokenised
IN_PARTS = "rows_tokenised_in_parts"  # a merge would have joined a prompt's end and an answer's beginning
MERGED = "rows_with_a_token_across_a_border"  # the text cannot be tokenised in parts


def special_token_ids(tokenizer) -> dict[str, bool]:
    """{token: whether it is special} of the tokens that were put beside the language, the longest first.

    Gemma adds line breaks and spaces as tokens: such are none.
    """
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()} | dict.fromkeys(
        tokenizer.all_special_tokens, True
    )
    return {name: added[name] for name in sorted(added, key=lambda name: (-len(name), name)) if name.strip()}


def added_special_tokens(tokenizer) -> list[int]:
    """The tokens that the tokenizer puts before a text of its own accord, BOS as a rule."""
    plain = tokenizer.encode("x", add_special_tokens=False)
    full = tokenizer.encode("x", add_special_tokens=True)
    return next((full[:i] for i in range(len(full)) if full[i : i + len(plain)] == plain), [])


def encode_all(tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of each text, none added."""
    return (
        tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        if texts
        else []
    )


def tokenize(tokenizer, documents: Sequence[RenderedText]) -> list[TokenizedText]:
    """The tokens of each document.

    The tokens before a learned part are those that the text before it has when it stands alone, which is what the model
    sees when it is asked; the part's own tokens follow. Where text and text together have the same tokens, they are
    taken.

    What stands between two special tokens is tokenised for itself: no tokenizer looks across one.
    """
    before = added_special_tokens(tokenizer)
    cut = _cut_at_special_tokens(tokenizer)
    spans = [cut(document.parts) for document in documents]
    pieces = dict.fromkeys(text for of_document in spans for span in of_document for text in _beginnings(span))
    encoded = dict(zip(pieces, encode_all(tokenizer, list(pieces)), strict=True))
    out = []
    for document, of_document in zip(documents, spans, strict=True):
        own = [] if _begins(tokenizer, document) else before
        tokens = _tokenize(tokenizer, document, of_document, encoded, own)
        out.append(tokens)
    return out


def _beginnings(span: Sequence[tuple[str, bool]]) -> list[str]:
    """The text up to the end of each part."""
    return list(itertools.accumulate(part for part, _ in span))


def _cut_at_special_tokens(tokenizer) -> Callable[[Sequence[tuple[str, bool]]], list[list[tuple[str, bool]]]]:
    """parts -> groups of parts, each of which but the first begins with a special token.

    Of a tokenizer in Python, which may look across them, and of special tokens that take the white space before them,
    nothing is cut.
    """
    added = list(tokenizer.added_tokens_decoder.values()) if tokenizer.is_fast else []
    cutting = {
        token.content
        for token in added
        if token.special and not (token.lstrip or token.single_word or token.normalized)
    }
    # The leftmost and longest one, as tokenizers find them.
    names = sorted((token.content for token in added), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def cut(parts: Sequence[tuple[str, bool]]) -> list[list[tuple[str, bool]]]:
        groups: list[list[tuple[str, bool]]] = [[]]
        for text, is_learned in parts:
            at = 0
            for match in pattern.finditer(text):
                place = match.start()
                if match.group() not in cutting:
                    continue
                if place > at or (place == at and groups[-1]):
                    groups[-1] += [(text[at:place], is_learned)] * (place > at)
                    groups.append([])
                at = place
            if at < len(text) or not text:
                groups[-1].append((text[at:], is_learned))
        return [group for group in groups if group]

    return cut


def _begins(tokenizer, document: RenderedText) -> bool:
    """Whether the text has its begin token already."""
    bos = tokenizer.bos_token
    return document.rendered or bool(bos and document.parts[0][0].startswith(bos))


def _tokenize(
    tokenizer,
    document: RenderedText,
    spans: list[list[tuple[str, bool]]],
    encoded: dict[str, list[int]],
    before: list[int],
) -> TokenizedText:
    ids, learned, way = list(before), [False] * len(before), WHOLE
    for span in spans:
        read = _parts(tokenizer, span, [encoded[text] for text in _beginnings(span)])
        if read is None:
            prefixes = encode_all(tokenizer, _beginnings(document.parts))
            return _merged(tokenizer, document, prefixes, before)
        ids += read[0]
        learned += read[1]
        way = way if read[2] == WHOLE else read[2]
    return _ended(tokenizer, document, ids, learned, way)


def _parts(
    tokenizer, parts: Sequence[tuple[str, bool]], prefixes: list[list[int]]
) -> tuple[list[int], list[bool], str] | None:
    """(tokens, whether each is learned, the way); None where the text cannot be tokenised in parts."""
    ids, ends, way = prefixes[0], [len(prefixes[0])], WHOLE
    for (part, _), whole in zip(parts[1:], prefixes[1:], strict=True):
        if whole[: len(ids)] == ids:
            ids = whole
        else:
            tail = _tail(tokenizer, ids, part, whole)
            if tail is None:
                return None
            ids, way = ids + tail, IN_PARTS
        ends.append(len(ids))
    learned = [flag for (_, flag), start, end in zip(parts, [0, *ends], ends, strict=False) for _ in range(start, end)]
    return ids, learned, way


def _tail(tokenizer, ids: list[int], part: str, whole: list[int]) -> list[int] | None:
    """Tokens of `part` that, after `ids`, spell the same text as `whole`; None where there are none."""
    for lead in _LEADS:
        alone, led = encode_all(tokenizer, [lead, lead + part]) if lead else ([], encode_all(tokenizer, [part])[0])
        if led[: len(alone)] == alone and token_texts(tokenizer, ids + led[len(alone) :]) == token_texts(
            tokenizer, whole
        ):
            return led[len(alone) :]
    return None


def token_texts(tokenizer, ids: Sequence[int]) -> str:
    """The text of tokens, special ones written out."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _merged(tokenizer, document: RenderedText, prefixes: list[list[int]], before: list[int]) -> TokenizedText:
    """The tokens of the whole text; one that holds a border belongs to the part after it."""
    whole = prefixes[-1]
    starts = [0, *itertools.accumulate((_common(prefix, whole) for prefix in prefixes[:-1]), max), len(whole)]
    learned = [
        flag
        for (_, flag), start, end in zip(document.parts, starts, starts[1:], strict=False)
        for _ in range(start, end)
    ]
    return _ended(tokenizer, document, before + whole, [False] * len(before) + learned, MERGED)


def _common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _ended(tokenizer, document: RenderedText, ids: list[int], learned: list[bool], way: str) -> TokenizedText:
    """With the end token, which is learned like any other, where the text has none of its own."""
    has_end = (
        document.ends_itself or bool(document.end)
        if document.rendered
        else ids[-1:] == [tokenizer.eos_token_id] and learned[-1]
    )
    if not has_end:
        ids, learned = [*ids, tokenizer.eos_token_id], [*learned, True]
    backward = learned[::-1]
    last = backward.index(True)
    run = backward[last:].index(False) if False in backward[last:] else len(ids) - last
    return TokenizedText(ids, learned, len(ids) - last - run, way)
