"""What cannot be used is named by file, line and column, with the reason and a cure; nothing is accepted silently."""

import gzip
import json
import re
import shutil
import time

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from anyqlora import __main__ as program
from anyqlora.core import errors
from anyqlora.data import audit, dataset
from anyqlora.models.architectures import DEMO_BASE
from tests.support import runs
from tests.support.data_fixtures import CHATML, byte_level, settings, write

GOOD = b'{"prompt": "2 + 2 =", "completion": " 4"}\n'
CHAT = b'{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}\n'


def chat(*turns):
    return (
        b'{"messages": ['
        + b", ".join(b'{"role": "%s", "content": "%s"}' % (role.encode(), said.encode()) for role, said in turns)
        + b"]}"
    )


# what the bad row is, its bytes as the second of three rows, the place it must be named at, the reason
ROWS = {
    "cut off inside a string": (b'{"prompt": "2 + 2 =", "comple', "2:23", "the JSON breaks off"),
    "cut off after a comma": (b'{"prompt": "2 + 2 =", ', "2:23", "the JSON breaks off"),
    "cut off after a value": (b'{"prompt": "2 + 2 ="', "2:21", "the JSON breaks off"),
    "single quotes": (b"{'prompt': 'a', 'completion': 'b'}", "2:2", "not JSON: Expecting property name"),
    "trailing comma": (b'{"prompt": "a", "completion": "b",}', "2:35", "not JSON"),
    "no comma": (b'{"prompt": "a" "completion": "b"}', "2:16", "not JSON: Expecting ',' delimiter"),
    "two rows on a line": (
        b'{"prompt": "a", "completion": "b"} {"prompt": "c", "completion": "d"}',
        "2:36",
        "more than one JSON value",
    ),
    "plain text": (b"hello", "2:1", "not JSON: Expecting value"),
    "a list": (b'["a", "b"]', "2:1", "a list, not an object"),
    "a string": (b'"a"', "2:1", "a string, not an object"),
    "a raw line break is no row": (b'{"prompt": "a', "2:12", "the JSON breaks off"),
    "a raw tab in a string": (b'{"prompt": "a\tb", "completion": "c"}', "2:14", "not JSON: Invalid control character"),
    "a NUL byte": (b'{"prompt": "a\0b", "completion": "c"}', "2:14", "a NUL byte"),
    "NUL bytes for a line": (b"\0" * 30, "2:1", "30 NUL bytes"),
    "Latin-1": ('{"prompt": "caf\u00e9", "completion": "c"}'.encode("latin-1"), "2:16", "byte 0xe9 is not UTF-8"),
    "a key twice": (b'{"prompt": "a", "prompt": "b", "completion": "c"}', "2", "key 'prompt' stands twice"),
    "NaN": (b'{"prompt": "NaN", "completion": NaN}', "2:33", "NaN is not JSON"),
    "NaN and more": (b'{"prompt": "a", "completion": NaNs}', "2:31", "NaN is not JSON"),
    "Infinity and more": (b'{"prompt": "a", "completion": Infinity9}', "2:31", "Infinity is not JSON"),
    "minus Infinity": (b'{"prompt": "a", "completion": -Infinity}', "2:31", "-Infinity is not JSON"),
    "null": (b'{"prompt": "a", "completion": null}', "2", "'completion' is null, not text"),
    "a number": (b'{"prompt": "a", "completion": 4}', "2", "'completion' is a number, not text"),
    "a boolean": (b'{"prompt": true, "completion": "4"}', "2", "'prompt' is a boolean, not text"),
    "an empty answer": (b'{"prompt": "a", "completion": ""}', "2", "'completion' is empty"),
    "a blank answer": (b'{"prompt": "a", "completion": " \\n"}', "2", "'completion' is empty"),
    "an empty prompt": (b'{"prompt": "", "completion": "b"}', "2", "'prompt' is empty"),
    "no completion": (
        b'{"prompt": "a", "completions": "b"}',
        "2",
        "no 'completion' (format prompt_completion); did you mean 'completions'?",
    ),
    "an empty row": (b"{}", "2", "no 'prompt', 'completion'"),
    "another format": (
        b'{"instruction": "a", "output": "b"}',
        "2",
        "a row of format alpaca among rows of format prompt_completion",
    ),
    "half a surrogate pair": (
        b'{"prompt": "a\\ud800", "completion": "b"}',
        "2",
        "half of a surrogate pair at character 2",
    ),
    "a NUL character": (b'{"prompt": "a\\u0000", "completion": "b"}', "2", "'prompt' holds a NUL character"),
    "too deep": (b'{"prompt": ' + b"[" * 100_000, "2", "nested too deeply"),
    "a prompt that fills the context": (
        b'{"prompt": "' + b"2 + " * 600 + b'", "completion": "b"}',
        "2",
        "fills the context of 512: nothing is learned from it",
    ),
    "a number too long for Python": (b'{"prompt": "a", "completion": ' + b"1" * 5000 + b"}", "2", "Exceeds the limit"),
}
TALKS = {
    "messages are text": (b'{"messages": "Hi"}', "no list of messages"),
    "no messages": (b'{"messages": []}', "no messages"),
    "a message that is text": (b'{"messages": ["Hi"]}', "message 1 is a string, not an object"),
    "unknown role": (
        chat(("user", "a"), ("asistant", "b")),
        "role 'asistant' of message 2 is unknown; did you mean 'assistant'?",
    ),
    "no role": (b'{"messages": [{"content": "a"}]}', "no 'role' of message 1"),
    "no content": (b'{"messages": [{"role": "user"}]}', "no 'content' of message 1"),
    "null content": (b'{"messages": [{"role": "user", "content": null}]}', "'content' of message 1 is null, not text"),
    "empty answer": (chat(("user", "a"), ("assistant", "")), "'content' of message 2 is empty"),
    "an image": (
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        "has a part that is no text: 'image_url'",
    ),
    "assistant alone": (chat(("assistant", "a")), "no assistant turn is learned"),
    "tool after user": (
        chat(("user", "a"), ("tool", "b"), ("assistant", "c")),
        "roles out of order: message 2 (tool) comes after user",
    ),
    "user alone": (chat(("user", "a")), "no message is the assistant's, so there is nothing to learn"),
    "a weight between": (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}]}',
        "'weight' of message 2 is 0.5",
    ),
    "nothing learned": (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}',
        "no assistant turn is learned",
    ),
    "tools are text": (
        b'{"tools": "x", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        "'tools' is text that is no JSON list",
    ),
    "tools are an object": (
        b'{"tools": "{}", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        "'tools' is an object, not a list of objects",
    ),
}


