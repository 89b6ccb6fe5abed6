"""Conversations through the tokenizer's own template: what is learned, turn by turn."""

import random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from anyqlora.core import errors
from anyqlora.data import audit, chat_template, dataset
from anyqlora.data.examples import prompt_ids
from anyqlora.data.tokenizer import DEMO
from tests.support.data_fixtures import (
    CHATML,
    DATED,
    LLAMA3,
    NO_PREFIX,
    STRICT,
    THINK,
    TOOLS,
    byte_level,
    metaspace,
    settings,
    wrapped,
    write,
)

WORDS = ["Hello", " there", "\n", "four", " is", " it", "?", "日本", " 2", "quick", "."]


def said(rng):
    return (rng.choice(["Hello", "four", "The"]) + "".join(rng.choices(WORDS, k=rng.randint(0, 6)))).strip()


def talk(rng, turns, system=False):
    """A conversation of so many questions and answers."""
    messages = [{"role": "system", "content": said(rng)}] if system else []
    return messages + [{"role": role, "content": said(rng)} for _ in range(turns) for role in ("user", "assistant")]


def prepared(path, tokens, *conversations, **more):
    return dataset.load_data(
        settings(write(path / "rows.jsonl", *[{"messages": c} for c in conversations]), **more), tokens
    )


def learned(example, tokens):
    """The text of each run of learned tokens."""
    runs, before = [], False
    for token, flag in zip(example.ids.tolist(), example.trained.tolist(), strict=True):
        if flag and not before:
            runs.append([])
        if flag:
            runs[-1].append(token)
        before = flag
    return [tokens.decode(run) for run in runs]


def test_tokens_and_mask_are_those_of_transformers(tmp_path):
    """Reference: apply_chat_template with return_assistant_tokens_mask, on a template that has {% generation %}."""
    tokens, rng = byte_level(CHATML), random.Random(2)
    conversations = [talk(rng, rng.randint(1, 4), rng.random() < 0.5) for _ in range(100)]
    read = prepared(tmp_path, tokens, *conversations)
    for conversation, example in zip(conversations, read.train, strict=True):
        reference = tokens.apply_chat_template(conversation, return_assistant_tokens_mask=True, return_dict=True)
        assert example.ids.tolist() == reference["input_ids"]
        assert example.trained.astype(int).tolist() == reference["assistant_masks"]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, THINK])
