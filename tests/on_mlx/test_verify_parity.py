"""verify --parity: what it prints of two backends, what it says when they differ, and what it refuses."""

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="needs mlx: pip install 'mlx[cpu]' mlx-lm")

from anyqlora.__main__ import main
from anyqlora.cli import parity


@pytest.mark.slow
def test_two_backends_agree_step_by_step(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # from any directory
    assert main(["verify", "--parity", "--backends", "cpu,mlx", "--steps", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["step", *map(str, range(1, 5))] and "they agree" in lines[5]
    assert not list(tmp_path.iterdir())


def test_backends_that_differ_are_told(capsys, monkeypatch):
    """The same comparison on recorded steps, one of which is off by a thousandth."""
    start = {f"a.lora_A.{n}": parity.start(f"a.lora_A.{n}", (2, 4)) for n in range(2)}
    steps = [{"step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 1.0}]
    good = (steps, {name: value + 0.1 for name, value in start.items()})
    other = ([{**steps[0], "loss": 2.002}], {name: value + 0.1 for name, value in start.items()})
    found = parity.differences(good, other)
    assert found["loss"] == pytest.approx(1e-3) and found["grad_norm"] == 0 and found["adapter"] == 0
    monkeypatch.setattr(parity, "train", lambda settings: None)
    monkeypatch.setattr(parity, "read_metrics", lambda run: {"cpu": good, "mlx": other}[run.name])
    assert main(["verify", "--parity", "--backends", "cpu,mlx"]) == 1
    assert "THEY DO NOT AGREE" in capsys.readouterr().out
    assert parity.differences(good, (steps, {name: value + np.float32(0.2) for name, value in start.items()}))[
        "adapter"
    ] == pytest.approx(1)


@pytest.mark.slow
def test_what_it_refuses(capsys):
    for argv, said in (
        (["--backends", "cpu"], "two backends or more"),
        (["--backends", "cpu,cpu"], "each once"),
        (["--backends", "cpu,cuda"], "'cuda' is not available"),
        (["--quantizer", "int8"], "no int8"),
    ):
        assert main(["verify", "--parity", *argv]) == 2
        assert said in capsys.readouterr().err
