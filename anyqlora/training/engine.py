"""What the loop asks of a framework: the protocol that on_torch/engine.py and on_mlx/engine.py fulfil."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from anyqlora.core.files import Content
from anyqlora.data.stream import Batch
from anyqlora.training.session import TrainingSession
from anyqlora.training.state import Arrays, FinalFiles, LoadSummary, Snapshot, StartingPoint, StepResult


class Engine(Protocol):
    """One run's model and optimizer on one framework. Made from a session, closed with it."""

    def __init__(self, session: TrainingSession): ...

    def load(self, sample: Sequence[Batch]) -> LoadSummary:
        """Read the base model through the quantizer, attach the adapter, make the optimizer; `sample` is for what
        calibrates.
        """
        ...

    def restore(self, start: StartingPoint) -> None:
        """Put back what training starts from. Raises UsageError naming tensors of another name or shape."""
        ...

    def evaluator(self, session: TrainingSession) -> Callable[[], dict]:
        """() -> {loss, perplexity, exact_match, samples} on the evaluation rows.

        Changes nothing of training, bit for bit.
        """
        ...

    def gradients(self, batches: Sequence[Batch], seed: int, trained_tokens: int) -> float | None:
        """Accumulate the gradients of a step's micro-batches; `trained_tokens` are those of the whole step over all
        processes.

        Returns the sum of this process's token losses, or None when memory ran out.
        """
        ...

    def discard_step(self) -> None:
        """Drop the gradients of a step that is done again, and give free memory back."""
        ...

    def check_gradients(self) -> None:
        """After the first backward: raises RunError naming trained tensors that got no gradient."""
        ...

    def step(self, lr: float, max_grad_norm: float | None, skip: bool) -> StepResult:
        """Reduce over processes, unscale, clip, update, clear. `skip` clears without an update."""
        ...

    def step_done(self) -> Sequence[str]:
        """The step and its report are over. Returns what there is to warn of."""
        ...

    def snapshot(self) -> Snapshot:
        """What a checkpoint has to hold."""
        ...

    def load_trainable(self, arrays: Arrays) -> None:
        """Make these the trained tensors: those of the best step."""
        ...

    def final_files(self, tokenizer, pretrained_files: Callable[..., dict[str, Content]]) -> FinalFiles:
        """PEFT's adapter or a whole model, with the tokenizer.

        `pretrained_files(name, thing, **options)` is what save_pretrained writes.
        """
        ...

    def used_memory(self) -> int:
        """Bytes that the run holds now."""
        ...

    def peak_memory(self) -> int:
        """Bytes that it held at most."""
        ...

    def phase(self, name: str) -> AbstractContextManager:
        """A context around one phase of a run, for profilers: load, step."""
        ...

    def span(self, name: str) -> AbstractContextManager:
        """A context around a part of a phase."""
        ...
