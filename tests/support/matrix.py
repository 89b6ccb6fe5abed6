"""Cells of the matrix run for real: many in one world of two processes, and each against one process on the same rows.

Figures come from SGD, which makes the difference of two gradients that of two adapters; AdamW divides what is left of
gradients that cancel by itself (tests/on_torch/parallel/test_strategies.py has its bound).
"""

from __future__ import annotations

import functools
import time

import numpy as np
import torch

from anyqlora.core import registry
from anyqlora.core.descriptors import QuantizerInfo
from anyqlora.core.errors import UsageError
from anyqlora.planning.cells import PROCESSES, Cell
from anyqlora.testing import WorldFailed, world
from tests.support.equality import distance, planned, train

STEPS = {"optimizer": "sgd", "lr": 0.1, "plans": [2, 1]}
AUTOMATIC = {"fused_lora": "auto", "padding_free": "auto"}  # as in train.py: the helper's own runs go without
AS_PLANNED = ("kernels", "fused_lora", "padding_free", "logits_chunk_tokens", "fused_linear_cross_entropy")
AT_ONCE = 40  # cells in one world

# |a - b| / |a - start| of the adapter, and the same of losses and norms. In 16 bits a last digit of a float32 adapter
# now and then tips the rounding of an activation, 2^-9 of it, and all that comes after; tp adds up products that are
# rounded one by one. Mostly it is 1e-6 (`Matrix.said` tells).
EXACT, SPLIT, ROUNDED = 5e-6, 2e-4, 1e-2


def bound(cell: Cell) -> float:
    """What a cell may differ by from one process."""
    if cell.precision != "fp32":
        return ROUNDED
    return SPLIT if dict(cell.strategy)["strategy"] == "tp" else EXACT


def settings_of(cell: Cell) -> dict:
    """How the cell is trained."""
    settings = {**STEPS, **AUTOMATIC, **cell.settings}
    if cell.precision == "fp16_autocast":
        settings["initial_loss_scale"] = 1024
    if settings["strategy"] == "tp" and quantizer_of(cell).double_quant:
        settings["double_quant"] = False  # scales of slices are quantized by themselves: not the same base
    return settings


def quantizer_of(cell: Cell) -> QuantizerInfo:
    given = dict(cell.trained)
    preset = registry.TRAIN_TYPES.get(given.get("train_type", ""))
    return registry.quantizer(preset.quantizer if preset else given["quantizer"])


@functools.cache
def plan_of(base, cell: Cell):
    """The plan of two processes, or the refusal."""
    settings = {name: value for name, value in settings_of(cell).items() if name != "plans"}
    try:
        return planned(base, PROCESSES, **settings)
    except UsageError as error:
        return error


def alone_of(base, cell: Cell) -> dict:
    """The run of one process that the cell is compared with: the same arithmetic, on the fast paths that two have."""
    config = plan_of(base, cell).config
    taken = {name: getattr(config, name) for name in AS_PLANNED}
    is_stage_3 = dict(cell.strategy).get("deepspeed_zero_stage") == 3
    learns_head = dict(cell.strategy)["strategy"] == "fsdp" and config.adapter == "full"
    if cell.precision != "fp32" and (is_stage_3 or learns_head):
        taken["logits_chunk_tokens"] = 0  # as those make them (needs_logits), and parts round otherwise
    if taken["fused_linear_cross_entropy"] is False:
        del taken["fused_linear_cross_entropy"]
    others = {name for name, _ in cell.strategy}
    rest = {name: value for name, value in settings_of(cell).items() if name not in others}
    return {**rest, **taken, "strategy": "single", "dealt_to": PROCESSES}


def run_each(base, all_settings: list[dict]) -> list:
    """In a world: what each run gives."""
    found = []
    for settings in all_settings:
        torch.manual_seed(0)
        found.append(train(base, **settings))
    return found


