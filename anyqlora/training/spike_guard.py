"""The spike guard: a step whose loss stands far above the recent ones is not learned from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

WINDOW = 64  # recent losses that tell what is usual
ENOUGH = 16  # of them, before anything is refused


class SpikeGuard:
    """Refuses a loss more than `limit` robust deviations above the median of the last WINDOW accepted losses.

    The deviation is 1.4826 times the median absolute deviation (a normal distribution's standard deviation), but at
    least 5 % of the median, so that a loss that has become very steady does not make every wiggle a spike. A limit of 0
    refuses nothing.
    """

    def __init__(self, limit: float, recent: Iterable[float] = ()):
        self.limit, self.recent = limit, deque(recent, maxlen=WINDOW)

    def refuses(self, loss: float) -> bool:
        """Whether a step with this loss is to be skipped; an accepted loss is remembered."""
        if self.limit and len(self.recent) >= ENOUGH:
            usual = median(self.recent)
            deviation = max(1.4826 * median(abs(x - usual) for x in self.recent), 0.05 * usual)
            if loss > usual + self.limit * deviation:
                return True
        if loss == loss and abs(loss) != float("inf"):
            self.recent.append(loss)
        return False
