"""The contract of backends: on this machine's, on every built-in one as a described machine has it, and on a third
party's package.
"""

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest

from anyqlora.planning.machine import Machine, observe
from anyqlora.testing import BackendContract
from tests.support.paths import MACHINES, PACKAGES


def described(name: str) -> Machine:
    return Machine.from_dict(json.loads((MACHINES / f"{name}.json").read_text())["machine"])


class TestCpu(BackendContract):
    backend = "cpu"

    def test_a_machine_where_nothing_is_installed_lacks_it_or_does_less(self):
        nothing = described("nothing")
        report = self.spec().probe(nothing)
        assert report.available and "nf4" not in report.quantizers and report.why("nf4")


class TestCuda(BackendContract):
    backend, machine = "cuda", described("h200")


class TestRocm(BackendContract):
    backend, machine = "rocm", described("rx7900")


class TestXpu(BackendContract):
    backend, machine = "xpu", described("arc")


class TestMlx(BackendContract):
    backend, machine = "mlx", described("m3")


class TestMps(BackendContract):
    backend, machine = "mps", described("m3")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mlx") is None, reason="mlx is not installed")
class TestMlxHere(BackendContract):
    backend = "mlx"


class TestThirdParty(BackendContract):
    backend = "acme"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def installed(cls, tmp_path_factory):
        """Installed by pip where only this test looks, from a copy: a build leaves files beside the sources."""
        place = tmp_path_factory.mktemp("acme")
        shutil.copytree(PACKAGES / "anyqlora_acme", place / "source")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
        subprocess.run([*command, str(place / "site"), str(place / "source")], check=True, capture_output=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(place / "site"))
            yield


def test_this_machine_is_not_a_described_one():
    assert observe() not in [described(path.stem) for path in MACHINES.glob("*.json")]
