"""The manual: commands can be planned, tables are the program's, every setting is there, the site builds."""

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from html.parser import HTMLParser

import pytest

import anyqlora
from anyqlora import __main__ as program
from anyqlora import distribution, extend, testing
from anyqlora.cli import doctor
from anyqlora.config.resolve import canonical_argv, resolve
from anyqlora.config.schema import SETTINGS, TrainConfig, canonical_name, parse_value
from anyqlora.core import errors
from anyqlora.core.errors import UsageError
from anyqlora.planning.backends import BackendManager
from anyqlora.planning.capabilities import Backend
from anyqlora.runs.finished import FinishedRun
from tests.support import documents
from tests.support.documents import CONTRIBUTING, DOCS, FIRST_STEPS, README, SITE_PAGES
from tests.support.paths import ROOT

DOCUMENTS = [README, CONTRIBUTING, *SITE_PAGES, documents.read(DOCS / "_site" / "settings_head.md")]
COMMANDS = sorted({command for document in DOCUMENTS for command in document.commands()})
INLINE = sorted({c for document in DOCUMENTS for c in re.findall(r"`(python -m anyqlora [^`]*)`", document.text)})
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for path in [ROOT / "train.py", ROOT / "backend_manager.py", *(ROOT / "anyqlora").rglob("*.py")]
)
ELSEWHERE = {"world_size", "run_name", "init_adapter"}  # settings of commands that need what a run has left


def named(document) -> str:
    return str(document.path.relative_to(ROOT))


# ----------------------------------------------------------------------------------------------------------- commands


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """The directory in which a reader stands."""
    return documents.newcomer(tmp_path_factory.mktemp("reader"))


@pytest.fixture(autouse=True)
def plugin_of_the_page(reader, monkeypatch):
    """What stands in that directory can be imported, as by a command that is given there."""
    monkeypatch.syspath_prepend(str(reader))


