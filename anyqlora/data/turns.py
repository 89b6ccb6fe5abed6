"""What of a conversation the assistant says: its turns as generation would write them, and where each ends.

A learned turn is what follows the prompt that the template itself makes of the messages before it, up to the token at
which generation stops. Of a template that asks otherwise than it writes the answered turn (DeepSeek-R1's opens a
thought, and writes turns without any) the prompt is as it asks, and the turn what would follow there.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from anyqlora.core.errors import UsageError
from anyqlora.data.chat_template import ChatTemplate, fingerprint
from anyqlora.data.conversations import VARIABLES, Conversation, functions, tool_name
from anyqlora.data.readers.bad_rows import BadRow
from anyqlora.data.tokenizer import RenderedText

REASONING = ("reasoning_content", "thinking", "reasoning")  # transformers takes one for the other
EMPTY_THOUGHTS = "answers_with_an_empty_thought_before_them"
KEPT_THOUGHTS = "conversations_in_which_earlier_turns_keep_their_thoughts"
SPLIT = "conversations_split_by_turn"
LEFT_OUT = "_not_in_template"  # ends the count of what a chat template has not written
_QUESTION, _ANSWER, _NEXT, _THOUGHT = "qzxwq", "rzxwr", "szxws", "tzxwt"  # that no template writes of its own accord
_THOUGHT_TAG = re.compile(r"[<\[][^<>\[\]\s]*(?:think|thought)[^<>\[\]\s]*[>\]]", re.IGNORECASE)
_CLOSING = re.compile(r"^.?/|end|close", re.IGNORECASE)  # in the name of a tag
_LONG, _EXCHANGES = 12, 2  # messages of a conversation that is read in parts, and of what
_REMEMBERED = 1000  # forms and patterns
_MARK = re.compile(r"qzx(\d{3})xzq")
_TAIL = 200  # characters of a prompt: no template asks with more
_SIDES = (("begin", "end"), ("BEGIN", "END"), ("start", "end"), ("START", "END"), ("open", "close"))


@dataclass(frozen=True)
class Turn:
    """One turn of the assistant, as text."""

    prompt: str  # with which the model is asked
    shared: str  # of it, what stands in the template's own record of the conversation, too
    answer: str  # what is learned, the end token with it
    end: str  # that token; "" where the template has none
    behind: str  # what the template writes behind it
    thought: str  # the reasoning in it
    forms: tuple[str, ...]  # the turn without its end and with its thought, and as it may stand earlier on
    has_empty_thought: bool = False  # which the template did not write


class TurnReader:
    """Reads the assistant's turns of conversations in what one template writes."""

    def __init__(self, template: ChatTemplate):
        self.template = template
        self._forms: dict[str, _Form] = {}
        self._patterns: dict[tuple, _Pattern | None] = {}
        self._rendered: dict[tuple, str] = {}  # of one conversation

    def documents(self, talk: Conversation, multi_turn: str = "auto") -> tuple[list[RenderedText], Counter]:
        """The texts to learn from, and what was done on the way and left out, each a count.

        Raises BadRow for a conversation of which the template makes something that cannot be learned.
        """
        self._check_variables(talk)
        self._rendered.clear()
        return self._by_pattern(talk, multi_turn) or self._read(talk, multi_turn)

    def _by_pattern(self, talk: Conversation, multi_turn: str) -> tuple[list[RenderedText], Counter] | None:
        """The same for a conversation of the same roles as an earlier one: its words in the texts of that one.

        One rendering instead of one or two for each turn; it shows whether the template writes these words so, too.
        None for words that a template could take for something else, and where it does not.
        """
        contents = [message["content"] for message in talk.messages]
        if talk.tools or len(contents) > _LONG or not all(map(self._is_plain, talk.messages)):
            return None
        shape = (tuple(m["role"] for m in talk.messages), talk.learned, multi_turn, _told(talk))
        _bound(self._patterns)
        if shape not in self._patterns:
            self._patterns[shape] = None  # the first one may be the only one
            return None
        pattern = self._patterns[shape] or self._pattern(talk, multi_turn)
        self._patterns[shape] = pattern
        self._rendered.clear()
        if pattern.whole is None or _filled(pattern.whole, contents) != self._render(talk, max(talk.learned) + 1):
            return None
        return [
            RenderedText(tuple((_filled(part, contents), is_learned) for part, is_learned in parts), True, end)
            for parts, end in pattern.documents
        ], pattern.counts.copy()

    def _is_plain(self, message: dict) -> bool:
        content = message["content"]
        return (
            message.keys() <= {"role", "content"}
            and bool(content)
            and not (content[0].isspace() or content[-1].isspace())
            and not self.template.tag.search(content)
        )

    def _pattern(self, talk: Conversation, multi_turn: str) -> _Pattern:
        """The texts of a conversation of these roles, with numbers where its words are."""
        marks = [f"qzx{number:03d}xzq" for number in range(len(talk.messages))]
        marked = [{**message, "content": mark} for message, mark in zip(talk.messages, marks, strict=True)]
        talk = replace(talk, messages=tuple(marked))
        try:
            documents, counts = self._read(talk, multi_turn)
            whole = self._render(talk, max(talk.learned) + 1)
        except BadRow:
            return _Pattern(None, [], Counter())
        if not all(any(mark in part for part, _ in documents[-1].parts) for mark in marks[: max(talk.learned) + 1]):
            return _Pattern(None, [], Counter())  # it leaves something out: what, depends on the words
        parts = [
            (tuple((_split_at_marks(part), is_learned) for part, is_learned in document.parts), document.end)
            for document in documents
        ]
        return _Pattern(_split_at_marks(whole), parts, counts)

    def _read(self, talk: Conversation, multi_turn: str) -> tuple[list[RenderedText], Counter]:
        numbers = sorted(talk.learned)[-1 if multi_turn == "last" else 0 :]
        groups = self._read_apart(talk, numbers, multi_turn) if len(talk.messages) > _LONG else None
        groups = groups or self._groups(talk, numbers, multi_turn, None)
        counts = Counter(
            {
                EMPTY_THOUGHTS: sum(placed.turn.has_empty_thought for group in groups for placed in group),
                KEPT_THOUGHTS: any(placed.is_rewritten for group in groups for placed in group),
                SPLIT: len(groups) > 1,
            }
        )
        documents = [_document(group) for group in groups]
        counts.update(f"{what}{LEFT_OUT}" for what in dropped_content(talk, documents, self._form(talk).closing_tag))
        return documents, +counts

    def _check_variables(self, talk: Conversation) -> None:
        """Raises for what the template is told and does not ask: it would change nothing, and nobody would know."""
        for name in self.template.variables:
            if not self.template.reads(name, talk.tools):
                raise UsageError(
                    f"chat_template_kwargs: the chat template does not read {name!r}",
                    where=self.template.name,
                    cure="a name that is in the template, or leave it out",
                )
        for name in talk.template_variables:
            if not self.template.reads(name, talk.tools):
                raise BadRow(f"the chat template does not read {name!r}", f"--ignore_columns {name},{VARIABLES}")

    def _read_apart(self, talk: Conversation, numbers: list[int], multi_turn: str) -> list[list[_Placed]] | None:
        """The same in a time that grows with the conversation, not with its square; None where it is not the same."""
        try:
            groups = self._groups(talk, numbers, multi_turn, _EXCHANGES)
        except BadRow:
            return None
        return groups if all(self._is_record(talk, group) for group in groups) else None

    def _groups(
        self, talk: Conversation, numbers: list[int], multi_turn: str, exchanges: int | None
    ) -> list[list[_Placed]]:
        """The learned turns, those together that stand in one text.

        With `exchanges`, each turn is read in a conversation of so many before it: a conversation of n messages is
        written n times else, each time longer. Whether that is the same, _is_record tells.
        """
        views = [_view(talk, number, exchanges) for number in numbers]
        turns = [self._turn(view) for view in views]
        groups = [[_Placed(turns[0], self._render(talk, numbers[0], generation=True), numbers[0])]]
        for (view, before), number, turn in zip(zip(views, turns, strict=True), numbers[1:], turns[1:], strict=False):
            prompt = self._render(view.up_to(number), None, generation=True)
            common = len(self.template.common(prompt, before.prompt))
            record = (len(before.prompt) - common, prompt[common:])
            if prompt.startswith(before.prompt + before.answer):
                place, is_rewritten = len(before.prompt + before.answer), False
            else:
                place = None if multi_turn == "split" else self._end_in(prompt, before, multi_turn == "all")
                is_rewritten = True
            if place is None:
                groups.append([_Placed(turn, self._render(talk, number, generation=True), number)])
            else:
                groups[-1].append(_Placed(turn, prompt[place:], number, is_rewritten, record))
        if multi_turn == "split" and len(groups) > 1:
            return [
                [_Placed(turn, self._render(talk, number, generation=True), number)]
                for number, turn in zip(numbers, turns, strict=True)
            ]
        return groups

    def _is_record(self, talk: Conversation, group: list[_Placed]) -> bool:
        """Whether the prompts of a group, put together from what was read apart, are the last one as it is written."""
        pieces = [group[0].before]
        for placed in group[1:]:
            taken, more = placed.record
            while taken:
                last = pieces.pop()
                if len(last) > taken:
                    pieces.append(last[:-taken])
                taken -= min(taken, len(last))
            pieces.append(more)
        return "".join(pieces) == self._render(talk, group[-1].number, generation=True)

    def _turn(self, view: _View) -> Turn:
        talk, number = view.talk, view.number
        form = self._form(talk)
        prompt = self._render(talk, number, generation=True)
        whole = self._render(talk, number + 1).removesuffix(form.header)
        message = talk.messages[number]
        shared = prompt if whole.startswith(prompt) else self.template.common(prompt, whole)
        tail, written = prompt[len(shared) :], whole[len(shared) :]
        answer, has_empty_thought = self._answer(form, message, tail, written, prompt, whole)
        _check_calls(message, number + 1 + view.passed - talk.put_before, answer)
        answer, end, behind = self._until_end(form, talk, number, answer)
        thought = _thought(message, form.closing_tag)
        answered = answer.removesuffix(end)
        forms = (tail + answered, answered, _without_thought(tail + answered, form.closing_tag))
        return Turn(prompt, shared, answer, end, behind, thought, forms, has_empty_thought)

    def _render(self, talk: Conversation, count: int | None, *, generation: bool = False) -> str:
        """What the template writes of the first `count` messages; not twice of a few of one conversation."""
        messages = talk.messages[:count]
        key = (*map(id, messages), generation)
        text = self._rendered.get(key)
        if text is None:
            text = self.template.render(messages, talk.tools, generation=generation, variables=talk.template_variables)
            if len(messages) <= _LONG:
                self._rendered[key] = text
        return text

    def _answer(self, form: _Form, message: dict, tail: str, written: str, prompt: str, whole: str) -> tuple[str, bool]:
        """(what generation would write behind the prompt, whether a thought was put there that holds nothing).

        `tail` is the prompt's end that the template does not write into the turn, `written` what it writes there.
        """
        if tail and not tail.strip():
            written = written.lstrip()
        opening = _open_thought(prompt)
        if opening:
            closing_tag = closing_of(opening)
            if closing_tag in written:
                return written, False
            thought = _thought(message, closing_tag).strip()
            if closing_tag in message["content"]:  # the words begin with what stood behind their thought
                written = written.lstrip()
            line = "\n" if prompt.endswith("\n") else ""
            closing = form.closing or f"{line}{closing_tag}{2 * line}"
            return f"{thought}{closing}{written}", not thought
        if tail.strip():
            closing_tag = next((tag for tag in _thought_tags(tail) if _CLOSING.search(tag)), "")
            if closing_tag or self._is_closed(tail):
                return _without_thought(written, closing_tag).removeprefix(prompt[len(prompt.rstrip()) :]), False
            if tail == form.asks:  # words that ask, and stand nowhere once there is an answer
                return written, False
            place = self._asked_at(prompt, whole)
            if place is None or place < len(whole) - len(written):
                raise BadRow(
                    _not_a_prefix(self.template, prompt, whole),
                    "--chat_template with another one, or rows with prompt and completion",
                )
            written = whole[place:]
        return written, False

    def _is_closed(self, tail: str) -> bool:
        """Whether what the prompt has of its own is something that is begun and ended."""
        tags = [tag.group() for tag in self.template.tag.finditer(tail)]
        return len(tags) > 1 and not tail.startswith(tags[-1]) and any(_closes(tags[-1], tag) for tag in tags[:-1])

    def _asked_at(self, prompt: str, whole: str) -> int | None:
        """Where in the answered conversation the words end that ask for the answer; None where they are not there.

        Mistral's templates move the system text to the last question, and leave it out once that is answered.
        """
        for tag in self._real_tags(prompt[-_TAIL:]):
            asks = prompt[-_TAIL:][tag.start() :]
            place = whole.rfind(asks)
            if place >= 0:
                return place + len(asks)
        return None

    def _until_end(self, form: _Form, talk: Conversation, number: int, answer: str) -> tuple[str, str, str]:
        """(the answer up to its end, the end token, what the template writes behind it)."""
        twice = answer.find(form.end + form.asks) if form.end and form.asks else -1
        if twice >= 0:  # the template asks again behind a turn that is over
            answer = answer[: twice + len(form.end)] + form.after
        if form.end and answer.endswith(form.end + form.after):
            return answer[: len(answer) - len(form.after)], form.end, form.after
        message = talk.messages[number]
        calls = functions(message)
        last = calls[-1]["name"] if calls else _without_thought(message["content"], form.closing_tag).strip()
        place = answer.rfind(last) + len(last) if last in answer else 0
        answered, end, behind = self._cut(answer, place, self._continued(talk, number, answer[:place], last), form.end)
        return answered, end, behind

    def _cut(self, written: str, place: int, following: str | None, usual: str = "") -> tuple[str, str, str]:
        """(a turn up to its end, the end token, what is behind it).

        `written` is the turn as it stands last, of which something is said up to `place`; `following` is what stands
        behind that place where the conversation goes on, `usual` the token with which turns end as a rule.
        """
        rest = written[place:]
        common = self.template.common(rest, following) if following is not None else rest
        for text in (common, rest):  # what a turn always ends with, or what it ends with where it is the last
            tags = list(self._real_tags(text))
            if not tags or text[tags[-1].end() :].strip():
                continue
            end, at = tags[-1].group(), place + tags[-1].end()
            opened = (tag.group() for tag in self._real_tags(written[:at]))
            if end == usual or not any(_closes(end, tag) for tag in opened):
                return written[:at], end, written[at:]
        for base in (rest, rest.rstrip()):
            if following is not None and following.startswith(base):
                tag = next(self._real_tags(following[len(base) :]), None)
                if tag and not following[len(base) : len(base) + tag.start()].strip():
                    return written[:place] + following[: len(base) + tag.end()], tag.group(), ""
        return written, "", ""

    def _real_tags(self, text: str) -> Iterator[re.Match]:
        """The tags in it that are tokens."""
        return (tag for tag in self.template.tag.finditer(text) if tag.group() in self.template.tags)

    def _continued(self, talk: Conversation, number: int, answered: str, last: str) -> str | None:
        """What stands behind a turn's last words where the conversation goes on; None where nothing goes on from it.

        `answered` is the turn up to these words.
        """
        calls = functions(talk.messages[number])
        following = talk.messages[number + 1 : number + 2]
        invented = (
            [{"role": "tool", "name": call["name"], "content": _NEXT} for call in calls]
            if calls
            else [{"role": "user", "content": _NEXT}]
        )
        before = self._render(talk, number)
        for more in (following, invented):
            if not more:
                continue
            try:
                whole = self.template.render(
                    [*talk.messages[: number + 1], *more], talk.tools, variables=talk.template_variables
                )
            except BadRow:
                continue
            behind = whole[len(self.template.common(before, whole)) :]
            if answered and answered in behind:
                return behind.partition(answered)[2]
            if last and last in behind:  # perhaps without its thought
                return behind.partition(last)[2]
        return None

    def _end_in(self, text: str, turn: Turn, with_thoughts: bool) -> int | None:
        """Where in the next prompt a turn ends that stands there without its thought, or with another end token."""
        shared = len(self.template.common(text, turn.prompt))
        own = turn.prompt[shared:]  # what only asks for the answer
        if own.strip() and not (_thought_tags(own) or self._is_closed(own)):
            return None
        rest = text[shared:]
        forms = [own + turn.forms[0][len(turn.prompt) - len(turn.shared) :], *turn.forms]
        for form in forms if with_thoughts or not turn.thought else forms[:1]:
            for wanted in (form, form.strip()):
                at = len(rest) - len(rest.lstrip()) if wanted != form else 0
                if wanted and rest.startswith(wanted, at):
                    place = shared + at + len(wanted)
                    tag = next(self._real_tags(text[place:]), None)
                    if not turn.end:
                        return place
                    if tag and not text[place : place + tag.start()].strip():
                        return place + tag.end()
        return None

    def _form(self, talk: Conversation) -> _Form:
        key = _told(talk)
        _bound(self._forms)
        if key not in self._forms:
            self._forms[key] = self._seen(talk)
        return self._forms[key]

    def _seen(self, talk: Conversation) -> _Form:
        """How the template writes turns, seen on words of our own; a form that knows nothing where it refuses them."""

        def render(*messages: dict, generation: bool = False) -> str:
            return self.template.render(messages, talk.tools, generation=generation, variables=talk.template_variables)

        user, answer, more = (
            {"role": role, "content": word}
            for role, word in (("user", _QUESTION), ("assistant", _ANSWER), ("user", _NEXT))
        )
        try:
            asked, unasked = render(user, generation=True), render(user)
            last, earlier = render(user, answer), render(user, answer, more)
        except BadRow:
            return _Form()
        if not (_QUESTION in asked and _ANSWER in last and _ANSWER in earlier):
            return _Form()
        behind, following = last.partition(_ANSWER)[2], earlier.partition(_ANSWER)[2]
        header = self._header(asked.partition(_QUESTION)[0], behind, following)
        behind = behind.removesuffix(header)
        _, end, after = self._cut(behind, 0, following)
        closing, before = "", last.partition(_ANSWER)[0]
        own = before[len(self.template.common(before, asked)) :]  # what begins an answer without a thought
        for key in REASONING:
            try:
                thinking = render(user, {**answer, key: _THOUGHT})
            except BadRow:
                continue
            if _THOUGHT in thinking and _ANSWER in thinking:
                closing = thinking.partition(_THOUGHT)[2].partition(_ANSWER)[0].removesuffix(own)
                break
        if not behind.endswith(end + after):  # it was taken from what follows
            end, after = "", ""
        asks = asked[len(unasked) :] if asked.startswith(unasked) else ""
        if thoughts := _thought_tags(asks):
            asks = asks.partition(thoughts[0])[0] or asks
        return _Form(end, after, header, asks, closing, self._closing_tag(asked, closing))

    def _header(self, before: str, behind: str, following: str) -> str:
        """What the template writes behind the last answer only: words that ask for the next one unasked, or that end
        the text. `before` is what stands before a first question.
        """
        common = self.template.common(behind, following)
        tags = list(self._real_tags(common))
        if not behind[len(common) :].strip() or not tags:
            return ""
        place = tags[-1].end()
        if len(tags) > 1 and before.rfind(tags[-1].group()) > before.rfind(tags[-2].group()):
            place = tags[-1].start()  # begins a turn, of whichever role
        return behind[place:]

    def _closing_tag(self, asked: str, closing: str) -> str:
        opening = _open_thought(asked)
        if opening:
            return closing_of(opening)
        return next(iter(_thought_tags(closing)), "</think>")


