"""The loss scale of fp16, with the rule and the saved form of torch's GradScaler, so that a run goes on with it on
either.
"""

from __future__ import annotations

GROWTH, BACKOFF = 2.0, 0.5


class LossScaler:
    def __init__(self, enabled: bool, initial: float, interval: int):
        self.enabled, self.interval, self.scale, self.tracker = enabled, interval, initial if enabled else 1.0, 0

    def update(self, finite: bool) -> None:
        """Half the scale after an overflow; twice as much after `interval` steps without one."""
        if not self.enabled:
            return
        self.tracker = self.tracker + 1 if finite else 0
        if not finite:
            self.scale *= BACKOFF
        elif self.tracker == self.interval:
            self.scale, self.tracker = self.scale * GROWTH, 0

    def state_dict(self) -> dict:
        if not self.enabled:
            return {}
        return {
            "scale": self.scale,
            "growth_factor": GROWTH,
            "backoff_factor": BACKOFF,
            "growth_interval": self.interval,
            "_growth_tracker": self.tracker,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from there; how often the scale grows is this run's."""
        self.scale, self.tracker = float(state["scale"]), int(state["_growth_tracker"]) % self.interval