def flags(words: list[str]) -> dict[str, str]:
    """{setting: text} of a command line as train.py takes it."""
    return {
        name.replace("-", "_"): value
        for name, _, value in (flag.removeprefix("--").partition("=") for flag in canonical_argv(words))
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_can_be_given(command, reader, monkeypatch, capsys):
    """Training is planned on this machine, flags of other verbs are in their help. test_readme.py runs README's."""
    monkeypatch.chdir(reader)
    verb, *rest = documents.argv(command, reader)
    if verb in ("train", "plan"):
        stated = flags(rest)
        if "init_adapter" in stated:  # needs a finished run
            assert canonical_name("init_adapter", "") and stated.pop("init_adapter")
        config = resolve(stated, environ={})
        plan = BackendManager(config.backend).plan(config)
        assert plan.global_batch >= 1 and "unknown" not in plan.memory_unknown
    elif verb in ("config", "strategies", "backends", "data"):
        if "local-sgd" in rest:  # of the example package, which is not installed
            rest = ["show", "ddp"]
        assert program.main([verb, *rest]) == 0, capsys.readouterr().err
    else:
        assert program.main([verb, "--help"]) == 0
        usage = capsys.readouterr().out
        assert [word for word in rest if word.startswith("--") and word.partition("=")[0] not in usage] == []


@pytest.mark.parametrize("command", INLINE)
def test_commands_within_the_text_are_known(command, capsys):
    """What stands in a sentence may leave out what it is about; its verb and its flags exist."""
    words = command.removeprefix("python -m anyqlora").split()
    if not words:
        return
    assert program.main([words[0], "--help"]) == 0, capsys.readouterr().err
    usage = capsys.readouterr().out
    names = {word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")}
    assert [name for name in names if f"--{name}" not in usage and name not in SETTINGS] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_settings_that_the_text_names_exist(document):
    """Every `--name value` in code spans is a setting or a flag of a verb, with a value that it can have."""
    others = {"parity", "backends", "to", "out", "prompt", "file", "show", "help", "index_url", "rdzv_conf"}
    for span in re.findall(r"`([^`\n]+)`", document.text):
        if not span.startswith(
            ("--", "python train.py")
        ):  # of another program, or of a verb, whose flags are tested above
            continue
        for name, value in re.findall(r"--([\w-]+)(?: ([^\s`]+))?", span):
            plain = name.replace("-", "_")
            if plain in others:  # of a verb, of pip or of torchrun, in a sentence that says so
                continue
            assert canonical_name(plain, named(document)) == plain, f"{name} is an older name"
            if value and re.fullmatch(r"[a-z0-9_.e-]+", value):
                parse_value(plain, value, named(document))


@pytest.mark.parametrize("document", SITE_PAGES, ids=named)
def test_python_on_the_pages_is_python(document):
    """It can be parsed, and what it imports of this package is there."""
    for language, lines in document.blocks():
        if language == "python":
            tree = ast.parse(textwrap.dedent("\n".join(lines)))
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("anyqlora"):
                    exec(compile(ast.Module([node], []), named(document), "exec"), {})


def test_the_strategy_of_the_page_is_that_of_the_example():
    """Line by line, so that the excerpt of extending.md stays true when the example changes."""
    example = (ROOT / "examples" / "strategy_plugin" / "local_sgd" / "__init__.py").read_text(encoding="utf-8")
    lines = next(
        lines for _, lines in documents.page("extending.md").blocks() if any("LocalSgd(" in line for line in lines)
    )
    own = [line for line in lines if line.strip() != "..." and not line.startswith("from anyqlora")]
    assert len(own) > 8 and [line for line in own if line not in example.splitlines()] == []


def test_the_quantizers_row_of_the_page_is_that_of_the_example():
    example = (ROOT / "examples" / "quantizer_plugin" / "rowwise" / "__init__.py").read_text(encoding="utf-8")
    text = next(
        "\n".join(lines) for _, lines in documents.page("extending.md").blocks() if "QuantizerInfo(" in "\n".join(lines)
    )
    assert text.strip() in example


def test_the_backend_of_the_page_plans():
    """Extending's example of a backend, as it stands there: a spec whose probe answers for a described machine."""
    text = next(
        "\n".join(lines) for language, lines in documents.page("extending.md").blocks() if "SPEC =" in "\n".join(lines)
    )
    names: dict = {}
    exec(compile(text, "extending.md", "exec"), names)
    report = names["SPEC"].probe(BackendManager("cpu").machine)
    assert not report.available and report.reasons["available"] and names["SPEC"].capabilities.framework == "torch"


# --------------------------------------------------------------------------------------------------------- settings


def test_every_setting_is_on_its_page():
    """Under its own name, once, with an anchor, what it is, its default and its other names."""
    page = documents.settings_page()
    headings = re.findall(r"^### `(\w+)` \{ #(\w+) \}$", page.text, re.MULTILINE)
    assert all(name == anchor for name, anchor in headings)
    names = [name for name, _ in headings]
    assert sorted(names) == sorted(SETTINGS) and len(names) >= 121
    for name, about in zip(names, re.split(r"^### .*$", page.text, flags=re.MULTILINE)[1:], strict=True):
        meta = SETTINGS[name].metadata
        assert meta["help"][1:20] in about.replace("\\", "") and "**When to change it.**" in about
        assert all(
            f"`{other}`" in about
            for other in (*meta["aliases"], *map(str, meta["choices"]))
            if other not in ("True", "False")
        )


def test_settings_that_pages_link_to_are_there():
    anchors = documents.settings_page().anchors()
    linked = {link.partition("#")[2] for page in SITE_PAGES for link in page.links() if link.startswith("settings.md#")}
    assert len(linked) > 10 and linked <= anchors


# ------------------------------------------------------------------------------------------------ tables of the program


def test_the_table_of_backends_is_the_programs(capsys):
    program.main(["backends", "--markdown"])
    shown = re.search(r"<!-- backends -->\n(.*?)\n<!-- /backends -->", documents.page("backends.md").text, re.DOTALL)[1]
    assert shown == capsys.readouterr().out.strip(), (
        "put what `python -m anyqlora backends --markdown` prints between the markers"
    )


def test_the_tables_of_many_processes_are_the_programs(capsys):
    program.main(["backends", "--cells"])
    shown = re.search(r"<!-- cells -->\n(.*?)\n<!-- /cells -->", documents.page("many-processes.md").text, re.DOTALL)[1]
    assert shown == capsys.readouterr().out.strip(), (
        "put what `python -m anyqlora backends --cells` prints between the markers"
    )


def test_the_table_of_speed_is_that_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))
    shown = table["BETWEEN"].search(documents.page("performance.md").text)[0]
    assert shown == table["markdown"](), "run `python benchmarks/table.py`"
    assert re.findall(r"^\| (\w+) \|", shown, re.MULTILINE) == ["backend", *Backend]


