"""Tensor parallel: each process along the model axis holds a slice of the linear layers; along the batch axis, FSDP2
shards that.

A weight is sliced first and its slice quantized: a scale belongs to 64 weights of one row, so the slices' codes are
those of the whole (with double quantization the scales of scales are not).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from anyqlora.core.errors import NotSupported, RunError
from anyqlora.models.architectures import COLUMNS
from anyqlora.models.lora_targets import PREFIX
from anyqlora.on_torch._compat import multiply_each_
from anyqlora.on_torch.parallel.base import Prepared
from anyqlora.on_torch.parallel.fsdp import blocks
from anyqlora.on_torch.parallel.group import ShardedStrategy, local
from anyqlora.on_torch.parallel.tp_layers import Copier, Split, replace_linears, split_adapter, split_frozen
from anyqlora.on_torch.parallel.tp_plan import own_splits, planned_splits
from anyqlora.planning.mesh import BATCH, MODEL, mesh_axes


class TensorParallel(ShardedStrategy):
    """`--mesh batch=2,model=2 --tensor_layout default|FILE`.

    Neighbours in rank are along the model axis and see the same rows.
    """

    name = "tp"

    def setup(self) -> None:
        shape = mesh_axes(self.plan.config.mesh)
        self.splits: dict[str, Split] | None = None
        super().setup()
        self.mesh = init_device_mesh(self.device.type, (shape[BATCH], shape[MODEL]), mesh_dim_names=(BATCH, MODEL))
        self.along = self.mesh[MODEL]
        self.data_rank, self.data_size = self.mesh.get_local_rank(BATCH), shape[BATCH]

    # ------------------------------------------------------------------------------------------------ before training

    def load_model(self, loader, pack: Callable) -> nn.Module:
        """Rank 0 slices each weight that the layout splits as it comes in, and only then quantizes; then every process
        gets its slices.
        """
        self.splits = planned_splits(self.plan.config, self.along.size())
        # Rank 0's: of each layer the slices 1, 2, ..., in host memory until they are sent
        for_others: dict[str, list[nn.Parameter]] = {}
        model = super().load_model(loader, functools.partial(self._pack_slices, pack, for_others))
        left = set(self.splits) - set(for_others)
        if self.rank == 0 and left:
            raise RunError(f"{len(left)} layers are not split as planned, {min(left)} is the first")
        layers = {name: model.get_submodule(name) for name in self.splits}
        self.share(model, done=lambda part: part in layers.values())
        for name, layer in layers.items():
            self.share_slices(layer, for_others.pop(name, []))
        copiers: dict[str, Copier] = {}
        for name, split in self.splits.items():
            parent = name.rpartition(".")[0]
            if parent not in copiers:
                copiers[parent] = Copier(self.along)
                model.get_submodule(parent).register_forward_hook(copiers[parent].forget)
            split_frozen(model.get_submodule(name), split, self.along, copiers[parent])
        return model

    def _pack_slices(
        self,
        pack: Callable,
        for_others: dict[str, list[nn.Parameter]],
        name: str,
        module: nn.Module,
        weight: torch.Tensor,
    ) -> nn.Parameter:
        """The first slice of a weight that is split, packed by itself; the others' go into `for_others`."""
        if name not in self.splits:
            return pack(name, module, weight)
        split, ways = self.splits[name], self.along.size()
        for_others[name] = [
            pack(name, module, split.slice(weight, number, ways)).to("cpu") for number in range(1, ways)
        ]
        return pack(name, module, split.slice(weight, 0, ways))

    def share_slices(self, layer: nn.Module, others: list[nn.Parameter]) -> None:
        """`layer` with this process's slice. Rank 0 has slice 0 in it and, in `others`, those that come after."""
        first = layer.weight
        for number in range(self.along.size()):
            if self.rank == 0 and number:
                give(layer, others[number - 1])
            self.share(layer, keeps=self.along.get_local_rank() == number)
        if self.rank == 0:
            give(layer, first)

    def shard_adapter(self, model: nn.Module) -> nn.Module:
        """Split the adapter as its layers are, and join those that stand alone."""
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer):
                split_adapter(module, self.splits.get(name.removeprefix(PREFIX)), self.along)
        for name, split in self.splits.items():
            replace_linears(model.get_submodule(PREFIX + name), split, self.along)
        return model

    def prepare(self, model: nn.Module, trainable: dict[str, nn.Parameter], optimizer_factory: Callable) -> Prepared:
        """Shard what each process holds along the batch axis, where there is one; then make the optimizer."""
        if self.splits is None:
            self.split_own(model, trainable)
        if self.data_size > 1:
            owners = self.owners(trainable, model)
            model = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
            for module in [*blocks(model), model]:
                fully_shard(module, mesh=self.mesh[BATCH])
            for module in model.modules():
                if isinstance(module, FSDPModule):  # gradients are summed, never averaged
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
            self.refresh(trainable, owners)
        self.assert_in_effect(model, trainable)
        return super().prepare(model, trainable, optimizer_factory)

    def split_own(self, model: nn.Module, trainable: dict[str, nn.Parameter]) -> None:
        """Slice those frozen linear layers of somebody's own model that a layout file names, in place.

        What is trained stays whole.
        """
        self.splits = own_splits(model, self.plan.config, self.along.size())
        learned = {id(p) for p in trainable.values()}
        for name, split in self.splits.items():
            module = model.get_submodule(name)
            if any(id(p) in learned for p in module.parameters(recurse=False)):
                raise NotSupported(
                    f"strategy tp splits frozen layers, and {name} is trained",
                    where=self.plan.config.tensor_layout,
                    cure="take it out of the layout",
                )
            module.weight = nn.Parameter(
                split.slice(module.weight.detach(), self.along.get_local_rank(), self.along.size()), requires_grad=False
            )
            split_frozen(module, split, self.along, Copier(self.along))
            replace_linears(module, split, self.along)

    def assert_in_effect(self, model: nn.Module, trainable: dict[str, nn.Parameter]) -> None:
        """Raises RunError when a trained tensor is not split, or not sharded, as planned."""
        along_batch = {BATCH} if self.data_size > 1 else set()
        for name, p in trainable.items():
            wanted = along_batch | ({MODEL} if ".lora_" in name else set())
            mesh_axes = set(p.device_mesh.mesh_dim_names) if isinstance(p, DTensor) else set()
            if mesh_axes != wanted:
                raise RunError(f"{name} is not on the mesh as planned: {sorted(mesh_axes)} instead of {sorted(wanted)}")
            split = self.splits.get(name.partition(".lora_")[0].removeprefix(PREFIX))
            if (
                split
                and (f".lora_{'B' if split.along == COLUMNS else 'A'}." in name) == p.placements[-1].is_replicate()
            ):
                raise RunError(f"{name} is not split as planned")

    # --------------------------------------------------------------------------------------------------------- a step

    def accumulate(self, scaled: torch.Tensor, is_final: bool) -> None:
        """Gradients are summed along the batch axis in the step's last backward only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_final)
            self.model.set_is_last_backward(is_final)
        super().accumulate(scaled, is_final)

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        return [local(p.grad) for p in parameters if p.grad is not None]

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """As one process does it: squares are added up along those axes of the mesh over which a gradient is split."""
        groups: dict[tuple, list[torch.Tensor]] = {}
        for p in parameters:
            if p.grad is not None:
                groups.setdefault(split_over(p.grad), []).append(local(p.grad))
        total = torch.zeros((), device=self.device)
        for over, gradients in sorted(groups.items()):
            square = torch.nn.utils.get_total_norm(gradients) ** 2
            for axis in over:
                dist.all_reduce(square, group=self.mesh.get_group(axis))
            total += square
        norm = total.sqrt()
        if max_norm is not None and torch.isfinite(norm):
            for gradients in groups.values():
                multiply_each_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    # -------------------------------------------------------------------------------------------------- what is learned

    def full_tensor(self, tensor: DTensor) -> torch.Tensor:
        if tensor.device_mesh.ndim > 1:  # one axis at a time, the one that was split last first
            tensor = tensor.redistribute(placements=[Replicate(), tensor.placements[1]])
        return tensor.full_tensor()

    def local_shard(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """What each process holds of `full`, which all have: nothing is sent."""
        if not isinstance(parameter, DTensor):
            return full
        mesh = parameter.device_mesh
        everywhere = DTensor.from_local(
            full.to(parameter.device, parameter.dtype), mesh, [Replicate()] * mesh.ndim, run_check=False
        )
        return everywhere.redistribute(placements=parameter.placements)


def give(layer: nn.Module, weight: nn.Parameter) -> None:
    """A frozen layer another weight, and the scales that go with it where it is quantized."""
    layer.weight = weight
    if hasattr(layer, "quant_state"):
        layer.quant_state = weight.quant_state


def split_over(tensor: torch.Tensor) -> tuple[str, ...]:
    """The axes of the mesh over which a tensor is split."""
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(
        axis
        for axis, placement in zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True)
        if not placement.is_replicate()
    )
