"""Started in a directory whose files have the names that everybody uses: none of them is imported in the place of ours.

`python -m` puts the working directory before everything else on sys.path, and so do the workers of a run. Each file
here leaves a line in EXECUTED and raises. What is run is a checkout, which nobody has installed, and a wheel, which no
checkout is near.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

NAMES = [
    *("train", "backend_manager", "data", "config", "utils"),
    *(path.stem for path in (ROOT / "anyqlora").iterdir() if path.name[0] not in "_." and path.suffix in ("", ".py")),
]
FOREIGN = """
import pathlib
with open(pathlib.Path(__file__).parent / "EXECUTED", "a") as file:
    file.write(__file__ + "\\n")
raise SystemExit("a file of the user's was executed: " + __file__)
"""
JOB = ["--backend=cpu", "--max_steps=1", "--samples=0", "--eval_dataset=", "--output_dir=out", "--run_name=run"]
TWO = ["--strategy=ddp", "--world_size=2"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
CHECKOUT = {
    "train.py": [ROOT / "train.py", *JOB],
    "train.py in two processes": [ROOT / "train.py", *JOB, *TWO],
    "module": ["-m", "anyqlora", "train", *JOB],
    "doctor": ["-m", "anyqlora", "doctor", "--backend=cpu"],
    "torchrun": [*TORCHRUN, ROOT / "train.py", *JOB, "--strategy=ddp"],
}
WHEEL = {
    "command": ["{command}", "train", *JOB],
    "command in two processes": ["{command}", "train", *JOB, *TWO],
    "module": ["-m", "anyqlora", "train", *JOB],
    "doctor": ["-m", "anyqlora", "doctor", "--backend=cpu"],
    "torchrun": [*TORCHRUN, "-m", "anyqlora", "train", *JOB, "--strategy=ddp"],
}
SLOW = {
    "checkout": ("train.py", "torchrun"),
    "wheel": ("command", "command in two processes", "module", "doctor"),
}  # of a kind that is in the other


@pytest.fixture
def foreign(tmp_path):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(FOREIGN)
    return tmp_path


def started(foreign, arguments, path) -> subprocess.CompletedProcess:
    """`python ARGUMENTS` in the foreign directory, where nobody has set anything but what finds the package."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    environ = {
        **kept,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if path:
        environ["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=foreign, env=environ, capture_output=True, text=True
    )


def check(foreign, out, kind: str) -> None:
    assert not (foreign / "EXECUTED").exists(), (foreign / "EXECUTED").read_text()
    assert out.returncode == 0, out.stderr
    if kind == "doctor":
        assert "ok    cpu: nf4" in out.stdout, out.stdout
    else:
        result = json.loads((foreign / "out" / "run" / "result.json").read_text())
        assert result["status"] == "finished" and result["steps"] == 1
        assert result["world_size"] == (2 if has_several(kind) else 1)


def has_several(kind: str) -> bool:
    return "two processes" in kind or kind == "torchrun"


def marked(name: str, cases: dict):
    for kind in cases:
        yield pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW[name]))


def test_the_directory_is_foreign(foreign):
    """What the other tests look for is there to be seen: an import by such a name executes the file."""
    for name in NAMES:
        out = started(foreign, ["-m", name], ROOT)
        assert out.returncode == 1 and "a file of the user's was executed" in out.stderr
    assert (foreign / "EXECUTED").read_text().count("\n") == len(NAMES)


@pytest.mark.parametrize("kind", marked("checkout", CHECKOUT))
def test_a_checkout(foreign, kind):
    out = started(foreign, CHECKOUT[kind], "" if "train.py" in kind or kind == "torchrun" else ROOT)
    check(foreign, out, kind)


@pytest.mark.parametrize("kind", marked("wheel", WHEEL))
def test_a_wheel(foreign, installed, kind):
    command = str(installed.target / "bin" / "anyqlora")
    out = started(foreign, [command if word == "{command}" else word for word in WHEEL[kind]], installed.target)
    check(foreign, out, kind)
    for name in ("anyqlora", "train.py"):  # of the checkout; the interpreter may stand in it
        assert str(ROOT / name) not in out.stdout + out.stderr


@pytest.mark.parametrize("module", ["extend", "testing", "distribution"])
def test_what_is_imported_by_hand(foreign, module):
    out = started(foreign, ["-c", f"import anyqlora, anyqlora.{module}"], ROOT)
    assert out.returncode == 0, out.stderr
    assert not (foreign / "EXECUTED").exists()