def test_the_table_of_memory_is_predicted_for_all_models():
    """A row for each model; weights take less than the total, and checkpointing less than keeping activations."""
    hooks = documents.site_hooks()
    rows = [line.split(" | ") for line in hooks["memory_table"]().splitlines()[2:]]
    assert len(rows) >= 6
    for name, billions, weights, recomputed, kept, _ in rows:
        sizes = [float(cell.split()[0]) for cell in (weights, recomputed, kept)]
        assert sizes == sorted(sizes) and 0.4 < sizes[0] / float(billions.split()[0]) < 1, name


def test_versions_and_indexes_are_those_of_requirements_and_doctor():
    pinned = re.search(r"^torch==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
    stated = re.findall(r"torch==([\w.]+)(?: --index-url (\S+?))?`", FIRST_STEPS.text)
    assert len(stated) == 3 and {version for version, _ in stated} == {pinned}
    assert {url.rpartition("/")[0] for _, url in stated} == {doctor.INDEX}
    assert all(any(url in how for _, url in stated) for _, how in doctor.BUILDS.values() if "--index-url" in how)


def test_exit_codes_are_those_of_the_source():
    text = documents.page("checkpoints.md").text
    stated = {int(code) for code in re.findall(r"\b(\d+) [a-z]", text[text.index("## Exit codes") :])}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RunError)]
    assert stated == {0, 130, *(kind.exit_code for kind in kinds)} and "130 if" in SOURCES


MESSAGES = [row[0] for row in documents.page("troubleshooting.md").rows()]


@pytest.mark.parametrize("quoted", MESSAGES)
def test_messages_of_the_troubleshooting_page_are_in_the_source(quoted):
    """The words between what differs from case to case: names in quotes, places, numbers and dots."""
    message = re.fullmatch(r"`(.+)`", quoted)[1]
    parts = [part.strip(" :") for part in re.split(r"\.\.\.|'(?:\w+)'|[A-Z]{3,}(?::[A-Z]+)*|\b\d+\b", message)]
    assert any(len(part) >= 8 for part in parts) or message.startswith("FILE:LINE:COL")
    assert all(part in SOURCES for part in parts), parts


COMING = [row for row in documents.page("coming-from.md").rows() if len(row) == 3 and row[1].startswith("`--")]


@pytest.mark.parametrize("theirs, ours, note", COMING, ids=[row[0] for row in COMING])
def test_other_tools_names_are_ours(theirs, ours, note):
    """What stands for them is a setting and a value that it takes; what is taken "as it is" is an alias of it."""
    name, _, value = ours.strip("`").removeprefix("--").partition(" ")
    assert canonical_name(name, "") == name
    if value:
        parse_value(name, value, "")
    if note.startswith("as it is"):
        their_name = re.search(r"(?<=\()\w+(?=\))", theirs) or re.search(r"\w+", theirs)
        assert canonical_name(their_name[0], "") == name


@pytest.mark.mlx
def test_peft_and_mlx_lm_have_the_names_that_are_theirs():
    """Reference: PEFT's LoraConfig, transformers' TrainingArguments and mlx-lm's own defaults."""
    import dataclasses

    import peft
    import transformers
    from mlx_lm.lora import CONFIG_DEFAULTS

    theirs = {"LoraConfig": {f.name for f in dataclasses.fields(peft.LoraConfig)}}
    theirs["TrainingArguments"] = {f.name for f in dataclasses.fields(transformers.TrainingArguments)}
    page = documents.page("coming-from.md").text
    lora = page[page.index("`LoraConfig` and") : page.index("## Accelerate")]
    assert {
        n for n in re.findall(r"^\| `(\w+)", lora, re.MULTILINE) if not n.startswith(("load_in", "bnb_"))
    } <= theirs["LoraConfig"]
    mlx = page[page.index("## mlx-lm") : page.index("## fsdp_qlora")]
    names = set(re.findall(r"^\| `(\w+)[`:]", mlx, re.MULTILINE))
    assert len(names) > 15 and names <= set(CONFIG_DEFAULTS)
    trl = page[page.index("`SFTConfig`, `Training") : page.index("`LoraConfig` and")]
    of_trl = {"model_name_or_path", "model_revision", "dataset_name", "max_length", "chat_template_path", "packing"}
    of_trl |= {"padding_free", "completion_only_loss", "activation_offloading", "EarlyStoppingCallback"}
    of_trl.add("dataset_num_proc")
    names = set(re.findall(r"^\| `(\w+)", trl, re.MULTILINE)) - of_trl
    assert len(names) > 20 and names - theirs["TrainingArguments"] == set()


# --------------------------------------------------------------------------------------------------------- contributing


