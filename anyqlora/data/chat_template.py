"""The tokenizer's own chat template: which one it is, and a conversation written by it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import UsageError
from anyqlora.core.registry import CHAT_TEMPLATES, nearest
from anyqlora.data.conversations import functions
from anyqlora.data.readers.bad_rows import BadRow, writable
from anyqlora.data.tokenizer import special_token_ids

_VARIABLES = '{"enable_thinking": false}'
_TAG_LENGTH = 100  # characters, no tag has more
_MARKUP = r"</?[\w:|-]{1,40}>|\[/?[A-Z_]{2,40}\]"  # <think> and its like are no tokens of their own in some tokenizers
_WORD = "qzxwq"  # that no template writes of its own accord
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


def template_variables(config: TrainConfig) -> dict:
    """What the setting chat_template_kwargs tells the template. Raises UsageError for what is no JSON object."""
    where = config.sources.get("chat_template_kwargs", "")
    try:
        variables = json.loads(config.chat_template_kwargs or "{}")
    except ValueError as error:
        raise UsageError(f"chat_template_kwargs: no JSON: {error}", where=where, cure=_VARIABLES) from None
    if not isinstance(variables, dict) or not all(name.isidentifier() for name in variables):
        raise UsageError("chat_template_kwargs: no JSON object of names and values", where=where, cure=_VARIABLES)
    taken = sorted({"messages", "tools", "add_generation_prompt", "tokenize", "chat_template"} & variables.keys())
    if taken:
        raise UsageError(f"chat_template_kwargs: {taken[0]!r} comes from the rows", where=where, cure=_VARIABLES)
    return variables


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


class ChatTemplate:
    """A tokenizer's chat template, with the variables that it is always given: `enable_thinking`, `date_string`.

    `tags` are the tokens that stand for no text of a language, each with whether it is special; `tag` finds them, and
    what looks like them.
    """

    def __init__(self, tokenizer, variables: dict | None = None):
        self.tokenizer, self.variables = tokenizer, variables or {}
        self.tags = special_token_ids(tokenizer)
        self.tag = re.compile("|".join([*map(re.escape, self.tags), _MARKUP]))
        self._wants: dict[str, bool] = {}

    @property
    def name(self) -> str:
        """What the tokenizer was loaded from."""
        return str(self.tokenizer.name_or_path)

    def render(self, messages, tools=None, *, generation: bool = False, variables: dict | None = None) -> str:
        """The conversation as text; with `generation`, up to where the assistant begins to speak.

        `variables` are a row's own. Arguments of tool calls are objects to most templates; others join them to text,
        and get them as JSON text: the first of the two that a template does not refuse or write as Python does. Raises
        UsageError without a chat template, BadRow where it refuses the conversation.
        """
        given = {**self.variables, **(variables or {})}
        if self._wants_parts(tools, given):
            messages = [_as_parts(message) for message in messages]
        refusals, objects = [], list(messages)
        texts = [_with_text(message) for message in messages]
        for form in (objects, texts) if objects != texts else (objects,):
            try:
                rendered = self._apply(form, tools, generation, given)
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

    def reads(self, variable: str, tools=None) -> bool:
        """Whether the template speaks of what it is told under this name."""
        return variable in self._text(tools)

    def common(self, one: str, other: str) -> str:
        """What both texts begin with; a tag, or what looks like one, is in it whole or not at all."""
        low, high = 0, min(len(one), len(other))
        while low < high:  # comparing slices is a thousand times faster than comparing characters
            middle = (low + high + 1) // 2
            low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
        for text in (one, other):
            first = max(0, low - _TAG_LENGTH)
            for tag in self.tag.finditer(text, first, low + _TAG_LENGTH):
                if tag.start() < low < tag.end():
                    low = tag.start()
        return one[:low]

    def _wants_parts(self, tools, variables: dict) -> bool:
        """Whether the template shows content only where it is a list of parts, as those of models that see do."""
        template = self._text(tools)
        if template not in self._wants:
            self._wants[template] = False
            message = {"role": "user", "content": _WORD}
            if "text" in template and "content" in template and not self._shows(message, tools, variables):
                self._wants[template] = self._shows(_as_parts(message), tools, variables)
        return self._wants[template]

    def _shows(self, message: dict, tools, variables: dict) -> bool:
        try:
            return _WORD in self._apply([message], tools, False, variables)
        except BadRow:
            return False

    def _apply(self, messages: list[dict], tools, generation: bool, variables: dict) -> str:
        from jinja2 import TemplateError, TemplateSyntaxError

        template = self._text(tools)
        if "strftime_now" in template:
            template = _PINNED + template
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=generation,
                **variables,
            )
        except TemplateSyntaxError as error:
            raise UsageError(f"the chat template is no template: {error}", where=self.name) from None
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise BadRow(f"the chat template refuses it: {error}", _cure(str(error), messages)) from None
        return writable(rendered, "what the chat template writes")

    def _text(self, tools) -> str:
        """The tokenizer's template, of several that for tools or the default one.

        Raises UsageError where there is none such.
        """
        template = self.tokenizer.chat_template
        if not template:
            raise UsageError(
                "the tokenizer has no chat template, and the rows are conversations",
                where=self.name,
                cure=f"--chat_template {'|'.join(CHAT_TEMPLATES)} or a Jinja file, an instruct model's tokenizer, or "
                f"rows with prompt and completion",
            )
        if isinstance(template, dict):
            if not {"default", *(["tool_use"] if tools else [])} & template.keys():
                raise UsageError(
                    f"the tokenizer has several chat templates ({', '.join(sorted(template))}), and none is called "
                    f"'default'",
                    where=self.name,
                    cure="name the one to take 'default' in tokenizer_config.json",
                )
            return self.tokenizer.get_chat_template(tools=tools)
        return template


def _as_parts(message: dict) -> dict:
    """The message with its content as a list of parts."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


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


def _cure(refused: str, messages) -> str:
    is_of_system = (
        "system" in refused.lower() and "optional system" not in refused.lower()
    )  # Mistral's on the order of the other roles
    if is_of_system and any(message["role"] == "system" for message in messages):
        return "put the system text into the first user turn"
    return "roles and keys that the model's template knows"


def unread(tokenizer, keys: frozenset[str]) -> list[str]:
    """Those keys of messages that the tokenizer's chat templates do not speak of."""
    template = json.dumps(tokenizer.chat_template) if keys else ""
    return sorted(key for key in keys if key not in template)