def calls(raw):
    return (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": %s}]}'
        % raw
    )


def arguments(raw):
    return calls(b'[{"function": {"name": "w", "arguments": %s}}]' % raw)


TALKS |= {
    "two system messages": (
        b'{"system": "x", "messages": [{"role": "system", "content": "y"}, {"role": "user", "content": "a"}, {"role": '
        b'"assistant", "content": "b"}]}',
        "'system' says something else than the system message",
    ),
    "disorder under a system column": (
        b'{"system": "x", ' + chat(("user", "a"), ("tool", "b"), ("assistant", "c"))[1:],
        "message 2 (tool) comes after user",
    ),
    "a system column that is no text": (
        b'{"system": 4, ' + chat(("user", "a"), ("assistant", "c"))[1:],
        "'system' is a number, not text",
    ),
    "tool calls are text": (calls(b'"w"'), "'tool_calls' of message 2 is no list of objects"),
    "a tool call that is text": (calls(b'["w"]'), "'tool_calls' of message 2 is no list of objects"),
    "a function that is text": (
        calls(b'[{"function": "w"}]'),
        "'function' of tool call 1 of message 2 is a string, not an object",
    ),
    "a tool call without a name": (
        calls(b'[{"function": {"arguments": {}}}]'),
        "no 'name' of tool call 1 of message 2",
    ),
    "arguments that break off": (
        arguments(b'"{"'),
        "'arguments' of tool call 1 of message 2 is text that is no JSON object: the JSON breaks off",
    ),
    "arguments that are no JSON": (
        arguments(b'"city=Rome"'),
        "is text that is no JSON object: not JSON: Expecting value",
    ),
    "arguments with more behind": (arguments(b'"{} {}"'), "is text that is no JSON object: more than one JSON value"),
    "arguments with NaN": (arguments(b'"{\\"n\\": NaN}"'), "is text that is no JSON object: NaN is not JSON"),
    "arguments that are a list": (
        arguments(b'"[1]"'),
        "'arguments' of tool call 1 of message 2 is a list, not an object",
    ),
    "arguments that are a number": (arguments(b"4"), "is a number, not an object"),
}
FILES = {
    "empty": ("a.jsonl", b"", "a.jsonl: no rows: the file is empty"),
    "only blank lines": ("a.jsonl", b"\n\n \n", "no rows"),
    "UTF-16": ("a.jsonl", GOOD.decode().encode("utf-16"), "not UTF-8 text but UTF-16"),
    "UTF-16 without a mark": ("a.jsonl", (GOOD * 9).decode().encode("utf-16-le"), "a binary file, or UTF-16"),
    "binary": ("a.jsonl", bytes(range(64)) * 4 + b"\0" * 200, "a binary file"),
    "gzip": ("a.jsonl", gzip.compress(GOOD), "not UTF-8 text but gzip"),
    "Parquet as JSON lines": ("a.jsonl", b"PAR1....", "name it .parquet"),
    "JSON lines as Parquet": ("a.parquet", GOOD, "not Parquet"),
    "a JSON object": (
        "a.json",
        b'{"data": [\n{"prompt": "a", "completion": "b"}]}',
        "neither a list of rows nor one row per line",
    ),
    "a JSON list that breaks off": (
        "a.json",
        b"[\n" + GOOD.strip() + b',\n{"prompt": "a"',
        "a.json:3:15: the JSON breaks off",
    ),
    "a JSON list without comma": ("a.json", b"[\n" + GOOD + GOOD + b"]", "a.json:3:1: not JSON: expected ',' or ']'"),
    "a comma at a JSON list's end": (
        "a.json",
        b"[\n" + GOOD.strip() + b",\n]",
        "a.json:2:42: not JSON: a comma before the ']'",
    ),
    "a JSON list of a comma": ("a.json", b"[,]", "a.json:1:2: not JSON: Expecting value"),
    "a JSON list with NaN and more": (
        "a.json",
        b'[\n{"prompt": "NaN", "completion": NaNx}]',
        "a.json:2:33: NaN is not JSON",
    ),
    "a JSON list of text": ("a.json", b'["a",\n "b"]', "a.json:2:2\n  cure: a row is {"),
    "text after a JSON list": ("a.json", b"[" + GOOD.strip() + b"]\nxyz", "a.json:2:1: text after the end of the list"),
    "a JSON list in JSON lines": ("a.jsonl", b"[\n" + GOOD + b"]", "a.jsonl:1"),
    "ragged CSV": ("a.csv", b'prompt,completion\na,b\nc,d,e\n"f\ng",h\ni\n', "a.csv:3: 3 cells, but the header has 2"),
    "CSV that ends inside quotes": (
        "a.csv",
        b'prompt,completion\na,b\nc,"d\n',
        "a.csv:3: not CSV: unexpected end of data",
    ),
    "CSV with a column twice": ("a.csv", b"prompt,prompt\na,b\n", "a.csv:1: the header names a column twice"),
    "CSV with only a header": ("a.csv", b"prompt,completion\n", "no rows"),
    "CSV with semicolons": (
        "a.csv",
        b"prompt;completion\na;b\n",
        "a.csv:2: no known format: the row has 'prompt;completion'",
    ),
    "CSV with an empty answer": ("a.csv", b"prompt,completion\na,\n", "a.csv:2: 'completion' is empty"),
    "Latin-1 CSV": ("a.csv", "prompt,completion\na,caf\u00e9\n".encode("latin-1"), "a.csv:2:6: byte 0xe9 is not UTF-8"),
    "CSV with a NUL byte": ("a.csv", b"prompt,completion\na,b\0\n" + GOOD * 9, "a.csv:2: a NUL byte"),
    "no known keys": (
        "a.jsonl",
        b'{"ask": "a", "say": "b"}\n',
        "a.jsonl:1: no known format: the row has 'ask', 'say'",
    ),
    "an unknown suffix": ("a.xlsx", b"PK\x03\x04", "unknown kind of file '.xlsx'"),
}