@dataclass(frozen=True)
class _Form:
    """How a template writes the assistant's turns."""

    end: str = ""  # the tag that it writes behind each answer; "": none, or what follows tells
    after: str = ""  # what it writes behind that
    header: str = ""  # what stands behind the last answer alone: words that ask for the next one unasked
    asks: str = ""  # what asks for an answer
    closing: str = ""  # what stands between a thought and its answer, where it writes thoughts
    closing_tag: str = "</think>"


def _told(talk: Conversation) -> str:
    """What the template is told beside the messages, as a key; which tools there are does not change its turns."""
    return json.dumps(talk.template_variables, sort_keys=True, default=str) + " with tools" * bool(talk.tools)


def _bound(known: dict) -> None:
    """Forget what is known where there is much of it: rows that each tell the template something else have no end."""
    if len(known) > _REMEMBERED:
        known.clear()


@dataclass(frozen=True)
class _Pattern:
    """What the template makes of conversations of the same roles: text and the numbers of messages in turn."""

    whole: list[str | int] | None  # the conversation up to its last answer; None: each has to be read
    documents: list[tuple[tuple[tuple[list[str | int], bool], ...], str]]
    counts: Counter


def _split_at_marks(text: str) -> list[str | int]:
    pieces = _MARK.split(text)
    return [int(piece) if number % 2 else piece for number, piece in enumerate(pieces)]


