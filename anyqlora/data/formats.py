"""What a row means: each format turns a row into text with marked answers, or into a conversation."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from anyqlora.config.schema import AUTO
from anyqlora.core.errors import UsageError
from anyqlora.core.registry import nearest
from anyqlora.data import meanings
from anyqlora.data.conversations import BESIDE, OTHER_ROLES, ROLES, Conversation, conversation, role_of
from anyqlora.data.readers import strict_json
from anyqlora.data.readers.bad_rows import BadRow, kind, text

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
QUESTION = "###Question:\n{question}\n###Answer:\n"
QUESTION_CONTEXT = "###Context:\n{context}\n###Question:\n{question}\n###Answer:\n"
_HUMAN = re.compile(r"(### (?:Human|Assistant): ?)")


@dataclass(frozen=True)
class TextRow:
    """Text as it stands: parts, one after the other, each with whether it is learned."""

    parts: tuple[tuple[str, bool], ...]
    ends_itself: bool = False  # no end token is put behind it


def exchange(prompt: str, answer: str, row: dict, style: str, question: str) -> TextRow | Conversation:
    """One prompt and its answer; in chat style `question` is the user's turn instead, after those of "history"."""
    if style == "chat":
        turns = [*_history(row), {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return conversation(turns, row, style)
    return TextRow(((prompt, False), (answer, True)))


def _history(row: dict) -> list[dict]:
    """The turns of "history", LLaMA-Factory's pairs of question and answer, which are learned, too."""
    pairs = row.get("history") or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(turn, str) for turn in pair) for pair in pairs
    ):
        raise BadRow("'history' is no list of pairs of text", '[["question", "answer"], ...]')
    roles = ("user", "assistant")
    return [{"role": role, "content": turn} for pair in pairs for role, turn in zip(roles, pair, strict=True)]


# ------------------------------------------------------------------------------------------------------- the formats


def alpaca(row: dict, style: str) -> TextRow | Conversation:
    """instruction, output and perhaps input, in Alpaca's own words unless the style is chat or plain."""
    instruction, extra, answer = text(row, "instruction"), text(row, "input", empty=True), text(row, "output")
    question = f"{instruction}\n\n{extra}" if extra.strip() else instruction
    if style == "plain":
        return exchange(question + "\n\n", answer, row, style, question)
    template = ALPACA_INPUT if extra.strip() else ALPACA
    return exchange(template.format(instruction=instruction, input=extra), answer, row, style, question)


def prompt_completion(row: dict, style: str) -> TextRow | Conversation:
    """prompt and completion: text that is joined as it stands, or both lists of messages."""
    if isinstance(row.get("prompt"), list):
        if not isinstance(row.get("completion"), list):
            raise BadRow("'prompt' is a list of messages and 'completion' is not", "messages in both, or text in both")
        return conversation([*row["prompt"], *row["completion"]], row, style, first=len(row["prompt"]))
    prompt = text(row, "prompt")
    return exchange(
        ALPACA.format(instruction=prompt) if style == "alpaca" else prompt, text(row, "completion"), row, style, prompt
    )


def question_answer(row: dict, style: str) -> TextRow | Conversation:
    """question, answer and perhaps context, in fsdp_qlora's words (its styles qna and qna_no_ctx) unless the style is
    another.
    """
    question, context, answer = text(row, "question"), text(row, "context", empty=True), text(row, "answer")
    joined = f"{context}\n\n{question}" if context.strip() else question
    if style == "alpaca":
        prompt = (ALPACA_INPUT if context.strip() else ALPACA).format(instruction=question, input=context)
    elif style == "plain":
        prompt = joined + "\n\n"
    else:
        prompt = (QUESTION_CONTEXT if context.strip() else QUESTION).format(question=question, context=context)
    return exchange(prompt, answer, row, style, joined)


def messages(row: dict, style: str) -> Conversation:
    """A conversation as OpenAI writes it: a list of {"role": ..., "content": ...} under "messages", perhaps "tools"
    beside it.
    """
    return conversation(row["messages"], row, style)


def sharegpt(row: dict, style: str) -> Conversation:
    """A conversation as ShareGPT writes it: {"from": "human" or "gpt", "value": ...} under "conversations", perhaps
    "system" beside it.
    """
    turns = row["conversations"]
    if not isinstance(turns, list):
        raise BadRow(f"'conversations' is a {kind(turns)}, not a list", '[{"from": "human", "value": "..."}, ...]')
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise BadRow(f"turn {number} is a {kind(turn)}, not an object", '{"from": "human", "value": "..."}')
        if "role" in turn and "from" not in turn:  # sets converted half way
            messages.append(turn)
            continue
        said_by = text(turn, "from", of=f" of turn {number}")
        if said_by.strip().lower() in CALLERS:
            messages.append(_call(turn, number))
            continue
        role = role_of(said_by)
        if role not in ROLES:
            known = (*ROLES, *OTHER_ROLES)
            raise BadRow(f"turn {number} is from {role!r}{nearest(role, known)}", f"one of {', '.join(known)}")
        messages.append(
            {
                "role": role,
                "content": text(turn, "value", of=f" of turn {number}"),
                **{key: value for key, value in turn.items() if key not in ("from", "value", "role", "content")},
            }
        )
    return conversation(messages, row, style)


