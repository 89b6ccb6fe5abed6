"""Fully sharded data parallel: each rank keeps a part of every layer, frozen codes too, and layers are put together as
they are used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from anyqlora.config.strategy_options import FsdpOptions
from anyqlora.core import registry
from anyqlora.core.errors import NotSupported, RunError, UsageError
from anyqlora.on_torch._compat import block_classes, multiply_each_
from anyqlora.on_torch.device import highest_precision
from anyqlora.on_torch.memory.malloc import return_freed_pages
from anyqlora.on_torch.parallel.base import Prepared, Strategy
from anyqlora.on_torch.parallel.group import ShardedStrategy
from anyqlora.on_torch.quantizers.experts import PackedExperts


class Fsdp(ShardedStrategy):
    """torch's FSDP2, `fully_shard` on every block and on the model; 4-bit codes are sharded and sent as the bytes they
    are.

    Layers reach the other ranks one at a time and are sharded at once, so no rank but the one that reads holds more
    than its shards and a layer.
    """

    name = "fsdp"
    plugin_cls = FsdpOptions
    keeps_whole = False

    def setup(self) -> None:
        super().setup()
        self.mesh = self._mesh()

    @property
    def needs_logits(self) -> str:
        return (
            "fsdp sums the gradient of a trained head behind the model's output"
            if registry.adapter(self.plan.adapter).trains_base
            else ""
        )

    def _mesh(self):
        """One axis; the hybrid ones have a second, along which shards are copies of each other."""
        kind = self.device.type
        if not self.options.sharding_strategy.startswith("hybrid"):
            return init_device_mesh(kind, (self.world_size,), mesh_dim_names=("shard",))
        size = self.options.hybrid_shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        if self.world_size % size:
            raise UsageError(
                f"hybrid sharding: {self.world_size} processes are no multiple of {size}",
                cure="another hybrid_shard_size",
            )
        return init_device_mesh(kind, (self.world_size // size, size), mesh_dim_names=("replicate", "shard"))

    def prepare(self, model: nn.Module, trainable: dict[str, nn.Parameter], optimizer_factory: Callable) -> Prepared:
        self._refuse(model)
        owners = self.owners(trainable, model)
        root = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
        offload = (
            CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if self.options.cpu_offload else OffloadPolicy()
        )
        options = {"mesh": self.mesh, "offload_policy": offload}
        keep = self.options.sharding_strategy.endswith("shard_grad_op")
        with return_freed_pages():
            for block in blocks(root):
                self.share(block)
                fully_shard(block, reshard_after_forward=not keep, **options)
            self.share(root, done=lambda part: isinstance(part, FSDPModule))
        fully_shard(root, reshard_after_forward=False, **options)  # its parameters are needed again at once
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # gradients are summed ...
                module.set_force_sum_reduction_for_comms(True)  # ... by an operation that gloo has, too
        self.refresh(trainable, owners)
        self.root = root
        self._assert_sharded()
        Strategy.prepare(self, root, trainable, optimizer_factory)
        return Prepared(root, self.optimizer)

    def _refuse(self, model: nn.Module) -> None:
        if any(isinstance(module, PackedExperts) for module in model.modules()):
            raise NotSupported(
                "quantized experts cannot be sharded yet: every process would hold all of them",
                cure="--strategy ddp, or --quantizer none",
            )

    def _assert_sharded(self) -> None:
        whole = [name for name, p in self.root.named_parameters() if not isinstance(p, DTensor)]
        if whole:
            raise RunError(f"fsdp: {len(whole)} parameters are not sharded, {whole[0]} is the first")
        if self.options.cpu_offload and any(p.to_local().device.type != "cpu" for p in self.root.parameters()):
            raise RunError("fsdp: shards were to wait in host memory, and some are on the device")

    # -------------------------------------------------------------------------------------------------------- the step

    def accumulate(self, scaled: torch.Tensor, is_final: bool) -> None:
        self.root.set_requires_gradient_sync(is_final)
        self.root.set_is_last_backward(is_final)
        super().accumulate(scaled, is_final)

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        return [p.grad.to_local() for p in parameters if p.grad is not None]

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Shards are squared and summed along the axis that splits them; copies along the other axis count once."""
        exact = highest_precision(self.device)
        square = (
            torch.stack([grad.to(exact).square().sum() for grad in gradients]).sum()
            if gradients
            else torch.zeros((), dtype=exact)
        )
        square = square.to(self.device)
        dist.all_reduce(square, group=self.mesh["shard"].get_group())
        return square.sqrt().float()

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        gradients = self.gradients(parameters)
        norm = self.norm(gradients)
        if max_norm is not None and gradients and torch.isfinite(norm):
            multiply_each_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].device))
        return norm

    # ------------------------------------------------------------------------------------------------ what is kept

    def local_shard(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        full = full.to(parameter.device)
        return distribute_tensor(
            full, parameter.device_mesh, parameter.placements, src_data_rank=None
        )  # everybody has it: nothing is sent

    def unwrap(self) -> nn.Module:
        return self.root


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers that are put together one at a time: what transformers says may not be split.

    Raises NotBuilt where it does not say.
    """
    names = block_classes(model)
    if names is None:  # a model of somebody's own: its lists of modules
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        return [block for one in lists for block in one]
    modules = [module for module in model.modules() if type(module).__name__ in names]
    if not modules:
        raise NotSupported(
            f"{type(model).__name__} has no blocks that transformers names, so it cannot be sharded",
            cure="--strategy ddp",
        )
    return modules