def _filled(pattern: list[str | int], contents: list[str]) -> str:
    return "".join(piece if isinstance(piece, str) else contents[piece] for piece in pattern)


@dataclass(frozen=True)
class _View:
    """A conversation, or the part of one that a turn is read in."""

    talk: Conversation
    number: int  # of the turn in it
    passed: int  # messages of the whole one that are not in it
    whole: Conversation

    def up_to(self, number: int) -> Conversation:
        """The same with all that stands before the message of this number in the whole conversation."""
        first = self.number + self.passed
        own = self.talk.messages[: self.number]
        return replace(self.talk, messages=(*own, *self.whole.messages[first:number]))


def _view(talk: Conversation, number: int, exchanges: int | None) -> _View:
    """What a turn is read in: all of the conversation, or the system text and the last `exchanges` before the turn."""
    if exchanges is None:
        return _View(talk, number, 0, talk)
    lead = next(i for i, message in enumerate(talk.messages) if message["role"] not in ("system", "developer"))
    first, left = number, exchanges
    while first > lead and left:
        first -= 1
        left -= talk.messages[first]["role"] == "user"
    if first <= lead or talk.messages[first]["role"] != "user":
        return _View(talk, number, 0, talk)
    passed = first - lead
    messages = (*talk.messages[:lead], *talk.messages[first : number + 2])
    return _View(replace(talk, messages=messages), number - passed, passed, talk)