@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_every_learned_turn_begins_as_inference_asks_it(template, make, tmp_path):
    """Reference: apply_chat_template with add_generation_prompt on the messages before the turn."""
    tokens, rng = make(template), random.Random(3)
    conversations = [talk(rng, rng.randint(1, 3), rng.random() < 0.5) for _ in range(40)]
    conversations.append([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "\n\nfour\n"}])
    read = prepared(tmp_path, tokens, *conversations, multi_turn="split")
    for example in read.train:
        conversation = conversations[int(example.where.rpartition(":")[2]) - 1]
        turns = [i for i, m in enumerate(conversation) if m["role"] == "assistant"]
        asked = [tokens.apply_chat_template(conversation[:i], add_generation_prompt=True)["input_ids"] for i in turns]
        assert example.ids[: example.trained.argmax()].tolist() in (asked if template is THINK else asked[:1])
        assert tokens.decode(example.prompt_ids) in [tokens.decode(ids) for ids in asked]
        shown = learned(example, tokens)
        assert len(shown) == (1 if template is THINK else len(turns))
        for text, number in zip(shown, turns if template is not THINK else [None], strict=True):
            text, end = text.removesuffix("<|im_end|>").removesuffix("<|eot_id|>"), text[-1]
            assert end == ">" and text.strip().endswith(conversation[number]["content"].strip() if number else "")
    assert len(read.train) == (sum(len(c) // 2 for c in conversations) if template is THINK else len(conversations))


def test_a_template_that_rewrites_earlier_turns_gives_one_example_per_turn(tmp_path):
    """Hand-made: what Qwen3's template does with the reasoning of earlier turns."""
    tokens = byte_level(THINK)
    conversation = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1", "reasoning_content": "so"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "2"},
    ]
    read = prepared(tmp_path, tokens, conversation)
    assert [learned(example, tokens) for example in read.train] == [
        ["<think>\nso\n</think>\n\n1<|im_end|>"],
        ["<think>\n\n</think>\n\n2<|im_end|>"],
    ]
    assert (
        read.train[1].prompt == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert read.report["sources"][0]["conversations_split_by_turn"] == 1


def test_turns_of_one_conversation_are_never_held_out_apart(tmp_path):
    conversations = [talk(random.Random(i), 3) for i in range(30)]
    read = prepared(tmp_path, byte_level(THINK), *conversations, eval_fraction=0.3, multi_turn="split")
    assert len(read.held_out) == 27 and not {e.where for e in read.train} & {e.where for e in read.held_out}


def test_a_template_that_asks_otherwise_than_it_writes_is_refused_by_name(tmp_path):
    """The row is named, as any other that cannot be used, and can be passed over."""
    reasons = CHATML.replace("assistant\n{% endif %}", "assistant\nHere are my reasoning steps:\n{% endif %}")
    rows = [talk(random.Random(0), 1)]
    with pytest.raises(
        errors.UsageError,
        match=r"rows.jsonl:1: its chat template \(sha256 [0-9a-f]{12}\) asks the assistant with .*reasoning steps",
    ):
        prepared(tmp_path, byte_level(reasons), *rows)
    with pytest.raises(errors.UsageError, match="no row can be used"):
        prepared(tmp_path, byte_level(reasons), *rows, on_bad_row="skip")


def test_an_open_thought_of_the_prompt_is_closed_before_the_answer(tmp_path):
    """As DeepSeek-R1's: the prompt ends with <think>, and answered turns have none."""
    tokens, turns = (
        byte_level(NO_PREFIX),
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "four"}],
    )
    thinks = [turns[0], {"role": "assistant", "content": "four", "reasoning_content": "two and two"}]
    read = prepared(tmp_path, tokens, turns, thinks)
    assert [learned(example, tokens) for example in read.train] == [
        ["\n</think>\n\nfour<|im_end|>"],
        ["two and two\n</think>\n\nfour<|im_end|>"],
    ]
    assert all(example.prompt.endswith("<|im_start|>assistant\n<think>\n") for example in read.train)
    assert read.report["sources"][0]["answers_with_an_empty_thought_before_them"] == 1


def test_roles_the_template_refuses_are_bad_rows(tmp_path):
    rows = [talk(random.Random(0), 1), talk(random.Random(1), 1, system=True)]
    with pytest.raises(
        errors.UsageError, match=r"rows.jsonl:2: the chat template refuses it: System role not supported"
    ):
        prepared(tmp_path, byte_level(STRICT), *rows)


