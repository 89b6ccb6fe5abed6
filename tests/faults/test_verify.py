"""python -m anyqlora verify --resume: what a person runs on a run of his own."""

import shutil
import subprocess
import sys

import pytest

from anyqlora.__main__ import main
from anyqlora.cli.verify import differences
from anyqlora.runs.checkpoints import Checkpoints
from tests.support import trials
from tests.support.paths import ROOT


@pytest.mark.slow
def test_verify_says_equal(whole, tmp_path):
    """As a person would call it, from another directory. Everything that it trains is gone afterwards."""
    done = subprocess.run(
        [sys.executable, "-m", "anyqlora", "verify", "--resume", str(whole)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**trials.os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0 and "are equal, byte for byte" in done.stdout, done.stdout + done.stderr
    assert not [
        path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")
    ]  # a cache that torch makes when it is imported


@pytest.mark.parametrize(
    "damaged",
    [
        "adapter/adapter_model.safetensors",
        "checkpoints/adapter_model.safetensors",
        "checkpoints/optimizer.safetensors",
        "metrics.jsonl",
    ],
)
def test_a_difference_of_one_bit_or_line_is_told(whole, tmp_path, damaged):
    other = trials.copied(whole, tmp_path)
    assert differences(whole, other) == []
    path = other / damaged
    if damaged.startswith("checkpoints"):
        path = Checkpoints(other / "checkpoints").path(trials.STEPS) / path.name
    content = bytearray(path.read_bytes())
    if damaged == "metrics.jsonl":
        content = content[: content.rindex(b"\n", 0, -1) + 1]
    else:
        content[-1] ^= 1
    path.write_bytes(content)
    assert len(differences(whole, other)) == 1 and path.name in differences(whole, other)[0]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--resume", "nowhere"], "no run directory"),
        ([], "no run directory"),
        (["--resume", "x", "--lr", "1"], "unknown flag"),
    ],
)
def test_verify_refuses(argv, said, capfd):
    assert main(["verify", *argv]) == 2
    assert said in capfd.readouterr().err


@pytest.mark.slow
def test_verify_tells_of_a_run_that_cannot_be_repeated(whole, tmp_path, capfd):
    """Its rows are gone: the reason of the run that failed is shown."""
    other = trials.copied(whole, tmp_path)
    stated = other / "config.resolved.yaml"
    stated.write_text(
        "".join(
            f"dataset: {tmp_path / 'gone.jsonl'}\n" if line.startswith("dataset:") else line
            for line in stated.read_text().splitlines(keepends=True)
        )
    )
    assert main(["verify", "--resume", str(other)]) == 1
    assert "gone.jsonl" in capfd.readouterr().err
    shutil.rmtree(other)


def test_the_document_is_what_the_counts_say():
    import runpy

    written = runpy.run_path(str(ROOT / "benchmarks" / "faults.py"))["document"]()
    assert (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8") == written
