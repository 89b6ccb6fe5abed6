"""Conversations: messages are checked and put in order for a tokenizer's chat template."""

from __future__ import annotations

from dataclasses import dataclass, field

from anyqlora.core.registry import nearest
from anyqlora.data.meanings import IMAGES, MEANINGS, is_empty
from anyqlora.data.readers import strict_json
from anyqlora.data.readers.bad_rows import BadRow, kind, shown, text

ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_ROLES = {  # as some data sets call them, in any case
    **dict.fromkeys(("human", "prompter", "customer"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "ai", "chatgpt", "agent"), "assistant"),
    **dict.fromkeys(("function", "observation", "ipython", "tool_response"), "tool"),
}


@dataclass(frozen=True)
class Conversation:
    """A conversation for the tokenizer's chat template; `learned` are the numbers of the assistant turns that are
    learned.
    """

    messages: tuple[dict, ...]
    learned: frozenset[int]
    tools: tuple[dict, ...] | None = None
    put_before: int = 0  # messages that stand before the row's own
    other_keys: frozenset[str] = frozenset()  # of messages, which only some templates read
    mended: tuple[str, ...] = ()  # what was done to the row's order: of MENDED
    template_variables: dict = field(default_factory=dict)  # of the row's own, for the template


CUT, MERGED, BEGUN = MENDED = (
    "conversations_cut_after_their_last_answer",
    "conversations_with_turns_of_one_role_joined",
    "conversations_that_the_assistant_begins_unlearned",
)
VARIABLES = "chat_template_kwargs"
TOLD = ("enable_thinking", "reasoning_effort")  # columns that the chat template is told of
BESIDE = ("system", "tools", "functions", VARIABLES, *TOLD)  # what a row may have beside its conversation
# Whether a turn is learned, as OpenAI and others write it, as axolotl, ms-swift, and what counts the other way.
SWITCHES = ("weight", "train", "training", "trainable", "learn", "loss", "loss_weight", "loss_scale")
MASKS = ("mask", "masked")
READ = {
    *(
        "role",
        "content",
        "name",
        "function_call",
        "tool_calls",
        "tool_call_id",
        "reasoning_content",
        "reasoning",
        "thinking",
    ),
    *SWITCHES,
    *MASKS,
}
DETAIL = "train_detail"  # of axolotl: which characters of a turn are learned


def conversation(turns: object, row: dict, style: str, first: int = 0) -> Conversation:
    """The conversation in `turns`, of which assistant turns from number `first` on are learned; the row's "system"
    stands before it.

    Raises BadRow for disorder.
    """
    if style in ("alpaca", "plain"):
        raise BadRow(
            f"a conversation has no {style} form",
            "--prompt_format chat where the tokenizer has a chat template, else rows with prompt and completion",
        )
    if not isinstance(turns, list) or not turns:
        raise BadRow(
            "no list of messages" if not isinstance(turns, list) else "no messages",
            '[{"role": "user", "content": "..."}, ...]',
        )
    messages = [_message(turn, number) for number, turn in enumerate(turns, 1)]
    is_learned = [
        _is_learned(turn, i + 1) is not False and i >= first and messages[i]["role"] == "assistant"
        for i, turn in enumerate(turns)
    ]
    messages, is_learned, mended = _in_order(messages, is_learned)
    learned = [i for i, flag in enumerate(is_learned) if flag]
    if not learned:
        raise BadRow("no assistant turn is learned", "an assistant message with content, of weight 1")
    before = _system(row, messages[0])
    return Conversation(
        (*before, *messages),
        frozenset(number + len(before) for number in learned),
        _tools(row),
        len(before),
        frozenset(key for turn in turns for key, value in turn.items() if key not in READ and not is_empty(value)),
        tuple(mended),
        _template_variables(row),
    )


