"""Keys that say more than a format reads: honoured, passed over, or refused by their meaning; never dropped."""

import itertools

import pytest

from anyqlora.core.errors import UsageError
from anyqlora.data import audit, dataset, meanings
from tests.data.test_chat import learned
from tests.support.data_fixtures import CHATML, byte_level, settings, write

TALK = [
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "two"},
]


def loaded(tmp_path, *rows, **more):
    tokens = byte_level(CHATML)
    return dataset.load_data(settings(write(tmp_path / "rows.jsonl", *rows), **more), tokens), tokens


def answers(tmp_path, *rows, **more):
    """The learned answers of each example, without their end tokens."""
    data, tokens = loaded(tmp_path, *rows, **more)
    return [
        [text.removesuffix("<|im_end|>").removesuffix(tokens.eos_token).strip() for text in learned(example, tokens)]
        for example in data.train
    ]


def refused(tmp_path, *rows, **more):
    with pytest.raises(UsageError) as error:
        loaded(tmp_path, *rows, **more)
    assert "rows.jsonl:1" in str(error.value)
    return str(error.value)


def with_key(number, key, value):
    return {"messages": [{**turn, key: value} if i == number else turn for i, turn in enumerate(TALK)]}


# ------------------------------------------------------------------------------------- whether a turn is to be learned


OFF = [
    *itertools.product(("train", "training", "trainable", "learn", "loss", "weight", "loss_weight"), (False, 0, 0.0)),
    *itertools.product(("mask", "masked"), (True, 1)),
    ("train_detail", [{"begin_offset": 0, "end_offset": 2, "train": False}]),
]


@pytest.mark.parametrize("key, value", OFF, ids=str)
def test_a_turn_that_is_switched_off_is_not_learned(key, value, tmp_path):
    """As OpenAI (weight), axolotl (train, training, train_detail) and ms-swift (loss) write it."""
    assert answers(tmp_path, with_key(1, key, value)) == [["two"]]
    assert answers(tmp_path, with_key(3, key, value)) == [["one"]]
    turn = {"from": "gpt", "value": "one", key: value}
    sharegpt = [{"from": "human", "value": "first"}, turn, *[{"from": t["role"], "value": t["content"]} for t in TALK]]
    assert answers(tmp_path, {"conversations": sharegpt}) == [["one", "two"]]


@pytest.mark.parametrize("key, value", [("train", True), ("weight", 1), ("loss", 1.0), ("mask", False)], ids=str)
def test_a_turn_that_is_switched_on_is_learned_like_others(key, value, tmp_path):
    assert answers(tmp_path, with_key(1, key, value)) == [["one", "two"]]
    assert answers(tmp_path, with_key(1, key, None)) == [["one", "two"]]


@pytest.mark.parametrize(
    "key, value, why",
    [
        ("weight", 0.5, "'weight' of message 2 is 0.5: a part of its loss"),
        ("train", "no", "'train' of message 2 is 'no': neither yes nor no"),
        ("train_detail", "all", "'train_detail' of message 2 is no list"),
        ("train_detail", 5, "'train_detail' of message 2 is no list"),
        ("train_detail", {"train": True}, "'train_detail' of message 2 is no list"),
        ("weight", [1], "'weight' of message 2 is [1]: neither yes nor no"),
        (
            "train_detail",
            [{"begin_offset": 0, "end_offset": 0, "train": True}, {"begin_offset": 1, "end_offset": 2, "train": False}],
            "'train_detail' of message 2 trains some of its characters and not others",
        ),
    ],
    ids=str,
)
def test_a_switch_that_is_neither_on_nor_off_is_refused(key, value, why, tmp_path):
    assert why in refused(tmp_path, with_key(1, key, value))


def test_two_switches_that_differ_are_refused(tmp_path):
    row = {"messages": [TALK[0], {**TALK[1], "train": False, "weight": 1}]}
    assert "message 2 says two things: weight, train" in refused(tmp_path, row)


def test_nobody_but_the_assistant_is_learned(tmp_path):
    assert "asks to learn what the user says" in refused(tmp_path, with_key(2, "train", True))
    assert answers(tmp_path, with_key(2, "train", False)) == [["one", "two"]]


def test_keys_of_messages_that_no_template_reads_are_told(tmp_path):
    data, _ = loaded(tmp_path, with_key(1, "emotion", "glad"), with_key(0, "id", 7))
    assert data.report["sources"][0]["unused_columns"] == {"messages[].emotion": 1, "messages[].id": 1}
    (line,) = [line for line in audit.warnings(data.report) if line.startswith("columns")]
    assert "'messages[].emotion' (1 row)" in line and "id" not in line


# ---------------------------------------------------------------------------------------------------- columns that mean


PLAIN = {"prompt": "a", "completion": "b"}
ROWS = {
    "messages": {"messages": TALK},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "alpaca": {"instruction": "a", "output": "b"},
    "prompt_completion": PLAIN,
    "question_answer": {"question": "a", "answer": "b"},
    "text": {"text": "a"},
}
SAYS = {  # of each meaning one value
    meanings.PREFERENCE: "x",
    meanings.DESIRABLE: False,
    meanings.IMAGES: ["a.png"],
    meanings.WEIGHED: 0.0,
    meanings.TREE: "prompter",
    meanings.TOKENS: [1, 2],
    meanings.TEMPLATE: {"enable_thinking": False},
    meanings.CONTEXT: "Be kind.",
}
READ = dict.fromkeys(
    ("system", "tools", "functions", "chat_template_kwargs", "enable_thinking", "reasoning_effort"),
    ("messages", "sharegpt"),
)


