"""One process: the behaviour that every other strategy starts from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ...run import StepResult


@dataclass
class Prepared:
    model: nn.Module
    optimizer: torch.optim.Optimizer


class Strategy:
    """Owns wrapping, backward and update. It never divides a loss and never steps inside backward."""

    name = "single"
    plugin_cls = None

    def __init__(self, plan):
        self.plan = plan
        self.device = torch.device(plan.device)
        self.rank, self.world_size = 0, 1
        self.data_rank, self.data_size = 0, 1  # which of how many shares of each micro-batch's rows this process sees
        fp16 = plan.precision == "fp16_autocast"
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**16, enabled=fp16)

    @classmethod
    def unavailable_reason(cls, env: dict) -> str | None:
        """Why this strategy cannot run here, or None."""
        return None

    def setup(self) -> None:
        """Form the process group and the mesh; one process needs neither."""

    def materialise(self, build: Callable, quantise: Callable) -> nn.Module:
        """`build(quantise)` reads the model and calls `quantise(name, module, weight)` for each linear weight."""
        return build(quantise)

    def adapt(self, model: nn.Module) -> nn.Module:
        """What `materialise` has split, its adapter is split like; before anything is run."""
        return model

    def prepare(self, model: nn.Module, trainable: dict[str, nn.Parameter], optimizer_factory: Callable) -> Prepared:
        """Wrap the model, then make the optimizer over what is trained: `optimizer_factory(parameters)`."""
        self.model, self.trainable = model, trainable
        self.optimizer = optimizer_factory(list(trainable.values()))
        return Prepared(model, self.optimizer)

    def micro_batch(self, is_final: bool):
        """A context around forward and backward of one micro-batch, for engines that must know the boundary before."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, *, is_final_micro_batch: bool) -> None:
        self.scaler.scale(loss).backward()

    def step(self, *, max_grad_norm: float | None, skip: bool = False) -> StepResult:
        """Unscale, measure, clip, update, clear. `skip` clears without an update; so do gradients that are not finite."""
        scale = self.scaler.get_scale()
        self.scaler.unscale_(self.optimizer)
        norm = self.clip_grad_norm_(self.trainable.values(), max_grad_norm)
        overflowed = self.scaler.is_enabled() and not torch.isfinite(norm)
        if self.scaler.is_enabled():
            if not skip or overflowed:
                self.scaler.step(self.optimizer)
            self.scaler.update()
        elif not skip and torch.isfinite(norm):
            self.optimizer.step()
        skipped = skip or not bool(torch.isfinite(norm))
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(float(norm), skipped, scale)

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Scale gradients to a 2-norm of at most `max_norm` (None: measure only). Returns the norm before."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if max_norm is not None and torch.isfinite(norm):
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, scale)
        return norm

    def gather_trainable(self) -> dict[str, torch.Tensor]:
        """{name: full tensor in host memory}; where it lies there already, it is the one that learns."""
        return {name: p.detach().cpu() for name, p in self.trainable.items()}

    def gather_moments(self) -> dict[str, torch.Tensor]:
        """{"name|key": tensor in host memory} of the optimizer's state."""
        return {f"{name}|{key}": value.detach().cpu()
                for name, p in self.trainable.items()
                for key, value in sorted(self.optimizer.state.get(p, {}).items()) if torch.is_tensor(value)}

    def load_trainable(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy values back. Raises KeyError when a name is missing."""
        with torch.no_grad():
            for name, p in self.trainable.items():
                p.copy_(tensors[name])

    def load_moments(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, p in self.trainable.items():
            state = {key.partition("|")[2]: value for key, value in tensors.items() if key.partition("|")[0] == name}
            if state:
                # torch keeps `step` on the CPU unless the optimizer is capturable.
                self.optimizer.state[p] = {key: value.clone() if key == "step" else value.to(p.device, copy=True)
                                           for key, value in state.items()}

    def unwrap(self) -> nn.Module:
        return self.model

    def teardown(self) -> None:
        """Leave the process group."""
