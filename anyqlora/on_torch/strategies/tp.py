"""Tensor parallel: each process along the model axis holds a slice of the linear layers; along the batch axis, FSDP2 shards that.

A weight is sliced first and its slice quantized: a scale belongs to 64 weights of one row, so the slices' codes are those of the
whole (with double quantization the scales of scales are not).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate

from ...errors import RunError
from ...layouts import COLUMNS
from ...mesh import BATCH, MODEL, axes
from ..adapters.lora import PREFIX
from ..split import Copier, join, split_adapter, split_frozen
from .single import Prepared, Strategy
from .tp_layout import planned_splits


class TensorParallel(Strategy):
    """`--mesh batch=2,model=2 --layout default|FILE`. Neighbours in rank are along the model axis and see the same rows."""

    name = "tp"

    def setup(self) -> None:
        shape = axes(self.plan.config.mesh)
        if not dist.is_initialized() or dist.get_world_size() != math.prod(shape.values()):
            there = dist.get_world_size() if dist.is_initialized() else 1
            raise RunError(f"strategy tp over {self.plan.config.mesh} needs {math.prod(shape.values())} processes, and there are {there}",
                           cure="--world_size, or torchrun --nproc_per_node, with that number")
        self.splits = planned_splits(self.plan.config, shape[MODEL])  # refuses on all processes alike, before they wait for one another
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh(self.device.type, (shape[BATCH], shape[MODEL]), mesh_dim_names=(BATCH, MODEL))
        self.along = self.mesh[MODEL]

    @property
    def data_rank(self) -> int:
        return self.mesh.get_local_rank(BATCH)

    @property
    def data_size(self) -> int:
        return self.mesh.size(0)

    # ------------------------------------------------------------------------------------------------ before training

    def materialise(self, build: Callable, quantise: Callable) -> nn.Module:
        """Slice each weight that the layout splits as it comes in, and only then quantize it."""
        left = set(self.splits)

        def slice_first(name: str, module: nn.Module, weight: torch.Tensor) -> nn.Parameter:
            split = self.splits.get(name)
            left.discard(name)
            return quantise(name, module, split.slice(weight, self.along) if split else weight)

        model = build(slice_first)
        if left:
            raise RunError(f"{len(left)} layers are not split as planned, {min(left)} is the first")
        copiers: dict[str, Copier] = {}
        for name, split in self.splits.items():
            parent = name.rpartition(".")[0]
            if parent not in copiers:
                copiers[parent] = Copier(self.along)
                model.get_submodule(parent).register_forward_hook(copiers[parent].forget)
            split_frozen(model.get_submodule(name), split, self.along, copiers[parent])
        return model

    def adapt(self, model: nn.Module) -> nn.Module:
        """Split the adapter as its layers are, and join those that stand alone."""
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer):
                split_adapter(module, self.splits.get(name.removeprefix(PREFIX)), self.along)
        for name, split in self.splits.items():
            join(model.get_submodule(PREFIX + name), split, self.along)
        return model

    def prepare(self, model: nn.Module, trainable: dict[str, nn.Parameter], optimizer_factory: Callable) -> Prepared:
        """Shard what each process holds along the batch axis, where there is one; then make the optimizer."""
        if self.data_size > 1:
            names = {p: name for name, p in model.named_parameters()}
            names = {name: names[p] for name, p in trainable.items()}
            blocks = set(getattr(model, "_no_split_modules", None) or ())
            for module in [*(m for m in model.modules() if type(m).__name__ in blocks), model]:
                fully_shard(module, mesh=self.mesh[BATCH])
            for module in model.modules():
                if isinstance(module, FSDPModule):  # gradients are summed, never averaged
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
            register_fsdp_forward_method(model, "generate")
            trainable.update({name: model.get_parameter(place) for name, place in names.items()})
        self.assert_in_effect(model, trainable)
        return super().prepare(model, trainable, optimizer_factory)

    def assert_in_effect(self, model: nn.Module, trainable: dict[str, nn.Parameter]) -> None:
        """Raises RunError when a layer is not split, or a trained tensor not sharded, as planned."""
        wanted = {MODEL, BATCH} if self.data_size > 1 else {MODEL}
        for name, p in trainable.items():
            found = set(p.device_mesh.mesh_dim_names) if isinstance(p, DTensor) else set()
            if found != wanted:
                raise RunError(f"{name} is not on the mesh as planned: {sorted(found)} instead of {sorted(wanted)}")
        for name, split in self.splits.items():
            prefix = f"{PREFIX}{name}.lora_{'B' if split.along == COLUMNS else 'A'}"
            for key, p in trainable.items():
                if key.startswith(prefix) and p.placements[-1].is_replicate():
                    raise RunError(f"{key} is not split as planned")

    # --------------------------------------------------------------------------------------------------------- a step

    def backward(self, loss: torch.Tensor, *, is_final_micro_batch: bool) -> None:
        """Gradients are summed along the batch axis in the step's last backward only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_final_micro_batch)
            self.model.set_is_last_backward(is_final_micro_batch)
        super().backward(loss, is_final_micro_batch=is_final_micro_batch)

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """As one process does it: squares are added up along those axes of the mesh over which a gradient is split."""
        groups: dict[tuple, list[torch.Tensor]] = {}
        for p in parameters:
            if p.grad is not None:
                split_over = tuple(axis for axis, placement in zip(p.device_mesh.mesh_dim_names, p.grad.placements, strict=True)
                                   if not placement.is_replicate())
                groups.setdefault(split_over, []).append(p.grad.to_local())
        total = torch.zeros((), device=self.device)
        for split_over, gradients in sorted(groups.items()):
            square = torch.nn.utils.get_total_norm(gradients) ** 2
            for axis in split_over:
                dist.all_reduce(square, group=self.mesh.get_group(axis))
            total += square
        norm = total.sqrt()
        if max_norm is not None and torch.isfinite(norm):
            for gradients in groups.values():
                torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    # -------------------------------------------------------------------------------------------------- what is learned

    def gather_trainable(self) -> dict[str, torch.Tensor]:
        return {name: whole(p) for name, p in self.trainable.items()}

    def gather_moments(self) -> dict[str, torch.Tensor]:
        return {f"{name}|{key}": whole(value)
                for name, p in self.trainable.items()
                for key, value in sorted(self.optimizer.state.get(p, {}).items()) if torch.is_tensor(value)}

    def load_trainable(self, tensors: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, p in self.trainable.items():
                p.copy_(part(tensors[name], p))

    def load_moments(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, p in self.trainable.items():
            state = {key.partition("|")[2]: value for key, value in tensors.items() if key.partition("|")[0] == name}
            if state:
                self.optimizer.state[p] = {key: part(value, p) if value.shape == p.shape else value.clone() for key, value in state.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor in host memory, on every process."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.ndim > 1:  # one axis at a time, the one that was split last first
            tensor = tensor.redistribute(placements=[Replicate(), tensor.placements[1]])
        tensor = tensor.full_tensor()
    return tensor.cpu()


def part(full: torch.Tensor, like: DTensor) -> DTensor:
    """What each process holds of `full`, spread as `like` is; nothing is sent."""
    everywhere = DTensor.from_local(full.to(like.device, like.dtype), like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=like.placements)
