"""Columns by other names: known ones are read and said, others stated; roles as people call them."""

import pytest

from anyqlora.core.errors import UsageError
from anyqlora.data import audit, columns
from tests.data.test_meanings import answers, loaded, refused

KNOWN = {  # a row of each data set, and what is learned of it
    "dolly": ({"instruction": "ask", "context": "given", "response": "yes", "category": "closed_qa"}, "given"),
    "OpenOrca": ({"id": "1", "system_prompt": "", "question": "ask", "response": "yes"}, "ask"),
    "MetaMath": ({"query": "ask", "response": "yes", "type": "GSM_Rephrased"}, "ask"),
    "query and answer": ({"query": "ask", "answer": "yes"}, "ask"),
    "prompt and response": ({"prompt": "ask", "response": "yes", "model": "x"}, "ask"),
    "prompt and answer": ({"prompt": "ask", "answer": "yes"}, "ask"),
    "prompt and output": ({"prompt": "ask", "output": "yes"}, "ask"),
    "input and output": ({"input": "ask", "output": "yes"}, "ask"),
    "input and response": ({"input": "ask", "response": "yes"}, "ask"),
    "NuminaMath": ({"problem": "ask", "solution": "yes", "source": "olympiads"}, "ask"),
    "problem and answer": ({"problem": "ask", "answer": "yes"}, "ask"),
    "question and solution": ({"question": "ask", "solution": "yes"}, "ask"),
    "Flan": ({"inputs": "ask", "targets": "yes"}, "ask"),
    "source and target": ({"source": "ask", "target": "yes"}, "ask"),
    "user and assistant": ({"user": "ask", "assistant": "yes"}, "ask"),
    "instruction and completion": ({"instruction": "ask", "completion": "yes"}, "ask"),
    "instruction and answer": ({"instruction": "ask", "context": "given", "answer": "yes"}, "given"),
    **{
        name: ({name: [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "yes"}]}, "ask")
        for name in columns.TURNS
    },
    "sharegpt turns": ({"dialog": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "yes"}]}, "ask"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_rows_of_known_data_sets_are_read_and_said(name, tmp_path):
    row, shown = KNOWN[name]
    assert answers(tmp_path, row) == [["yes"]]
    data, tokens = loaded(tmp_path, row)
    assert shown in tokens.decode(data.train[0].ids)
    (line,) = [line for line in audit.warnings(data.report) if "are read as" in line]
    assert line.startswith("1 rows are read as ") and "rows.jsonl" in line
    assert not any(line.startswith("columns") for line in audit.warnings(data.report))


def test_text_under_content_is_text_and_a_single_message_is_not(tmp_path):
    assert answers(tmp_path, {"content": "any words"}) == [["any words"]]
    assert "a message of a tree" in refused(tmp_path, {"role": "user", "content": "any words"})


def test_no_known_name_takes_the_place_of_what_a_row_has(tmp_path):
    """Half of a format and half of a data set are neither: the row is refused, and nothing of it lost."""
    for row in (
        {"prompt": "mine", "source": "web", "target": "yes"},
        {"question": "mine", "query": "other", "prompt": "third"},
    ):
        assert "no known format" in refused(tmp_path, row)
    both = {"instruction": "ask", "input": "mine", "context": "other", "response": "yes"}
    data, tokens = loaded(tmp_path, both)
    assert "mine" in tokens.decode(data.train[0].ids) and "other" not in tokens.decode(data.train[0].ids)
    assert any("'context' (1 row" in line for line in audit.warnings(data.report))


def test_what_a_system_prompt_says_is_not_dropped(tmp_path):
    row = {"system_prompt": "Be kind.", "question": "ask", "response": "yes"}
    assert "--prompt_format chat" in refused(tmp_path, row)
    data, tokens = loaded(tmp_path, row, prompt_format="chat")
    assert "Be kind." in tokens.decode(data.train[0].ids)


@pytest.mark.parametrize(
    "row, stated",
    [
        ({"frage": "ask", "antwort": "yes"}, "prompt=frage,completion=antwort"),
        ({"a": {"b": [{"c": "ask"}]}, "d": ["no", "yes"]}, "prompt=a.b[0].c, completion=d[1]"),
        ({"a.b": "ask", "c": "yes"}, "prompt=a.b,completion=c"),
        ({"prompt": "no", "completion": "no", "x": "ask", "y": "yes"}, "prompt=x,completion=y"),
        ({"talk": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "yes"}]}, "messages=talk"),
    ],
    ids=str,
)
def test_columns_are_where_they_are_said_to_be(row, stated, tmp_path):
    assert answers(tmp_path, row, columns=stated) == [["yes"]]
    data, tokens = loaded(tmp_path, row, columns=stated)
    assert "ask" in tokens.decode(data.train[0].ids)


@pytest.mark.parametrize(
    "stated, why",
    [
        ("prompt", "--columns: 'prompt' names no column"),
        ("prompt=", "--columns: 'prompt=' names no column"),
        ("promt=q", "--columns: 'promt' is no name of a format; did you mean 'prompt'?"),
    ],
)
def test_columns_that_are_stated_wrongly_are_refused(stated, why, tmp_path):
    with pytest.raises(UsageError) as error:
        loaded(tmp_path, {"q": "ask"}, columns=stated)
    assert why in str(error.value)


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path):
    error = refused(tmp_path, {"q": "ask", "a": {"b": 1}}, columns="prompt=q,completion=a.c")
    assert "no column 'a.c'" in error and "'b'" in error


ROLES = [("human", "gpt"), ("User", "Assistant"), ("prompter", "model"), ("HUMAN", "bot"), ("customer", "agent")]


@pytest.mark.parametrize("asks, says", ROLES)
def test_roles_are_known_by_their_other_names(asks, says, tmp_path):
    turns = [{"role": asks, "content": "ask"}, {"role": says, "content": "yes"}]
    assert answers(tmp_path, {"messages": turns}) == [["yes"]]
    turns = [{"from": asks, "value": "ask"}, {"from": says, "value": "yes"}]
    assert answers(tmp_path, {"conversations": turns}) == [["yes"]]


def test_a_role_that_nobody_knows_is_refused(tmp_path):
    error = refused(tmp_path, {"messages": [{"role": "oracle", "content": "a"}, {"role": "assistant", "content": "b"}]})
    assert "role 'oracle' of message 1 is unknown" in error
