"""The bytes that MLX has taken, its limits, and how it says that there are no more."""

from __future__ import annotations

import mlx.core as mx

from anyqlora.core.terminal import format_bytes

CACHED = (
    4  # of what stays resident, the part that freed buffers may have: a step's, while most stays with what is in use
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether MLX's allocator has run out: it has no type of its own for that."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("malloc" in str(error) or "nsufficient Memory" in str(error))
    )


def recommended() -> int:
    """Bytes that stay resident for the GPU; 0 where there is no Metal."""
    return int(mx.device_info()["max_recommended_working_set_size"]) if mx.metal.is_available() else 0


class Memory:
    """MLX's own count of active and peak bytes, since it was started.

    On Metal, what the system recommends stays resident. Its allocator takes more without a word, and what is beyond
    makes the whole machine slow: `strained` says so. What it keeps of freed buffers, which fit later ones of nearly
    their size only, is bounded.
    """

    def __init__(self):
        self.before, self.limit, self.limits = 0, 0, {}

    def start(self) -> None:
        """Count from here."""
        self.limit = recommended()
        if self.limit:
            self.limits = {
                mx.set_wired_limit: mx.set_wired_limit(self.limit),
                mx.set_cache_limit: mx.set_cache_limit(self.limit // CACHED),
            }
        self.before = mx.get_active_memory()
        mx.reset_peak_memory()

    def used(self) -> int:
        return max(mx.get_active_memory() - self.before, 0)

    def peak(self) -> int:
        return max(mx.get_peak_memory() - self.before, 0)

    def strained(self) -> str:
        """Once, when more was taken than stays resident: that, and what helps. Else nothing."""
        most, limit = mx.get_peak_memory(), self.limit
        if not limit or most <= limit:
            return ""
        self.limit = 0
        return (
            f"{format_bytes(most)} taken, and {format_bytes(limit)} stay resident for the GPU: steps may be many times "
            f"slower. Less is taken with a smaller "
            "--batch_size and as many more --gradient_accumulation_steps, or --use_gradient_checkpointing true"
        )

    def close(self) -> None:
        """Put MLX's limits back."""
        for put, limit in self.limits.items():
            put(limit)
