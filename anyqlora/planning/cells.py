"""The cells of several processes, what is trained x strategy x precision x kernels x packing, from the rows of the
registry; and which of them a plan refuses, as a table for the manual.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from anyqlora.config.resolve import resolve
from anyqlora.config.schema import AUTO
from anyqlora.core import registry
from anyqlora.core.errors import UsageError
from anyqlora.planning.capabilities import CAPABILITIES, Backend, BackendReport, Capabilities
from anyqlora.planning.machine import Device
from anyqlora.planning.planner import RunPlan, plan_run

RUNS = "✓"
PROCESSES = 2
USUAL = {"precision": "fp32", "kernels": "portable", "packing": False}


@dataclass(frozen=True)
class Cell:
    """One combination of the settings of a run of several processes; each part is settings by name."""

    trained: tuple[tuple[str, Any], ...]  # train_type, or quantizer and adapter
    strategy: tuple[tuple[str, Any], ...]  # strategy, and the setting of its kind
    precision: str
    kernels: str
    packing: bool

    @property
    def settings(self) -> dict[str, Any]:
        """As on the command line."""
        return {**dict(self.trained), **dict(self.strategy), **{name: getattr(self, name) for name in USUAL}}

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings.items())


def trained(capabilities: Capabilities) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Every train type, then each other pair of what weights are kept in and what learns."""
    presets = [row for row in registry.TRAIN_TYPES.values() if not row.refused]
    yield from ((("train_type", row.name),) for row in presets)
    covered = {(row.quantizer, row.adapter) for row in presets}
    for quantizer, adapter in itertools.product(capabilities.quantizers, capabilities.adapters):
        if (quantizer, adapter) not in covered:
            yield ("quantizer", quantizer), ("adapter", adapter)


def strategies(capabilities: Capabilities) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Every strategy of several processes, in each of its kinds: the choices of an option that is a setting, too."""
    for name in capabilities.strategies:
        row = registry.strategy(name)
        if not row.several:
            continue
        options = fields(registry.load(row.options)) if row.options else ()
        kind = next((f.metadata for f in options if f.metadata.get("choices") and f.metadata.get("setting")), None)
        if kind is None:
            yield (("strategy", name),)
        else:
            yield from ((("strategy", name), (kind["setting"], choice)) for choice in kind["choices"])


def cells(capabilities: Capabilities) -> Iterator[Cell]:
    """All cells of what a backend's row offers."""
    kernels = (AUTO, *sorted(capabilities.kernels))
    axes = trained(capabilities), strategies(capabilities), registry.PRECISIONS, kernels, (False, True)
    yield from itertools.starmap(Cell, itertools.product(*axes))


def others(capabilities: Capabilities) -> Iterator[dict[str, Any]]:
    """Settings by names that the registry has and this row does not offer: each is refused whatever goes with it."""
    tables = {
        "train_type": (registry.TRAIN_TYPES, [row.name for row in registry.TRAIN_TYPES.values() if not row.refused]),
        "quantizer": (registry.QUANTIZERS, capabilities.quantizers),
        "adapter": (registry.ADAPTERS, capabilities.adapters),
        "strategy": (registry.STRATEGIES, [dict(kind)["strategy"] for kind in strategies(capabilities)]),
        "kernels": (registry.KERNELS, capabilities.kernels),
    }
    for setting, (table, offered) in tables.items():
        yield from ({"strategy": "ddp", **USUAL, setting: name} for name in table if name not in offered)


# ----------------------------------------------------------------------------------------------------------- the table


def everything(capabilities: Capabilities) -> BackendReport:
    """A machine that does all of a row, so that the table is the same on every machine."""
    return BackendReport(
        available=True,
        devices=(Device("any", bf16=True),),
        dtypes=capabilities.dtypes,
        quantizers=capabilities.quantizers,
        optimizers=capabilities.optimizers,
        collective=capabilities.collective,
        kernels=capabilities.kernels,
        products=capabilities.products,
    )


@functools.cache
def refusal(cell: Cell, model: str = "demo") -> str:
    """Why a CPU does not run this cell; "" where it does."""
    capabilities = CAPABILITIES[Backend.CPU]
    given = {**cell.settings, "model_name": model, "backend": "cpu", "world_size": PROCESSES}
    try:
        plan: RunPlan = plan_run(
            resolve(given, environ={}, origin="cells"), Backend.CPU, "cpu", capabilities, everything(capabilities)
        )
    except UsageError as error:
        return error.message
    return "; ".join(map(str, plan.adjustments))


def label(part: tuple[tuple[str, Any], ...]) -> str:
    """`fsdp full_shard`, `qlora`, `nf4 + pissa`."""
    return (" " if part[0][0] == "strategy" else " + ").join(str(value) for _, value in part)


def markdown() -> str:
    """Two tables whose refusals add up: what is trained, and how it is computed, each against the strategies."""
    capabilities = CAPABILITIES[Backend.CPU]
    kinds, notes = list(strategies(capabilities)), {}

    def shown(cell: Cell) -> str:
        why = refusal(cell)
        if not why:
            return RUNS
        reason = why.partition(": ")[2] or why
        return str(notes.setdefault(reason, len(notes) + 1))

    head = [f"| | {' | '.join(map(label, kinds))} |", "|---" * (len(kinds) + 1) + "|"]
    lines = list(head)
    alike: dict[tuple[str, ...], list[str]] = {}
    for what in trained(capabilities):
        row = tuple(shown(Cell(what, kind, **USUAL)) for kind in kinds)
        alike.setdefault(row, []).append(label(what))
    lines += [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in alike.items()]
    lines += ["", *head]
    ways = {
        **{name: {**USUAL, "precision": name} for name in registry.PRECISIONS},
        **{f"bf16, {name} kernels": {**USUAL, "precision": "bf16", "kernels": name} for name in (AUTO, "native")},
        "native kernels, another precision": {**USUAL, "kernels": "native"},
        "packing": {**USUAL, "packing": True},
    }
    for name, way in ways.items():
        row = (shown(Cell((("train_type", "qlora"),), kind, **way)) for kind in kinds)
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in notes.items())])
