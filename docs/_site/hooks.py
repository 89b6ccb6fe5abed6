"""What the site has from the program itself: the page of all settings, the table of memory, CONTRIBUTING.md.

settings.yaml says of each setting when somebody would change it; everything else on that page (what it is, its section,
type, default, range, choices, other names) is read from anyqlora/config/schema.py. models.yaml has the shapes of the
models in the table.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent

SETTINGS_PAGE, CONTRIBUTING_PAGE = "settings.md", "contributing.md"
MEMORY_TABLE = "<!-- memory table -->"
CARDS = (6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 80, 96, 141)  # GiB of VRAM that cards have
CONTEXT_LENGTH = 2048


def on_config(config):
    """mkdocs: the package is that of this checkout, whether it is installed or not."""
    sys.path.insert(0, str(ROOT))


def on_files(files, config):
    """mkdocs: the pages that are written here, in the place of what tells a reader of the repository where they are."""
    from mkdocs.structure.files import File

    for page, content in ((SETTINGS_PAGE, settings_page()), (CONTRIBUTING_PAGE, contributing_page())):
        files.remove(files.get_file_from_path(page))
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """mkdocs: the table of memory goes where a page asks for it."""
    return markdown.replace(MEMORY_TABLE, memory_table()) if MEMORY_TABLE in markdown else markdown


# -------------------------------------------------------------------------------------------------------- every setting


def notes() -> dict[str, dict[str, str]]:
    """settings.yaml: {"sections": {section: what there is to say of it}, "settings": {name: when to change it}}."""
    return yaml.safe_load((HERE / "settings.yaml").read_text(encoding="utf-8"))


def settings_page() -> str:
    """The page of all settings as Markdown, in the sections and the order of --help."""
    from anyqlora.config.facets import SECTIONS
    from anyqlora.config.schema import settings_with

    written = notes()
    parts = [(HERE / "settings_head.md").read_text(encoding="utf-8")]
    for section, (title, about) in SECTIONS.items():
        parts.append(f"## {title}\n\n{sentence(about)} {written['sections'][section]}\n")
        parts += [setting(name, written["settings"][name]) for name in settings_with("section", section)]
    return "\n".join(parts)


def setting(name: str, when: str) -> str:
    """One setting: heading with its anchor, what it is, when to change it, its facts."""
    from anyqlora.config.schema import SETTINGS

    return (
        f"### `{name}` {{ #{name} }}\n\n{sentence(SETTINGS[name].metadata['help'])}\n\n"
        f"**When to change it.** {when.strip()}\n\n{' · '.join(facts(name))}\n{{ .setting-facts }}\n"
    )


def facts(name: str) -> list[str]:
    """Type, default, values, range, what it means to a resumed run, other names of a setting, each as a short text."""
    from anyqlora.config.resolve import flag_type
    from anyqlora.config.schema import SETTINGS

    f = SETTINGS[name]
    meta = f.metadata
    choices = [shown(choice) for choice in meta["choices"]]
    kind = "" if choices and "|" in flag_type(name) or choices == ["true", "false"] else flag_type(name)
    low, above, high = meta["low"], meta["above"], meta["high"]
    bounds = [
        f"at least `{low}`" if low is not None else "",
        f"greater than `{above}`" if above is not None else "",
        f"at most `{high}`" if high is not None else "",
    ]
    return [
        *[f"`{kind}`"] * bool(kind),
        f"default `{shown(f.default)}`" if f.default != "" else "no default",
        *["one of " + ", ".join(f"`{choice}`" for choice in choices)] * bool(choices),
        *filter(None, bounds),
        *["on the command line only"] * bool(meta["cli_only"]),
        *["another value is another run"] * (meta["on_resume"] == "identity"),
        *["also called " + ", ".join(f"`{other}`" for other in meta["aliases"])] * bool(meta["aliases"]),
    ]


def sentence(text: str) -> str:
    """Help text as a sentence of Markdown: what would be read as emphasis or as a tag is not."""
    return re.sub(r"([*_<])", r"\\\1", text[0].upper() + text[1:]) + "."


def shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ----------------------------------------------------------------------------------------------------------- the memory


def memory_table() -> str:
    """What the plan predicts for each model of models.yaml on one NVIDIA card, as a Markdown table."""
    models = yaml.safe_load((HERE / "models.yaml").read_text(encoding="utf-8"))
    lines = [
        "| model | parameters | weights in NF4 | one row, activations recomputed | one row, activations kept | "
        "smallest card |",
        "|---|---|---|---|---|---|",
    ]
    for name, about in models.items():
        recomputed, kept = (predicted(about, checkpointing) for checkpointing in (True, False))
        lines.append(
            f"| {name} | {parameters(about) / 1e9:.1f} B | {gibibytes(weights(recomputed))} | "
            f"{gibibytes(recomputed.total)} | {gibibytes(kept.total)} | {card(recomputed.total)} |"
        )
    return "\n".join(lines)


def predicted(about: dict, checkpointing: bool):
    """The memory that the plan of one row to a micro-batch predicts, part by part."""
    from anyqlora.config.resolve import resolve
    from anyqlora.planning.backends import BackendManager

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(about))
        settings = {
            "model_name": directory,
            "dataset": "dummy",
            "context_length": CONTEXT_LENGTH,
            "batch_size": 1,
            "gradient_accumulation_steps": 16,
            "use_gradient_checkpointing": checkpointing,
            "dequantized_layers": 0,  # what takes the room that is left
        }
        return BackendManager("cuda", machine=large_machine()).plan(resolve(settings, environ={})).memory


def large_machine():
    """A machine with one NVIDIA card that has room for everything, so that the plan has nothing to save."""
    from anyqlora.planning.machine import Machine

    described = json.loads((ROOT / "tests" / "support" / "machines" / "h200.json").read_text(encoding="utf-8"))[
        "machine"
    ]
    machine = Machine.from_dict(described)
    room = {"memory_total": 1 << 40, "memory_free": 1 << 40}
    return replace(machine, cuda=tuple(replace(device, **room) for device in machine.cuda[:1]))


def parameters(about: dict) -> int:
    from anyqlora.models import architectures

    return architectures.model_shape(about).parameters


def weights(estimate) -> int:
    return sum(size for name, size in estimate.parts.items() if name in ("linear weights", "embedding, head, norms"))


def gibibytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def card(size: int) -> str:
    """The smallest card with room: a plan fills nine tenths of what is free, a CUDA context takes half a GiB."""
    from anyqlora.planning.fitting import HEADROOM

    return next((f"{gib} GiB" for gib in CARDS if size <= HEADROOM * (gib - 0.5) * 2**30), "several cards")


# ------------------------------------------------------------------------------------------------------------ the rest


def contributing_page() -> str:
    """CONTRIBUTING.md with its links as the site has them."""
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")