def test_system_and_tool_turns_are_never_learned(tmp_path):
    tokens = byte_level(TOOLS)
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2"},
        {"role": "assistant", "content": "I ask.", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    read = prepared(tmp_path, tokens, conversation)
    assert learned(read.train[0], tokens) == [
        'I ask.<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>',
        "It is 4.<|im_end|>",
    ]


def test_a_turn_of_weight_zero_is_not_learned(tmp_path):
    tokens = byte_level(CHATML)
    conversation = talk(random.Random(4), 2)
    conversation[1]["weight"] = 0
    assert learned(prepared(tmp_path, tokens, conversation).train[0], tokens) == [
        conversation[3]["content"] + "<|im_end|>"
    ]


def test_the_date_of_a_template_does_not_change_with_the_day(tmp_path):
    example = prepared(tmp_path, byte_level(DATED), talk(random.Random(5), 1)).train[0]
    assert example.prompt.startswith("26 Jul 2024\n")


def test_the_begin_token_is_the_templates_own(tmp_path):
    tokens = metaspace(LLAMA3)
    read = prepared(tmp_path, tokens, talk(random.Random(6), 2))
    assert (
        read.train[0].ids.tolist().count(tokens.bos_token_id) == 1 and read.report["train"]["double_bos"]["count"] == 0
    )


def test_a_template_without_end_token_gets_one(tmp_path):
    tokens = byte_level(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% "
        "endif %}"
    )
    read = prepared(tmp_path, tokens, talk(random.Random(7), 2))
    assert [text.endswith("</s>") for text in learned(read.train[0], tokens)] == [False, True]
    assert read.report["train"]["without_end_token"]["count"] == 1


def test_white_space_that_is_a_token_ends_no_turn(tmp_path):
    """As Gemma's, which has tokens for line breaks; and a token that is not special may end a turn."""
    tokens = byte_level(
        CHATML.replace("<|im_end|>", "<end>").replace("m.content }}<end>{% endgen", "m.content }}\\n\\n<end>{% endgen")
    )
    tokens.add_tokens(["\n\n", "<end>"])
    read = prepared(tmp_path, tokens, talk(random.Random(11), 2))
    assert all(text.endswith("<end>") for text in learned(read.train[0], tokens)) and read.report["train"][
        "end_tokens"
    ] == {"<end>": 2}


def test_a_template_that_leaves_the_system_turn_out_is_counted(tmp_path):
    tokens = byte_level("{% for m in messages if m.role != 'system' %}" + CHATML.split("%}", 1)[1])
    read = prepared(tmp_path, tokens, talk(random.Random(8), 1, system=True), talk(random.Random(8), 1))
    assert read.report["sources"][0]["system_messages_not_in_template"] == 1
    assert audit.warnings(read.report) == [
        f"system messages that the chat template leaves out: 1, in {tmp_path / 'rows.jsonl'}"
    ]


def test_sharegpt_and_openai_rows_mean_the_same(tmp_path):
    tokens, conversation = byte_level(CHATML), talk(random.Random(9), 2, system=True)
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    row = {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in conversation], "id": 7}
    other = dataset.load_data(settings(write(tmp_path / "sharegpt.jsonl", row)), tokens)
    parts = [
        {**m, "content": [{"type": "text", "text": m["content"][:3]}, {"type": "text", "text": m["content"][3:]}]}
        for m in conversation
    ]
    assert (
        prepared(tmp_path, tokens, conversation).identity
        == other.identity
        == prepared(tmp_path, tokens, parts).identity
    )


def test_only_the_completion_of_conversational_rows_is_learned(tmp_path):
    tokens, conversation = byte_level(CHATML), talk(random.Random(10), 2)
    row = {"prompt": conversation[:3], "completion": conversation[3:]}
    example = dataset.load_data(settings(write(tmp_path / "rows.jsonl", row)), tokens).train[0]
    assert learned(example, tokens) == [conversation[3]["content"] + "<|im_end|>"]
    assert example.answer == conversation[3]["content"]


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "2 + 2", "output": "4"},
        {"prompt": "2 + 2", "completion": "4"},
        {"question": "2 + 2", "answer": "4"},
    ],
)
def test_prompt_format_chat_puts_any_pair_through_the_template(row, tmp_path):
    tokens = byte_level(CHATML)
    read = dataset.load_data(settings(write(tmp_path / "rows.jsonl", row), prompt_format="chat"), tokens)
    assert tokens.decode(read.train[0].ids) == "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    write(tmp_path / "rows.jsonl", {**row, "system": "Be brief."})
    said = dataset.load_data(settings(tmp_path / "rows.jsonl", prompt_format="chat"), tokens).train[0]
    assert tokens.decode(said.ids) == "<|im_start|>system\nBe brief.<|im_end|>\n" + tokens.decode(read.train[0].ids)
    assert learned(said, tokens) == ["4<|im_end|>"]


TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]
BRIEF = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"messages": TURNS}, ["b", "d"]),
        ({"messages": [BRIEF, *TURNS]}, ["b", "d"]),
        ({"prompt": TURNS[:3], "completion": TURNS[3:]}, ["d"]),
        ({"conversations": [{"from": m["role"], "value": m["content"]} for m in TURNS]}, ["b", "d"]),
        ({"conversations": TURNS}, ["b", "d"]),
    ],
)
def test_a_system_column_stands_before_any_conversation_once(row, answers, tmp_path):
    tokens = byte_level(CHATML)
    read = dataset.load_data(settings(write(tmp_path / "rows.jsonl", {**row, "system": "Be brief."})), tokens)
    assert tokens.decode(read.train[0].ids) == tokens.apply_chat_template([BRIEF, *TURNS], tokenize=False)
    assert (
        learned(read.train[0], tokens) == [f"{answer}<|im_end|>" for answer in answers]
        and audit.warnings(read.report) == []
    )