def _is_learned(turn: dict, number: int) -> bool | None:
    """What a message says of its being learned; None where it says nothing."""
    switches = {}
    for key in (*SWITCHES, *MASKS):
        value = turn.get(key)
        if value is None:
            continue
        if value not in (0, 1):
            what = "a part of its loss, which nothing here weighs" if isinstance(value, float) else "neither yes nor no"
            raise BadRow(f"{key!r} of message {number} is {value!r}: {what}", "0 or false (not learned), 1 or true")
        switches[key] = bool(value) != (key in MASKS)
    detail = turn.get(DETAIL) or []
    for part in detail if isinstance(detail, list) else [None]:
        if not isinstance(part, dict) or part.get("train") not in (0, 1):
            raise BadRow(f"{DETAIL!r} of message {number} is no list of parts to train", '{"train": true, ...} in each')
        switches[DETAIL] = bool(part["train"])
        if switches[DETAIL] != bool(detail[0]["train"]):
            raise BadRow(
                f"{DETAIL!r} of message {number} trains some of its characters and not others",
                "'train' for a whole message, or several messages",
            )
    if len({*switches.values()}) > 1:
        raise BadRow(f"message {number} says two things: {', '.join(switches)}", "one of them")
    is_learned = next(iter(switches.values()), None)
    if is_learned and role_of(str(turn.get("role"))) != "assistant" and not {"weight", *MASKS} & switches.keys():
        raise BadRow(
            f"{next(iter(switches))!r} of message {number} asks to learn what the {turn.get('role')} says",
            "only what the assistant says is learned: false here, or leave it out",
        )
    return is_learned


def role_of(name: str) -> str:
    """One of ROLES for what a data set calls it; what is none of theirs as it is."""
    low = name.strip().lower()
    return OTHER_ROLES.get(low, low if low in ROLES else name)


def _tools(row: dict) -> tuple[dict, ...] | None:
    """The row's tools, a list of JSON schemas or the text of one, as columns of CSV and Parquet have it; None without
    any.
    """
    schemas: dict[str, list] = {}
    for name in ("tools", "functions"):  # the latter is what OpenAI called them first
        tools = _parsed(row.get(name) or None, f"{name!r}", "list")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise BadRow(f"{name!r} is {shown(tools)}, not a list of objects", "tools as JSON schemas")
        if tools:
            schemas[name] = tools
    if len(schemas) > 1:
        raise BadRow("the row has 'tools' and 'functions'", "one of them")
    if "functions" in schemas:
        return tuple({"type": "function", "function": tool} for tool in schemas["functions"])
    return tuple(schemas["tools"]) if schemas else None


def _template_variables(row: dict) -> dict:
    """What the row's own columns tell the chat template."""
    variables = _parsed(row.get(VARIABLES) or {}, f"{VARIABLES!r}", "object")
    if not isinstance(variables, dict):
        raise BadRow(f"{VARIABLES!r} is {shown(variables)}, not an object", '{"enable_thinking": false}')
    return variables | {name: row[name] for name in TOLD if row.get(name) is not None}


def _system(row: dict, first: dict) -> list[dict]:
    """The system message that the row has beside its conversation, unless that begins with it."""
    content = text(row, "system", empty=True)
    if not content.strip():
        return []
    if first["role"] == "user":
        return [{"role": "system", "content": content}]
    if first["content"].strip() != content.strip():
        raise BadRow(f"'system' says something else than the {first['role']} message", "one of the two")
    return []


def _message(turn: object, number: int) -> dict:
    """The message as the chat template gets it: text parts joined, nulls and weight left out."""
    if not isinstance(turn, dict):
        raise BadRow(f"message {number} is a {kind(turn)}, not an object", '{"role": "user", "content": "..."}')
    of = f" of message {number}"
    role = role_of(text(turn, "role", of=of))
    if role not in ROLES:
        raise BadRow(f"role {role!r}{of} is unknown{nearest(role, ROLES)}", f"one of {', '.join(ROLES)}")
    for key in turn:
        if MEANINGS.get(key) is IMAGES and not is_empty(turn[key]):
            raise BadRow(f"{key!r}{of}: {IMAGES}", f"messages of text; or --ignore_columns {key}")
    content = turn.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                part_type = part.get("type") if isinstance(part, dict) else part
                raise BadRow(
                    f"'content'{of} has a part that is no text: {part_type!r}",
                    "text parts only; images and sound cannot be trained on",
                )
        turn = {**turn, "content": "".join(text(part, "text", empty=True, of=of) for part in content)}
    message = {
        key: value
        for key, value in turn.items()
        if key not in (*SWITCHES, *MASKS, DETAIL, "tool_calls") and value is not None
    }
    message["role"] = role
    if "function_call" in message:  # OpenAI's form before tool_calls
        turn = {**turn, "tool_calls": [{"type": "function", "function": message.pop("function_call")}]}
    calls = turn.get("tool_calls") or []  # an empty list is none, and templates ask whether there is one
    message["content"] = text(turn, "content", of=of, empty=role == "tool" or role == "assistant" and bool(calls))
    return {**message, "tool_calls": _tool_calls(calls, of)} if calls else message


