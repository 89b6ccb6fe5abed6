"""The data verb: what it shows of the first rows, and what it finds in all of them."""

import json
import re

import pytest

from anyqlora import __main__ as program
from anyqlora.data import audit, dataset
from anyqlora.data.rows import Example
from tests.support import local_hub, runs, tiny_models
from tests.support.data_fixtures import CHATML, byte_level, metaspace, settings, write

ROWS = [{"prompt": "What is [two]?", "completion": " It [is] 2."}, {"prompt": "a\u001b[31mb", "completion": " \u202ec"}]


@pytest.fixture
def model(tmp_path):
    byte_level(CHATML).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def shown(capsys, *argv):
    stated = [] if "--prompt-format" in argv else ["--prompt_format=text"]
    code = program.main(["data", *argv, *stated])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_trained_tokens_stand_in_brackets_where_there_is_no_terminal(model, tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", *ROWS)
    code, out, _ = shown(capsys, "--model-name", model, "--dataset", str(path), "--show", "1")
    assert code == 0 and "What is [two]?[[ It [is] 2.</s>]]\n" in out and "a.jsonl:2" not in out


def test_what_is_shown_cannot_steer_the_terminal(model, tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", *ROWS)
    code, out, _ = shown(capsys, "--model_name", model, "--dataset", str(path), "--show=2")
    assert code == 0 and r"a\x1b[31mb[[ \u202ec</s>]]" in out and not re.search("[\x1b\u202e]", out)


def test_on_a_terminal_trained_tokens_are_green(model, tmp_path, capsys, monkeypatch):
    """FORCE_COLOR is how rich is told that its output is a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    path = write(tmp_path / "a.jsonl", ROWS[0])
    out = shown(capsys, "--model_name", model, "--dataset", str(path), "--show", "1")[1]
    assert "\x1b[2mWhat is [two]?\x1b[0m\x1b[32m It [is] 2.</s>\x1b[0m" in out


def test_flags_of_training_are_flags_here_and_unknown_ones_are_refused(model, tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", ROWS[0])
    assert (
        "prompt_completion"
        in shown(capsys, "--model", model, "--train_file", str(path), "--lr", "1e-4", "--prompt-format", "plain")[1]
    )
    code, _, err = shown(capsys, "--model", model, "--datasett", str(path))
    assert code == 2 and "did you mean 'dataset'?" in err
    assert shown(capsys, "--show", "x", "--model", model)[0] == 2


def test_the_audit_counts_what_hand_made_rows_hold(tmp_path):
    tokens = metaspace()
    rows = [
        {"prompt": "What is 1?", "completion": " 1"},
        {"prompt": "What is 1?", "completion": " 1"},
        {"prompt": "x", "completion": " very" * 300},
        {"prompt": "<|im_start|>user", "completion": " 3"},
    ]
    report = dataset.load_data(settings(write(tmp_path / "a.jsonl", *rows), context_length=64), tokens).report
    place = str(tmp_path / "a.jsonl")
    assert report["duplicates"] == {"count": 1, "first": [f"{place}:2"]}
    assert report["train"]["truncated"] == report["train"]["without_end_token"] == {"count": 1, "first": [f"{place}:3"]}
    assert report["train"]["fully_masked"]["count"] == report["train"]["double_bos"]["count"] == 0
    assert report["train"]["end_tokens"] == {"</s>": 3}
    assert report["sources"][0]["rows_with_special_tokens_in_their_text"] == 1
    assert (
        report["rows"] == report["train"]["examples"] == sum(report["train"]["lengths"].values()) == 4
        and report["train"]["longest"] == 64
    )


def test_a_file_that_is_named_twice_is_full_of_duplicates(tmp_path):
    """The reference is one file that holds the rows twice; turns that a template splits are no duplicates of each
    other.
    """
    tokens, rows = byte_level(), [{"prompt": f"{n}", "completion": " x"} for n in range(8)]
    once, twice = write(tmp_path / "a.jsonl", *rows), write(tmp_path / "b.jsonl", *rows, *rows)
    found = [
        dataset.load_data(settings(spec), tokens).report["duplicates"]["count"]
        for spec in (twice, f"{once},{once}", f"{once}=2", once)
    ]
    assert found == [8, 8, 0, 0]


def test_columns_that_are_not_used_are_told_in_one_line(model, tmp_path, capsys):
    """Those first that may be misspelt; what is empty is not missed."""
    rows = [
        {
            "instruction": "Translate",
            "inputs": "Guten Tag",
            "output": "Good day",
            "id": 0,
            "source": None,
            "politeness": 3,
            "history": [],
        },
        {"instruction": "Add", "input": "2 and 2", "output": "4", "id": 1, "\u001b[31m": 1},
    ]
    path = write(tmp_path / "a.jsonl", *rows)
    report = dataset.load_data(settings(path), byte_level()).report
    assert report["sources"][0]["unused_columns"] == {"inputs": 1, "id": 2, "politeness": 1, "\u001b[31m": 1}
    told = (
        r"columns that are not used: 'inputs' (1 row; did you mean 'input'?), 'politeness' (1 row), "
        r"'\x1b[31m' (1 row)"
    )
    assert audit.warnings(report) == [f"{told}, in {path}"]
    assert f"\n  {told}\n" in shown(capsys, "--model_name", model, "--dataset", str(path))[1]


@pytest.mark.parametrize(
    "row",
    [
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "tools": [{"name": "x"}],
        },
        {"context": "c", "question": "a", "answer": "b"},
        {"instruction": "a", "input": "c", "output": "b"},
        {"text": "a"},
    ],
)
def test_columns_that_are_used_are_not_told(row, tmp_path):
    report = dataset.load_data(settings(write(tmp_path / "a.jsonl", row)), byte_level()).report
    assert report["sources"][0]["unused_columns"] == {} and not any(
        line.startswith("columns") for line in audit.warnings(report)
    )


def test_of_many_columns_five_are_named(tmp_path):
    report = dataset.load_data(
        settings(
            write(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b", **{f"column{i}": i for i in range(9)}})
        ),
        byte_level(),
    ).report
    assert (
        audit.warnings(report)[0].count("'column") == 5
        and "'column4' (1 row), 4 more, in " in audit.warnings(report)[0]
    )


def test_double_begin_tokens_and_masked_rows_are_found():
    """On examples made by hand, for nothing that the data layer makes has them."""
    import numpy as np

    tokens = metaspace()
    ids = np.array([tokens.bos_token_id, tokens.bos_token_id, 40, 41], np.int32)
    example = Example(ids, np.array([False, False, False, False]), "f:1", ids, "", None)
    found = audit.statistics([example], tokens)
    assert found["double_bos"] == found["fully_masked"] == {"count": 1, "first": ["f:1"]}


@pytest.mark.parametrize(
    ("length", "name"),
    [(1, "1-1"), (2, "2-2"), (3, "3-4"), (4, "3-4"), (5, "5-8"), (512, "257-512"), (513, "513-1024")],
)
def test_the_histogram_is_by_powers_of_two(length, name):
    import numpy as np

    assert audit.histogram(np.array([length, length])) == {name: 2}


def test_rows_are_shown_as_long_as_they_are_trained(tmp_path, capsys):
    """A model with fewer positions than the default context; the reference is the report of a run."""
    base = tiny_models.make(tmp_path / "base", "gpt2")
    path = write(
        tmp_path / "a.jsonl", {"prompt": "x", "completion": " lamp" * 400}, {"prompt": "y", "completion": " z"}
    )
    code, out, _ = shown(capsys, "--model_name", str(base), "--dataset", str(path), "--show", "1")
    assert (
        code == 0
        and "rows have up to 256 tokens: the model has no more positions" in out
        and "a.jsonl:1: 256 tokens, 255 trained, truncated" in out
    )
    trained = runs.run(tmp_path, model_name=str(base), dataset=str(path), max_steps=1, save_steps=0)
    assert f"identity {json.loads((trained / 'data_report.json').read_text())['identity']}" in out
    code, _, err = shown(capsys, "--model_name", str(base), "--dataset", str(path), "--context_length", "300")
    assert code == 2 and "context_length 300: the model has 256 positions" in err


def test_a_model_of_the_hub_says_its_positions_before_its_weights_are_here(tmp_path):
    base = tiny_models.make(tmp_path / "base", "gpt2")
    path = write(tmp_path / "a.jsonl", {"prompt": "x", "completion": " lamp" * 400})
    files = {path.name: path.read_bytes() for path in base.iterdir()}
    with local_hub.serving(kind="models", name="some/model", files=files) as (hub, endpoint):
        out = local_hub.python(
            "-m",
            "anyqlora",
            "data",
            "--model_name",
            "some/model",
            "--dataset",
            path,
            endpoint=endpoint,
            home=tmp_path / "home",
        )
    assert "rows have up to 256 tokens: the model has no more positions" in out.stdout, out.stderr
    assert not any("safetensors" in path for _, path, _ in hub.asked)


def test_a_set_of_which_nothing_is_learned_is_refused(model, tmp_path, capsys):
    path = write(
        tmp_path / "a.jsonl",
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]},
    )
    code, _, err = shown(capsys, "--model_name", model, "--dataset", str(path))
    assert code == 2 and "no assistant turn is learned" in err