@dataclass(frozen=True)
class _Placed:
    """A turn in a document, and the text before it that no turn says."""

    turn: Turn
    before: str
    number: int  # of the message
    is_rewritten: bool = False  # the turn before it stands there otherwise than the template writes it later on
    record: tuple[int, str] = (0, "")  # from the prompt of the turn before to this one's: characters off, text on


def _document(group: list[_Placed]) -> RenderedText:
    """Without what stands behind the last turn where there is nothing, or where an end token has to be put there."""
    parts: list[tuple[str, bool]] = []
    for placed in group:
        parts += [(placed.before, False), (placed.turn.answer, True)]
    last = group[-1].turn
    behind = last.behind if last.end and not last.behind.strip() else ""
    return RenderedText(tuple(parts + [(behind, False)] * bool(behind)), True, last.end)


def closing_of(opening: str) -> str:
    """The tag that ends what `opening` begins: </think> of <think>, <|END_THINKING|> of <|START_THINKING|>."""
    for begin, end in _SIDES:
        if begin in opening:
            return opening.replace(begin, end)
    return opening[0] + "/" + opening[1:]


def _closes(tag: str, opening: str) -> bool:
    """Whether a tag ends what another one begins: as above, or <channel|> of <|channel>, or [/INST] of [INST]."""
    return tag != opening and (tag == closing_of(opening) or tag.replace("|", "") == opening.replace("|", ""))


