"""JSON read strictly: every row knows its line, and what is not JSON is named to the column."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from anyqlora.data.readers.bad_rows import BadRow, kind

_CONSTANT = re.compile(r'"(?:[^"\\]|\\.)*"|(-?(?:NaN|Infinity))')
_SPACE = re.compile(r"[ \t\r\n]*")


def text_of(raw: bytes, name: str, line: int) -> str:
    """`raw`, which begins at `line` of file `name`, as text. Raises BadRow at the byte that is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        column = error.start - (before.rfind(b"\n") + 1) + 1
        raise BadRow(
            f"byte 0x{raw[error.start]:02x} is not UTF-8",
            "iconv -f LATIN1 -t UTF-8, if it is Latin-1",
            f"{name}:{line + before.count(10)}:{column}",
        ) from None


def lines(content: bytes, name: str, first: int = 1) -> Iterator[tuple[str, dict | BadRow]]:
    """("file:line", row) of text with one row per line, from line `first` on; a BadRow instead of a row that cannot be
    read.
    """
    for number, raw in enumerate(content.split(b"\n"), first):
        if not raw.strip():
            continue
        try:
            yield f"{name}:{number}", _line(raw.rstrip(b"\r"), name, number)
        except BadRow as bad:
            yield f"{name}:{number}", bad


def _after_space(text: str, position: int = 0) -> int:
    """Where the white space from `position` on ends."""
    space = _SPACE.match(text, position)
    assert space, "the pattern matches nothing, too"
    return space.end()


def _line(raw: bytes, name: str, number: int) -> dict:
    if not raw.strip(b"\0"):
        raise BadRow(
            f"{len(raw)} NUL bytes", "delete the line: the file was cut off while it was written", f"{name}:{number}:1"
        )
    text = text_of(raw, name, number)
    start = _after_space(text)
    value, end = _decoded(text, start, lambda position: f"{name}:{number}:{position + 1}", f"{name}:{number}")
    end = _after_space(text, end)
    if end < len(text):
        raise BadRow("more than one JSON value on the line", "one row per line", f"{name}:{number}:{end + 1}")
    return _object(value, f"{name}:{number}:{start + 1}")


def value(text: str) -> object:
    """The one JSON value that `text` is. Raises BadRow, of which nobody knows the place."""
    decoded, end = _decoded(text, _after_space(text), lambda position: "", "")
    if _after_space(text, end) < len(text):
        raise BadRow("more than one JSON value", "one value")
    return decoded


def items(content: bytes, name: str) -> Iterator[tuple[str, dict | BadRow]]:
    """("file:line", row) of a file that is one JSON list; a BadRow instead of a row that is none.

    Nothing follows a break.
    """
    try:
        text = text_of(content, name, 1)
    except BadRow as bad:
        yield bad.where, bad
        return
    place = _Place(text, name)
    position = _after_space(text, text.index("[") + 1)
    while text[position : position + 1] != "]":
        start = place(position)
        where = start.rpartition(":")[0]
        try:
            value, end = _decoded(text, position, place, where)
        except BadRow as bad:
            yield where, bad
            return
        try:
            yield where, _object(value, start)
        except BadRow as bad:
            yield where, bad
        end = _after_space(text, end)
        if text[end : end + 1] not in (",", "]"):
            reason = "the JSON breaks off" if end == len(text) else "not JSON: expected ',' or ']'"
            yield where, BadRow(reason, "write the file anew with a JSON library", place(end))
            return
        position = _after_space(text, end + 1) if text[end] == "," else end
        if text[end] == "," and text[position : position + 1] == "]":
            yield (
                where,
                BadRow("not JSON: a comma before the ']'", "write the file anew with a JSON library", place(end)),
            )
            return
    rest = _after_space(text, position + 1)
    if rest < len(text):
        yield place(rest), BadRow("text after the end of the list", "one list per file", place(rest))


class _Place:
    """ "file:line:col" of a position in a text, asked for in rising order: each line break is counted once."""

    def __init__(self, text: str, name: str):
        self.text, self.name, self.line, self.seen = text, name, 1, 0

    def __call__(self, position: int) -> str:
        self.line += self.text.count("\n", self.seen, position)
        self.seen = max(position, self.seen)
        return f"{self.name}:{self.line}:{position - self.text.rfind(chr(10), 0, position)}"


class _Repeated(ValueError):
    """A key stands twice in one object."""


class _Constant(ValueError):
    """NaN or Infinity, which Python reads and JSON does not have."""


def _pairs(pairs: list[tuple[str, object]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Repeated(next(name for name in names if names.count(name) > 1))
    return row


def _constant(name: str):
    raise _Constant(name)


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)


def _decoded(text: str, start: int, place: Callable[[int], str], where: str) -> tuple[object, int]:
    """The JSON value at `start`, and where it ends.

    Raises BadRow at the place of the break, or at `where` where none is known.
    """
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        reason = "the JSON breaks off" if cut else f"not JSON: {error.msg}"
        if text[error.pos : error.pos + 1] == "\0":
            reason = "a NUL byte"
        raise BadRow(reason, "write the row anew with a JSON library", place(error.pos)) from None
    except _Repeated as error:
        raise BadRow(f"key {str(error)!r} stands twice", "keep one of the two", where) from None
    except _Constant as error:
        position = next(match.start(1) for match in _CONSTANT.finditer(text, start) if match[1])
        raise BadRow(f"{error} is not JSON", "null, or leave the key out", place(position)) from None
    except RecursionError:
        raise BadRow("nested too deeply", "a row is flat", where) from None
    except ValueError as error:  # a number with more digits than Python converts
        raise BadRow(str(error).split(";")[0], "a string", where) from None


def _object(value: object, where: str) -> dict:
    if not isinstance(value, dict):
        raise BadRow(f"a {kind(value)}, not an object", 'a row is {"key": value, ...}', where)
    return value
