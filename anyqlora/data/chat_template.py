"""A conversation through the tokenizer's own chat template, and what of the result the assistant says."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import UsageError
from anyqlora.core.registry import CHAT_TEMPLATES, nearest
from anyqlora.data.conversations import Conversation, functions, tool_name
from anyqlora.data.readers.bad_rows import BadRow, writable
from anyqlora.data.tokenizer import RenderedText

REASONING = ("reasoning_content", "thinking", "reasoning")  # transformers takes one for the other
# Llama 3's template and others write today's date into the system turn: a run that is resumed tomorrow would read other
# tokens.
_PINNED = (
    "{%- macro strftime_now(format) -%}{{ format | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July') "
    "| "
    "replace('%m', '07') | replace('%Y', '2024') | replace('%y', '24') | replace('%A', 'Friday') | replace('%a', "
    "'Fri') | "
    "replace('%H', '12') | replace('%I', '12') | replace('%M', '00') | replace('%S', '00') | replace('%p', 'PM') }}{%- "
    "endmacro -%}"
)


def requested_template(config: TrainConfig) -> str:
    """The template that the setting chat_template names: one of ours, or what is in a file; "" where it names none.

    Raises UsageError.
    """
    name, where = config.chat_template, config.sources.get("chat_template", "")
    if not name:
        return ""
    path = (
        Path(__file__).parent / "templates" / f"{name}.jinja"
        if name in CHAT_TEMPLATES
        else Path(os.path.expanduser(name))
    )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8: {error.reason}", where=name, cure="save it as UTF-8") from None
    except OSError as error:
        raise UsageError(
            f"chat_template: {name!r} cannot be read: {error.strerror or error}{nearest(name, list(CHAT_TEMPLATES))}",
            where=where,
            cure=f"{', '.join(CHAT_TEMPLATES)}, or a Jinja file",
        ) from None
    if not text.strip():
        raise UsageError("an empty chat template", where=name, cure=f"{', '.join(CHAT_TEMPLATES)}, or a Jinja file")
    return text


def set_template(tokenizer, config: TrainConfig) -> None:
    """Give the tokenizer the template that is stated, with which it is then saved.

    Raises UsageError where it does not fit.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    text = requested_template(config)
    if not text:
        return
    lacking = [token for token in CHAT_TEMPLATES.get(config.chat_template, ()) if token not in tokenizer.get_vocab()]
    if lacking:
        raise UsageError(
            f"chat_template: {config.chat_template} writes {lacking[0]}, which is no token of this model",
            where=str(tokenizer.name_or_path),
            cure="--chat_template zephyr, which needs none of its own",
        )
    tokenizer.chat_template = text
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "-"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise UsageError(
            f"not a Jinja template: {error.message}",
            where=f"{config.chat_template}:{error.lineno}",
            cure=f"{', '.join(CHAT_TEMPLATES)} are built in",
        ) from None
    except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError):
        return  # it may want something else than one turn: what the rows are, it will be told


def fingerprint(tokenizer) -> str | None:
    """sha256 of the tokenizer's chat template, or None without one."""
    template = tokenizer.chat_template
    return template and hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()


def render(tokenizer, messages, tools=None, *, generation: bool = False) -> str:
    """The conversation as text; with `generation`, up to where the assistant begins to speak.

    Arguments of tool calls are objects to most templates; others join them to text, and get them as JSON text: the
    first of the two that a template does not refuse or write as Python does. Raises UsageError without a chat template,
    BadRow where it refuses the conversation.
    """
    refusals, objects, texts = [], list(messages), [_with_text(message) for message in messages]
    for form in (objects, texts) if objects != texts else (objects,):
        try:
            rendered = _apply(tokenizer, form, tools, generation)
        except BadRow as bad:
            refusals.append(bad)
            continue
        if not _shows_python(rendered, objects):
            return rendered
    raise (
        refusals[0]
        if refusals
        else BadRow(
            "the chat template writes the arguments of a tool call as Python does", "a template that writes JSON"
        )
    )


