"""What may watch a run's phases: nothing, or several things at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable


class NullHooks:
    """Nothing is watched."""

    def phase(self, name: str, is_final: bool = True):
        """A context around one phase of a run: load, forward, backward (`is_final`: of the step's last micro-batch),
        step or evaluate.
        """
        return contextlib.nullcontext()

    def span(self, name: str):
        """A context around a part of a phase: data, and what an optimizer step is made of."""
        return contextlib.nullcontext()

    def evaluation(self, evaluate: Callable):
        """`evaluate`, of which each call is a phase."""
        return evaluate

    def step_done(self) -> None:
        """The optimizer step and what is reported of it are over."""

    def close(self) -> None:
        """Write what is left to write. Called on every way out of the run."""


class HookList(NullHooks):
    """Several at once."""

    def __init__(self, watches: list[NullHooks]):
        self.watches = watches

    @contextlib.contextmanager
    def phase(self, name: str, is_final: bool = True):
        with contextlib.ExitStack() as stack:
            for one in self.watches:
                stack.enter_context(one.phase(name, is_final))
            yield

    @contextlib.contextmanager
    def span(self, name: str):
        with contextlib.ExitStack() as stack:
            for one in self.watches:
                stack.enter_context(one.span(name))
            yield

    def evaluation(self, evaluate: Callable):
        def watched():
            with self.phase("evaluate"):
                return evaluate()

        return watched

    def step_done(self) -> None:
        for one in self.watches:
            one.step_done()

    def close(self) -> None:
        for one in self.watches:
            one.close()
