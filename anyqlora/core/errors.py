"""The ways a run can end early, each with its exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from anyqlora.core.redaction import redacted
from anyqlora.core.terminal import printable

FIRST_SAYS = (
    3.0  # seconds that other processes leave to the first one, which mostly has the same to say and whose end is theirs
)


class RunError(Exception):
    """A failure that is explained to the user in words, without a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, where: str = "", cure: str = ""):
        """`where` is `file[:line[:col]]` of the cause, `cure` says what to do about it."""
        self.message, self.where, self.cure = message, where, cure
        super().__init__(str(self))

    def __reduce__(self):
        return _again, (type(self), self.message, self.where, self.cure)

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return printable(redacted(f"{text}\n  cure: {self.cure}" if self.cure else text))


def _again(kind: type[RunError], message: str, where: str, cure: str) -> RunError:
    """The same error, in another process."""
    return kind(message, where=where, cure=cure)


class UsageError(RunError):
    """The command line, a configuration or the data cannot be used."""

    exit_code = 2


class NotSupported(UsageError):
    """A known name whose implementation this version does not have."""


class NoCheckpoint(RunError):
    """Resuming was asked for and no checkpoint is usable."""

    exit_code = 3


class NonFinite(RunError):
    """Loss or gradients were not finite several steps in a row."""

    exit_code = 4


class DiskFull(RunError):
    """What has to be written does not fit."""

    exit_code = 5


class PeerLost(RunError):
    """Another process of the run is gone, or does not answer."""

    exit_code = 70


class OutOfMemory(RunError):
    """One of several processes ran out of memory, while the others wait for it."""

    exit_code = 71


class Stopped(RunError):
    """A signal ended the run after its state was saved; the same command continues it."""

    exit_code = 75

    @classmethod
    def by(cls, number: int, saved: str = "") -> Stopped:
        """Of the signal `number`; `saved` says what is on disk."""
        stopped = cls(
            "; ".join(filter(None, [f"stopped by {signal.Signals(number).name}", saved])),
            cure="the same command continues the run",
        )
        stopped.exit_code = 130 if number == signal.SIGINT else cls.exit_code
        return stopped


@contextlib.contextmanager
def explained(program: str):
    """Print a RunError in words on standard error and leave with its exit code; so do signals that ask to stop."""
    code = 0
    try:
        with stoppable():
            yield
    except KeyboardInterrupt:
        code = 130
        print(f"{program}: stopped by SIGINT; the same command starts it again", file=sys.stderr)
    except RunError as error:
        code = error.exit_code
        if isinstance(error, UsageError) and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
            time.sleep(FIRST_SAYS)
        print(f"{program}: {error}", file=sys.stderr)
    except SystemExit as end:
        if not _has_been_in_a_group() or not isinstance(end.code, int):
            raise
        code = end.code
    except Exception as error:
        if not _has_been_in_a_group():
            raise
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # a closed pipe or a full disk: the interpreter would try again, fail, and say so
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if _has_been_in_a_group():
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)


def _has_been_in_a_group() -> bool:
    """Whether this process has to end at once: gloo's threads may still hold tensors, and one that lets go of a tensor
    while the interpreter ends aborts the process, whether or not the group was left in order.
    """
    distributed = sys.modules.get("torch.distributed")
    return "anyqlora.on_torch.parallel.process_group" in sys.modules or bool(
        distributed and distributed.is_available() and distributed.is_initialized()
    )


@contextlib.contextmanager
def stoppable():
    """Where nothing has to be saved, SIGTERM is a Stopped, and SIGUSR1, which asks to save, is nothing."""

    def stop(_number, _frame):
        raise Stopped("stopped by SIGTERM", cure="the same command starts it again")

    handlers = {signal.SIGTERM: stop, **({signal.SIGUSR1: signal.SIG_IGN} if hasattr(signal, "SIGUSR1") else {})}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
