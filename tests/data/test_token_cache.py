"""Tokens that are kept for the next start: the same ones, read by nobody twice, whatever happens meanwhile."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from anyqlora.core.errors import UsageError
from anyqlora.data import dataset, examples, token_cache, workers
from tests.support import runs
from tests.support.data_fixtures import CHATML, LLAMA3, byte_level, settings, write
from tests.support.paths import ROOT

ROWS = [
    {"messages": [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"It is {i}. " * 3}]}
    for i in range(300)
]


def loaded(path, cache, tokenizer=None, **more):
    return dataset.load_data(settings(path, token_cache=str(cache), **more), tokenizer or byte_level())


def entries(cache):
    return sorted(path for path in cache.iterdir() if token_cache.ENTRY.fullmatch(path.name))


def same(one, other):
    assert one.identity == other.identity
    left_out = ("dataset", "sources")
    assert {k: v for k, v in one.report.items() if k not in left_out} == {
        k: v for k, v in other.report.items() if k not in left_out
    }
    assert len(one.train) == len(other.train)
    for row in range(0, len(one.train), 7):
        ours, theirs = one.train[row], other.train[row]
        assert ours.ids.tolist() == theirs.ids.tolist() and ours.trained.tolist() == theirs.trained.tolist()
        assert (ours.where, ours.key, ours.truncated) == (theirs.where, theirs.key, theirs.truncated)
        assert ours.prompt_ids.tolist() == theirs.prompt_ids.tolist()


@pytest.fixture
def unread(monkeypatch):
    """From here on nobody reads rows."""

    def stop():
        def fails(*args, **more):
            raise AssertionError("rows were read again")

        monkeypatch.setattr(examples, "read_chunks", fails)

    return stop


def test_the_second_start_reads_nothing_and_has_the_same_rows(tmp_path, unread):
    path = write(tmp_path / "a.jsonl", *ROWS, {"messages": []}, *ROWS[:3])
    more = {"on_bad_row": "skip", "eval_fraction": 0.1, "context_length": 40, "on_long_row": "truncate"}
    plain = dataset.load_data(settings(path, token_cache=False, **more), byte_level())
    first = loaded(path, tmp_path / "kept", **more)
    unread()
    second = loaded(path, tmp_path / "kept", **more)
    same(first, plain)
    same(second, plain)
    assert second.report["sources"] == first.report["sources"] == plain.report["sources"]
    assert [(e.prompt, e.answer) for e in second.held_out] == [(e.prompt, e.answer) for e in plain.held_out]
    assert second.report["skipped"] and second.report["duplicates"]["count"] == 3
    assert any("tokens are kept in" in line for line in first.news) and not second.news and not second.notes


def test_several_processes_give_the_rows_of_one_in_their_order(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", *(row for row in ROWS * 30))
    monkeypatch.setattr("anyqlora.data.readers.sources.CHUNK_BYTES", 20_000)
    plain = dataset.load_data(settings(path, token_cache=False, dataset_num_proc=1), byte_level())
    monkeypatch.setattr(workers, "LARGE", 0)
    told = []
    several = dataset.load_data(
        settings(path, token_cache=False, dataset_num_proc=3), byte_level(), progress=lambda name: told.append
    )
    same(several, plain)
    assert len(told) > 10 and sum(told[:-1]) == len(ROWS) * 30 and told[-1] is None
    same(loaded(path, tmp_path / "kept", dataset_num_proc=2), plain)


def test_errors_of_other_processes_are_those_of_one(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", *ROWS[:5], {"prompt": "x", "completion": 3}, *ROWS)
    monkeypatch.setattr("anyqlora.data.readers.sources.CHUNK_BYTES", 2_000)
    errors = []
    for large in (10**9, 0):
        monkeypatch.setattr(workers, "LARGE", large)
        for more in ({}, {"chat_template_kwargs": '{"mood": 1}'}):
            with pytest.raises(UsageError) as refused:
                dataset.load_data(settings(path, token_cache=False, dataset_num_proc=2, **more), byte_level())
            errors.append(str(refused.value))
    assert errors[:2] == errors[2:] and "a.jsonl:6" in errors[0] and "does not read 'mood'" in errors[1]


@pytest.mark.parametrize(
    "change",
    [
        {"context_length": 50},
        {"prompt_format": "chat"},
        {"on_long_row": "skip"},
        {"multi_turn": "last"},
        {"ignore_columns": "x"},
        {"chat_template_kwargs": "{}"},
    ],
)
def test_other_settings_are_another_entry(change, tmp_path):
    path = write(tmp_path / "a.jsonl", *ROWS)
    loaded(path, tmp_path / "kept")
    loaded(path, tmp_path / "kept", **change)
    assert len(entries(tmp_path / "kept")) == 2


def test_other_rows_and_another_template_are_another_entry(tmp_path):
    path = write(tmp_path / "a.jsonl", *ROWS)
    found = [loaded(path, tmp_path / "kept").identity, loaded(path, tmp_path / "kept", byte_level(LLAMA3)).identity]
    write(path, *ROWS[1:])
    found.append(loaded(path, tmp_path / "kept").identity)
    assert len({*found}) == len(entries(tmp_path / "kept")) == 3
    plain = dataset.load_data(settings(path, token_cache=False), byte_level(CHATML))
    assert plain.identity == found[-1]


def test_the_same_rows_under_another_name_are_found_under_it(tmp_path, unread):
    path = write(tmp_path / "a.jsonl", *ROWS[:3], {"messages": 3})
    loaded(path, tmp_path / "kept", on_bad_row="skip")
    path.rename(tmp_path / "b.jsonl")
    unread()
    read = loaded(tmp_path / "b.jsonl", tmp_path / "kept", on_bad_row="skip")
    assert read.train[2].where == f"{tmp_path / 'b.jsonl'}:3"
    assert read.report["skipped"][0]["where"] == f"{tmp_path / 'b.jsonl'}:4"


def test_what_is_damaged_is_made_again_and_told(tmp_path):
    path, kept = write(tmp_path / "a.jsonl", *ROWS), tmp_path / "kept"
    plain = loaded(path, kept)
    for name in ("rows.arrow", "manifest.json"):
        content = bytearray((entries(kept)[0] / name).read_bytes())
        content[len(content) // 2] ^= 1
        (entries(kept)[0] / name).write_bytes(content)
        again = loaded(path, kept)
        same(again, plain)
        assert any("are made again" in note and name in note for note in again.notes)
        assert not loaded(path, kept).notes


PROGRAM = """
import sys, time
from anyqlora.data import dataset, row_reader
from tests.support.data_fixtures import byte_level, settings
read, slow = row_reader.RowReader.read, float(sys.argv[3])
def slowly(self, chunk):
    time.sleep(slow)
    return read(self, chunk)
