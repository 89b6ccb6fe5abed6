"""Columns by other names: those of known data sets, and those that a setting gives."""

from __future__ import annotations

import re

from anyqlora.core.errors import UsageError
from anyqlora.core.registry import nearest
from anyqlora.data.readers.bad_rows import BadRow

NAMES = (
    *("messages", "conversations", "tools", "system", "instruction", "input", "output", "history"),
    *("prompt", "completion", "question", "answer", "context", "text"),
)
# Our names for those of data sets that have no format's own: the first whose columns are all there is taken. `optional`
# ones are read where they are there.
KNOWN: tuple[tuple[dict[str, str], dict[str, str]], ...] = (
    ({"instruction": "instruction", "output": "response"}, {"input": "context", "system": "system_prompt"}),  # dolly
    ({"instruction": "instruction", "output": "completion"}, {"input": "input", "system": "system_prompt"}),
    ({"instruction": "instruction", "output": "answer"}, {"input": "context"}),
    ({"question": "question", "answer": "response"}, {"context": "context", "system": "system_prompt"}),  # OpenOrca
    ({"question": "question", "answer": "solution"}, {}),
    ({"prompt": "query", "completion": "response"}, {"system": "system_prompt"}),  # MetaMath
    ({"prompt": "query", "completion": "answer"}, {}),
    ({"prompt": "prompt", "completion": "response"}, {"system": "system_prompt"}),
    ({"prompt": "prompt", "completion": "answer"}, {"system": "system_prompt"}),
    ({"prompt": "prompt", "completion": "output"}, {"system": "system_prompt"}),
    ({"prompt": "input", "completion": "output"}, {"system": "system_prompt"}),
    ({"prompt": "input", "completion": "response"}, {"system": "system_prompt"}),
    ({"prompt": "inputs", "completion": "targets"}, {}),  # Flan
    ({"prompt": "source", "completion": "target"}, {}),
    ({"prompt": "problem", "completion": "solution"}, {}),  # MATH, NuminaMath
    ({"prompt": "problem", "completion": "answer"}, {}),
    ({"prompt": "user", "completion": "assistant"}, {"system": "system"}),
    ({"prompt": "prompt", "completion": "generation"}, {"system": "system_prompt"}),  # metharme
    ({"instruction": "INSTRUCTION", "output": "RESPONSE"}, {}),  # OpenAssistant's instructions
    ({"prompt": "message_1", "completion": "message_2"}, {}),  # CAMEL
    ({"prompt": "article", "completion": "summary"}, {}),
    ({"prompt": "document", "completion": "summary"}, {}),
    ({"prompt": "dialogue", "completion": "summary"}, {}),
    ({"question": "question", "answer": "final_answer"}, {"context": "context"}),
    ({"text": "content"}, {}),
)
TURNS = ("conversation", "dialog", "dialogue", "chat", "turns", "conversation_turns")
_STEP = re.compile(r"\[(\d+)\]|\.?([^.\[\]]+)")


def parse(stated: str, where: str) -> dict[str, str]:
    """{our name: path} of `columns`: "prompt=question,completion=answers[0].text". Raises UsageError."""
    named = {}
    for part in filter(None, map(str.strip, stated.split(","))):
        name, equals, path = (text.strip() for text in part.partition("="))
        if not (equals and path):
            raise UsageError(f"{part!r} names no column", where=where, cure="prompt=question,completion=answer")
        if name not in NAMES:
            raise UsageError(
                f"{name!r} is no name of a format{nearest(name, NAMES)}",
                where=where,
                cure=f"one of {', '.join(NAMES)}",
            )
        named[name] = path
    return named


def renamed(row: dict, stated: dict[str, str]) -> dict:
    """The row with the columns `stated` under our names; what they were called before is gone. Raises BadRow."""
    if not stated:
        return row
    values = {name: value_at(row, path) for name, path in stated.items()}
    taken = {_steps(path)[0] for path in stated.values()} - {*stated}
    return {**{key: value for key, value in row.items() if key not in taken}, **values}


def value_at(row: dict, path: str) -> object:
    """What is at a path such as answers[0].text. Raises BadRow."""
    value: object = row
    if path in row:  # a name with a dot in it
        return row[path]
    for step in _steps(path):
        try:
            value = value[step]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            keys = ", ".join(map(repr, value)) if isinstance(value, dict) else ""
            raise BadRow(f"no column {path!r}", f"--columns with what is there{': ' * bool(keys)}{keys}") from None
    return value


def _steps(path: str) -> list[str | int]:
    return [int(number) if number else name for number, name in _STEP.findall(path)]


def recognised(row: dict) -> dict[str, str]:
    """{our name: the row's} of a row without a format's own columns that has those of a known data set; {}: none."""
    for name in TURNS:
        turns = row.get(name)
        if isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns):
            if {"role", "content"} <= turns[0].keys():
                return {"messages": name}
            if {"from", "value"} <= turns[0].keys():
                return {"conversations": name}
    free = [name for name in NAMES if name not in row]  # nothing takes the place of what the row has
    for needed, optional in KNOWN:
        if all(theirs in row and ours in (theirs, *free) for ours, theirs in needed.items()):
            return needed | {ours: theirs for ours, theirs in optional.items() if theirs in row and ours in free}
    return {}
