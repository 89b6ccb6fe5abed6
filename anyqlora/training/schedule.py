"""Learning rate, seeds and adapter start as pure functions: nothing of them has to be saved."""

from __future__ import annotations

import math
import zlib

import numpy as np

from anyqlora.config.schema import TrainConfig


def warmup(config: TrainConfig, total_steps: int) -> int:
    """Steps of linear warm-up: as stated, or the stated part of all steps, rounded up."""
    return config.warmup_steps if config.warmup_steps >= 0 else math.ceil(config.warmup_ratio * total_steps)


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """The rate of optimizer step `step` (from 0), after linear warm-up from lr / warm-up steps to lr."""
    rising = warmup(config, total_steps)
    if step < rising:
        return config.lr * (step + 1) / rising
    done = min(1.0, (step - rising) / max(1, total_steps - rising))  # in [0, 1)
    floor = config.cosine_min_lr_ratio
    shape = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
        "cosine_with_restarts": 0.5 * (1.0 + math.cos(math.pi * ((config.lr_cycles * done) % 1.0))),
        "polynomial": (1.0 - done) ** config.lr_power,
        "exponential": config.lr_decay**done,
    }[config.lr_scheduler]
    return config.lr * (floor + (1.0 - floor) * shape)


def seed_at(seed: int, step: int, rank: int = 0) -> int:
    """The seed of dropout in optimizer step `step` on process `rank`; steps and ranks never share one."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1)


def uniform_start(name: str, shape: tuple[int, ...], bound: float, seed: int) -> np.ndarray:
    """float32 values in [-bound, bound) that depend on the tensor's name and the seed only.

    So an adapter starts alike on every backend and world size, in whatever order its tensors are made.
    """
    stream = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
    return ((stream.random(shape, dtype=np.float32) * 2 - 1) * np.float32(bound)).astype(np.float32)
