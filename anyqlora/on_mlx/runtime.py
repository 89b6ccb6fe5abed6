"""One planned run's precision, gradients and update on MLX: the verbs of on_torch's Runtime that the loop calls."""

from __future__ import annotations

import math

import mlx.core as mx
from mlx.utils import tree_unflatten

from anyqlora.core import registry
from anyqlora.on_mlx.loss_scaler import LossScaler
from anyqlora.on_mlx.memory import Memory
from anyqlora.on_mlx.nn.loss import Inputs, inputs
from anyqlora.on_mlx.optimizers import Rates
from anyqlora.training.state import StepResult

COMPUTE = {"fp32": mx.float32, "bf16": mx.bfloat16, "fp16_autocast": mx.float16}
STORED = COMPUTE  # MLX has no autocast: what is computed in 16 bits is kept in 16 bits
WIDTH = 32  # tokens: a compiled step sees rows of whole multiples only, so that there are few shapes


class Runtime:
    """What the MLX loop does with a model; everything that is learned is float32."""

    def __init__(self, plan):
        self.plan, self.config = plan, plan.config
        self.compute = COMPUTE[plan.precision]
        self.memory = Memory()
        self.scaler = LossScaler(
            plan.precision == "fp16_autocast", self.config.initial_loss_scale, self.config.loss_scale_growth_interval
        )
        self.gradients: dict[str, mx.array] | None = None  # of this process's micro-batches so far
        self.is_reduced = False

    def prepare(self, built, ranks) -> None:
        """Take the built model over; `ranks` are the processes whose gradients are summed."""
        self.process_group = ranks
        self.model, self.paths, self.loss = built.model, built.names, built.loss
        self.values, self.moments = built.trainable(), {name: {} for name in built.names}
        self.updates, self.rule = 0, registry.OPTIMIZERS[self.config.optimizer].load("mlx")
        self.adapted = [
            module for _, module in self.model.named_modules() if hasattr(module, "lora_A") and module.dropout
        ]
        self.is_full = built.adapter.folder == "model"
        self._gradient = mx.value_and_grad(self._loss)
        if self.compiles:
            self._gradient, self._norm, self._updated = map(mx.compile, (self._gradient, self._norm, self._updated))

    @property
    def compiles(self) -> bool:
        """Whether the gradient of a micro-batch is compiled, once for each shape, and the update: where kernels are
        fused for a GPU.
        """
        return mx.default_device() == mx.gpu

    def set_parameters(self, values: dict[str, mx.array]) -> None:
        """Make these the model's; a whole model computes in the precision's own type, whatever is learned in."""
        cast = {
            self.paths[name]: value.astype(self.compute) if self.is_full else value for name, value in values.items()
        }
        self.model.update(tree_unflatten(list(cast.items())))

    def _loss(self, values, key, factor, *given):
        self.set_parameters(values)
        given = Inputs(*given)
        for module, part in zip(self.adapted, mx.random.split(key, max(len(self.adapted), 1)), strict=False):
            module.draw_from(part, given.keys)
        return self.loss(given, factor)

    def seed(self, seed: int) -> None:
        """Every micro-batch of a step draws its dropout from here."""
        self.key = mx.random.key(seed)

    def backward(self, batch, trained: int) -> float:
        """Accumulate the gradients of one micro-batch of a step with so many `trained` tokens.

        Returns the sum of its losses.
        """
        self.key, key = mx.random.split(self.key)
        factor = mx.array(self.scaler.scale / trained, mx.float32)
        (_, total), gradients = self._gradient(self.values, key, factor, *inputs(batch, WIDTH if self.compiles else 1))
        if self.gradients is not None:
            gradients = {name: self.gradients[name] + gradient for name, gradient in gradients.items()}
        mx.eval(total, gradients)
        self.gradients = gradients
        self.set_parameters(self.values)  # a compiled step leaves what it traced in the model
        return float(total)

    def reduced(self) -> dict[str, mx.array]:
        """The step's gradients over all processes."""
        if not self.is_reduced and self.process_group.size > 1:
            self.gradients = self.process_group.all_reduce_gradients(self.gradients)
        self.is_reduced = True
        return self.gradients

    def step(self, lr: float, max_grad_norm: float | None, skip: bool = False) -> StepResult:
        """Unscale, measure, clip, update, clear.

        `skip` clears without an update; so do gradients that are not finite.
        """
        scale, gradients = self.scaler.scale, self.reduced()
        norm = self._norm(gradients) / scale  # a power of two
        finite = math.isfinite(float(norm))
        if finite and not skip:
            part = 1.0 if max_grad_norm is None else mx.minimum(max_grad_norm / (norm + 1e-6), 1.0)
            self.updates += 1
            rates = Rates.at(self.updates, lr, self.config)
            self.values, self.moments = self._updated(
                self.values, self.moments, gradients, part / mx.array(scale), *rates
            )
            mx.eval(self.values, self.moments)
            self.set_parameters(self.values)
        self.scaler.update(finite)
        self.gradients, self.is_reduced = None, False
        return StepResult(float(norm), skip or not finite, scale)

    @staticmethod
    def _norm(gradients):
        """The 2-norm over all of them."""
        return mx.linalg.norm(mx.stack([mx.linalg.norm(gradient.reshape(-1)) for gradient in gradients.values()]))

    def _updated(self, values, moments, gradients, factor, *rates):
        """(values, moments) after a step along `factor` times the gradients."""
        moments, rates = {name: dict(state) for name, state in moments.items()}, Rates(*rates)
        return {
            name: self.rule(value, gradients[name] * factor, moments[name], rates, self.config)
            for name, value in values.items()
        }, moments

    def discard_step(self) -> None:
        """Drop the gradients of a step that is done again, and give the allocator's free memory back."""
        self.gradients, self.is_reduced = None, False
        mx.clear_cache()
