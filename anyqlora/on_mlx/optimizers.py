"""torch's update rules: (value, gradient, state, rate, config) -> value. `state` holds float32 arrays by torch's names.

MLX's own differ where it shows: its AdamW corrects no bias unless asked, and its Adadelta and SGD decay otherwise.
"""

from __future__ import annotations

import math

import mlx.core as mx

from ..config import TrainConfig

RHO, ADADELTA_EPS = 0.9, 1e-6  # torch.optim.Adadelta's defaults


def adamw(value: mx.array, gradient: mx.array, state: dict, rate: float, config: TrainConfig) -> mx.array:
    """Decoupled decay, then Adam (Loshchilov and Hutter 2019)."""
    return _adam(value * (1 - rate * config.wd), gradient, state, rate, config)


def adam(value: mx.array, gradient: mx.array, state: dict, rate: float, config: TrainConfig) -> mx.array:
    """The decay is part of the gradient."""
    return _adam(value, gradient + config.wd * value if config.wd else gradient, state, rate, config)


def _adam(value, gradient, state, rate, config):
    step = int(state.get("step", mx.array(0.0))) + 1
    first, second = (state.get(name, mx.zeros_like(value)) for name in ("exp_avg", "exp_avg_sq"))
    first = first + (gradient - first) * (1 - config.adam_beta1)
    second = second * config.adam_beta2 + gradient * gradient * (1 - config.adam_beta2)
    state |= {"exp_avg": first, "exp_avg_sq": second, "step": mx.array(float(step))}
    root = math.sqrt(1 - config.adam_beta2**step)
    return value - rate / (1 - config.adam_beta1**step) * (first / (mx.sqrt(second) / root + config.adam_eps))


def sgd(value: mx.array, gradient: mx.array, state: dict, rate: float, config: TrainConfig) -> mx.array:
    return value - rate * (gradient + config.wd * value if config.wd else gradient)


def adadelta(value: mx.array, gradient: mx.array, state: dict, rate: float, config: TrainConfig) -> mx.array:
    """Zeiler 2012."""
    gradient = gradient + config.wd * value if config.wd else gradient
    squares, deltas = (state.get(name, mx.zeros_like(value)) for name in ("square_avg", "acc_delta"))
    squares = squares * RHO + gradient * gradient * (1 - RHO)
    delta = mx.sqrt(deltas + ADADELTA_EPS) / mx.sqrt(squares + ADADELTA_EPS) * gradient
    deltas = deltas * RHO + delta * delta * (1 - RHO)
    step = int(state.get("step", mx.array(0.0))) + 1
    state |= {"square_avg": squares, "acc_delta": deltas, "step": mx.array(float(step))}
    return value - rate * delta