def refused(path, tokens=None, **more):
    with pytest.raises(errors.UsageError) as caught:
        dataset.load_data(settings(path, **more), tokens or byte_level())
    assert "cure: " in str(caught.value) and caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("kind", ROWS)
def test_a_bad_row_is_named(kind, tmp_path):
    raw, place, reason = ROWS[kind]
    (tmp_path / "a.jsonl").write_bytes(GOOD + raw + b"\n" + GOOD)
    message = refused(tmp_path / "a.jsonl")
    assert message.startswith(f"{tmp_path / 'a.jsonl'}:{place}: ") and reason in message


@pytest.mark.parametrize("kind", ROWS)
def test_a_bad_row_is_skipped_and_listed_when_asked(kind, tmp_path):
    raw, place, reason = ROWS[kind]
    (tmp_path / "a.jsonl").write_bytes(GOOD + raw + b"\n" + GOOD)
    read = dataset.load_data(settings(tmp_path / "a.jsonl", on_bad_row="skip"), byte_level())
    assert [example.where.rpartition(":")[2] for example in read.train] == ["1", "3"]
    [skipped] = read.report["skipped"]
    assert skipped["where"] == f"{tmp_path / 'a.jsonl'}:{place}" and reason in skipped["reason"]


@pytest.mark.parametrize("kind", TALKS)
def test_a_bad_conversation_is_named(kind, tmp_path):
    raw, reason = TALKS[kind]
    (tmp_path / "a.jsonl").write_bytes(CHAT + raw + b"\n")
    message = refused(tmp_path / "a.jsonl", byte_level(CHATML))
    assert message.startswith(f"{tmp_path / 'a.jsonl'}:2: ") and reason in message