def in_worlds(size: int, base, all_settings: list[dict]) -> list:
    """What each run gives on each rank, [[rank 0's, ...]], or the traceback of one that failed, as text."""
    results: list = []
    for first in range(0, len(all_settings), AT_ONCE):
        results += _in_a_world(size, base, all_settings[first : first + AT_ONCE])
    return results


def _in_a_world(size: int, base, chunk: list[dict]) -> list:
    try:
        return list(zip(*world(size, run_each, base, chunk, timeout=30 + 20 * len(chunk)), strict=True))
    except WorldFailed as error:
        if len(chunk) == 1:
            return [str(error)]
        half = len(chunk) // 2
        return _in_a_world(size, base, chunk[:half]) + _in_a_world(size, base, chunk[half:])


class Matrix:
    """What came of cells: refused by name, run (with how far from one process), or failed."""

    def __init__(self, base, cells: list[Cell], alone: dict | None = None):
        self.refused: dict[Cell, str] = {}
        self.distances: dict[Cell, float] = {}
        self.failed: dict[Cell, str] = {}
        self.alone = {} if alone is None else alone
        began = time.monotonic()
        same: dict[str, list[Cell]] = {}  # cells whose plans are one: kernels auto and by name
        for cell in cells:
            plan = plan_of(base, cell)
            if isinstance(plan, UsageError):
                self.refused[cell] = plan.message
                if not any(name.partition("_")[0] in plan.message for name in cell.settings):
                    self.failed[cell] = f"refused without naming a setting: {plan.message}"
            elif plan.adjustments:
                self.failed[cell] = f"changed: {plan.adjustments}"
            else:
                same.setdefault(repr(sorted({**cell.settings, "kernels": plan.kernels}.items())), []).append(cell)
        first = [group[0] for group in same.values()]
        references = {repr(sorted(alone_of(base, cell).items(), key=repr)): alone_of(base, cell) for cell in first}
        missing = [key for key in references if key not in self.alone]
        alones = in_worlds(1, base, [references[key] for key in missing])
        self.alone |= dict(zip(missing, alones, strict=True))
        ran = in_worlds(PROCESSES, base, [settings_of(cell) for cell in first])
        for group, ranks in zip(same.values(), ran, strict=True):
            expected = self.alone[repr(sorted(alone_of(base, group[0]).items(), key=repr))]
            for cell in group:
                self._compare(cell, ranks, expected)
        self.seconds, self.runs = time.monotonic() - began, len(first)

    def _compare(self, cell: Cell, ranks, expected) -> None:
        texts = [result for result in (ranks, expected) if isinstance(result, str)]
        if texts:
            self.failed[cell] = texts[0]
            return
        first, (one,) = ranks[0], expected
        copies = first.size / first.data_size  # of each row's loss
        losses = np.sum([rank.losses for rank in ranks], axis=0) / copies
        far = {
            "adapter": distance(one.adapter, first.adapter, one.start),
            "losses": np.abs(losses / one.losses - 1).max(),
            "norms": max(np.abs(np.array(rank.norms) / one.norms - 1).max() for rank in ranks),
        }
        self.distances[cell] = float(max(far.values()))
        if not self.distances[cell] < bound(cell):  # NaN, too
            self.failed[cell] = f"differs from one process: {far}"

    def said(self) -> str:
        """The counts, and every failure."""
        lines = [
            f"{len(self.refused)} refused, {len(self.distances)} ran ({self.runs} runs), {len(self.failed)} failed, "
            f"{self.seconds:.0f} s"
        ]
        for name, limit in (("float32", EXACT), ("float32, tp", SPLIT), ("16 bits", ROUNDED)):
            of = {cell: far for cell, far in self.distances.items() if bound(cell) == limit}
            if of:
                worst = max(of, key=lambda cell: of[cell])
                middle = np.median(list(of.values()))
                lines.append(f"{name}: {of[worst]:.2g} from one process at most ({worst}), {middle:.2g} mostly")
        return "\n".join([*lines, *(f"{cell}: {why[-1500:]}" for cell, why in self.failed.items())])
