"""Rows that cannot be used, and how a row's text is read so that such a one is named."""

from __future__ import annotations


class BadRow(Exception):
    """A row that cannot be used: why, what to do about it, and `file:line[:col]`."""

    def __init__(self, reason: str, cure: str, where: str = ""):
        super().__init__(reason)
        self.reason, self.cure, self.where = reason, cure, where

    def __reduce__(self):
        return type(self), (self.reason, self.cure, self.where)

    def at(self, where: str) -> BadRow:
        """The same, of a row whose place is known now."""
        return type(self)(self.reason, self.cure, where)


class LongRow(BadRow):
    """A row that is longer than the context: on_long_row says what becomes of it, on_bad_row of the others."""


def kind(value: object) -> str:
    """The JSON name of a value's type."""
    kinds = {
        str: "string",
        list: "list",
        bool: "boolean",
        int: "number",
        float: "number",
        type(None): "null",
        dict: "object",
    }
    return kinds.get(type(value), type(value).__name__)


def shown(value: object) -> str:
    """What a value is, in a sentence: "null", "a list"."""
    return "null" if value is None else f"{'an' if isinstance(value, dict) else 'a'} {kind(value)}"


def text(row: dict, key: str, *, empty: bool = False, of: str = "") -> str:
    """The text under `key`.

    Raises BadRow where it is missing, not text or (unless `empty`) blank; `of` says of what it is part.
    """
    named = f"{key!r}{of}"
    if key not in row:
        if empty:
            return ""
        raise BadRow(f"no {named}", f"it has {', '.join(map(repr, row)) or 'nothing'}")
    value = row[key]
    if value is None and empty:
        return ""
    if not isinstance(value, str):
        raise BadRow(f"{named} is {shown(value)}, not text", f'"{key}": "..."')
    if not empty and not value.strip():
        raise BadRow(f"{named} is empty", "fill it in, or delete the row")
    return writable(value, named)


def writable(value: str, named: str) -> str:
    """The text itself. Raises BadRow where a tokenizer cannot have it."""
    if "\0" in value:
        raise BadRow(f"{named} holds a NUL character", "delete the character")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(
            f"{named} holds half of a surrogate pair at character {error.start + 1}", "write the row anew as UTF-8"
        ) from None
    return value
