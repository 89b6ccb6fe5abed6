"""The run on a terminal: a panel that is drawn over and over, or a progress bar."""

from __future__ import annotations

import sys
import time
from collections import deque

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel as Frame
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from anyqlora.core.redaction import redacted
from anyqlora.core.terminal import duration, format_bytes, printable, sparkline
from anyqlora.reporting.console import ConsoleReporter, format_evaluation

KEPT = 400  # losses that the trend is made of
REDRAWN = 0.1  # seconds between two drawings at least: drawing takes a few milliseconds


def is_interactive() -> bool:
    """Whether standard output is a terminal that can be drawn on."""
    return Console().is_interactive and sys.stdout.isatty()


class LivePanel(ConsoleReporter):
    """Step, loss with its trend, rate, gradient norm, speed, memory and time left.

    What is said or warned stands above it.
    """

    def __init__(self, plan, total_steps: int):
        super().__init__(plan, total_steps)
        self.console = Console()
        self.losses: deque[float] = deque(maxlen=KEPT)
        self.started, self.drawn, self.last, self.held_out = time.monotonic(), 0.0, {}, ""
        self.live = None

    def info(self, text: str) -> None:
        self.console.print(Text(printable(redacted(text))), soft_wrap=True)

    def warn(self, text: str) -> None:
        self.console.print(Text(printable(redacted(f"warning: {text}")), style="yellow"), soft_wrap=True)

    def step(self, record: dict) -> None:
        self.last = record
        self.losses.append(record["loss"])
        if self.live is None:
            # Drawn by hand at each step: a thread would draw while torch works. Whatever prints, prints above.
            self.live = Live(console=self.console, auto_refresh=False, transient=True)
            self.live.start()
        if time.monotonic() - self.drawn >= REDRAWN or record["step"] == self.total:
            self.live.update(self.drawing(), refresh=True)
            self.drawn = time.monotonic()

    def evaluation(self, record: dict) -> None:
        self.held_out = format_evaluation(record)
        self.info(self.held_out)

    def drawing(self) -> Frame:
        """The panel as it stands."""
        last, config = self.last, self.plan.config
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            f"step {last['step']}/{self.total}",
            ProgressBar(total=self.total, completed=last["step"], width=30),
            f"elapsed {duration(time.monotonic() - self.started)}",
            f"left {duration(last['eta_seconds'])}",
        )
        planned = f" of {format_bytes(self.plan.memory.total)} planned" if self.plan.memory else ""
        rows = Table.grid(padding=(0, 2))
        for name, value in (
            ("loss", f"{last['loss']:.4f}  {sparkline(list(self.losses), self.console.encoding)}"),
            ("learning rate", f"{last['lr']:.2e}"),
            ("gradient norm", f"{last['grad_norm']:.3f}"),
            (
                "speed",
                f"{last['trained_tokens_per_second']:.0f} trained tokens/s, {last['tokens_per_second']:.0f} in all",
            ),
            ("memory", f"{format_bytes(last['memory_bytes'])}{planned}"),
            ("held out", self.held_out),
        ):
            if value:
                rows.add_row(Text(name, style="dim"), Text(value))
        title = Text(printable(redacted(f"{config.model_name} on {config.dataset}")))
        return Frame(Group(bar, rows), title=title, title_align="left", expand=False)

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None


class ProgressBarReporter(ConsoleReporter):
    """tqdm's progress bar, fsdp_qlora's choice; what is said stands above it."""

    def __init__(self, plan, total_steps: int):
        super().__init__(plan, total_steps)
        self.bar = None

    def info(self, text: str) -> None:
        tqdm.write(printable(redacted(text)), file=sys.stdout)

    def warn(self, text: str) -> None:
        tqdm.write(printable(redacted(f"warning: {text}")), file=sys.stderr)

    def step(self, record: dict) -> None:
        if self.bar is None:
            self.bar = tqdm(total=self.total, initial=record["step"] - 1, unit="step", dynamic_ncols=True)
        self.bar.set_postfix_str(
            f"loss {record['loss']:.4f}, norm {record['grad_norm']:.3f}, lr {record['lr']:.2e}, "
            f"{record['trained_tokens_per_second']:.0f} trained tok/s",
            refresh=False,
        )
        self.bar.update(record["step"] - self.bar.n)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