@pytest.mark.parametrize("style", ["chat", "alpaca", "plain"])
def test_a_question_has_the_tokens_that_the_rows_had(style, tmp_path):
    tokens = metaspace(CHATML)
    read = dataset.load_data(
        settings(
            write(tmp_path / "rows.jsonl", {"prompt": "What is 2?", "completion": "It is 2."}), prompt_format=style
        ),
        tokens,
    )
    assert prompt_ids(tokens, "What is 2?", style) == read.train[0].prompt_ids.tolist()
    if style == "chat":
        assert (
            prompt_ids(tokens, [{"role": "user", "content": "What is 2?"}], style) == read.train[0].prompt_ids.tolist()
        )


def test_of_several_templates_the_one_for_tools_or_the_default_one_is_taken(tmp_path):
    tokens, conversation = byte_level().backend_tokenizer, talk(random.Random(12), 1)
    row = {"messages": conversation, "tools": [{"name": "add"}]}
    for templates, fits, refused in (
        ({"default": CHATML, "tool_use": TOOLS}, [row, {"messages": conversation}], []),
        ({"tool_use": TOOLS}, [row], [{"messages": conversation}]),
        ({"rag": CHATML}, [], [row, {"messages": conversation}]),
    ):
        several = wrapped(tokens, templates)
        for wanted in fits:
            example = dataset.load_data(settings(write(tmp_path / "rows.jsonl", wanted)), several).train[0]
            assert ("system" in example.prompt) == ("tools" in wanted)
        for wanted in refused:
            with pytest.raises(
                errors.UsageError, match=r"several chat templates \((tool_use|rag)\), and none is called 'default'"
            ):
                dataset.load_data(settings(write(tmp_path / "rows.jsonl", wanted)), several)


def test_a_question_that_the_template_cannot_write_is_refused():
    with pytest.raises(
        errors.UsageError,
        match="this cannot be asked: what the chat template writes holds half of a surrogate pair at character 22",
    ):
        prompt_ids(byte_level(CHATML), "What\udcff", "chat")


# ------------------------------------------------------------------------------------------- a template that is stated

DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "four"},
]
# As Zephyr's, Qwen2.5's and Llama 3's own templates write it.
WRITTEN = {
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nHello</s>\n<|assistant|>\nfour</s>\n",
    "chatml": "<|im_start|>system\nBe "
    "brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe "
    "brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nfour<|eot_id|>",
}


def with_template(name, tokenizer=byte_level, path=None):
    tokens = wrapped(tokenizer(None).backend_tokenizer, None)
    config = settings(path or "none", chat_template=str(name))
    chat_template.set_template(tokens, config)
    return tokens


@pytest.mark.parametrize("tokenizer", [byte_level, metaspace])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_stated_template_writes_what_its_models_read(name, tokenizer, tmp_path):
    tokens = with_template(name, tokenizer)
    begin = "" if WRITTEN[name].startswith("<s>") else "<s>"
    assert tokens.apply_chat_template(DIALOGUE, tokenize=False) == begin + WRITTEN[name]
    asked = tokens.apply_chat_template(DIALOGUE[:2], tokenize=False, add_generation_prompt=True)
    assert WRITTEN[name].removeprefix("<s>").startswith(asked.removeprefix("<s>")) and asked.count("<s>") == 1
    example = prepared(tmp_path, tokens, DIALOGUE).train[0]
    end = {"zephyr": "</s>", "chatml": "<|im_end|>", "llama3": "<|eot_id|>"}[name]
    assert learned(example, tokens) == ["four" + end]


def test_a_template_writes_no_begin_token_that_the_model_has_not(tmp_path):
    for special in (
        {},
        {"bos_token": "</s>"},
        {"bos_token": "<|im_start|>"},
    ):  # as Qwen's; as GPT-2's, whose one token is both; as SmolLM2-Instruct's
        tokens = PreTrainedTokenizerFast(
            tokenizer_object=byte_level(None).backend_tokenizer, eos_token="</s>", pad_token="<pad>", **special
        )
        chat_template.set_template(tokens, settings("none", chat_template="zephyr"))
        assert tokens.apply_chat_template(DIALOGUE, tokenize=False) == WRITTEN["zephyr"]