def test_the_data_format_of_contributing_is_read(tmp_path, monkeypatch):
    """Its function, its row and its test as they stand there."""
    from anyqlora.data import formats
    from tests.data import test_tokens

    function, row, test = (
        next("\n".join(lines) for _, lines in CONTRIBUTING.blocks() if mark in "\n".join(lines))
        for mark in ("def short_question", '"short_question": FormatInfo(', "def test_a_short_question")
    )
    names = dict(vars(formats))
    exec(compile(dedented(function), "CONTRIBUTING.md", "exec"), names)
    info = eval(re.search(r'"short_question": (FormatInfo\(.*\)),', row)[1], names)
    monkeypatch.setitem(formats.FORMATS, "short_question", info)
    names = dict(vars(test_tokens))
    exec(compile(dedented(test), "CONTRIBUTING.md", "exec"), names)
    names["test_a_short_question_trains_its_answer"](tmp_path)
    run = FinishedRun(tmp_path, TrainConfig(), {}, {"sources": [{"format": "short_question"}]})
    assert run.format_prompt("How many?") == "How many?\n"


def test_the_exporter_of_contributing_exports(tmp_path):
    """Reference: safetensors' own reader of the adapter, and numpy's of what was written."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    from anyqlora.core.files import FileSystem, write_directory
    from anyqlora.core.registry import ADAPTER

    source = next("\n".join(lines) for _, lines in CONTRIBUTING.blocks() if "def to_npz" in "\n".join(lines))
    names: dict = {}
    exec(compile(dedented(source), "CONTRIBUTING.md", "exec"), names)
    save_file({"a.lora_A.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}, tmp_path / ADAPTER)
    write_directory(tmp_path / "out", names["to_npz"](tmp_path), FileSystem())
    written = np.load(tmp_path / "out" / "adapter.npz")
    expected = load_file(tmp_path / ADAPTER)
    assert set(written) == set(expected) and all(np.array_equal(written[name], expected[name]) for name in expected)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("title", "flags"),
    [
        pytest.param("A quantizer", ["--quantizer", "rowwise8"], id="quantizer"),
        pytest.param("An adapter", ["--adapter", "gaussian"], id="adapter", marks=pytest.mark.slow),
    ],
)
def test_the_steps_of_contributing_are_enough(title, flags, tmp_path):
    """In a copy of the sources: the file, the row and the test as they stand there, then the contract and a run."""
    for folder in ("anyqlora", "tests", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "old_runs"))
    shutil.copy(ROOT / "train.py", tmp_path)
    section = CONTRIBUTING.text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    targets = re.findall(r"`((?:anyqlora|tests)/[\w/]+\.py)`", section)
    blocks = documents.Document(CONTRIBUTING.path, section).blocks()
    file, row, contract = (dedented("\n".join(lines)) + "\n" for _, lines in blocks[:3])
    (tmp_path / targets[0]).write_text(file, encoding="utf-8")
    registry = tmp_path / targets[1]
    table = {"A quantizer": "QUANTIZERS", "An adapter": "ADAPTERS"}[title]
    registry.write_text(registry.read_text().replace(f"{table} = _table(\n", f"{table} = _table(\n{row}"))
    with open(tmp_path / targets[2], "a", encoding="utf-8") as tests:
        tests.write(f"\n\n{contract}")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    pytest_options = ["-q", "-p", "no:cacheprovider", "-n0", "-c", os.devnull, "--rootdir", str(tmp_path)]
    name = re.search(r"class (\w+)", contract)[1]
    for arguments in (
        ["-m", "pytest", *pytest_options, str(tmp_path / targets[2]), "-k", f"{name} or every_built_in"],
        ["train.py", *flags, "--backend", "cpu", "--max_steps", "2", "--output_dir", "out", "--run_name", "run"],
    ):
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "train.py" in arguments or re.search(r"\b\d+ passed", done.stdout), done.stdout
    assert json.loads((tmp_path / "out" / "run" / "result.json").read_text())["steps"] == 2


def dedented(text: str) -> str:
    """A block within a list of steps has four spaces more."""
    lines = text.splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines) if lines[0].startswith("    ") else text


# --------------------------------------------------------------------------------------------------------- words, links


@pytest.mark.parametrize("document", [README, CONTRIBUTING, *SITE_PAGES], ids=named)
def test_links_lead_somewhere(document):
    assert [link for link in document.links() if not documents.leads_somewhere(document, link)] == []


STANDARD = {  # an own word -> the standard one
    r"(?<!random )(?<!Adam's )\bmoments\b": "optimizer state",
    r"\b(?:the|a|an|quantized|frozen|embedded|small) base\b(?! model)": "base model",
    r"\b(?:graphics|video|GPU|card's) memory\b": "VRAM",
    r"\bweights? of the loss\b|\btoken mask\b": "loss mask",
    r"\bquantis|\bmaterialis": "quantiz-",
    r"\b(?:held-out|evaluation) data\b|\bvalidation set\b": "evaluation set",
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_words_are_the_standard_ones(document):
    text = re.sub(r"`[^`]*`", "", document.text)
    assert [(found, word) for pattern, word in STANDARD.items() for found in re.findall(pattern, text)] == []


def test_no_package_is_named_that_we_do_not_own():
    """`pip install anyqlora[...]` would install whatever somebody publishes by that name."""
    wrong = re.compile(r"pip install [^\n`]*\banyqlora\b(?!_)", re.IGNORECASE)
    files = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *DOCS.rglob("*.yaml")]
    for folder in ("anyqlora", "examples", "benchmarks", "scripts"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".sh", ".yaml", ".toml")]
    assert [str(path) for path in files if wrong.search(path.read_text(encoding="utf-8"))] == []


def test_measurements_open_with_the_answer():
    """Performance and reliability say in their first paragraph how good it is; the notes stand in the laboratory."""
    for name in ("performance.md", "reliability.md"):
        first = documents.page(name).text.split("\n\n")[1]
        assert re.search(r"\d", first) and len(re.findall(r"[.:](?:\s|$)", first)) <= 5
    assert {path.name for path in (DOCS / "lab").glob("*.md")} == {"journal.md", "performance.md"}


# ------------------------------------------------------------------------------------------------------------- the site


class Loads(HTMLParser):
    """What a page loads by itself: scripts, styles, pictures, frames."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        if tag in ("script", "img", "iframe", "source", "video", "object", "embed"):
            self.found += filter(None, [named.get("src"), named.get("data")])
        if tag == "link" and named.get("rel") != "canonical":
            self.found.append(named.get("href") or "")


