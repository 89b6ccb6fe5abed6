"""Forms of rows beside text and conversations: pieces that say what is learned, and tokens that are there already."""

import json

import numpy as np
import pyarrow as pa
import pytest

from anyqlora.core.errors import UsageError
from anyqlora.data import dataset
from tests.data.test_chat import learned
from tests.support.data_fixtures import TOOLS, byte_level, metaspace, settings, write


def loaded(path, tokens=None, **more):
    return dataset.load_data(settings(path, **more), tokens or byte_level())


def refused(path, **more):
    with pytest.raises(UsageError) as error:
        loaded(path, **more)
    return str(error.value)


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_segments_are_as_they_stand_and_their_labels_say_what_is_learned(make, tmp_path):
    """axolotl's template-free rows: neither a begin token nor an end token is put to them."""
    tokens = make()
    pieces = [("<s>Who?\n", False), ("Tam.", True), ("\nWhere?\n", False), ("In Ashford.</s>", True)]
    row = {"segments": [{"label": label, "text": piece} for piece, label in pieces]}
    [example] = loaded(write(tmp_path / "a.jsonl", row), tokens, prompt_format="auto").train
    whole = "".join(piece for piece, _ in pieces)
    assert tokens.decode(example.ids) == tokens.decode(tokens.encode(whole, add_special_tokens=False))
    assert learned(example, tokens) == ["Tam.", "In Ashford.</s>"]


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ([], "'segments' is no list of pieces"),
        ([{"text": "a"}], "segment 1 does not say whether it is learned"),
        ([{"label": True, "text": 3}], "'text' of segment 1 is a number"),
        ([{"label": False, "text": "a"}], "no segment is learned"),
    ],
)
def test_segments_that_cannot_be_read_are_named(segments, reason, tmp_path):
    error = refused(write(tmp_path / "a.jsonl", {"segments": segments}))
    assert "a.jsonl:1: " in error and reason in error


def test_tokens_are_trained_as_they_are(tmp_path):
    """Labels as Hugging Face's trainer takes them: not moved, -100 where nothing is learned; padding is left out."""
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "attention_mask": [1, 1, 1, 1]},
        {"input_ids": [5, 6, 7]},
        {"input_ids": [0, 0, 5, 6], "labels": [-100, -100, -100, 6], "attention_mask": [0, 0, 1, 1]},
    ]
    found = loaded(write(tmp_path / "a.jsonl", *rows)).train
    assert [(e.ids.tolist(), e.trained.tolist()) for e in found] == [
        ([5, 6, 7, 8], [False, False, True, True]),
        ([5, 6, 7], [True, True, True]),
        ([5, 6], [False, True]),
    ]
    assert found[0].prompt_ids.tolist() == [5, 6] and found[0].answer is None
    cut = loaded(tmp_path / "a.jsonl", context_length=3, on_long_row="truncate").train[0]
    assert cut.ids.tolist() == [5, 6, 7] and cut.truncated


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [1, "2"]}, "'input_ids' is no list of whole numbers"),
        ({"input_ids": [1, True]}, "'input_ids' is no list of whole numbers"),
        ({"input_ids": [1, -2]}, "token 1 of 'input_ids' is -2"),
        ({"input_ids": [1, 2], "labels": [1]}, "'labels' has 1 numbers and 'input_ids' 2"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "label 0 is 2 and its token is 1"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "token 1 is padding and learned"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "there is no token to learn"),
    ],
)
def test_tokens_that_cannot_be_trained_are_named(row, reason, tmp_path):
    error = refused(write(tmp_path / "a.jsonl", row))
    assert "a.jsonl:1: " in error and reason in error


def test_text_with_its_tokens_beside_it_is_asked_about(tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "Who?", "input_ids": [5, 6, 7]})
    assert "'input_ids' says something that would not be learned" in refused(path)
    assert loaded(path, dataset_format="tokens").train[0].ids.tolist() == [5, 6, 7]
    assert loaded(path, ignore_columns="input_ids").train[0].ids.tolist() != [5, 6, 7]


def test_functions_are_tools(tmp_path):
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "four"}]
    schema = {"name": "add", "parameters": {}}
    rows = [
        {"messages": talk, "functions": [schema]},
        {"messages": talk, "tools": [{"type": "function", "function": schema}]},
        {"messages": talk, "functions": json.dumps([schema])},
    ]
    found = loaded(write(tmp_path / "a.jsonl", *rows), byte_level(TOOLS)).train
    assert len({tuple(e.ids.tolist()) for e in found}) == 1 and "add" in found[0].prompt
    both = {**rows[0], **rows[1]}
    assert "the row has 'tools' and 'functions'" in refused(write(tmp_path / "b.jsonl", both))


ROWS = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(20)]


def saved(directory, rows, kind):
    """As datasets' save_to_disk writes a set: Arrow streams, and descriptions beside them."""
    directory.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    maker = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    for number, half in enumerate((table.slice(0, 2 * len(rows) // 3), table.slice(2 * len(rows) // 3))):
        with maker(directory / f"data-{number:05d}-of-00002.arrow", half.schema) as writer:
            writer.write_table(half, max_chunksize=4)
    (directory / "state.json").write_text(json.dumps({"_data_files": []}))
    (directory / "dataset_info.json").write_text("{}")
    (directory / "cache-0123.arrow").write_bytes(b"left by datasets.map")


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_set_that_was_saved_to_disk_is_read(kind, tmp_path):
    saved(tmp_path / "set", ROWS, kind)
    found = loaded(tmp_path / "set")
    plain = loaded(write(tmp_path / "a.jsonl", *ROWS))
    assert found.identity == plain.identity
    assert [e.where.rpartition("/")[2] for e in found.train][12:14] == [
        "data-00000-of-00002.arrow:13",
        "data-00001-of-00002.arrow:1",
    ]
    assert found.train[0].ids.dtype == np.int32


def test_of_several_saved_splits_the_one_to_train_on_is_taken(tmp_path):
    for name, rows in (("train", ROWS[:8]), ("test", ROWS[8:])):
        saved(tmp_path / "set" / name, rows, "stream")
    (tmp_path / "set" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    found = loaded(tmp_path / "set", eval_dataset=str(tmp_path / "set"))
    assert (len(found.train), len(found.held_out)) == (8, 12)


def test_a_file_that_is_not_arrow_is_named(tmp_path):
    (tmp_path / "a.arrow").write_bytes(b"no arrow at all")
    assert "a.arrow: not Arrow: " in refused(tmp_path / "a.arrow")


def node(role, text, *replies, **more):
    return {"message_id": "m", "role": role, "text": text, "replies": list(replies), **more}


def test_of_a_tree_the_best_replies_are_a_conversation(tmp_path):
    """As OpenAssistant's ready trees: the path of the lowest ranks, and nothing that was deleted."""
    tree = node(
        "prompter",
        "Who?",
        node("assistant", "Nobody.", rank=1),
        node("assistant", "Tam.", node("prompter", "Where?", node("assistant", "Here.", rank=None)), rank=0),
        node("assistant", "Spam.", rank=-1, deleted=True),
    )
    path = write(tmp_path / "a.jsonl", {"message_tree_id": "t", "tree_state": "ready_for_export", "prompt": tree})
    read = loaded(path)
    [example] = read.train
    assert learned(example, byte_level()) == ["Tam.<|im_end|>", "Here.<|im_end|>"]
    assert (
        "1 rows are read as conversations of the replies with the best ranks" in read.report["sources"][0]["notes"][0]
    )
