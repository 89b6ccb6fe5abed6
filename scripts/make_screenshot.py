#!/usr/bin/env python3
"""The picture of a run in README and on the site: docs/images/run.svg, drawn from a real run of the embedded job.

.venv/bin/python scripts/make_screenshot.py [--out FILE] [--at STEP] [--max_steps N]

The run is `python train.py` on this machine. What is drawn is what its own live panel showed after step STEP and what
its own summary printed in the end, on a terminal of 120 columns; the figures are those of this machine at that moment.
The SVG refers to no font and to nothing else outside itself.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich._export_format import CONSOLE_SVG_FORMAT  # noqa: E402 - the checkout is on the path only now
from rich.console import Console  # noqa: E402
from rich.terminal_theme import MONOKAI  # noqa: E402
from rich.text import Text  # noqa: E402

from anyqlora.config.resolve import resolve  # noqa: E402
from anyqlora.recipes.sft import train  # noqa: E402
from anyqlora.reporting import select, summary  # noqa: E402
from anyqlora.reporting.live_panel import LivePanel  # noqa: E402

COLUMNS = 120
COMMAND = ".venv/bin/python train.py"
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"


class Terminal(Console):
    """A console that records, and wraps what does not fit, as a terminal does."""

    def __init__(self):
        form = {"force_terminal": True, "color_system": "truecolor", "legacy_windows": False}
        super().__init__(record=True, file=io.StringIO(), width=COLUMNS, **form)

    def print(self, *objects, soft_wrap=None, **options) -> None:
        super().print(*objects, soft_wrap=False, **options)


class RecordedPanel(LivePanel):
    """The live panel, which records itself after one step, and records the summary instead of printing it."""

    recorded: Terminal
    at: int

    def step(self, record: dict) -> None:
        super().step(record)
        if record["step"] == self.at:
            self.recorded.print(self.drawing())

    def report(self, directory: Path) -> None:
        self.close()
        summary.show(directory, self.recorded)


def draw(at: int, run_name: str, max_steps: int = -1) -> str:
    """The SVG of a new run of the embedded job, whose directory is deleted afterwards."""
    recorded = Terminal()
    recorded.print(Text.assemble(("$ ", "dim"), (COMMAND, "bold")))
    recorded.print()
    RecordedPanel.recorded, RecordedPanel.at = recorded, at
    select.make_reporter = RecordedPanel  # in this process: the view that log_to would have chosen
    config = resolve({"run_name": run_name, "max_steps": max_steps}, environ={})
    try:
        train(config)
    finally:
        shutil.rmtree(Path(config.output_dir) / run_name, ignore_errors=True)
    return recorded.export_svg(
        title="AnyQLoRA, the embedded first job", theme=MONOKAI, code_format=without_fonts(), unique_id="run"
    )


def without_fonts() -> str:
    """rich's SVG, whose fonts would be read from another host, with those that a machine has."""
    plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    plain = plain.replace("font-family: Fira Code, monospace", f"font-family: {FONT}")
    assert "://" not in plain.replace("http://www.w3.org/2000/svg", "").replace("https://www.textualize.io", "")
    return plain


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "run.svg")
    asked.add_argument("--at", type=int, default=48, help="the step after which the panel is drawn")
    asked.add_argument("--run_name", default="first-run", help="directory of the run inside runs/, deleted afterwards")
    asked.add_argument("--max_steps", type=int, default=-1, help="steps of the run; -1: the whole job")
    flags = asked.parse_args()
    flags.out.write_text(draw(flags.at, flags.run_name, flags.max_steps), encoding="utf-8")
    print(flags.out)


if __name__ == "__main__":
    main()