row_reader.RowReader.read = slowly
from anyqlora.data.readers import sources
sources.CHUNK_BYTES = 5000
data = dataset.load_data(settings(sys.argv[1], token_cache=sys.argv[2]), byte_level())
print(data.identity, *data.news, *data.notes, sep="\\n")
"""


def started(path, kept, slow=0.0, **more):
    command = [sys.executable, "-c", PROGRAM, str(path), str(kept), str(slow)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def test_two_runs_at_once_make_them_once(tmp_path):
    path, kept = write(tmp_path / "a.jsonl", *ROWS), tmp_path / "kept"
    both = [started(path, kept, 0.05) for _ in range(2)]
    outputs = [run.communicate(timeout=120) for run in both]
    assert all(run.returncode == 0 for run in both), outputs
    lines = [out.splitlines() for out, _ in outputs]
    plain = dataset.load_data(settings(path, token_cache=False), byte_level()).identity
    assert [line[0] for line in lines] == [plain, plain]
    assert sorted(len(line) for line in lines) == [1, 2] and len(entries(kept)) == 1


def test_a_run_that_is_killed_leaves_nothing_that_counts(tmp_path):
    path, kept = write(tmp_path / "a.jsonl", *ROWS), tmp_path / "kept"
    run = started(path, kept, 0.2)
    for _ in range(600):
        if kept.exists() and list(kept.glob("*.staged/rows.arrow")):
            break
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    left = list(kept.glob("*.staged"))
    assert left and not entries(kept)
    plain = dataset.load_data(settings(path, token_cache=False), byte_level())
    same(loaded(path, kept), plain)
    yesterday = time.time() - 2 * token_cache.DAY
    for path_left in left:
        os.utime(path_left, (yesterday, yesterday))
    loaded(write(tmp_path / "b.jsonl", *ROWS[5:]), kept)
    assert not list(kept.glob("*.staged")) and len(entries(kept)) == 2


def test_a_full_disk_is_told_and_the_rows_are_there(tmp_path):
    """As seen from a process that may write no file of more than 4 kB."""
    path, kept = write(tmp_path / "a.jsonl", *ROWS), tmp_path / "kept"

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    run = started(path, kept, preexec_fn=limited)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    identity, note = out.splitlines()
    assert identity == dataset.load_data(settings(path, token_cache=False), byte_level()).identity
    assert f"the tokens of {path} are not kept in {kept}: File too large" in note
    assert not entries(kept) and not list(kept.glob("*.staged"))


def test_those_that_were_not_used_for_longest_go_first(tmp_path):
    kept, paths = tmp_path / "kept", [write(tmp_path / f"{i}.jsonl", *ROWS[i:]) for i in range(3)]
    for path in paths[:2]:
        loaded(path, kept)
    first, second = sorted(entries(kept), key=lambda path: path.stat().st_mtime)
    long_ago = time.time() - token_cache.READING - 5
    os.utime(first, (long_ago, long_ago))
    size = sum(file.stat().st_size for file in first.iterdir())
    loaded(paths[2], kept, token_cache_limit=2.5 * size / (1 << 30))
    assert first not in entries(kept) and second in entries(kept) and len(entries(kept)) == 2


def test_the_adapter_has_the_same_bytes_with_kept_tokens_and_without(tmp_path, monkeypatch):
    """And made by one process or two; the second run reads what the first kept."""
    monkeypatch.setattr(workers, "LARGE", 0)
    rows = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(64)]
    common = {"dataset": str(write(tmp_path / "a.jsonl", *rows)), "max_steps": 3, "context_length": 32}
    common |= {"model_name": "demo", "lora_rank": 2, "save_steps": 0, "batch_size": 4, "exact_match": False}
    kept = str(tmp_path / "kept")
    ways = {
        "plain": {"token_cache": False, "dataset_num_proc": 1},
        "two": {"token_cache": False, "dataset_num_proc": 2},
        "first": {"token_cache": kept, "dataset_num_proc": 2},
        "second": {"token_cache": kept},
    }
    digests = {
        name: runs.result(runs.run(tmp_path / name, **common, **way))["adapter_sha256"] for name, way in ways.items()
    }
    assert len({*digests.values()}) == 1, json.dumps(digests)
