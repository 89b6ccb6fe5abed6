"""`pip install .`: the packages, the command, the configurations and the demo, in a directory of their own."""

import os
import re
import resource
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from anyqlora import __version__
from anyqlora.cli import doctor
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def files(root):
    return {
        str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }


def product():
    """Every file of the package and of the configurations, as the wheel calls them."""
    return {f"anyqlora/{name}" for name in files(ROOT / "anyqlora")} | {
        f"anyqlora/configs/{name}" for name in files(ROOT / "configs")
    }


def python(installed, *arguments, cwd):
    environ = {**os.environ, "PYTHONPATH": str(installed.target)}
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env=environ, capture_output=True, text=True)


def test_the_wheel_has_every_file_of_the_product_and_no_name_beside_it(installed):
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
    about = {name for name in names if name.startswith(f"anyqlora-{__version__}.dist-info/")}
    assert names - about == product()
    assert {"anyqlora/py.typed", "anyqlora/configs/first.yaml", "anyqlora/data/templates/chatml.jinja"} <= names
    assert f"anyqlora-{__version__}.dist-info/licenses/LICENSE" in about


def test_the_source_distribution_has_the_faces_and_the_pins_too(installed):
    with tarfile.open(installed.sdist) as sdist:
        names = {path.partition("/")[2] for path in sdist.getnames()}
    assert {name.replace("anyqlora/configs/", "configs/") for name in product()} <= names
    assert {"train.py", "backend_manager.py", "setup.py", "requirements.txt", "requirements-dev.txt"} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks", "."))]


def test_the_installed_product_finds_its_first_run_and_its_demo(installed, tmp_path):
    code = (
        "import anyqlora; from anyqlora.config import resolve; from anyqlora.data.readers import sources; "
        "from anyqlora.models import architectures; print(anyqlora.__file__); "
        "print(resolve.resolve({}, environ={}).is_demo, architectures.DEMO_BASE.joinpath('model.safetensors').exists(),"
        " len(sources.read('demo')[0].rows) > 100)"
    )
    out = python(installed, "-c", code, cwd=tmp_path)
    assert out.stdout.splitlines() == [str(installed.target / "anyqlora" / "__init__.py"), "True True True"], out.stderr


def test_the_command(installed, tmp_path):
    command = installed.target / "bin" / "anyqlora"
    out = python(installed, command, "config", "explain", "--lr", "0.5", cwd=tmp_path)
    assert out.returncode == 0 and "lr = 0.5  command line: --lr" in out.stdout, out.stderr
    assert f"{installed.target / 'anyqlora' / 'configs' / 'first.yaml'}:" in out.stdout
    out = python(installed, command, "--help", cwd=tmp_path)
    assert out.returncode == 0 and "train " in out.stdout


@pytest.mark.parametrize("start", ["command", "module", "train.py"])
def test_the_version_is_said_at_once(installed, start, tmp_path):
    arguments = {
        "command": [installed.target / "bin" / "anyqlora"],
        "module": ["-m", "anyqlora"],
        "train.py": [ROOT / "train.py"],
    }[start]
    seconds = []  # of a processor: other tests run beside this one
    for _ in range(3):
        began = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        out = python(installed, *arguments, "--version", cwd=tmp_path)
        seconds.append(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - began)
        assert (out.returncode, out.stdout, out.stderr) == (0, f"anyqlora {__version__}\n", "")
    assert min(seconds) < 0.5, seconds


# --------------------------------------------------------------------------------------- what has to be there beside it


def pins() -> dict[str, Version]:
    """{package: version} of all files of requirements."""
    found = {}
    for path in ROOT.glob("requirements*.txt"):
        for line in path.read_text().splitlines():
            if line.strip() and not line.startswith(("#", "-r")):
                requirement = Requirement(line)
                ((_, version),) = [(s.operator, s.version) for s in requirement.specifier]
                found[requirement.name] = Version(version)
    return found


def ranges(requirements) -> dict[str, Requirement]:
    return {requirement.name: requirement for requirement in map(Requirement, requirements)}


def bounds(requirement) -> dict[str, Version]:
    return {specifier.operator: Version(specifier.version) for specifier in requirement.specifier}


def test_the_wheel_states_ranges_around_the_pins():
    needed, exact = ranges(PROJECT["dependencies"]), pins()
    product = [
        re.split(r"==", line)[0] for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line
    ]
    assert sorted(needed) == sorted(product)
    extras = ranges(line for name, lines in PROJECT["optional-dependencies"].items() for line in lines)
    for name, requirement in {**needed, **extras}.items():
        bound = bounds(requirement)
        if name in exact:
            assert exact[name] in requirement.specifier, f"{requirement} leaves {exact[name]} out"
        if "==" not in bound:
            assert set(bound) == ({">="} if name == "setuptools" else {">=", "<"}), str(requirement)


def test_the_oldest_versions_are_those_that_the_doctor_calls_old():
    needed = ranges(PROJECT["dependencies"])
    for name, oldest in doctor.NEEDED.items():
        assert bounds(needed[name])[">="] == Version(oldest), name


def test_tools_are_one_version_wherever_they_are_named():
    places = [ROOT / ".ci" / "run", ROOT / ".pre-commit-config.yaml", *(ROOT / ".github" / "workflows").glob("*.yml")]
    named = [
        (name, Version(version), path.name)
        for path in [*places, ROOT / "pyproject.toml"]
        for name, version in re.findall(r"([\w-]+)==(\d[\d.]*\d)", path.read_text())
    ]
    versions = dict(pins())
    for name, version, where in named:
        assert versions.setdefault(name, version) == version, f"{name} in {where}"
    assert {"ruff", "pyright"} <= {name for name, _, where in named if where == "pyproject.toml"}
    assert {"torch", "ruff", "pre-commit", "build"} <= {name for name, _, _ in named}


def test_the_metadata_is_what_pyproject_says(installed):
    (about,) = metadata.distributions(name="anyqlora", path=[str(installed.target)])
    assert about.version == __version__ and about.metadata["Requires-Python"] == ">=3.11"
    assert set(about.metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert {point.name for point in about.entry_points} == {"anyqlora"}