def _thought_tags(text: str) -> list[str]:
    """The tags in it that begin or end a thought."""
    return [tag.group() for tag in _THOUGHT_TAG.finditer(text)]


def _open_thought(prompt: str) -> str:
    """The tag of a thought that the prompt begins and leaves open; "" where it does not."""
    tags = _thought_tags(prompt[-_TAIL:])
    is_open = bool(tags) and not _CLOSING.search(tags[-1]) and not prompt.rpartition(tags[-1])[2].strip()
    return tags[-1] if is_open else ""


def _thought(message: dict, closing_tag: str) -> str:
    """The reasoning of a message: of its own key, or what stands before the closing tag in its words."""
    own = next((message[key] for key in REASONING if isinstance(message.get(key), str)), "")
    if own or closing_tag not in message["content"]:
        return own
    thought = message["content"].partition(closing_tag)[0]
    opened = _THOUGHT_TAG.search(thought)
    return thought[opened.end() :] if opened else thought


def _without_thought(text: str, closing_tag: str) -> str:
    """The text behind its thought; all of it where it has none."""
    before, tag, after = text.partition(closing_tag) if closing_tag else (text, "", "")
    return after if tag else before


def _check_calls(message: dict, number: int, rendered: str) -> None:
    """Raises BadRow for a call that is not in what is said: the model would learn to say nothing."""
    for function in functions(message):
        if function["name"] not in rendered:
            raise BadRow(
                f"the chat template does not write the call of {function['name']!r} in message {number}",
                "a template that does (some of DeepSeek's wait for content that is null, which transformers leaves "
                "out), or rows without tool calls",
            )


