"""README.md: its commands run, its table is the program's, its messages and exit codes are in the source, its links lead somewhere."""

import io
import re
import runpy
import shlex
import shutil
import subprocess

import pytest

from anyqlora import __main__ as program
from anyqlora.cli import doctor
from anyqlora.config.resolve import configs_directory
from anyqlora.core import errors
from anyqlora.models.architectures import DEMO_BASE
from anyqlora.planning.capabilities import Backend
from tests.support.data_fixtures import write
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = [line.strip() for line in README.splitlines() if line.startswith("    ")]
SETUP = [line for line in LINES if line.startswith("python3 -m venv")]
COMMANDS = [line for line in LINES if line.startswith(("python train.py", "python -m anyqlora"))]
INLINE = sorted(set(re.findall(r"`(python -m anyqlora [^`.]*)`", README)))
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for path in [ROOT / "train.py", ROOT / "backend_manager.py", *(ROOT / "anyqlora").rglob("*.py")]
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory in which a newcomer stands: rows, the configurations, and a small model in place of each that is named."""
    place = tmp_path_factory.mktemp("newcomer")
    rows = [
        {"prompt": f"{name} bought {n} lamps. Repeat:", "completion": f"{name} bought {n} lamps."}
        for n in range(6)
        for name in ("Bren", "Tam")
    ]
    write(place / "my.jsonl", *rows)
    write(place / "other.jsonl", *rows[:3])
    (place / "configs").mkdir()
    for path in configs_directory().glob("*.yaml"):
        (place / "configs" / path.name).write_text(
            re.sub(r"^(model_name: )[\w.-]+/[\w.-]+$", rf"\g<1>{place / 'model'}", path.read_text(), flags=re.MULTILINE)
        )
    shutil.copytree(DEMO_BASE, place / "model")
    return place


def arguments(command, place):
    """The words after `python -m anyqlora` (or, for train.py, after its verb there), on the stand-ins."""
    words = shlex.split(
        re.sub(r"meta-llama/[\w.-]+", str(place / "model"), command)
        .replace("runs/NAME", "runs/one")
        .replace('"..."', "'Bren bought 2 lamps. Repeat:'")
    )
    return ["train", *words[2:]] if words[1] == "train.py" else words[3:]


def test_the_commands_of_this_readme_in_their_order(place, monkeypatch, capfd):
    """One after the other, as a newcomer runs them; runs end after two steps. Those that train write into one directory each."""
    assert len(COMMANDS) >= 10
    monkeypatch.chdir(place)
    monkeypatch.setenv("ANYQLORA_MAX_STEPS", "2")
    monkeypatch.setattr("sys.stdin", io.StringIO("Bren bought 2 lamps.\n"))
    seen = set()
    for number, command in enumerate(COMMANDS):
        words = arguments(command, place)
        seen.add(words[0])
        assert program.main(words) == 0, (command, capfd.readouterr().err)
        assert capfd.readouterr().out.strip(), command  # of the processes that it starts, too
        if words[0] == "train" and number < COMMANDS.index(next(c for c in COMMANDS if " chat " in c)):
            newest = max((place / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
            assert (newest / "result.json").exists(), command
            if not (place / "runs" / "one").exists():
                newest.rename(place / "runs" / "one")
    assert seen == {"data", "train", "plan", "config", "chat", "generate", "eval", "quantize", "export"}


@pytest.mark.parametrize("command", INLINE)
def test_commands_within_the_text_are_known(command, place, capsys):
    words = arguments(command, place)
    assert program.main([*words, "--help"] if words[0] in ("doctor", "plan") else words) == 0, capsys.readouterr().err


def test_the_two_commands_are_those_that_ci_runs():
    script = (ROOT / ".ci" / "run").read_text()
    function = re.search(r"^commands\(\).*$", script, re.MULTILINE)[0]
    out = subprocess.run(["bash", "-c", f"{function}; commands"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (
        out.stdout.splitlines()
        == SETUP
        == [
            "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && .venv/bin/python train.py",
            "python3 -m venv .venv && .venv/bin/pip install -r requirements-dev.txt && .venv/bin/python -m pytest",
        ]
    )
    assert '(eval "$first")' in script and '(eval "$second")' in script


def test_the_table_of_backends_is_the_programs(capsys):
    program.main(["backends", "--markdown"])
    shown = re.search(r"<!-- backends -->\n(.*?)\n<!-- /backends -->", README, re.DOTALL)[1]
    assert shown == capsys.readouterr().out.strip(), (
        "put what `python -m anyqlora backends --markdown` prints between the markers"
    )


def test_the_table_of_speed_is_that_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    shown = table["BETWEEN"].search(README)[0]
    assert shown == table["markdown"](), "run `python benchmarks/table.py`"
    assert re.findall(r"^\| (\w+) \|", shown, re.MULTILINE) == ["backend", *Backend]


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert (
        len(links) >= 4 and [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []
    )


def test_versions_and_indexes_are_those_of_requirements_and_doctor():
    pinned = re.search(r"^torch==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
    found = re.findall(r"torch==([\w.]+)(?: --index-url (\S+?))?`", README)
    assert len(found) == 3 and {version for version, _ in found} == {pinned}
    assert {url.rpartition("/")[0] for _, url in found} == {doctor.INDEX}
    assert all(any(url in how for _, url in found) for _, how in doctor.BUILDS.values() if "--index-url" in how)


def test_exit_codes_are_those_of_the_source():
    stated = {
        int(code) for code in re.findall(r"\b(\d+) [a-z]", re.search(r"Exit codes: (.*?)\.\n", README, re.DOTALL)[1])
    }
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RunError)]
    assert stated == {0, 130, *(kind.exit_code for kind in kinds)} and "130 if" in SOURCES


ROWS = re.findall(r"^\| (.+?) \| ", README[README.index("## When something is wrong") :], re.MULTILINE)[1:]


@pytest.mark.parametrize("quoted", [row for row in ROWS if not set(row) <= set("-|")])
def test_messages_of_the_troubleshooting_table_are_in_the_source(quoted):
    """The words between what differs from case to case: names in quotes, places, numbers and dots."""
    message = re.fullmatch(r"`(.+)`", quoted)[1]
    parts = [part.strip(" :") for part in re.split(r"\.\.\.|'(?:\w+)'|[A-Z]{3,}(?::[A-Z]+)*|\b\d+\b", message)]
    assert any(len(part) >= 8 for part in parts) or message.startswith("FILE:LINE:COL")
    assert all(part in SOURCES for part in parts), parts


def test_the_settings_that_the_text_names_exist():
    from anyqlora.config.schema import SETTINGS

    named = {
        name.replace("-", "_")
        for text in (*COMMANDS, *re.findall(r"`(--[^`]+)`", README))
        for name in re.findall(r"--([a-z_-]+)", text)
    }
    assert named - set(SETTINGS) <= {"prompt", "file", "parity", "to", "out"} and len(named) > 20
