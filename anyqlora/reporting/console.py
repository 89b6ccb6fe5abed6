"""What is seen while a run goes on, and metrics.jsonl, from which trackers, plots and reports are fed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from pathlib import Path

from anyqlora.core.files import flush_to_disk, json_safe
from anyqlora.core.redaction import redacted
from anyqlora.core.terminal import duration, printable


class JsonLines:
    """A file of JSON objects, one to a line, written at once.

    On a full disk lines wait, and none is lost or cut: each write first tries those that wait.
    """

    def __init__(self, path: Path, keep: int, warn):
        """Of an earlier part of the run the first `keep` lines stay."""
        self.path, self.warn, self.waiting, self.file = path, warn, [], None
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        complete = [
            line for line in lines[:keep] if line.endswith(b"\n")
        ]  # the last one may have been cut short by a kill
        self.count, self.end = len(complete), sum(map(len, complete))
        if len(complete) < len(lines):
            os.truncate(path, self.end)

    def write(self, record: dict) -> None:
        self.waiting.append(
            (json.dumps(json_safe(record), allow_nan=False, ensure_ascii=False) + "\n").encode(
                "utf-8", "backslashreplace"
            )
        )
        self.count += 1
        self.flush()

    def flush(self) -> None:
        """Write what waits; a line that did not go in whole is cut off again."""
        try:
            while self.waiting:
                if self.file is None:
                    self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - open for the run's life; unbuffered, so that what was not written is known
                if self.file.write(self.waiting[0]) != len(self.waiting[0]):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.end += len(self.waiting.pop(0))
        except OSError as error:
            self.warn(f"{self.path.name} cannot be written ({error.strerror}); its lines wait")
            with contextlib.suppress(OSError):
                os.truncate(self.path, self.end)

    def sync(self) -> None:
        """Bring the lines to the disk before a checkpoint counts them."""
        self.flush()
        if self.file is not None:
            with contextlib.suppress(OSError):
                flush_to_disk(self.file.fileno())

    def close(self) -> None:
        self.flush()
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.close()


class Metrics(JsonLines):
    """metrics.jsonl: an object for each logged step and each evaluation.

    `trackers` are told what is written, when it is written.
    """

    def __init__(self, path: Path, keep: int, trackers, warn):
        self.trackers = trackers
        super().__init__(path, keep, warn)

    def write(self, record: dict) -> None:
        super().write(record)
        self.trackers.record(json_safe(record))

    def close(self) -> None:
        super().close()
        self.trackers.close()


class ConsoleReporter:
    """Plain lines on standard output, warnings on standard error. What comes from data cannot steer the terminal."""

    def __init__(self, plan, total_steps: int):
        self.plan, self.total = plan, total_steps

    def announce(self) -> None:
        self.info("\n".join(self.plan.explain()))

    def info(self, text: str) -> None:
        with contextlib.suppress(
            OSError
        ):  # nobody reads any more, or the output is a file on a full disk: training goes on
            print(printable(redacted(text)), flush=True)

    def warn(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(printable(redacted(f"warning: {text}")), file=sys.stderr, flush=True)

    def step(self, record: dict) -> None:
        """`record` is that of metrics.jsonl, with eta_seconds."""
        self.info(
            f"step {record['step']:>5}/{self.total}  loss {record['loss']:.4f}  norm {record['grad_norm']:.3f}  lr "
            f"{record['lr']:.2e}"
            f"  {record['trained_tokens_per_second']:.0f} trained tok/s  eta {duration(record['eta_seconds'])}"
        )

    def evaluation(self, record: dict) -> None:
        self.info(format_evaluation(record))

    def report(self, directory: Path) -> None:
        """What came of the finished run in `directory`."""
        from anyqlora.reporting.summary import show

        self.close()
        try:
            show(directory)
        except (OSError, ValueError, KeyError, TypeError) as error:  # written to a full disk, or damaged since
            self.warn(f"{directory} cannot be shown whole: {error}")

    def close(self) -> None:
        """Leave the terminal as it was. May be called again."""


class QuietReporter(ConsoleReporter):
    """Nothing but warnings, among them what the plan could not do as it was asked."""

    def announce(self) -> None:
        for adjustment in self.plan.adjustments:
            self.warn(str(adjustment))

    def info(self, text: str) -> None:
        pass

    def report(self, directory: Path) -> None:
        pass


class NullReporter(QuietReporter):
    """Nothing at all: of several processes the first one speaks."""

    def announce(self) -> None:
        pass

    def warn(self, text: str) -> None:
        pass


def format_evaluation(record: dict) -> str:
    """One evaluation in words."""
    exact = f"  exact match {100 * record['exact_match']:.1f} %" if "exact_match" in record else ""
    return (
        f"evaluation at step {record['step']}: loss {record['loss']:.4f}  perplexity {record['perplexity']:.2f}{exact}"
    )