def test_a_file_takes_the_place_of_the_tokenizers_own_template(tmp_path):
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}{% if add_generation_prompt "
        "%}[assistant] {% endif %}"
    )
    tokens = wrapped(byte_level().backend_tokenizer, CHATML)
    chat_template.set_template(tokens, settings("none", chat_template=str(tmp_path / "mine.jinja")))
    example = prepared(tmp_path, tokens, DIALOGUE).train[0]
    assert tokens.decode(example.ids) == "[system] Be brief.</s>[user] Hello</s>[assistant] four</s>"
    assert learned(example, tokens) == ["four</s>"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read: No such file"),
        ("{{ 1 / 0 }}{{ messages[0].role }", "mine.jinja:1: not a Jinja template"),
        ("", "an empty chat template"),
        ("{% for m in messages %}\n{{ m.role }", "mine.jinja:2: not a Jinja template"),
        (b"\xff\xfe", "mine.jinja: not UTF-8"),
    ],
)
def test_a_template_that_cannot_be_used(content, told, tmp_path):
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(errors.UsageError) as found:
        with_template(path)
    assert told in str(found.value)


def test_a_template_whose_tokens_the_model_has_not():
    plain = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(None).backend_tokenizer, eos_token="</s>", additional_special_tokens=[]
    )
    config = settings("none", chat_template="chatml")
    chat_template.set_template(plain, config)  # the trained vocabulary has them
    bare = AutoTokenizer.from_pretrained(DEMO)
    with pytest.raises(errors.UsageError, match=r"chatml writes <\|im_start\|>, which is no token of this model"):
        chat_template.set_template(bare, config)


def test_an_unknown_template_has_a_suggestion():
    with pytest.raises(errors.UsageError, match=r"chat_template: 'chatlm' cannot be read.*did you mean 'chatml'"):
        with_template("chatlm")


U, A, S, T = "user", "assistant", "system", "tool"
ORDERS = {  # roles of "0", "1", ... -> what is learned, what the model sees of others, what is said of it
    "user last": ([U, A, U], ["1"], "0", "conversations cut after their last answer: 1"),
    "several users last": ([U, A, S, U], ["1"], "0", "conversations cut after their last answer: 1"),
    "two users": ([U, U, A], ["2"], "0\n\n1", "conversations with turns of one role joined: 1"),
    "two systems": ([S, S, U, A], ["3"], "0\n\n1", "conversations with turns of one role joined: 1"),
    "two answers": ([U, A, A], ["1\n\n2"], "0", "conversations with turns of one role joined: 1"),
    "assistant first": ([A, U, A], ["2"], "0", "conversations that the assistant begins unlearned: 1"),
    "assistant after system": ([S, A, U, A], ["3"], "1", "conversations that the assistant begins unlearned: 1"),
    "system in the middle": ([U, A, S, U, A], ["1", "4"], "2", ""),
    "system before the answer": ([U, S, A], ["2"], "1", ""),
}


@pytest.mark.parametrize("order", ORDERS)
def test_turns_in_other_orders_are_trained_and_said(order, tmp_path):
    roles, answers, seen, line = ORDERS[order]
    tokens = byte_level(CHATML)
    data = prepared(tmp_path, tokens, [{"role": role, "content": str(i)} for i, role in enumerate(roles)])
    (example,) = data.train
    assert [text.removesuffix("<|im_end|>") for text in learned(example, tokens)] == answers
    assert seen in tokens.decode(example.ids)
    told = [text.partition(", in ")[0] for text in audit.warnings(data.report) if text.startswith("conversations")]
    assert told == ([line] if line else [])


def test_answers_of_which_one_is_not_learned_are_not_joined(tmp_path):
    answers = [{"role": A, "content": "b", "weight": 0}, {"role": A, "content": "c"}]
    row = {"messages": [{"role": U, "content": "a"}, *answers]}
    with pytest.raises(errors.UsageError, match="message 3 .assistant. comes after assistant"):
        dataset.load_data(settings(write(tmp_path / "rows.jsonl", row)), byte_level(CHATML))


def test_an_order_that_the_template_refuses_is_refused_with_its_reason(tmp_path):
    alternating = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
    )
    for roles in ([U, A, S, U, A], [A, U, A]):
        turns = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
        with pytest.raises(errors.UsageError, match="rows.jsonl:1: the chat template refuses it: roles must alternate"):
            prepared(tmp_path, byte_level(alternating), turns)
