"""README.md: a newcomer's commands run in their order, what ran where is the program's table, links lead somewhere."""

import io
import re
import subprocess

import pytest

from anyqlora import __main__ as program
from anyqlora.planning.capabilities import CAPABILITIES
from tests.support import documents
from tests.support.documents import FIRST_STEPS, README, SITE_PAGES
from tests.support.paths import ROOT

WORDS = 900  # of README at most: what is longer is the manual's
SETUP = [line.strip() for line in README.text.splitlines() if line.startswith("    python3 -m venv")]
CONVERTING = [  # what leaves the program; the page about backends has them
    command
    for command in documents.page("backends.md").commands()
    if re.search(r"anyqlora (quantize|export) ", command)
]
JOURNEY = list(dict.fromkeys([*README.commands(), *FIRST_STEPS.commands(), *CONVERTING]))


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory):
    """The directory in which a newcomer stands."""
    return documents.newcomer(tmp_path_factory.mktemp("newcomer"))


@pytest.mark.distributed
def test_the_commands_in_their_order(newcomer, monkeypatch, capfd):
    """One after the other, as a newcomer runs them; runs end after two steps. `doctor` alone has a test of its own."""
    monkeypatch.chdir(newcomer)
    monkeypatch.setenv("ANYQLORA_MAX_STEPS", "2")
    verbs = set()
    for command in JOURNEY:
        argv = documents.argv(command, newcomer)
        if argv[0] == "doctor":
            continue
        verbs.add(argv[0])
        monkeypatch.setattr("sys.stdin", io.StringIO("Bren bought 2 lamps.\n"))
        assert program.main(argv) == 0, (command, capfd.readouterr().err)
        assert capfd.readouterr().out.strip(), command  # of the processes that it starts, too
        if argv[0] == "train":
            newest = max((newcomer / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
            assert (newest / "result.json").exists(), command
            if not (newcomer / "runs" / "NAME").exists():
                newest.rename(newcomer / "runs" / "NAME")
    assert verbs == {"data", "train", "plan", "config", "chat", "generate", "eval", "quantize", "export"}


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


def test_it_is_short_and_shows_the_run():
    assert len(README.text.split()) <= WORDS
    assert README.text.index("docs/images/run.svg") < README.text.index("## ")  # above everything but the command


def test_what_ran_where_is_what_the_table_of_capabilities_says():
    """A backend is called tested exactly where cells of its row are marked so; MLX's are, for its CPU build."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", README.text[README.text.index("## What ran where") :], re.MULTILINE)
    for backend, capabilities in CAPABILITIES.items():
        names = rf"\b{'MLX' if backend == 'mlx' else 'CPU' if backend == 'cpu' else backend}\b"
        said = next(where for what, where in rows if re.search(names, what))
        assert said.startswith("tested") == bool(capabilities.tested), (backend, said)
    assert "commits of one day (2026-11-26) were, on one NVIDIA H200" in README.text


def test_links_lead_somewhere_in_the_repository():
    links = README.links()
    assert len(links) >= 12 and [link for link in links if not documents.leads_somewhere(README, link)] == []


def test_every_page_of_the_manual_is_linked_from_readme_or_the_first_page():
    named = {link.partition("#")[0].rpartition("/")[2] for link in README.links() + documents.page("index.md").links()}
    assert {page.path.name for page in SITE_PAGES} - named <= {
        "index.md",
        "glossary.md",
        "distribution.md",
        "own-loop.md",
        "api.md",
    }