def dropped_content(talk: Conversation, documents: list[RenderedText], closing_tag: str) -> list[str]:
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
    spans = list(_trained_spans(documents))
    for number, (prompt, answer) in zip(sorted(talk.learned)[-len(spans) :], spans, strict=True):
        message = talk.messages[number]
        reasoning, content = _thought({**message, "content": ""}, closing_tag), message["content"]
        in_parts = (_without_thought(content, closing_tag), _thought({"content": content}, closing_tag))
        if not (_is_written(content, prompt, answer) or all(_is_written(text, prompt, answer) for text in in_parts)):
            raise BadRow(
                f"the chat template leaves out what the assistant says in message {number + 1 - talk.put_before}",
                "--chat_template with one that writes it, or the message as the template has it",
            )
        dropped += ["reasoning"] * (not _is_written(reasoning, prompt, answer))
    return dropped


@dataclass(frozen=True)
class _TextBefore:
    """The text before a learned part, joined where somebody asks for it."""

    parts: tuple[tuple[str, bool], ...]

    @cached_property
    def squeezed(self) -> str:
        return _without_whitespace("".join(text for text, _ in self.parts))


def _is_written(text: str, prompt: _TextBefore, answer: str) -> bool:
    """Whether a turn's words are in it, or at least once more than they were before it."""
    if text in answer:
        return True
    return _contains(text, prompt.squeezed + _without_whitespace(answer), prompt.squeezed)


def _trained_spans(documents: list[RenderedText]) -> Iterator[tuple[_TextBefore, str]]:
    """(the text before it, what is said) of each learned turn."""
    for document in documents:
        for number, (part, learned) in enumerate(document.parts):
            if learned:
                yield _TextBefore(document.parts[:number]), part


def _contains(needle: str, text: str, before: str = "") -> bool:
    """Whether a template has written words, as they are or inside of JSON, in squeezed `text` once more than in
    `before`.
    """
    forms = (_without_whitespace(needle), _without_whitespace(json.dumps(needle, ensure_ascii=False)[1:-1]))
    return not forms[0] or any(text.count(form) > before.count(form) for form in forms)


def _without_whitespace(text: str) -> str:
    """Without white space, which templates add and take away."""
    return "".join(text.split())


def _not_a_prefix(template: ChatTemplate, prompt: str, whole: str) -> str:
    at = len(template.common(prompt, whole))
    digest = (fingerprint(template.tokenizer) or "")[:12]
    return (
        f"its chat template (sha256 {digest}) asks the assistant with {prompt[max(at - 20, 0) : at + 40]!r} "
        f"and writes the answered turn as {whole[max(at - 20, 0) : at + 40]!r}: what is trained would not be what is "
        f"seen"
    )
