"""The bytes that MLX has taken, its limits, and how it says that there are no more."""

from __future__ import annotations

import mlx.core as mx


def is_out_of_memory(error: BaseException) -> bool:
    """Whether MLX's allocator has run out: it has no type of its own for that."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and ("malloc" in str(error) or "nsufficient Memory" in str(error)))


class Memory:
    """MLX's own count of active and peak bytes, since it was started."""

    def __init__(self):
        self.before = 0

    def start(self) -> None:
        """Count from here. On Metal, what the system recommends stays resident, and no more is taken."""
        if mx.metal.is_available():
            recommended = int(mx.device_info()["max_recommended_working_set_size"])
            mx.set_wired_limit(recommended)
            mx.set_memory_limit(recommended)
        self.before = mx.get_active_memory()
        mx.reset_peak_memory()

    def used(self) -> int:
        return max(mx.get_active_memory() - self.before, 0)

    def peak(self) -> int:
        return max(mx.get_peak_memory() - self.before, 0)

    def close(self) -> None:
        """Nothing runs in the background."""