def _tool_calls(calls: object, of: str) -> list[dict]:
    """The calls of a message as templates expect them: arguments are an object, which OpenAI writes as JSON text."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRow(f"'tool_calls'{of} is no list of objects", '[{"function": {"name": "...", "arguments": {...}}}]')
    return [_tool_call(call, f" of tool call {number}{of}") for number, call in enumerate(calls, 1)]


def _tool_call(call: dict, of: str) -> dict:
    function = call.get("function", call)  # some sets leave the object between out, as templates allow
    if not isinstance(function, dict):
        raise BadRow(f"'function'{of} is {shown(function)}, not an object", '{"name": "...", "arguments": {...}}')
    text(function, "name", of=of)
    if "arguments" in function:
        function = {**function, "arguments": _arguments(function["arguments"], of)}
    return {**call, "function": function} if "function" in call else function


def tool_name(tool: dict) -> str:
    """What a tool's JSON schema calls it; "" where it has no name."""
    function = tool.get("function", tool)
    return str(function.get("name") or "") if isinstance(function, dict) else ""


def functions(message: dict) -> list[dict]:
    """The functions that a message calls: name, and arguments as an object."""
    return [call.get("function", call) for call in message.get("tool_calls", ())]


def _arguments(value: object, of: str) -> dict:
    value = _parsed(value, f"'arguments'{of}", "object")
    if not isinstance(value, dict):
        raise BadRow(f"'arguments'{of} is {shown(value)}, not an object", '"arguments": {"city": "Rome"}')
    return value


def _parsed(value: object, named: str, wanted: str) -> object:
    """What JSON text says; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return strict_json.value(value)
    except BadRow as bad:
        raise BadRow(f"{named} is text that is no JSON {wanted}: {bad.reason}", bad.cure) from None


def _in_order(messages: list[dict], is_learned: list[bool]) -> tuple[list[dict], list[bool], list[str]]:
    """The messages up to the last answer, neighbours of one role joined, an answer to nothing not learned; and what of
    this was done. Raises BadRow for any other disorder.
    """
    mended, last = [], max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if last < 0:
        raise BadRow("no message is the assistant's, so there is nothing to learn", "an assistant message")
    if last + 1 < len(messages):
        mended.append(CUT)
    ordered: list[tuple[dict, bool]] = []
    for message, flag in zip(messages[: last + 1], is_learned, strict=False):
        if ordered and _can_join(*ordered[-1], message, flag):
            joined = {**ordered[-1][0], "content": f"{ordered[-1][0]['content']}\n\n{message['content']}"}
            ordered[-1] = joined, flag
            mended.append(MERGED)
        else:
            ordered.append((message, flag))
    roles = [message["role"] for message, _ in ordered]
    _check_order(roles)
    begins = next(i for i, role in enumerate(roles) if role == "assistant")
    if "user" not in roles[:begins]:
        ordered[begins] = ordered[begins][0], False
        mended.append(BEGUN)
    return [message for message, _ in ordered], [flag for _, flag in ordered], list(dict.fromkeys(mended))


def _can_join(before: dict, is_learned: bool, message: dict, flag: bool) -> bool:
    """Whether two neighbours say one thing after the other: text of one role, both learned or neither."""
    is_text = {*before, *message} == {"role", "content"}
    return is_text and message["role"] == before["role"] != "tool" and is_learned == flag


def _check_order(roles: list[str]) -> None:
    """Raises BadRow where somebody speaks out of turn. A template may be stricter, and then gives its own reason."""
    follows = {
        "start": ("system", "developer", "user", "assistant"),
        "system": ("user", "assistant"),
        "developer": ("user", "assistant"),
        "user": ("assistant", "system", "developer"),
        "assistant": ("user", "tool", "system", "developer"),
        "tool": ("tool", "assistant"),
    }
    before = "start"
    for number, role in enumerate(roles, 1):
        if role not in follows[before]:
            after = "first" if before == "start" else f"after {before}"
            raise BadRow(
                f"roles out of order: message {number} ({role}) comes {after}",
                f"{before if before != 'start' else 'first'}: {' or '.join(follows[before])} comes next",
            )
        before = role
