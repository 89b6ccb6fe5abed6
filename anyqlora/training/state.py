"""What a run has come to besides tensors, which state.json holds; and what passes between the session and its
engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import NamedTuple

import numpy as np

from anyqlora.core.files import Content


@dataclass
class TrainState:
    """Learning rate, seeds and batches are functions of the step, so this is little."""

    step: int = 0  # optimizer steps that are finished
    tokens_trained: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0  # that the run took, in all the processes that went on with it
    loop_seconds: float = 0.0  # of these in steps
    saving_seconds: float = 0.0
    before: dict | None = None  # the evaluation before the first step
    after: dict | None = None  # the last one since: {"step", "loss", ...}
    best: dict | None = None  # the best one since
    best_saved: dict | None = None  # the best one whose step has a checkpoint
    without_improvement: int = 0  # evaluations since the best one
    pending_evaluation: bool = False  # a signal dropped the evaluation after `step`: it comes first
    non_finite: int = 0  # steps in a row, up to `step`, that could not be used
    recent_losses: list[float] = field(default_factory=list)  # what the spike guard compares with
    batch_size: int = 0  # rows of a micro-batch, which a step that ran out of memory halves; 0: as planned
    lines: dict[str, int] = field(default_factory=dict)  # {file: lines of it that belong to the run up to here}

    def evaluated(self, evaluation: dict) -> None:
        """Take up an evaluation after the first step: {"step", "loss", ...}."""
        if is_better(evaluation, self.best):
            self.best, self.without_improvement = evaluation, 0
        else:
            self.without_improvement += 1

    @classmethod
    def from_state(cls, state: dict) -> TrainState:
        train_state = cls(**{f.name: state[f.name] for f in fields(cls) if f.name in state})
        train_state.before, train_state.after, train_state.best, train_state.best_saved = map(
            with_numbers,
            (
                train_state.before,
                train_state.after,
                train_state.best,
                state.get("best_saved", state.get("kept", train_state.best)),
            ),
        )
        return train_state

    def to_state(self) -> dict:
        return asdict(self)


def with_numbers(evaluation: dict | None) -> dict | None:
    """An evaluation as it was before it was JSON, which has no number for what is not finite."""
    return evaluation and {
        name: float(value) if value in ("nan", "inf", "-inf") else value for name, value in evaluation.items()
    }


def is_better(evaluation: dict, than: dict | None) -> bool:
    """Whether an evaluation is better than another one, if there is one.

    A loss that is not finite is worse than any other.
    """
    return math.isfinite(evaluation["loss"]) and (than is None or not evaluation["loss"] >= than["loss"])


class StepResult(NamedTuple):
    """What one optimizer step did. `grad_norm` is the 2-norm before clipping, over all trained tensors and ranks."""

    grad_norm: float
    skipped: bool
    loss_scale: float


Arrays = dict[str, np.ndarray]


class LoadSummary(NamedTuple):
    """What came of loading: `notes` are fast paths that the plan names and this model cannot take, `news` what else is
    worth a line.
    """

    notes: Sequence[str]
    news: Sequence[str]
    trained_numbers: int  # elements of all trained tensors


class StartingPoint(NamedTuple):
    """What training starts from beside the base model: a checkpoint, or the adapter of another run."""

    origin: str  # named where a tensor does not fit
    adapter: Arrays  # emptied once its tensors are in place
    moments: Arrays | None = None  # optimizer state, {"tensor|key": array}; None: none yet
    loop: Mapping | None = None  # what else the engine's snapshot held


class Snapshot(NamedTuple):
    """What a checkpoint holds of the engine; empty on processes that write none."""

    adapter: Arrays
    moments: Arrays
    adapter_config: Mapping
    loop: Mapping  # {"scaler": state of the loss scaler}


class FinalFiles(NamedTuple):
    """What was learned as files of `folder` in the run directory; `weights` is the one whose sha256 the result
    states.
    """

    folder: str
    files: dict[str, Content]
    weights: str
