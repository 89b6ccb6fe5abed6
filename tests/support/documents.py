"""The documents of this repository as tests read them: commands, links, tables; and stand-ins for what a reader has."""

import json
import re
import runpy
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from anyqlora.config.resolve import configs_directory
from anyqlora.models.architectures import DEMO_BASE
from tests.support.data_fixtures import write
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
GENERATED = ("settings.md", "contributing.md")  # pages that docs/_site/hooks.py writes when the site is built
# the steps of CONTRIBUTING.md are followed by a test of their own
PLACEHOLDERS = {
    "--quantizer rowwise8": "--quantizer nf4",
    "--adapter gaussian": "--adapter lora",
    "--backend mynpu": "--backend cpu",
    "RUN": "runs/NAME",
}


@dataclass(frozen=True)
class Document:
    """One Markdown file, or one that is generated from elsewhere."""

    path: Path
    text: str

    def blocks(self) -> list[tuple[str, list[str]]]:
        """(language, lines) of each block of code, fenced, or indented by four spaces and without a language."""
        found, language, is_indented, empty = [], None, False, 1
        for line in self.text.splitlines():
            fence = re.match(r"\s*```(\w*)", line)
            if fence:
                is_indented = False
                if language is None:
                    found.append((fence[1], []))
                language = fence[1] if language is None else None
            elif language is not None:
                found[-1][1].append(line.strip() if language == "bash" else line)
            elif line.startswith("    ") and (is_indented or empty):
                if not is_indented:
                    found.append(("", []))
                found[-1][1].extend([""] * empty * is_indented + [line[4:]])
                is_indented, empty = True, 0
            elif line.strip():
                is_indented, empty = False, 0
            else:
                empty += 1
        return found

    def commands(self) -> list[str]:
        """The commands of this program that stand in blocks."""
        lines = [line.strip() for language, lines in self.blocks() if language in ("", "bash") for line in lines]
        pattern = r"(python (train\.py|-m anyqlora)|(torchrun|mlx\.launch) .*train\.py)( |$)"
        return [line for line in lines if re.match(pattern, line)]

    def links(self) -> list[str]:
        """Targets of links and pictures that are not of another host."""
        prose = re.sub(r"```.*?```|`[^`]*`", "", self.text, flags=re.DOTALL)
        return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in link]

    def anchors(self) -> set[str]:
        """The anchors of its headings, as Markdown makes them, and those that are stated."""
        headings = re.findall(r"^#{1,6} (.*)$", self.text, re.MULTILINE)
        stated = {anchor for heading in headings for anchor in re.findall(r"\{ #([\w-]+) \}", heading)}
        plain = (re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings)
        return stated | {re.sub(r"[- ]+", "-", heading) for heading in plain}

    def rows(self, *, below: str = "") -> list[list[str]]:
        """The cells of each row of its tables, without heads."""
        text = self.text[self.text.index(below) :] if below else self.text
        lines = [line for line in text.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
        rules = {number for number, row in enumerate(cells) if set("".join(row)) <= set("-: ")}
        return [row for number, row in enumerate(cells) if number not in rules and number + 1 not in rules]


def read(path: Path) -> Document:
    return Document(path, path.read_text(encoding="utf-8"))


def page(name: str) -> Document:
    """A page of the site."""
    return read(DOCS / name)


def files_of(name: str) -> dict[str, str]:
    """{file name: content} of a page that makes files step by step: a section that begins with a file's name in code
    starts it, and the blocks of Python up to the next one are its lines.
    """
    parts: dict[str, list[str]] = {}
    current = ""
    for section in re.split(r"^## ", page(name).text, flags=re.MULTILINE)[1:]:
        starts = re.findall(r"^`([\w.]+\.(?:py|toml))`", section, re.MULTILINE)
        current = starts[0] if starts else current
        for language, lines in Document(DOCS / name, section).blocks():
            if (language, Path(current).suffix) in (("python", ".py"), ("toml", ".toml")):
                is_member = lines[0].startswith(" ")  # a method of the class above
                parts.setdefault(current, []).append("\n" * (not is_member) + "\n".join(lines) + "\n")
    return {file: "\n".join(blocks).lstrip("\n") for file, blocks in parts.items()}


def site_hooks() -> dict:
    """The functions of docs/_site/hooks.py."""
    return runpy.run_path(str(DOCS / "_site" / "hooks.py"))


def settings_page() -> Document:
    return Document(DOCS / "settings.md", site_hooks()["settings_page"]())


def leads_somewhere(document: Document, link: str) -> bool:
    """Whether a link of `document` leads to a file, and to an anchor in it where it names one."""
    target, _, anchor = link.partition("#")
    path = (document.path.parent / target).resolve() if target else document.path
    if path.name in GENERATED and path.parent == DOCS and document.path.parent == DOCS:
        other = settings_page() if path.name == "settings.md" else CONTRIBUTING
    elif not path.exists():
        return False
    else:
        other = read(path) if path.suffix == ".md" else None
    return not anchor or (other is not None and anchor in other.anchors())


README, CONTRIBUTING = read(ROOT / "README.md"), read(ROOT / "CONTRIBUTING.md")
SITE_PAGES = [read(path) for path in sorted(DOCS.glob("*.md"))]
FIRST_STEPS = page("first-steps.md")


# ----------------------------------------------------------------------------------------------------- a reader's place


def newcomer(place: Path) -> Path:
    """In `place`: rows, the configurations with a small model in place of those that they name, and that model."""
    rows = [
        {"prompt": f"{name} bought {n} lamps. Repeat:", "completion": f"{name} bought {n} lamps."}
        for n in range(6)
        for name in ("Bren", "Tam")
    ]
    write(place / "my.jsonl", *rows)
    write(place / "other.jsonl", *rows[:3])
    write(place / "short.jsonl", *rows[:3])
    (place / "my_backend.py").write_text(files_of("writing-a-strategy.md")["my_backend.py"], encoding="utf-8")
    (place / "configs").mkdir()
    for path in configs_directory().glob("*.yaml"):
        text = re.sub(
            r"^(model_name: )[\w.-]+/[\w.-]+$", rf"\g<1>{place / 'model'}", path.read_text(), flags=re.MULTILINE
        )
        (place / "configs" / path.name).write_text(text)
    shutil.copytree(DEMO_BASE, place / "model")
    template = json.loads((place / "model" / "tokenizer_config.json").read_text())
    assert "chat_template" not in template  # as of a base model: pages that need one state it
    return place


def argv(command: str, place: Path) -> list[str]:
    """The words after `python -m anyqlora` (or, for train.py, after its verb there), on the stand-ins.

    A launcher's own words go; how many processes it starts becomes --world_size.
    """
    for name, stand_in in PLACEHOLDERS.items():
        command = re.sub(rf"(?<![\w/]){re.escape(name)}(?!\w)", stand_in, command)
    command = re.sub(r"meta-llama/[\w.-]+", str(place / "model"), command)
    words = shlex.split(command.replace('"..."', "'Bren bought 2 lamps. Repeat:'"))
    if words[0] == "python":
        return ["train", *words[2:]] if words[1] == "train.py" else words[3:]
    count = next(
        b for a, b in zip(words, words[1:], strict=False) if a in ("--nproc_per_node", "--nproc-per-node", "-n")
    )
    return ["train", *words[words.index("train.py") + 1 :], "--world_size", count]
