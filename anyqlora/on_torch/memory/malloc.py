"""glibc's heap: which freed memory goes back to the system, while loading and while training; and oneDNN's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

# mallopt's parameters, from glibc's malloc.h
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
# A block of MMAP_THRESHOLD bytes or more gets pages of its own, MMAP_MAX of them at most, which are unmapped when it is
# freed
RESTING = {
    MMAP_THRESHOLD: 32 << 20,
    MMAP_MAX: 65536,
    TRIM_THRESHOLD: 64 << 20,
}  # where glibc's own adaptive thresholds end
LOADING = {MMAP_THRESHOLD: 64 << 10, MMAP_MAX: 65536, TRIM_THRESHOLD: 128 << 10}
TRAINING = {MMAP_MAX: 0, TRIM_THRESHOLD: -1}  # nothing leaves by itself
WORTH = 0.05  # of the plan; less is not worth the way
SMALLEST_HOARD = 32 << 20  # bytes

_now = RESTING


def _set(settings: dict[int, int]) -> dict[int, int]:
    """Have glibc's heap so; elsewhere nothing changes. Returns how it was."""
    global _now
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    for parameter, value in settings.items() if mallopt else ():
        mallopt(parameter, value)
    before, _now = _now, settings
    return before


def trim() -> None:
    """Give back to the system what is free."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim:
        malloc_trim(0)


@contextlib.contextmanager
def return_freed_pages():
    """While it lasts, a freed tensor's pages leave the process (glibc; elsewhere nothing changes).

    glibc raises its threshold to the size of each large block that is freed, so that the weights of a shard come to lie
    in one heap among the codes made from them, and the holes stay resident: 886 MB for 206 MB of tensors in a 330
    M-parameter model.
    """
    before = _set(LOADING)
    try:
        yield
    finally:
        _set(before)
        trim()


class _Info(ctypes.Structure):
    """struct mallinfo2 of glibc's malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class MallocTuner:
    """Keeps a process's pages while it trains, and the process within the memory that was planned for it.

    Training frees and takes the same sizes again and again. Blocks of 32 MiB or more would have their pages cleared
    anew each time, which takes 2-3 % of a step where a layer's outputs are that large.

    torch asks for blocks on 64-byte borders, and glibc before 2.39 does not put one where another of its size was freed
    (its bug 30723): a 135 M-parameter model held 1.7 GB of pages for 0.9 GB of tensors. Those holes are given back, but
    only when the process outgrows its plan, which lets it have some (memory.HOLES), since pages that are used again
    cost time: 1 % of a step so, 9 % with half as many holes, 35 % with every tensor mapped by itself.
    """

    keeping = 0  # heaps that keep their process's pages

    def __init__(self, planned: int):
        """`planned` bytes, above what the process has now; 0: unknown, so that every hoard is given back, and large
        blocks when they are freed.
        """
        self.libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self.can_tell = all(hasattr(self.libc, name) for name in ("mallinfo2", "malloc_trim"))  # glibc 2.33 or newer
        if self.can_tell:
            self.libc.mallinfo2.restype = _Info
        self.planned, self.hoard = planned, max(SMALLEST_HOARD, WORTH * planned)
        self.before, self.is_keeping = self._alive(), self.can_tell and planned > 0
        if self.is_keeping:
            MallocTuner.keeping += 1
            _set(TRAINING)

    def _alive(self) -> int:
        """Bytes of the blocks that are in use."""
        if not self.can_tell:
            return 0
        info = self.libc.mallinfo2()
        return info.uordblks + info.hblkhd

    def give_back(self, used: int) -> None:
        """Give free pages back if the process, which by now takes `used` bytes more, has outgrown its plan by more than
        `hoard`, and hoards that.
        """
        if self.can_tell and used > self.planned + self.hoard and used - (self._alive() - self.before) > self.hoard:
            trim()

    def close(self) -> None:
        """Let pages go again, as glibc does by itself, where no other heap keeps them."""
        if self.is_keeping:
            self.is_keeping = False
            MallocTuner.keeping -= 1
            if not MallocTuner.keeping:
                _set(RESTING)
                trim()


def set_primitive_cache(number: int) -> None:
    """Let oneDNN, and torch's bridge to it, each keep so many compiled products, unless the environment says otherwise.

    They keep 1024 by themselves, one for each shape, 0.6 MB each in 16 bits: 620-720 MB where lengths vary. Both ask
    before their first one.
    """
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, str(number))