@pytest.mark.parametrize("kind", FILES)
def test_a_bad_file_is_named(kind, tmp_path):
    name, raw, reason = FILES[kind]
    (tmp_path / name).write_bytes(raw)
    assert reason in refused(tmp_path / name)


@pytest.mark.parametrize(
    "row", [{"from": "human", "value": "a"}, {"from": "alien", "value": "a"}, {"from": "human"}, "a"]
)
def test_a_bad_sharegpt_turn_is_named(row, tmp_path):
    assert f"{tmp_path / 'a.jsonl'}:1: " in refused(
        write(tmp_path / "a.jsonl", {"conversations": [row]}), byte_level(CHATML)
    )


def test_no_such_file(tmp_path):
    assert "no such file or directory" in refused(tmp_path / "none.jsonl")


def test_an_empty_directory(tmp_path):
    assert "no file of rows in this directory" in refused(tmp_path)


def test_conversations_need_a_chat_template(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(CHAT)
    assert "no chat template" in refused(tmp_path / "a.jsonl", byte_level(None))


@pytest.mark.parametrize("style", ["auto", "chat", "plain", "alpaca"])
def test_conversations_without_a_template_have_a_cure_that_works(style, tmp_path):
    """Whatever prompt_format is tried, the cure does not lead back to another refusal."""
    (tmp_path / "a.jsonl").write_bytes(CHAT)
    assert "rows with prompt and completion" in refused(tmp_path / "a.jsonl", byte_level(None), prompt_format=style)
    (tmp_path / "b.jsonl").write_bytes(GOOD * 4)
    assert len(dataset.load_data(settings(tmp_path / "b.jsonl"), byte_level(None)).train) == 4


@pytest.mark.parametrize(("raw", "style"), [(CHAT, "alpaca"), (CHAT, "plain"), (b'{"text": "a"}\n', "chat")])
def test_a_prompt_format_that_does_not_fit(raw, style, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(raw)
    assert f"has no {style} form" in refused(tmp_path / "a.jsonl", prompt_format=style)


def test_twenty_bad_rows_are_named_and_the_rest_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"{\n" * 33 + GOOD)
    message = refused(tmp_path / "a.jsonl")
    assert "33 rows cannot be used" in message and "and 13 more" in message
    assert re.findall(r"a.jsonl:(\d+):2\b", message) == [str(n) for n in range(2, 22)]
    assert message.count("the JSON breaks off") == 1


def test_what_is_wrong_with_several_rows_is_said_once_with_its_cure(tmp_path):
    no_system = byte_level(
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
    )
    write(
        tmp_path / "a.jsonl",
        *[
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "u"},
                    {"role": "assistant", "content": str(n)},
                ]
            }
            for n in range(30)
        ],
    )
    message = refused(tmp_path / "a.jsonl", no_system)
    assert message.startswith(
        "30 rows cannot be used: the chat template refuses it: System role not supported\n"
    ) and message.endswith(
        "a.jsonl:20 and 10 more\n  cure: put the system text into the first user turn; or --on_bad_row skip"
    )
    with open(tmp_path / "a.jsonl", "ab") as rows:
        rows.write(b"{\n[]\n")
    lines = refused(tmp_path / "a.jsonl", no_system).splitlines()
    assert (
        len(lines) == 5
        and lines[0] == "32 rows cannot be used"
        and lines[-1] == "  cure: mend them; or --on_bad_row skip"
    )
    assert any(
        line.startswith("  30 rows: the chat template refuses it") and line.endswith("a.jsonl:6 and 24 more")
        for line in lines
    )
    assert any(re.match(r"  \S*a.jsonl:31:2: the JSON breaks off \(cure: ", line) for line in lines)


