"""One process: the behaviour that every other strategy starts from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from anyqlora.on_torch._compat import multiply_each_
from anyqlora.on_torch.precision import LossScaler, autocast
from anyqlora.training.state import StepResult


@dataclass
class Prepared:
    model: nn.Module
    optimizer: torch.optim.Optimizer


class Strategy:
    """Owns wrapping, backward and update.

    It never divides a loss, always sums gradients, and never steps inside backward.
    """

    name = "single"
    plugin_cls: type | None = None  # the dataclass of its options, a StrategyOptions mostly; None: it has none
    owns_optimizer = False  # whether an engine of its own updates with one optimizer and no more
    keeps_whole = True  # whether every process holds the whole model, so that what is read may stay where it is

    def __init__(self, plan, options=None):
        self.plan, self.options = plan, options
        self.device = torch.device(plan.device)
        self.rank, self.world_size = 0, 1
        self.data_rank, self.data_size = 0, 1  # which of how many shares of each micro-batch's rows this process sees
        self.clipped: torch.Tensor | None = None  # the norm, once the step's gradients are summed and cut
        self.announced: bool | None = (
            None  # whether the micro-batch that is under way ends its step; None: nobody has said
        )
        config = plan.config
        self.scaler = LossScaler(
            plan.precision == "fp16_autocast", config.initial_loss_scale, config.loss_scale_growth_interval
        )

    @classmethod
    def unavailable_reason(cls, env: dict) -> str | None:
        """Why this strategy cannot run here, or None."""
        return None

    def setup(self) -> None:
        """Form the process group and the mesh; one process needs neither."""

    def load_model(self, loader, pack: Callable) -> nn.Module:
        """`loader.load(pack)` reads the model and calls `pack(name, module, weight)`, which gives a parameter, for each
        linear weight. See loading/base_model.py."""
        return loader.load(pack)

    def shard_adapter(self, model: nn.Module) -> nn.Module:
        """What `load_model` has split, its adapter is split like; before anything is run."""
        return model

    def prepare(self, model: nn.Module, trainable: dict[str, nn.Parameter], optimizer_factory: Callable) -> Prepared:
        """Wrap the model, then make the optimizer over what is trained: `optimizer_factory(parameters)`.

        `trainable` names the parameters as they are afterwards, too: where sharding replaces them, it is brought up to
        date.
        """
        self.model, self.trainable = model, trainable
        self.optimizer = optimizer_factory(list(trainable.values()))
        return Prepared(model, self.optimizer)

    def autocast(self):
        """The precision's context for a forward pass."""
        return autocast(self.plan, self.device)

    @property
    def needs_logits(self) -> str:
        """Why the loss must come through the model's own output; "" where the head may be used by itself after the
        model's forward.
        """
        return ""

    def broadcast(self, value):
        """Rank 0's JSON-able `value`, on all."""
        return value

    # -------------------------------------------------------------------------------------------------------- the step

    @contextlib.contextmanager
    def micro_batch(self, is_final: bool):
        """Around forward and backward of one micro-batch: the boundary is known before, so communication overlaps
        backward.
        """
        self.announced = is_final
        try:
            yield
        finally:
            self.announced = None

    def backward(self, loss: torch.Tensor, *, is_final_micro_batch: bool) -> None:
        """Accumulate gradients.

        Raises RuntimeError when the micro-batch was announced as the last of its step and is not.
        """
        if self.announced and not is_final_micro_batch:
            raise RuntimeError(
                "this micro-batch was announced as the last of its step, and its backward says that it is not"
            )
        self.accumulate(self.scaler.scale(loss), is_final_micro_batch)

    def accumulate(self, scaled: torch.Tensor, is_final: bool) -> None:
        """Backward of the scaled loss."""
        scaled.backward()

    def sum_gradients(self) -> None:
        """Whatever is left to do so that each gradient is the sum over all ranks."""

    def clip(self, max_grad_norm: float | None) -> torch.Tensor | None:
        """Sum and unscale the step's gradients and cut them to `max_grad_norm` (None: measure only), ahead of `step`.

        Returns the norm before; None where the engine takes it in `step`.
        """
        if self.clipped is None:
            self.sum_gradients()
            if self.scaler.is_enabled():
                self.multiply(1 / self.scaler.get_scale())
            self.clipped = self.clip_grad_norm_(self.trainable.values(), max_grad_norm)
        elif max_grad_norm is not None:
            self.clip_grad_norm_(self.trainable.values(), max_grad_norm)
        return self.clipped

    def step(self, *, max_grad_norm: float | None, skip: bool = False) -> StepResult:
        """Sum, unscale, measure, clip, update, clear.

        `skip` clears without an update; so do gradients that are not finite.
        """
        scale = self.scaler.get_scale()
        norm = self.clip(max_grad_norm)
        is_finite = bool(torch.isfinite(norm))
        if is_finite and not skip:
            self.update()
        self.scaler.update(overflowed=not is_finite)
        self.zero_grad()
        return StepResult(float(norm), skip or not is_finite, scale)

    def update(self) -> None:
        """One step of the optimizer."""
        self.optimizer.step()

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        """The gradients, or the parts of them, that this process has."""
        return [p.grad for p in parameters if p.grad is not None]

    def multiply(self, factor: float) -> None:
        """Scale all gradients."""
        gradients = self.gradients(self.trainable.values())
        if gradients:
            multiply_each_(gradients, factor)

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The 2-norm of the whole gradient, of which this process has `gradients`; the same on all processes."""
        return torch.nn.utils.get_total_norm(gradients)

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Scale gradients to a 2-norm of at most `max_norm` (None: measure only). Returns the norm before."""
        gradients = self.gradients(parameters)
        norm = self.norm(gradients)
        if max_norm is not None and gradients and torch.isfinite(norm):
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            multiply_each_(gradients, scale)
        return norm

    def zero_grad(self) -> None:
        """Drop the step's gradients."""
        self.clipped = None
        self.optimizer.zero_grad(set_to_none=True)

    def set_lr(self, lr: float) -> None:
        """The rate of the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def missing_gradients(self) -> dict[str, bool]:
        """After a backward, before the step: {name: False where there is no gradient at all, True where it is zero
        throughout}.
        """
        return {name: p.grad is not None for name, p in self.trainable.items() if p.grad is None or not p.grad.any()}

    # ------------------------------------------------------------------------------------------------ what is kept

    def gather_trainable(self) -> dict[str, torch.Tensor]:
        """{name: full tensor in host memory} on rank 0, nothing on the others; all call it.

        Where it lies there already, it is the one that learns.
        """
        return {name: p.detach().cpu() for name, p in self.trainable.items()}

    def gather_moments(self) -> dict[str, torch.Tensor]:
        """{"name|key": full tensor in host memory} of the optimizer's state on rank 0, nothing on the others; all call
        it.
        """
        return {
            f"{name}|{key}": value.detach().cpu()
            for name, p in self.trainable.items()
            for key, value in saved_state(self.optimizer.state.get(p, {}))
        }

    def load_trainable(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy full values back; all ranks have them. Raises KeyError when a name is missing."""
        with torch.no_grad():
            for name, p in self.trainable.items():
                p.copy_(self.local_shard(p, tensors[name]))

    def load_moments(self, tensors: dict[str, torch.Tensor]) -> None:
        """Full moments back, which all ranks have."""
        for name, state in by_parameter_name(tensors).items():
            p = self.trainable[name]
            self.optimizer.state[p] = {
                key: self.restore_step(value, p.device)
                if key == "step"
                else self.local_shard(p, value).to(p.device, copy=True)
                for key, value in state.items()
            }

    def restore_step(self, step: torch.Tensor, device: torch.device) -> torch.Tensor | int:
        """A parameter's `step` as its optimizer keeps it: an integer as a number (bitsandbytes), and a tensor in host
        memory, unless moments are updated by one launch on `device`, which reads it there.
        """
        if not step.is_floating_point():
            return int(step)
        is_on_device = any(group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups)
        return step.to(device if is_on_device else "cpu", copy=True)

    def shape(self, p: nn.Parameter) -> torch.Size:
        """That of all of a parameter, of which this rank may hold a part."""
        return p.shape

    def local_shard(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """What of a full tensor belongs to this rank's parameter."""
        return full

    def unwrap(self) -> nn.Module:
        """The model that is trained, without what a strategy has put around it: what evaluates and generates."""
        return self.model

    def release(self) -> None:
        """Let go of the model and the optimizer: others may be prepared."""
        self.model = self.optimizer = None
        self.trainable, self.clipped = {}, None

    def teardown(self) -> None:
        """After the last step: let go of what `setup` has made."""


def saved_state(state: dict) -> list[tuple[str, torch.Tensor]]:
    """(key, tensor) of what an optimizer keeps of a parameter; of its numbers, tensors without dimensions."""
    return [
        (key, value if torch.is_tensor(value) else torch.tensor(value))
        for key, value in sorted(state.items())
        if torch.is_tensor(value) or isinstance(value, (int, float))
    ]


def by_parameter_name(moments: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """{name: {key: tensor}} of {"name|key": tensor}."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for joined, value in moments.items():
        name, _, key = joined.partition("|")
        states.setdefault(name, {})[key] = value
    return states