CALLERS = ("function_call", "tool_call", "function-call")  # of whom what is said is a call, as JSON


def _call(turn: dict, number: int) -> dict:
    """The assistant's message for a turn that is a call: {"name": ..., "arguments": ...}, or a list of such."""
    of = f" of turn {number}"
    value = turn.get("value")
    try:
        calls = strict_json.value(value) if isinstance(value, str) else value
    except BadRow as bad:
        raise BadRow(f"'value'{of} is a call that is no JSON: {bad.reason}", bad.cure) from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise BadRow(f"'value'{of} is no call", '{"name": "...", "arguments": {...}}')
    rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
    functions = [{"type": "function", "function": call} for call in calls]
    return {**rest, "role": "assistant", "content": "", "tool_calls": functions}


def raw_text(row: dict, style: str) -> TextRow:
    """Text of which everything is learned; of a dialogue with "### Human:" and "### Assistant:" (Guanaco) the
    assistant's words are.
    """
    whole = text(row, "text")
    if style in ("chat", "alpaca"):
        raise BadRow(f"raw text has no {style} form", "--prompt_format plain, or rows with prompt and completion")
    pieces = _HUMAN.split(whole)
    if len(pieces) < 5 or pieces[0].strip() or not any(piece.startswith("### Assistant") for piece in pieces):
        return TextRow(((whole, True),))
    parts: list[tuple[str, bool]] = [(pieces[0], False)]
    for mark, content in zip(pieces[1::2], pieces[2::2], strict=True):
        if mark.startswith("### Assistant") and content.strip():
            parts[-1] = (parts[-1][0] + mark, False)
            parts += [(content, True), ("", False)]
        else:
            parts[-1] = (parts[-1][0] + mark + content, False)
    if len(parts) == 1:
        raise BadRow("the assistant says nothing", "fill it in, or delete the row")
    return TextRow(tuple(parts[:-1]))  # what a human says last is answered by nobody


def segments(row: dict, style: str) -> TextRow:
    """Pieces of text, each with whether it is learned, as axolotl's template-free rows have them."""
    pieces = row["segments"]
    example = '[{"label": false, "text": "..."}, {"label": true, "text": "..."}]'
    if not isinstance(pieces, list) or not pieces:
        raise BadRow("'segments' is no list of pieces", example)
    parts = []
    for number, piece in enumerate(pieces, 1):
        if not isinstance(piece, dict) or piece.get("label") not in (0, 1):
            raise BadRow(f"segment {number} does not say whether it is learned", example)
        parts.append((text(piece, "text", empty=True, of=f" of segment {number}"), bool(piece["label"])))
    if not any(learned and piece for piece, learned in parts):
        raise BadRow("no segment is learned", example)
    if style in ("chat", "alpaca"):
        raise BadRow(f"segments have no {style} form", "--prompt_format text")
    return TextRow(tuple(parts), ends_itself=True)


@dataclass(frozen=True)
class TokenRow:
    """Tokens as they stand, and which of them are learned."""

    ids: tuple[int, ...]
    learned: tuple[bool, ...]


def tokens(row: dict, style: str) -> TokenRow:
    """Tokens that somebody has made: `input_ids`, and perhaps `labels` (-100: not learned) and `attention_mask`."""
    ids = _whole_numbers(row, "input_ids")
    labels = _whole_numbers(row, "labels", len(ids)) if row.get("labels") is not None else ids
    mask = _whole_numbers(row, "attention_mask", len(ids)) if row.get("attention_mask") is not None else [1] * len(ids)
    for place, (token, label, seen) in enumerate(zip(ids, labels, mask, strict=True)):
        if token < 0:
            raise BadRow(f"token {place} of 'input_ids' is {token}", "tokens of the model's own tokenizer")
        if label not in (token, _NOT_LEARNED):
            raise BadRow(
                f"label {place} is {label} and its token is {token}", "labels as the tokens, or -100: not moved"
            )
        if seen not in (0, 1) or not seen and label != _NOT_LEARNED:
            raise BadRow(f"token {place} is padding and learned", "-100 among the labels where attention_mask is 0")
    seen_tokens = [(token, label != _NOT_LEARNED) for token, label, seen in zip(ids, labels, mask, strict=True) if seen]
    return TokenRow(tuple(token for token, _ in seen_tokens), tuple(learned for _, learned in seen_tokens))


