"""What each precision computes in, and what keeps fp16's gradients from vanishing."""

from __future__ import annotations

import contextlib

import torch

from anyqlora.core import registry

AUTOCAST = {"fp16_autocast": torch.float16, "bf16_autocast": torch.bfloat16, "bf16_buffers_autocast": torch.bfloat16}
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, **AUTOCAST}
STORED = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16_autocast": torch.float32,
    "bf16_autocast": torch.float32,
    "bf16_buffers_autocast": torch.bfloat16,
}


def autocast(plan, device: torch.device, *, cache: bool = True):
    """The plan's context for a forward pass. `cache`: whether what is learned is cast once for all of its uses."""
    full_in_bf16 = (
        registry.adapter(plan.adapter).trains_base and plan.precision == "bf16"
    )  # float32 weights, computed in bf16
    dtype = torch.bfloat16 if full_in_bf16 else AUTOCAST.get(plan.precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=cache)


class LossScaler:
    """fp16's dynamic loss scale (Micikevicius et al. 2018): halved when a step overflows, doubled after `interval`
    steps that did not.

    torch.amp.GradScaler decides by the gradients that one process has; where they are sharded, only the whole norm,
    which all processes share, says whether a step overflowed. The state is in GradScaler's words. Not `enabled`, the
    scale is 1 and stays.
    """

    def __init__(self, enabled: bool, initial: float = 2.0**16, interval: int = 2000):
        self.enabled, self.interval, self.good_steps = enabled, interval, 0
        self._scale = initial if enabled else 1.0

    def is_enabled(self) -> bool:
        return self.enabled

    def get_scale(self) -> float:
        return self._scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self._scale if self.enabled else loss

    def update(self, overflowed: bool) -> None:
        """After a step, on all processes with the same word."""
        if not self.enabled:
            return
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self._scale *= 0.5
        elif self.good_steps == self.interval:
            self._scale, self.good_steps = self._scale * 2.0, 0

    def state_dict(self) -> dict:
        if not self.enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": self.interval,
            "_growth_tracker": self.good_steps,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from there; how often the scale grows is this run's."""
        if self.enabled:
            self._scale, self.good_steps = float(state["scale"]), int(state["_growth_tracker"]) % self.interval
