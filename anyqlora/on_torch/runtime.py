"""Accelerate's verbs over one strategy: what `train.py` and people's own loops use."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from .. import tables
from ..run import StepResult
from .device import Memory
from .loss import token_loss
from .offload import offloaded

AUTOCAST = {"fp16_autocast": torch.float16, "bf16_autocast": torch.bfloat16, "bf16_buffers_autocast": torch.bfloat16}
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, **AUTOCAST}
STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16_autocast": torch.float32, "bf16_autocast": torch.float32,
          "bf16_buffers_autocast": torch.bfloat16}


class Runtime:
    """One planned run's device, precision and strategy."""

    def __init__(self, plan):
        self.plan = plan
        self.strategy = tables.load(tables.choose("strategy", plan.strategy, tables.STRATEGIES))(plan)
        self.strategy.setup()
        self.device = self.strategy.device
        self.memory = Memory(self.device, plan.memory.total if plan.memory else 0)
        self.is_main_process = self.strategy.rank == 0
        self.loss = token_loss  # (model, batch, device) -> sum over trained tokens; `build` may put a faster one in its place
        self._is_final = True
        full_in_bf16 = plan.adapter == "full" and plan.precision == "bf16"  # float32 weights, computed in bf16
        self._autocast = torch.bfloat16 if full_in_bf16 else AUTOCAST.get(plan.precision)

    def prepare(self, model: nn.Module, trainable: dict[str, nn.Parameter], optimizer_factory):
        """The wrapped model and its optimizer. The optimizer is made after wrapping, because sharding replaces parameters."""
        prepared = self.strategy.prepare(model, trainable, optimizer_factory)
        return prepared.model, prepared.optimizer

    def autocast(self):
        """The precision's context for a forward pass."""
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

    @contextlib.contextmanager
    def forward(self):
        """Around the forward pass of a micro-batch: the precision's context, and where the activations stay until backward."""
        with offloaded() if self.plan.use_activation_cpu_offload else contextlib.nullcontext(), self.autocast():
            yield

    @contextlib.contextmanager
    def micro_batch(self, is_final: bool):
        """Around forward and backward of one micro-batch; `is_final` marks the boundary of the optimizer step."""
        self._is_final = is_final
        with self.strategy.micro_batch(is_final):
            yield

    def backward(self, loss: torch.Tensor, is_final_micro_batch: bool | None = None) -> None:
        """Accumulate gradients of `loss`, which is a part of the step's whole loss: nothing is divided here."""
        is_final = self._is_final if is_final_micro_batch is None else is_final_micro_batch
        self.strategy.backward(loss, is_final_micro_batch=is_final)

    def step(self, lr: float, max_grad_norm: float | None, skip: bool = False) -> StepResult:
        """Clip and update at rate `lr`, unless gradients are not finite or `skip` says so; gradients are cleared either way."""
        for group in self.strategy.optimizer.param_groups:
            group["lr"] = lr
        return self.strategy.step(max_grad_norm=max_grad_norm, skip=skip)

    def forget(self) -> None:
        """Drop the gradients of a step that is done again, and give the allocator's free memory back."""
        self.strategy.optimizer.zero_grad(set_to_none=True)
        if self.device.type in ("cuda", "xpu", "mps"):
            getattr(torch, self.device.type).empty_cache()
