"""Rows of a file through one or several processes, in their order."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator

from anyqlora.data.readers.sources import Chunk, Source
from anyqlora.data.row_reader import RowReader, TokenizedChunk

LARGE = 8 << 20  # bytes of a file from which other processes are worth their start
AHEAD = 3  # chunks for each process, read or done, that nobody has taken
CAN_FORK = hasattr(os, "fork") and sys.platform != "darwin"  # whose frameworks do not survive it
_PR_SET_PDEATHSIG = 1

_reader: RowReader | None = None  # of a worker


def read_chunks(
    reader: RowReader, source: Source, workers: int = 1, progress: Callable[[int | None], None] = lambda rows: None
) -> Iterator[TokenizedChunk]:
    """Every chunk of the file as tokens, in its order; `progress(rows)` is told of each, and None at the end."""
    chunks = source.chunks()
    first = reader.choose_format(chunks)
    everything = itertools.chain(first, chunks)
    is_large = source.path is not None and source.path.stat().st_size >= LARGE
    several = workers > 1 and is_large
    for result in _in_processes(reader, everything, workers) if several else map(reader.read, everything):
        progress(result.rows)
        yield result
    progress(None)


def _in_processes(reader: RowReader, chunks: Iterator[Chunk], workers: int) -> Iterator[TokenizedChunk]:
    """Through forked processes, which have the tokenizer as it is; few chunks are under way at a time."""
    global _reader
    import multiprocessing

    _reader = reader
    with warnings.catch_warnings():
        # The children neither compute with torch nor take a lock that a thread of this process may hold.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
        pool = multiprocessing.get_context("fork").Pool(workers, _begin, (os.getpid(),))
    try:
        waiting: deque = deque()
        for chunk in chunks:
            waiting.append(pool.apply_async(_read, (chunk,)))
            if len(waiting) >= AHEAD * workers:
                yield waiting.popleft().get()
        while waiting:
            yield waiting.popleft().get()
    finally:
        _reader = None
        pool.terminate()
        pool.join()


def _begin(parent: int) -> None:
    """What a worker does first: it ends with its parent, leaves signals to it, and is one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _read(chunk: Chunk) -> TokenizedChunk:
    assert _reader is not None, "forked with it"
    return _reader.read(chunk)
