"""The first five minutes: the embedded job as the README's first command runs it, and what answers before any framework
is there.
"""

import json
import os
import statistics
import subprocess
import sys
import time

import pytest

from anyqlora.config.resolve import configs_directory
from tests.support import runs
from tests.support.paths import ROOT

RESULT = {
    "status",
    "backend",
    "strategy",
    "quantizer",
    "adapter",
    "world_size",
    "steps",
    "epochs",
    "tokens_trained",
    "tokens_seen",
    "seconds",
    "tokens_per_second",
    "trained_tokens_per_second",
    "time_to_first_step_s",
    "peak_memory_bytes",
    "planned_memory_bytes",
    "adapter_sha256",
    "adjustments",
    "eval",
}
HOOK = """
import os, sys
def look(event, arguments):
    if event.startswith("socket."):
        with open(os.environ["SOCKETS"], "a") as file:
            file.write(f"{event} {arguments}\\n")
sys.addaudithook(look)
"""


def script(place, *arguments, cwd=ROOT, **environ):
    """(what came of `python train.py`, the socket calls of all its threads), on a machine where nobody has set
    anything.
    """
    (place / "site").mkdir(parents=True, exist_ok=True)
    (place / "site" / "sitecustomize.py").write_text(HOOK)
    (place / "home").mkdir(exist_ok=True)
    kept = {
        name: os.environ[name]
        for name in ("PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
        if name in os.environ
    }
    environ = {
        **kept,
        "HOME": str(place / "home"),
        "PYTHONPATH": str(place / "site"),
        "SOCKETS": str(place / "sockets"),
        **environ,
    }
    out = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environ, capture_output=True, text=True)
    calls = (place / "sockets").read_text().splitlines() if (place / "sockets").exists() else []
    return out, calls


def written(directory):
    return {path.name: path.read_bytes() for path in (directory / "adapter").iterdir()}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    place = tmp_path_factory.mktemp("first")
    out, calls = script(place, "train.py", "--output_dir", str(place / "runs"))
    assert out.returncode == 0, out.stderr
    (directory,) = (place / "runs").iterdir()
    return directory, out, calls


def test_the_embedded_job_learns_its_task_without_a_socket(first):
    directory, out, calls = first
    assert calls == []
    found = runs.result(directory)
    assert found["eval"]["before"]["exact_match"] <= 0.05 and found["eval"]["after"]["exact_match"] >= 0.95
    assert json.loads((directory / "data_report.json").read_text())["held_out"]["examples"] == 64
    assert (found["quantizer"], found["adapter"], found["adjustments"], found["status"]) == (
        "nf4",
        "lora",
        [],
        "finished",
    )
    assert (
        found.keys() >= RESULT
        and found["tokens_seen"] > found["tokens_trained"] > 0
        and found["time_to_first_step_s"] > 0
    )


def test_five_prompts_are_shown_before_and_after(first):
    directory, out, _ = first
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    before, after = ([s for s in samples if (s["step"] == 0) == start] for start in (True, False))
    assert len(before) == len(after) == 5 and [s["prompt"] for s in before] == [s["prompt"] for s in after]
    assert sum(s["answer"] == s["expected"] for s in after) >= 4 and not any(
        s["answer"] == s["expected"] for s in before
    )
    assert out.stderr == "" and out.stdout.count("exact match") >= 3


def test_the_hook_sees_sockets(tmp_path):
    out, calls = script(tmp_path, "-c", "import socket; socket.socket().close()")
    assert out.returncode == 0 and calls


@pytest.mark.slow
def test_neither_hash_seed_nor_place_nor_language_changes_a_byte(tmp_path):
    """The first steps of the embedded job in this process and in another one, where all of that is otherwise."""
    short = {
        "max_steps": "12",
        "eval_dataset": "",
        "num_samples": "0",
        "config": str(configs_directory() / "first.yaml"),
    }
    here = runs.run(tmp_path / "here", **short)
    flags = [
        word
        for name, value in {**short, "output_dir": str(tmp_path / "else where"), "run_name": "run"}.items()
        for word in (f"--{name}", value)
    ]
    out, _ = script(
        tmp_path,
        str(ROOT / "train.py"),
        *flags,
        cwd=tmp_path,
        PYTHONHASHSEED="1",
        TZ="Asia/Kathmandu",
        LC_ALL="C",
        LANG="C",
    )
    assert out.returncode == 0, out.stderr
    assert written(here) == written(tmp_path / "else where" / "run")


@pytest.mark.slow
def test_the_whole_job_twice_writes_the_same_bytes(first, tmp_path):
    out, _ = script(tmp_path, "train.py", "--output_dir", str(tmp_path / "again"), PYTHONHASHSEED="1")
    assert out.returncode == 0, out.stderr
    assert (
        runs.result(next((tmp_path / "again").iterdir()))["adapter_sha256"] == runs.result(first[0])["adapter_sha256"]
    )


EARLY = [["--help"], ["--lrr", "1"], ["--data", "x"], ["--lr", "much"], ["--strategy", "pipeline", "--model_name", "x"]]


@pytest.mark.parametrize("arguments", EARLY)
def test_help_and_usage_errors_import_no_framework(arguments):
    code = (
        f"import sys, runpy\nsys.argv = ['train.py', *{arguments!r}]\ncode = 0\n"
        "try: runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit as e: code = e.code\n"
        "print('loaded', sorted({'torch', 'transformers', 'mlx', 'numpy'} & set(sys.modules)), code or 0)"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.stdout.splitlines()[-1] == f"loaded [] {0 if arguments == ['--help'] else 2}", out.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", EARLY)
def test_help_and_usage_errors_answer_within_half_a_second(arguments):
    """Wall time, the median of five, on a machine that does nothing else."""
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "train.py", *arguments], cwd=ROOT, capture_output=True)
        spent.append(time.perf_counter() - began)
    assert statistics.median(spent) < 0.5
