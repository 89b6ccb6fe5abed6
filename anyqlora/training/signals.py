"""What is asked of a run from outside: SIGTERM and SIGINT to stop, SIGUSR1 to save."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

from anyqlora.core.errors import Stopped

NUMBERS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]
SAVE = getattr(signal, "SIGUSR1", None)
SHOW_CURSOR = b"\x1b[?25h"


class Interrupted(Exception):
    """A signal came while evaluation rows were read; what was found so far is dropped."""


class Signals:
    """`stop` is the signal that asked to stop, or None; `save` is whether a checkpoint was asked for.

    In the loop a stop waits until the step is over and saved. Anywhere else there is nothing to save, and it is raised
    at once. A second SIGINT ends the process at once, wherever it is.
    """

    def __init__(self, saved: Callable[[], str], is_alone: bool = True):
        """`saved()` says what a stop leaves on disk.

        Where there are other processes, a signal counts in the loop once all know of it.
        """
        self.saved, self.stop, self.save, self.in_loop = saved, None, False, False
        self.is_alone, self.asked = is_alone, dict.fromkeys(NUMBERS, False)
        self.handlers, self.pipe = {}, ()
        if threading.current_thread() is threading.main_thread():  # Python delivers signals to no other
            self.handlers = {number: signal.signal(number, self._on_signal) for number in NUMBERS}
            self._watch()

    def check(self) -> None:
        """Raises Stopped if a stop was asked for."""
        if self.stop is not None:
            raise Stopped.by(self.stop, self.saved())

    def interrupt(self) -> None:
        """Raises Interrupted if a stop was asked for."""
        if self.stop is not None:
            raise Interrupted

    def asked_numbers(self) -> list[float]:
        """Whether each of NUMBERS came here and the others do not know of it yet."""
        return [float(self.asked[number]) for number in NUMBERS]

    def agree(self, counts: list[float]) -> None:
        """Take up what came to any process, from the sums of `asked_numbers` over all of them."""
        for number, count in zip(NUMBERS, counts, strict=True):
            if count:
                self.asked[number] = False
                self._take(number)

    def close(self) -> None:
        """Leave signals to whom they belonged before."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.pipe:
            signal.set_wakeup_fd(self.woken)
            os.close(self.pipe[1])
        self.handlers, self.pipe = {}, ()

    def _on_signal(self, number: int, _frame) -> None:
        if self.is_alone or not (self.in_loop or number == SAVE):
            self._take(number)
        else:
            self.asked[number] = True

    def _take(self, number: int) -> None:
        if number == SAVE:
            self.save = True
            return
        self.stop = number
        if not self.in_loop:
            self.check()

    def _watch(self) -> None:
        """Look for the second SIGINT in a thread: the interpreter calls handlers only between two calls of a library,
        and one call can take long.
        """
        self.pipe = os.pipe()
        os.set_blocking(self.pipe[1], False)
        self.woken = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=_end_at_second, args=(self.pipe[0],), name="signals", daemon=True).start()


def _end_at_second(pipe: int) -> None:
    """Read the numbers of the signals that come, until the pipe is closed."""
    stops = 0
    while came := os.read(pipe, 1):
        if came[0] == signal.SIGINT and stops:
            if sys.stdout.isatty():
                os.write(1, SHOW_CURSOR)  # which a panel hides
            os._exit(130)
        stops += came[0] in (signal.SIGTERM, signal.SIGINT)
    os.close(pipe)
