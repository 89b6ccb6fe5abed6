"""The loss scale of fp16, with the rule and the saved form of torch's GradScaler, so that a run goes on with it on either."""

from __future__ import annotations

GROWTH, BACKOFF, INTERVAL, FIRST = 2.0, 0.5, 2000, 2.0**16


class Scaler:
    def __init__(self, enabled: bool):
        self.enabled, self.scale, self.tracker = enabled, FIRST if enabled else 1.0, 0

    def update(self, finite: bool) -> None:
        """Half the scale after an overflow; twice as much after 2000 steps without one."""
        if not self.enabled:
            return
        self.tracker = self.tracker + 1 if finite else 0
        if not finite:
            self.scale *= BACKOFF
        elif self.tracker == INTERVAL:
            self.scale, self.tracker = self.scale * GROWTH, 0

    def state_dict(self) -> dict:
        if not self.enabled:
            return {}
        return {"scale": self.scale, "growth_factor": GROWTH, "backoff_factor": BACKOFF, "growth_interval": INTERVAL, "_growth_tracker": self.tracker}

    def load_state_dict(self, state: dict) -> None:
        self.scale, self.tracker = float(state["scale"]), int(state["_growth_tracker"])
