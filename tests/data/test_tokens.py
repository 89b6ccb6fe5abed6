"""Tokens and masks of prompts and answers: the model is trained on exactly what it sees when it is asked."""

import random

import numpy as np
import pytest

from anyqlora.core import errors
from anyqlora.data import audit, dataset, stream, tokenizer
from anyqlora.data.formats import ALPACA
from tests.support.data_fixtures import byte_level, composing, metaspace, settings, write

PIECES = [
    "The",
    " quick",
    "\n",
    "\n\n",
    " ",
    "  ",
    "Answer:",
    "é",
    "日本",
    "😀",
    "four",
    ".",
    " it",
    "1",
    "2",
    "'s",
    "\t",
    "sleeps",
    "a" * 9,
]


def one(row, tmp_path, tokens, **more):
    """The only example of a file with this row."""
    return dataset.load_data(settings(write(tmp_path / "rows.jsonl", row), **more), tokens).train[0]


def pairs(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        prompt, answer = ("".join(rng.choices(PIECES, k=rng.randint(1, 6))) for _ in range(2))
        if prompt.strip() and answer.strip() and not prompt.startswith((" ", "▁")):
            yield {"prompt": prompt, "completion": answer}


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_the_prompt_has_the_tokens_it_has_at_inference(make, tmp_path):
    """Reference: the tokenizer's own call on the prompt alone, and its decoding of the whole."""
    tokens, rows = make(), list(pairs(400, 1))
    read = dataset.load_data(settings(write(tmp_path / "rows.jsonl", *rows)), tokens)
    straddled = 0
    for row, example in zip(rows, read.train, strict=True):
        asked = tokens(row["prompt"])["input_ids"]
        assert example.ids[: len(asked)].tolist() == asked == example.prompt_ids.tolist()
        assert example.trained.tolist() == [False] * len(asked) + [True] * (len(example.ids) - len(asked))
        assert example.ids[-1] == tokens.eos_token_id
        assert (
            tokens.decode(example.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            == row["prompt"] + row["completion"]
        )
        straddled += example.ids[:-1].tolist() != tokens(row["prompt"] + row["completion"])["input_ids"]
    assert straddled == read.report["sources"][0]["rows_tokenised_in_parts"] > 5  # the hard case was really there


def test_a_border_inside_a_character_is_counted(tmp_path):
    """NFC makes one character of the prompt's e and the answer's accent; the token that holds the answer's part is
    learned.
    """
    read = dataset.load_data(
        settings(write(tmp_path / "rows.jsonl", {"prompt": "caf e", "completion": "\u0301 is it"})), composing()
    )
    assert read.report["sources"][0]["rows_with_a_token_across_a_border"] == 1
    example = read.train[0]
    assert composing().decode(example.ids[example.trained]) == "é is it</s>"
    assert composing().decode(example.ids[~example.trained]) == "caf "


def test_the_end_token_is_learned_even_where_it_is_the_pad_token(tmp_path):
    tokens = byte_level()
    example = one({"prompt": "Hello", "completion": " there"}, tmp_path, tokens)
    batch = stream.make_batches(
        [example, one({"prompt": "Hello", "completion": " there, how are you?"}, tmp_path, tokens)],
        2,
        tokens.eos_token_id,
    )[0]
    learned = batch.targets[0][batch.targets[0] != stream.IGNORE_INDEX]
    assert learned[-1] == tokens.eos_token_id and (learned == tokens.eos_token_id).sum() == 1
    assert (batch.ids[0, len(example.ids) :] == tokens.eos_token_id).all() and (
        batch.segments[0, len(example.ids) :] == -1
    ).all()


def test_neither_begin_nor_end_token_is_doubled(tmp_path):
    tokens = metaspace()
    example = one({"prompt": "<s>Hello", "completion": " there</s>"}, tmp_path, tokens)
    assert example.ids.tolist().count(tokens.bos_token_id) == 1 and example.ids.tolist().count(tokens.eos_token_id) == 1
    assert example.trained[-1] and example.answer == " there"


def test_raw_text_is_learned_from_its_first_token(tmp_path):
    tokens = metaspace()
    example = one({"text": "The quick brown fox."}, tmp_path, tokens)
    assert example.ids.tolist() == [*tokens("The quick brown fox.")["input_ids"], tokens.eos_token_id]
    assert example.trained.tolist() == [False] + [True] * (len(example.ids) - 1)
    assert example.answer is None and example.prompt_ids.tolist() == [tokens.bos_token_id]


@pytest.mark.parametrize("length", [12, 14])
def test_a_long_row_is_cut_without_an_end_token(length, tmp_path):
    tokens, row = byte_level(), {"prompt": "Hello there,", "completion": " how are you?" * 9}
    example = one(row, tmp_path, tokens, context_length=length, on_long_row="truncate")
    whole = one(row, tmp_path, tokens)
    assert len(example.ids) == length and example.truncated and not whole.truncated
    assert example.ids.tolist() == whole.ids[:length].tolist() and tokens.eos_token_id not in example.ids


def test_a_row_that_fits_exactly_is_not_cut(tmp_path):
    row = {"prompt": "Hello there,", "completion": " how are you?"}
    whole = one(row, tmp_path, byte_level())
    assert not one(row, tmp_path, byte_level(), context_length=len(whole.ids), on_long_row="error").truncated
    with pytest.raises(
        errors.UsageError, match=rf"rows.jsonl:1: {len(whole.ids)} tokens, over the context of {len(whole.ids) - 1}"
    ):
        one(row, tmp_path, byte_level(), context_length=len(whole.ids) - 1, on_long_row="error")


LONG = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b " * 600}]


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_on_long_row_says_what_becomes_of_long_rows_alone(on_bad_row, tmp_path):
    path = write(tmp_path / "rows.jsonl", *LONG)
    read = dataset.load_data(settings(path, on_long_row="skip", on_bad_row=on_bad_row), byte_level())
    assert [example.where for example in read.train] == [f"{path}:1"] and [
        bad["where"] for bad in read.report["skipped"]
    ] == [f"{path}:2"]
    assert "1202 tokens, over the context of 512" in audit.warnings(read.report)[0]
    with pytest.raises(
        errors.UsageError, match=r"rows.jsonl:2: 1202 tokens.*\n.*--on_long_row truncate; or --on_long_row skip$"
    ):
        dataset.load_data(settings(path, on_long_row="error", on_bad_row=on_bad_row), byte_level())


@pytest.mark.parametrize("on_long_row", ["truncate", "skip"])
def test_on_bad_row_says_what_becomes_of_the_others(on_long_row, tmp_path):
    path = write(tmp_path / "rows.jsonl", *LONG, {"prompt": "a", "completion": ""})
    with pytest.raises(errors.UsageError, match=r"rows.jsonl:3: 'completion' is empty\n.*; or --on_bad_row skip$"):
        dataset.load_data(settings(path, on_long_row=on_long_row), byte_level())
    with pytest.raises(
        errors.UsageError,
        match="(?s)2 rows cannot be used.*jsonl:3.*jsonl:2.*; or --on_bad_row skip and --on_long_row skip$",
    ):
        dataset.load_data(settings(path, on_long_row="error"), byte_level())


def test_alpaca_text_is_the_published_one(tmp_path):
    """Reference: the prompt of stanford_alpaca, written out."""
    tokens = byte_level()
    example = one({"instruction": "Add {input}.", "input": "2 and 2", "output": "4"}, tmp_path, tokens)
    assert example.prompt == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n### Instruction:\nAdd {input}.\n\n### Input:\n2 "
        "and 2\n\n### Response:\n"
    )
    assert one({"instruction": "Go.", "input": "", "output": "4"}, tmp_path, tokens).prompt == ALPACA.replace(
        "{instruction}", "Go."
    )
    assert tokens.decode(example.ids[example.trained]) == "4</s>"


def test_a_tokenizer_is_loaded_from_a_directory(tmp_path):
    byte_level().save_pretrained(tmp_path / "model")
    loaded = tokenizer.load_tokenizer(str(tmp_path / "model"))
    assert (
        loaded("Hello there")["input_ids"] == byte_level()("Hello there")["input_ids"]
        and loaded.chat_template == byte_level().chat_template
    )
    with pytest.raises(errors.UsageError, match="no tokenizer"):
        tokenizer.load_tokenizer(str(tmp_path), offline=True)


def test_without_an_end_token_nothing_is_prepared(tmp_path):
    tokens = byte_level(None)
    tokens.eos_token = None
    try:
        with pytest.raises(errors.UsageError, match="no end token"):
            one({"prompt": "a", "completion": "b"}, tmp_path, tokens)
    finally:
        tokens.eos_token = "</s>"


def test_identity_is_of_tokens_masks_and_split(tmp_path):
    tokens, row = byte_level(), {"prompt": "a", "completion": " b c"}
    first = dataset.load_data(settings(write(tmp_path / "a.jsonl", row)), tokens).identity
    assert first == dataset.load_data(settings(write(tmp_path / "b.jsonl", row)), tokens).identity
    other = dataset.load_data(settings(write(tmp_path / "c.jsonl", {"prompt": "a b", "completion": " c"})), tokens)
    assert other.identity != first and np.array_equal(
        other.train[0].ids, dataset.load_data(settings(tmp_path / "a.jsonl"), tokens).train[0].ids
    )
