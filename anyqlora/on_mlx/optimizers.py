"""torch's update rules: (value, gradient, state, rates, config) -> value.

`state` holds float32 arrays by torch's names, without the count of steps.

MLX's own differ where it shows: its AdamW corrects no bias unless asked, and its Adadelta and SGD decay otherwise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx

from anyqlora.config.schema import TrainConfig

RHO, ADADELTA_EPS = 0.9, 1e-6  # torch.optim.Adadelta's defaults


class Rates(NamedTuple):
    """What changes from step to step, as arrays, since a compiled update takes Python's numbers for constants."""

    rate: mx.array  # of learning
    remaining: mx.array  # of a value that decays by itself
    first: mx.array  # the rate over Adam's correction of the first moment
    root: mx.array  # the root of its correction of the second moment

    @classmethod
    def at(cls, step: int, rate: float, config: TrainConfig) -> Rates:
        """Of step 1, 2, ...; in float64 until each is an array."""
        numbers = (
            rate,
            1 - rate * config.weight_decay,
            rate / (1 - config.adam_beta1**step),
            math.sqrt(1 - config.adam_beta2**step),
        )
        return cls(*(mx.array(number, mx.float32) for number in numbers))


def adamw(value: mx.array, gradient: mx.array, state: dict, rates: Rates, config: TrainConfig) -> mx.array:
    """Decoupled decay, then Adam (Loshchilov and Hutter 2019)."""
    return _adam(value * rates.remaining, gradient, state, rates, config)


def adam(value: mx.array, gradient: mx.array, state: dict, rates: Rates, config: TrainConfig) -> mx.array:
    """The decay is part of the gradient."""
    return _adam(
        value, gradient + config.weight_decay * value if config.weight_decay else gradient, state, rates, config
    )


def _adam(value, gradient, state, rates, config):
    first, second = (state.get(name, mx.zeros_like(value)) for name in ("exp_avg", "exp_avg_sq"))
    first = first + (gradient - first) * (1 - config.adam_beta1)
    second = second * config.adam_beta2 + gradient * gradient * (1 - config.adam_beta2)
    state |= {"exp_avg": first, "exp_avg_sq": second}
    return value - rates.first * (first / (mx.sqrt(second) / rates.root + config.adam_eps))


def sgd(value: mx.array, gradient: mx.array, state: dict, rates: Rates, config: TrainConfig) -> mx.array:
    return value - rates.rate * (gradient + config.weight_decay * value if config.weight_decay else gradient)


def adadelta(value: mx.array, gradient: mx.array, state: dict, rates: Rates, config: TrainConfig) -> mx.array:
    """Zeiler 2012."""
    gradient = gradient + config.weight_decay * value if config.weight_decay else gradient
    squares, deltas = (state.get(name, mx.zeros_like(value)) for name in ("square_avg", "acc_delta"))
    squares = squares * RHO + gradient * gradient * (1 - RHO)
    delta = mx.sqrt(deltas + ADADELTA_EPS) / mx.sqrt(squares + ADADELTA_EPS) * gradient
    deltas = deltas * RHO + delta * delta * (1 - RHO)
    state |= {"square_avg": squares, "acc_delta": deltas}
    return value - rates.rate * delta
