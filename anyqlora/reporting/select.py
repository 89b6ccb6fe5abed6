"""Which view of a run log_to asks for."""

from __future__ import annotations

from anyqlora.core import registry
from anyqlora.processes.group import Alone
from anyqlora.reporting.console import Lines
from anyqlora.reporting.live_panel import Panel, is_interactive


def view(plan, total_steps: int) -> Lines:
    """A panel where the output is a terminal, else lines, unless log_to names one."""
    named = [name.strip() for name in plan.config.log_to.split(",")]
    name = next((name for name in named if name in registry.VIEWS), "auto")
    kind = registry.load(registry.VIEWS[name]) if name != "auto" else Panel if is_interactive() else Lines
    return kind(plan, total_steps)


def announce(plan, ranks: Alone) -> None:
    """Say what the plan is, once."""
    if ranks.is_first:
        view(plan, 0).announce()
