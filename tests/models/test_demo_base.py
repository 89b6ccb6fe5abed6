"""The embedded base and task are whole, small, and what scripts/make_base.py makes."""

import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.paths import ROOT

SCRIPT = ROOT / "scripts" / "make_base.py"
DEMO = ROOT / "anyqlora" / "demo"
FILES = {
    "base/config.json",
    "base/generation_config.json",
    "base/model.safetensors",
    "base/tokenizer.json",
    "base/tokenizer_config.json",
    "task/heldout.jsonl",
    "task/train.jsonl",
}


def read_rows(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "task" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def read_sums(folder: Path) -> dict[str, str]:
    """name -> hexadecimal SHA-256, from SHA256SUMS."""
    return {
        name: digest for digest, name in (line.split("  ") for line in (folder / "SHA256SUMS").read_text().splitlines())
    }


def hash_files(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> Path:
    """What the script writes in its short mode, in a process of its own as a person would run it."""
    out = tmp_path_factory.mktemp("demo")
    env = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--short", "--out", out], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "exact match" in done.stdout
    return out


@pytest.fixture(scope="module")
def make_base():
    spec = importlib.util.spec_from_file_location("make_base", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_shipped_files_match_their_sums():
    """Reference: hashlib over the files that lie there."""
    assert read_sums(DEMO) == hash_files(DEMO)
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file() and path.suffix != ".pyc") < 1.6e6


@pytest.mark.slow
def test_script_writes_the_same_tokenizer_and_task(rehearsal):
    """Reference: the shipped bytes.

    Only the weights, and their sum, depend on the number of steps and on the machine.
    """
    again, shipped = hash_files(rehearsal), hash_files(DEMO)
    assert read_sums(rehearsal) == again
    assert {name for name in FILES if again[name] != shipped[name]} <= {
        "base/model.safetensors",
        "base/config.json",
        "base/generation_config.json",
    }  # both JSON files name the version of transformers


@pytest.mark.parametrize("which", [pytest.param("rehearsal", marks=pytest.mark.slow), "shipped"])
def test_base_loads_in_transformers(which, request):
    """Reference: the Auto classes of transformers, told nothing but the folder."""
    folder = (DEMO if which == "shipped" else request.getfixturevalue(which)) / "base"
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert (model.config.pad_token_id, model.config.eos_token_id, model.config.bos_token_id) == (0, 1, None)
    assert len(tokenizer) == model.config.vocab_size == 512
    assert tokenizer.decode(tokenizer("Zoë paid 7 €.")["input_ids"]) == "Zoë paid 7 €."
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            assert layer.in_features % 64 == 0, name


def test_shipped_base_knows_its_own_text_and_not_the_task(make_base):
    """Reference: the rows that the base was drawn from, under a seed that pre-training did not use."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "base")
    model = AutoModelForCausalLM.from_pretrained(DEMO / "base", dtype=torch.float32)
    rng = random.Random(99)
    assert make_base.score_exact_match(model, tokenizer, [make_base.draw_base_row(rng) for _ in range(16)]) >= 0.8
    assert make_base.score_exact_match(model, tokenizer, read_rows(DEMO, "heldout")[:16]) == 0


def test_heldout_rows_share_nothing_with_train():
    train, heldout = read_rows(DEMO, "train"), read_rows(DEMO, "heldout")
    assert (len(train), len(heldout)) == (768, 64)
    prompts = [row["prompt"] for row in train + heldout]
    assert len(set(prompts)) == len(prompts)
    for row in train + heldout:
        assert set(row) == {"prompt", "completion"}
        assert list(json.loads(row["completion"])) == ["who", "qty", "item", "where"]
    for key in ("who", "where"):
        seen, new = ({json.loads(row["completion"])[key] for row in rows} for rows in (train, heldout))
        assert not seen & new
        assert len(seen) >= 80 and len(new) >= 25


def test_base_was_trained_on_every_token_that_the_task_emits(make_base):
    """Reference: the completions of the first 20,000 rows of the pre-training stream, by the shipped tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "base")
    rng = random.Random(3)
    trained = {
        token
        for row in (make_base.draw_base_row(rng) for _ in range(20_000))
        for token in tokenizer(row["completion"])["input_ids"]
    }
    rows = read_rows(DEMO, "train") + read_rows(DEMO, "heldout")
    emitted = {token for row in rows for token in tokenizer(row["completion"])["input_ids"]}
    assert emitted <= trained
    longest = max(len(tokenizer(row["prompt"] + row["completion"])["input_ids"]) for row in rows)
    assert longest + 1 <= 128, "context_length of configs/first.yaml"
