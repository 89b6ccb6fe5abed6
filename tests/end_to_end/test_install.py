"""`pip install .`: the packages, the command, the configurations and the demo, in a directory of their own."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

SOURCES = (
    "anyqlora",
    "configs",
    "train.py",
    "backend_manager.py",
    "pyproject.toml",
    "requirements.txt",
    "README.md",
    "LICENSE",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """What pip puts there from a copy of the sources: a build leaves files beside them."""
    place = tmp_path_factory.mktemp("installed")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, place / "source" / name)
    out = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--disable-pip-version-check",
            "-q",
            "--target",
            place / "target",
            place / "source",
        ],
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    return place / "target"


def files(root):
    return {
        str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }


def python(installed, *arguments, cwd):
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env=environ, capture_output=True, text=True)


def test_every_file_of_the_product_is_installed(installed):
    assert {f"anyqlora/{name}" for name in files(ROOT / "anyqlora")} <= files(installed)
    assert {f"anyqlora/configs/{name}" for name in files(ROOT / "configs")} <= files(installed)
    assert (installed / "train.py").exists() and (installed / "backend_manager.py").exists()


def test_the_installed_product_finds_its_first_run_and_its_demo(installed, tmp_path):
    code = (
        "import anyqlora; from anyqlora.config import resolve as config; from anyqlora.data.readers import sources; from anyqlora.models import architectures; print(anyqlora.__file__); "
        "print(config.resolve({}, environ={}).is_demo, layouts.DEMO_BASE.joinpath('model.safetensors').exists(), len(sources.read('demo')[0].rows) > 100)"
    )
    out = python(installed, "-c", code, cwd=tmp_path)
    assert out.stdout.splitlines() == [str(installed / "anyqlora" / "__init__.py"), "True True True"], out.stderr


def test_the_command(installed, tmp_path):
    out = python(installed, installed / "bin" / "anyqlora", "config", "explain", "--lr", "0.5", cwd=tmp_path)
    assert out.returncode == 0 and "lr = 0.5  command line: --lr" in out.stdout, out.stderr
    assert f"{installed / 'anyqlora' / 'configs' / 'first.yaml'}:" in out.stdout
    out = python(installed, installed / "bin" / "anyqlora", "--help", cwd=tmp_path)
    assert out.returncode == 0 and "train " in out.stdout