@pytest.mark.distributed
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    """With --strict, so that a broken link, a lost anchor or a page outside the navigation is an error."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) >= 20
    foreign = re.compile(r"^(?:https?:)?//")
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert [link for link in Loads(text).found if foreign.match(link)] == [], path.name
        assert 'class="mermaid"' not in text  # which the theme's script would fetch a library for
    for path in [*tmp_path.rglob("*.css"), *tmp_path.rglob("*.svg")]:
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//", path.read_text(encoding="utf-8")), path.name
    anchors = set(re.findall(r'<h3 id="(\w+)">', (tmp_path / "settings.html").read_text(encoding="utf-8")))
    assert set(SETTINGS) <= anchors
    shown = re.findall(r'<h3 id="anyqlora\.[\w.]*?(\w+)"', (tmp_path / "api.html").read_text(encoding="utf-8"))
    public = {name for module in (anyqlora, extend, testing, distribution) for name in module.__all__}
    assert public - set(shown) == {"__version__", "PRELOADED"}


def test_the_picture_of_the_run_is_of_the_panel_and_the_summary():
    """The committed one: what both show is in it, and it refers to nothing outside itself."""
    picture = (DOCS / "images" / "run.svg").read_text(encoding="utf-8")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", picture).replace("&#160;", " "))
    for shown in (
        "train.py",
        "step 48/192",
        "gradient norm",
        "trained tokens/s",
        "exact match",
        "expected",
        "adapter",
        "next",
    ):
        assert shown in text, shown
    assert not re.search(r"url\(\s*['\"]?https?:|@font-face|@import|href=", picture)
    assert str(ROOT.parent) not in picture


@pytest.mark.slow
def test_the_picture_is_drawn_from_a_run(tmp_path):
    out = tmp_path / "run.svg"
    subprocess.run(
        [
            sys.executable,
            "scripts/make_screenshot.py",
            "--out",
            str(out),
            "--at",
            "2",
            "--max_steps",
            "3",
            "--run_name",
            "drawn",
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    picture = out.read_text(encoding="utf-8")
    assert "step&#160;2/3" in picture and "exact&#160;match" in picture and not (ROOT / "runs" / "drawn").exists()


def test_a_setting_that_is_none_is_found():
    """The checks above can fail: an unknown name and a value out of range are errors of the program itself."""
    with pytest.raises(UsageError):
        canonical_name("no_such_setting", "")
    with pytest.raises(UsageError):
        parse_value("lora_rank", "0", "")
