"""What is shown on a terminal, as text."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#@"
WIDTH = 40  # points of a sparkline


def printable(shown: str) -> str:
    """The same text with everything that could steer a terminal written as an escape; line breaks stay."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "surrogatepass").decode() for c in shown
    )


def duration(seconds: float) -> str:
    """0:07, 12:34 or 3:04:05."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def sparkline(values: Sequence[float], encoding: str = "utf-8") -> str:
    """The values as a line of blocks, the smallest the lowest; at most WIDTH of them, each a mean.

    What is not finite is a gap.
    """
    blocks = BLOCKS if encoding.lower().startswith("utf") else ASCII
    size = -(-len(values) // WIDTH) or 1
    points = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    finite = [point for point in points if abs(point) < float("inf")]  # of a NaN, too, this is false
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)

    def block(point: float) -> str:
        return (
            blocks[round((point - low) / span * (len(blocks) - 1)) if span else 0] if abs(point) < float("inf") else " "
        )

    return "".join(map(block, points))


def format_bytes(count: float) -> str:
    """Bytes with a unit: 4.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