def _with_text(message: dict) -> dict:
    """The message with the arguments of its tool calls as JSON text."""

    def call(tool_call: dict) -> dict:
        if "function" in tool_call:
            return {**tool_call, "function": call(tool_call["function"])}
        return (
            {**tool_call, "arguments": json.dumps(tool_call["arguments"], ensure_ascii=False)}
            if "arguments" in tool_call
            else tool_call
        )

    return (
        {**message, "tool_calls": [call(tool_call) for tool_call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
    )


def _shows_python(rendered: str, messages: list[dict]) -> bool:
    """Whether the template has written arguments as Python prints an object, of its own accord."""
    shown = [
        str(function["arguments"])
        for message in messages
        for function in functions(message)
        if function.get("arguments")
    ]
    return any(form in rendered and not any(form in message["content"] for message in messages) for form in shown)


def _apply(tokenizer, messages: list[dict], tools, generation: bool) -> str:
    from jinja2 import TemplateError, TemplateSyntaxError

    template = _template(tokenizer, tools)
    if "strftime_now" in template:
        template = _PINNED + template
    try:
        rendered = tokenizer.apply_chat_template(
            messages,
            tools=list(tools) if tools else None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=generation,
        )
    except TemplateSyntaxError as error:
        raise UsageError(f"the chat template is no template: {error}", where=str(tokenizer.name_or_path)) from None
    except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise BadRow(f"the chat template refuses it: {error}", _cure(str(error), messages)) from None
    return writable(rendered, "what the chat template writes")


def _cure(refused: str, messages) -> str:
    is_of_system = (
        "system" in refused.lower() and "optional system" not in refused.lower()
    )  # Mistral's on the order of the other roles
    if is_of_system and any(message["role"] == "system" for message in messages):
        return "put the system text into the first user turn"
    return "roles and keys that the model's template knows"


def _template(tokenizer, tools) -> str:
    """The tokenizer's template, of several that for tools or the default one.

    Raises UsageError where there is none such.
    """
    template = tokenizer.chat_template
    if not template:
        raise UsageError(
            "the tokenizer has no chat template, and the rows are conversations",
            where=str(tokenizer.name_or_path),
            cure=f"--chat_template {'|'.join(CHAT_TEMPLATES)} or a Jinja file, an instruct model's tokenizer, or rows "
            f"with prompt and completion",
        )
    if isinstance(template, dict) and not {"default", *(["tool_use"] if tools else [])} & template.keys():
        raise UsageError(
            f"the tokenizer has several chat templates ({', '.join(sorted(template))}), and none is called 'default'",
            where=str(tokenizer.name_or_path),
            cure="name the one to take 'default' in tokenizer_config.json",
        )
    return tokenizer.get_chat_template(tools=tools)


def unread(tokenizer, keys: frozenset[str]) -> list[str]:
    """Those keys of messages that the tokenizer's chat templates do not speak of."""
    template = json.dumps(tokenizer.chat_template) if keys else ""
    return sorted(key for key in keys if key not in template)


def documents(tokenizer, talk: Conversation, tags: tuple[str, ...]) -> list[RenderedText]:
    """One document; or one for each learned turn, where the template writes earlier turns otherwise than it wrote them
    (Qwen3 takes the reasoning out of them). `marks` are the tokens that may end a turn.

    What is rendered up to a turn must be the beginning of what is rendered with it: then the model is trained on what
    it sees when it is asked. Raises UsageError for a template where it is not, BadRow for a learned tool call that the
    template does not write.
    """
    turns = []
    for number in sorted(talk.learned):
        prompt = render(tokenizer, talk.messages[:number], talk.tools, generation=True)
        whole = render(tokenizer, talk.messages[: number + 1], talk.tools)
        if not whole.startswith(prompt):
            raise UsageError(
                _not_a_prefix(tokenizer, prompt, whole),
                where=str(tokenizer.name_or_path),
                cure="--chat_template with another one, or rows with prompt and completion",
            )
        _check_calls(talk.messages[number], number + 1 - talk.put_before, whole[len(prompt) :])
        turns.append((prompt, *_until_end(whole[len(prompt) :], tags)))
    parts, done = [], ""
    for prompt, answer, rest, _ in turns:
        if not prompt.startswith(done):
            return [
                _document(((prompt, False), (answer, True), (rest, False)), end) for prompt, answer, rest, end in turns
            ]
        parts += [(prompt[len(done) :], False), (answer, True)]
        done = prompt + answer
    return [_document((*parts, (rest, False)), turns[-1][3])]


def _document(parts: tuple[tuple[str, bool], ...], end: str) -> RenderedText:
    """Without what stands behind the last turn where there is nothing, or where an end token has to be put there."""
    return RenderedText(parts if end and parts[-1][0] else parts[:-1], rendered=True, end=end)


def _check_calls(message: dict, number: int, rendered: str) -> None:
    """Raises BadRow for a call that is not in what is said: the model would learn to say nothing."""
    for function in functions(message):
        if function["name"] not in rendered:
            raise BadRow(
                f"the chat template does not write the call of {function['name']!r} in message {number}",
                "a template that does (some of DeepSeek's wait for content that is null, which transformers leaves "
                "out), or rows without tool calls",
            )


def dropped_content(talk: Conversation, documents: list[RenderedText]) -> list[str]:
    """What the template left out of what the model sees, and of reasoning that it learns, one name for each message.

    Of the assistant only learned turns count: templates take the reasoning out of earlier ones on purpose. Raises
    BadRow for one whose content is not there: something else than the row says would be learned.
    """
    seen = _without_whitespace("".join(part for part, _ in documents[-1].parts))
    before = talk.messages[: max(talk.learned)]
    dropped = [
        f"{m['role']}_messages" for m in before if m["role"] != "assistant" and not _contains(m["content"], seen)
    ]
    if not all(_contains(tool_name(tool), seen) for tool in talk.tools or ()):
        dropped.append("tools")
    dropped += [
        "tool_calls"
        for message in before
        if not all(_contains(function["name"], seen) for function in functions(message))
    ]
    for number, (prompt, answer) in zip(sorted(talk.learned), _trained_spans(documents), strict=True):
        message = talk.messages[number]
        reasoning = next((message[key] for key in REASONING if isinstance(message.get(key), str)), "")
        if not _is_written(message["content"], prompt, answer):
            raise BadRow(
                f"the chat template leaves out what the assistant says in message {number + 1 - talk.put_before}",
                "--chat_template with one that writes it, or the message as the template has it",
            )
        dropped += ["reasoning"] * (not _is_written(reasoning, prompt, answer))
    return dropped


def _is_written(text: str, prompt: str, answer: str) -> bool:
    """Whether a turn's words are in it, or at least once more than they were before it."""
    squeezed = _without_whitespace(prompt + answer), _without_whitespace(prompt)
    return text in answer or _contains(text, *squeezed)


def _trained_spans(documents: list[RenderedText]) -> Iterator[tuple[str, str]]:
    """(the text before it, what is said) of each learned turn."""
    for document in documents:
        for number, (part, learned) in enumerate(document.parts):
            if learned:
                yield "".join(text for text, _ in document.parts[:number]), part


def _contains(needle: str, text: str, before: str = "") -> bool:
    """Whether a template has written words, as they are or inside of JSON, in squeezed `text` once more than in
    `before`.
    """
    forms = (_without_whitespace(needle), _without_whitespace(json.dumps(needle, ensure_ascii=False)[1:-1]))
    return not forms[0] or any(text.count(form) > before.count(form) for form in forms)


def _without_whitespace(text: str) -> str:
    """Without white space, which templates add and take away."""
    return "".join(text.split())


def _until_end(turn: str, tags: tuple[str, ...]) -> tuple[str, str, str]:
    """(a turn up to its end token, the white space that the template writes behind it, the end token).

    The model stops at the end token, so what stands behind it is not learned.
    """
    stripped = turn.rstrip()
    end = next((mark for mark in tags if stripped.endswith(mark)), "")
    return (stripped, turn[len(stripped) :], end) if end else (turn, "", "")


def _not_a_prefix(tokenizer, prompt: str, whole: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole)))
    digest = (fingerprint(tokenizer) or "")[:12]
    return (
        f"its chat template (sha256 {digest}) asks the assistant with {prompt[max(at - 20, 0) : at + 20]!r} "
        f"and writes the answered turn as {whole[max(at - 20, 0) : at + 20]!r}: what is trained would not be what is "
        f"seen"
    )
