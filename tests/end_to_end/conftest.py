"""The wheel, installed once beside the checkout: built from the source distribution, as a package index would."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.paths import ROOT

SOURCES = (
    *("anyqlora", "configs", "train.py", "backend_manager.py"),
    *("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"),
)
SDIST = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index"]


class Installed(NamedTuple):
    """The built files, and the directory that pip installed them in (which is on nobody's path by itself)."""

    sdist: Path
    wheel: Path
    target: Path


def call(*command, cwd):
    out = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return out.stdout


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Installed:
    """Built from a copy of the sources: a build leaves files beside them, and takes what an earlier one has left."""
    place = tmp_path_factory.mktemp("installed")
    source = place / "source"
    for name in (*SOURCES, *(path.name for path in ROOT.glob("requirements*.txt"))):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    sdist = place / call(sys.executable, "-c", SDIST, place, cwd=source).splitlines()[-1]
    call(*PIP, "wheel", *OFFLINE, "--wheel-dir", place / "wheels", sdist, cwd=place)
    (wheel,) = (place / "wheels").iterdir()
    call(*PIP, "install", *OFFLINE, "--target", place / "target", wheel, cwd=place)
    return Installed(sdist, wheel, place / "target")
