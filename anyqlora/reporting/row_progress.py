"""How far the rows of a large file are, while tokens are made of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from anyqlora.core.terminal import printable

FIRST, EVERY = 2.0, 15.0  # seconds before the first line, and between lines where there is no terminal


def show_rows(name: str) -> Callable[[int | None], None]:
    """A bar on a terminal, else a line now and then, for the file `name`; nothing where it takes no time."""
    from tqdm import tqdm

    began = printed = time.monotonic()
    done, bar = 0, None
    title = printable(Path(name).name)

    def show(rows: int | None) -> None:
        nonlocal done, printed, bar
        if rows is None:
            if bar is not None:
                bar.close()
            return
        done += rows
        now = time.monotonic()
        if bar is not None:
            bar.update(rows)
        elif sys.stderr.isatty() and now - began > FIRST:
            bar = tqdm(desc=f"rows of {title}", unit=" rows", initial=done, dynamic_ncols=True, leave=False)
        elif not sys.stderr.isatty() and now - printed > (EVERY if printed > began else FIRST):
            printed = now
            print(f"rows of {title}: {done:,} ({done / (now - began):,.0f} rows/s)", file=sys.stderr, flush=True)

    return show