@pytest.mark.parametrize("key", [*meanings.MEANINGS, "Images", "LABEL"])
@pytest.mark.parametrize("form", ROWS)
def test_a_column_that_means_something_is_refused_by_its_meaning(form, key, tmp_path):
    """Beside any format that does not read it; what is empty means nothing; and each cure works."""
    if form in READ.get(key, ()):
        return
    meaning = meanings.MEANINGS[key.lower()]
    row = {**ROWS[form], key: SAYS.get(meaning, 3)}
    error = refused(tmp_path, row)
    assert f"{key!r} says something that would not be learned: {meaning}" in error
    assert f"--ignore_columns {key}" in error
    as_it_is = answers(tmp_path, ROWS[form])
    assert answers(tmp_path, row, ignore_columns=key) == as_it_is
    assert answers(tmp_path, {**row, key: None}) == answers(tmp_path, {**row, key: []}) == as_it_is


@pytest.mark.parametrize("key", ["images", "audio", "video"])
def test_a_message_with_pictures_is_refused(key, tmp_path):
    row = with_key(0, key, ["a.png"])
    assert f"{key!r} of message 1: {meanings.IMAGES}" in refused(tmp_path, row)
    assert answers(tmp_path, row, ignore_columns=f"id, {key}") == [["one", "two"]]


def test_a_class_is_no_preference(tmp_path):
    assert "'label' says something that would not be learned: a class" in refused(
        tmp_path, {"text": "awful", "label": "negative"}
    )


def test_harmless_columns_are_not_told(tmp_path):
    row = {**PLAIN, "id": 1, "Source": "web", "created_at": "2024", "mood": "glad"}
    data, _ = loaded(tmp_path, row)
    (line,) = [line for line in audit.warnings(data.report) if line.startswith("columns")]
    assert line.startswith("columns that are not used: 'mood' (1 row), in ")
    assert not meanings.HARMLESS & {name.lower() for name in meanings.MEANINGS}


# --------------------------------------------------------------------------------------------------------- Alpaca's own


ALPACA = {
    "instruction": "third",
    "output": "three",
    "system": "Be brief.",
    "history": [["first", "one"], ["second", "two"]],
}


def test_history_and_system_of_alpaca_rows_are_turns_of_a_conversation(tmp_path):
    """LLaMA-Factory learns the answers of the history, too."""
    assert answers(tmp_path, ALPACA, prompt_format="chat") == [["one", "two", "three"]]
    data, tokens = loaded(tmp_path, ALPACA, prompt_format="chat")
    text = tokens.decode(data.train[0].ids)
    assert text.index("Be brief.") < text.index("first") < text.index("one") < text.index("third")
    for key in ("system", "history"):
        row = {name: value for name, value in ALPACA.items() if name in ("instruction", "output", key)}
        assert "--prompt_format chat" in refused(tmp_path, row)
    wrong = {**ALPACA, "history": [["first"]]}
    assert "'history' is no list of pairs of text" in refused(tmp_path, wrong, prompt_format="chat")


# ---------------------------------------------------------------------------------------------------------- preferences


YES, NO = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}
ASK = {"role": "user", "content": "ask"}
PREFERENCES = {
    "TRL, text": ({"prompt": "ask", "chosen": "yes", "rejected": "no"}, ["yes"]),
    "TRL, messages": ({"prompt": [ASK], "chosen": [YES], "rejected": [NO]}, ["yes"]),
    "TRL, without a prompt": ({"chosen": [ASK, YES], "rejected": [ASK, NO]}, ["yes"]),
    "UltraFeedback": (
        {
            "prompt": "ask",
            "prompt_id": "1",
            "chosen": [ASK, YES],
            "rejected": [ASK, NO],
            "score_chosen": 8.5,
            "score_rejected": 2.0,
        },
        ["yes"],
    ),
    "several turns": ({"chosen": [*TALK, ASK, YES], "rejected": [*TALK, ASK, NO]}, ["yes"]),
    "Alpaca's question": ({"instruction": "ask", "input": "", "chosen": "yes", "rejected": "no"}, ["yes"]),
    "question": ({"question": "ask", "chosen": "yes", "rejected": "no", "system": ""}, ["yes"]),
    "LLaMA-Factory": (
        {
            "conversations": [{"from": "human", "value": "ask"}],
            "chosen": {"from": "gpt", "value": "yes"},
            "rejected": {"from": "gpt", "value": "no"},
        },
        ["yes"],
    ),
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_the_chosen_answer_is_trained_where_that_is_asked_for(name, tmp_path):
    row, expected = PREFERENCES[name]
    assert "--preference_data chosen" in refused(tmp_path, row)
    assert answers(tmp_path, row, preference_data="chosen") == [expected]


@pytest.mark.parametrize("key, good, bad", [("label", True, False), ("kto_tag", 1, 0), ("desirable", True, False)])
def test_rows_that_are_called_bad_are_left_out_and_counted(key, good, bad, tmp_path):
    rows = [{**PLAIN, key: good}, {"prompt": "c", "completion": "d", key: bad}, {"messages": TALK[:2], key: bad}]
    assert "--preference_data chosen" in refused(tmp_path, rows[1])
    data, tokens = loaded(tmp_path, *rows, preference_data="chosen")
    assert answers(tmp_path, *rows, preference_data="chosen") == [["b"]]
    assert data.report["sources"][0]["rows_that_are_not_chosen"] == 2


@pytest.mark.parametrize(
    "row, why",
    [
        ({"chosen": "Human: a Assistant: b", "rejected": "no"}, "nothing says what was asked"),
        ({"prompt": "a", "chosen": 3, "rejected": 2}, "'chosen' is a number"),
        ({"chosen": YES, "rejected": NO}, "'chosen' is a message, and nothing says what was asked"),
    ],
)
def test_preferences_that_say_no_question_are_refused(row, why, tmp_path):
    assert why in refused(tmp_path, row, preference_data="chosen")