_NOT_LEARNED = -100


def _whole_numbers(row: dict, key: str, count: int | None = None) -> list[int]:
    values = row[key]
    if not isinstance(values, list) or not values or not all(type(value) is int for value in values):
        raise BadRow(f"{key!r} is no list of whole numbers", f'"{key}": [1, 2, 3]')
    if count is not None and len(values) != count:
        raise BadRow(f"{key!r} has {len(values)} numbers and 'input_ids' {count}", "one for each token")
    return values


# --------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class FormatInfo:
    """How rows of one format are known and read, and how a question is put as they put theirs."""

    keys: tuple[str, ...]  # by which a row is known
    parse: Callable[[dict, str], TextRow | TokenRow | Conversation]  # of (row, style); raises BadRow
    optional: tuple[str, ...] = ()  # keys that are read where they are there
    in_chat: tuple[str, ...] = ()  # and those that only a conversation has a place for
    style: str = "plain"  # what --prompt_format text is: chat, alpaca or plain
    question: str = ""  # the key of what is asked; "": a question is put as it stands, or as a user's turn

    def question_row(self, question: str) -> dict[str, str]:
        """A row that asks `question`."""
        return {**dict.fromkeys(self.keys, "-"), self.question: question}


WITHOUT_STYLE = ("text", "segments", "tokens")  # what stands there is what is learned
# The first one whose keys are all there is a row's.
FORMATS = {
    "messages": FormatInfo(("messages",), messages, optional=BESIDE, style="chat"),
    "sharegpt": FormatInfo(("conversations",), sharegpt, optional=BESIDE, style="chat"),
    "alpaca": FormatInfo(
        ("instruction", "output"),
        alpaca,
        optional=("input",),
        in_chat=("history",),
        style="alpaca",
        question="instruction",
    ),
    "prompt_completion": FormatInfo(("prompt", "completion"), prompt_completion, question="prompt"),
    "question_answer": FormatInfo(("question", "answer"), question_answer, optional=("context",), question="question"),
    "text": FormatInfo(("text",), raw_text),
    "segments": FormatInfo(("segments",), segments),
    "tokens": FormatInfo(("input_ids",), tokens, optional=("labels", "attention_mask")),
}


def style_of(name: str, prompt_format: str, has_template: bool) -> str:
    """How rows of format `name` are written: chat, alpaca or plain, or text where each format has its own words."""
    if prompt_format == AUTO:
        return "chat" if has_template and name not in WITHOUT_STYLE else "text"
    return prompt_format


def detect(row: dict) -> str | None:
    """The format whose keys the row has."""
    return next((name for name, info in FORMATS.items() if all(key in row for key in info.keys)), None)


def refuse(row: dict, where: str) -> NoReturn:
    """Raises UsageError for the first row of a file of which no row has a format."""
    known = "; ".join(f"{name}: {', '.join(info.keys)}" for name, info in FORMATS.items())
    raise UsageError(
        f"no known format: the row has {', '.join(map(repr, row)) or 'nothing'}",
        where=where,
        cure=f"--columns prompt=COLUMN,completion=COLUMN, or keys of a format - {known}",
    )


def parse_row(row: dict, name: str, style: str) -> TextRow | TokenRow | Conversation:
    """What `row` of format `name` says. Raises BadRow."""
    info = FORMATS[name]
    missing = [key for key in info.keys if key not in row]
    other = detect(row)
    if missing and other:
        raise BadRow(
            f"a row of format {other} among rows of format {name}",
            "one format per file: put these rows into a file of their own",
        )
    if missing:
        near = nearest(missing[0], row)
        raise BadRow(
            f"no {', '.join(map(repr, missing))} (format {name}){near}",
            f"it has {', '.join(map(repr, row)) or 'nothing'}",
        )
    parsed = info.parse(row, style)
    meanings.check(row, used_columns(name, parsed))
    return parsed


def used_columns(name: str, parsed: TextRow | TokenRow | Conversation) -> tuple[str, ...]:
    """The columns of a row that are read."""
    info = FORMATS[name]
    return info.keys + info.optional + ((*BESIDE, *info.in_chat) if isinstance(parsed, Conversation) else ())


def unused_columns(row: dict, name: str, parsed: TextRow | TokenRow | Conversation) -> list[str]:
    """The columns of the row that hold something and are neither seen nor learned."""
    used = used_columns(name, parsed)
    return [key for key, value in row.items() if key not in used and not meanings.is_empty(value)]