def test_bad_rows_of_several_files_and_of_several_stages_are_in_one_message(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"{\n")
    (tmp_path / "b.jsonl").write_bytes(GOOD + b'{"prompt": "a", "completion": ""}\n')
    (tmp_path / "c.jsonl").write_bytes(b'{"prompt": "' + b"2 + " * 600 + b'", "completion": "b"}\n')
    message = refused(f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.jsonl'}", eval_dataset=str(tmp_path / "c.jsonl"))
    assert all(f"{name}.jsonl:{line}" in message for name, line in (("a", 2), ("b", 2), ("c", 1)))


def test_skipping_every_row_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a", "completion": ""}\n' * 3)
    assert "no row can be used" in refused(tmp_path / "a.jsonl", on_bad_row="skip")


def test_what_a_row_says_cannot_steer_the_terminal(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"\\u001b[31mprompt": "a", "\\u202ecompletion": "b"}\n' + GOOD)
    assert not re.search("[\x1b\u202e]", refused(tmp_path / "a.jsonl"))
    repeating = byte_level("{{ raise_exception(messages[0].content) }}")
    for rows in (1, 2):
        write(
            tmp_path / "b.jsonl",
            *[{"messages": [{"role": "user", "content": "\x1b[31m"}, {"role": "assistant", "content": "a"}]}] * rows,
        )
        message = refused(tmp_path / "b.jsonl", repeating)
        assert r"refuses it: \x1b[31m" in message and "\x1b" not in message


def test_a_line_that_is_long_in_characters_only_has_no_end_token(tmp_path):
    """A tokenizer of whole words: a hundred thousand characters are one token, and yet the row is cut."""
    words = Tokenizer(models.WordLevel({"x": 0, "[UNK]": 1, "</s>": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    path = write(tmp_path / "a.jsonl", {"prompt": "x", "completion": " " + "y" * 100_000})
    [example] = dataset.load_data(settings(path, on_long_row="truncate"), tokens).train
    assert example.ids.tolist() == [0, 1] and example.truncated


@pytest.mark.parametrize(
    "row", [{"prompt": "</s>" * 100_000, "completion": "b"}, {"text": "### Human: a### Assistant: "}]
)
def test_rows_of_which_nothing_is_left_to_learn(row, tmp_path):
    assert re.search("nothing is learned from it|the assistant says nothing", refused(write(tmp_path / "a.jsonl", row)))


@pytest.mark.parametrize("words", [b"y" * 10_000_000, b" y" * 5_000_000, b" " * 9_999_999 + b"y"])
def test_a_line_of_ten_megabytes_takes_no_time(words, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD + b'{"prompt": "x", "completion": "' + words + b'"}\n')
    start = time.process_time()
    read = dataset.load_data(settings(tmp_path / "a.jsonl"), byte_level())
    assert time.process_time() - start < 5
    assert (
        read.train[1].truncated and byte_level().eos_token_id not in read.train[1].ids and len(read.train[1].ids) <= 512
    )


def test_sizes_that_are_named_are_true_and_their_cure_works(tmp_path):
    """Also of rows that are far too long: nothing but the size of the whole is a cure."""
    rows = {"prompt": "Who? " * 40_000, "completion": "Tam."}, {"prompt": "Who?", "completion": "Tam " * 40_000}
    for row, more in zip(rows, ({}, {"on_long_row": "error"}), strict=True):
        path = write(tmp_path / "a.jsonl", json.loads(GOOD), row)
        error = refused(path, **more)
        (size,) = set(re.findall(r"--context_length (\d+)", error))
        assert int(size) > 40_000 and "a.jsonl:2: " in error
        read = dataset.load_data(settings(path, context_length=int(size), **more), byte_level())
        assert len(read.train[1].ids) == int(size) and not read.train[1].truncated
        assert f"{size} tokens" in refused(path, context_length=int(size) - 1, on_long_row="error")


def test_a_context_that_cuts_the_end_off_most_answers_stops_the_run(tmp_path):
    """With the contexts that would cut fewer, each of which does."""
    rows = [{"prompt": "Who?", "completion": "Tam " * i} for i in range(1, 201)]
    path = write(tmp_path / "a.jsonl", *rows)
    error = refused(path, context_length=64)
    none, few, some = (int(number) for number in re.findall(r"(\d+) cuts", error))
    assert "rows have more than 64 tokens" in error and none > few > some > 64

    def cut(context, **more):
        report = dataset.load_data(settings(path, context_length=context, **more), byte_level()).report["train"]
        return report["truncated"]["count"], report["percentiles"]

    assert [cut(context)[0] for context in (none, few, some)] == [0, 2, 10]
    assert cut(64, on_long_row="truncate")[0] > 100
    assert cut(some)[1] == {"p50": cut(none)[1]["p50"], "p95": some, "p99": few, "max": none}
    write(path, *[{"text": "Tam " * i} for i in range(100, 201)])  # of text alone nothing ends an answer
    assert cut(64)[0] == 101


def test_what_was_found_in_the_rows_is_said_a_line_each(tmp_path, capfd):
    """By a run; where nothing is found, nothing is said."""
    (tmp_path / "a.jsonl").write_bytes(
        GOOD
        + b"{\n"
        + GOOD
        + b'{"prompt": "x", "completion": "'
        + b"y " * 200
        + b'"}\n{"prompt": "x", "completion": ""}\n'
    )
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "3 + 3 =", "completion": " 6"}\n' + GOOD)
    few = {
        "model_name": "demo",
        "context_length": 96,
        "max_steps": 1,
        "lora_rank": 2,
        "save_steps": 0,
        "exact_match": False,
        "log_to": "none",
    }
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    runs.run(tmp_path, **few, dataset=str(a), eval_dataset=str(b), on_bad_row="skip")
    assert capfd.readouterr().err.splitlines() == [
        f"warning: rows that cannot be used and are skipped: 2, the first is {a}:2:2: the JSON breaks off",
        f"warning: rows cut to 96 tokens: 1, the first is {a}:4",
        f"warning: duplicate rows: 1, the first is {a}:3",
        f"warning: evaluation rows that are trained on: 1, the first is {b}:2",
    ]
    runs.run(tmp_path, "clean", **few, dataset=str(b))
    assert capfd.readouterr().err == ""


def test_rows_of_which_nothing_is_learned_are_findings_too():
    """Of a report made by hand, for the data layer lets none through."""
    report = {
        "context_length": 8,
        "skipped": [],
        "train": {"fully_masked": {"count": 3, "first": ["a:1", "a:2", "a:3"]}},
    }
    assert audit.warnings(report) == ["rows of which nothing is learned: 3, the first is a:1"]


def cases():
    """(name, {file: content}, the file and the place that must be named) of everything above that cannot be trained
    on.
    """
    yield from (
        (kind, {"a.jsonl": GOOD + raw + b"\n" + GOOD}, f"a.jsonl:{place}: ") for kind, (raw, place, _) in ROWS.items()
    )
    yield from ((kind, {"a.jsonl": CHAT + raw + b"\n"}, "a.jsonl:2: ") for kind, (raw, _) in TALKS.items())
    yield from ((kind, {name: raw}, name) for kind, (name, raw, _) in FILES.items())
    yield "a ShareGPT turn", {"a.jsonl": b'{"conversations": [{"from": "alien", "value": "a"}]}\n'}, "a.jsonl:1: "
    yield "an empty directory", {}, ""
    yield (
        "several",
        {"train-a.jsonl": GOOD + b"{\n", "train-b.jsonl": b'{"prompt": "a", "completion": ""}\n' + GOOD},
        "train-b.jsonl:1: ",
    )


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    """The embedded base with a chat template."""
    base = shutil.copytree(DEMO_BASE, tmp_path_factory.mktemp("talking") / "base")
    about = json.loads((base / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    (base / "tokenizer_config.json").write_text(json.dumps({**about, "chat_template": template}))
    return base


def in_each_part():
    """Each case in the rows that are trained on; one in ten in those that are held out too, which the same code
    reads.
    """
    for part in ("dataset", "eval_dataset"):
        for number, (kind, files, named) in enumerate(cases()):
            is_quick = part == "dataset" or number % 10 == 0
            yield pytest.param(part, files, named, id=f"{part}-{kind}", marks=[] if is_quick else [pytest.mark.slow])


@pytest.mark.parametrize(("part", "files", "named"), in_each_part())
def test_training_ends_with_two_and_leaves_nothing(part, files, named, talking, tmp_path, capsys):
    """The command, from its flags on; whatever is no refusal comes out of it as an exception."""
    rows = tmp_path / "rows"
    rows.mkdir()
    for name, raw in files.items():
        (rows / name).write_bytes(raw)
    good = write(tmp_path / "good.jsonl", {"prompt": "1 + 1 =", "completion": " 2"})
    bad = rows if len(files) != 1 else rows / next(iter(files))
    given = {
        "dataset": good,
        part: bad,
        "model_name": talking,
        "context_length": 512,
        "output_dir": tmp_path / "runs",
        "backend": "cpu",
        "log_to": "none",
    }
    assert program.main(["train", *(f"--{name}={value}" for name, value in given.items())]) == 2
    said = capsys.readouterr()
    assert str(rows / named) in said.err and "\n  cure: " in said.err and "Traceback" not in said.err + said.out
    assert not (tmp_path / "runs").exists()


def test_the_command_ends_with_two(tmp_path, capsys):
    byte_level().save_pretrained(tmp_path / "model")
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"{\n")
    assert program.main(["data", "--model_name", str(tmp_path / "model"), "--dataset", str(tmp_path / "a.jsonl")]) == 2
    shown = capsys.readouterr()
    assert f"{tmp_path / 'a.jsonl'}:2:2: " in shown.err and shown.out == ""
