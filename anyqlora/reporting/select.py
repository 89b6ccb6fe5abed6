"""Which view of a run log_to asks for."""

from __future__ import annotations

from collections.abc import Callable

from anyqlora.core import registry
from anyqlora.processes.group import SingleProcess
from anyqlora.reporting.console import ConsoleReporter
from anyqlora.reporting.live_panel import LivePanel, is_interactive
from anyqlora.reporting.row_progress import show_rows


def make_reporter(plan, total_steps: int) -> ConsoleReporter:
    """A panel where the output is a terminal, else lines, unless log_to names one."""
    named = [name.strip() for name in plan.config.log_to.split(",")]
    name = next((name for name in named if name in registry.REPORTERS), "auto")
    kind = (
        registry.load(registry.REPORTERS[name])
        if name != "auto"
        else LivePanel
        if is_interactive()
        else ConsoleReporter
    )
    return kind(plan, total_steps)


def row_progress(plan, ranks: SingleProcess) -> Callable[[str], Callable[[int | None], None]] | None:
    """Who shows how far the rows of a file are: the first process, unless nothing is to be shown."""
    is_shown = ranks.is_first and "none" not in plan.config.log_to.split(",")
    return show_rows if is_shown else None


def announce_plan(plan, ranks: SingleProcess) -> None:
    """Say what the plan is, once."""
    if ranks.is_first:
        make_reporter(plan, 0).announce()
