"""Linear layers of which each process along the model axis holds a slice, and what travels between them (Shoeybi et al.
2019).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from anyqlora.models.architectures import COLUMNS, ROWS
from anyqlora.on_torch.kernels.dropout import TokenDropout, token_mask

DIMENSION = {COLUMNS: 0, ROWS: 1}  # of a weight [outputs, inputs] that is split


@dataclass(frozen=True)
class Split:
    """How one linear layer is split.

    `alone`: what stands beside it needs whole tensors, so that outputs are gathered, or inputs sliced; else the
    neighbours are split too, and a column split's outputs are a row split's inputs as they are.
    """

    along: str  # COLUMNS or ROWS
    alone: bool

    def slice(self, weight: torch.Tensor, number: int, ways: int) -> torch.Tensor:
        """Part `number` of `ways` of `weight` [outputs, inputs], in memory of its own."""
        return weight.chunk(ways, DIMENSION[self.along])[number].clone(memory_format=torch.contiguous_format)


# ---------------------------------------------------------------------- what travels: [..., features] on each process


def copy_to_slices(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """x, the same on all; backward sums what each process's slice has to say of it."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def all_reduce_in_backward(y: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of all processes' y; backward hands the gradient on."""
    return DTensor.from_local(y, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()


def gather_slices(y: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """All processes' features side by side; backward takes the own ones."""
    return (
        DTensor.from_local(y, mesh, [Shard(y.ndim - 1)], run_check=False)
        .redistribute(placements=[Replicate()])
        .to_local()
    )


def slice_for_rank(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This process's features of x; backward puts them side by side."""
    return (
        DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        .redistribute(placements=[Shard(x.ndim - 1)])
        .to_local()
    )


class Copier:
    """`copied`, once for all layers that read the very same tensor: queries, keys and values cost one sum in backward,
    not three.
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh, self.read, self.copy = mesh, None, None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.read is None or self.read() is not x:
            self.read, self.copy = weakref.ref(x), copy_to_slices(x, self.mesh)
        return self.copy

    def forget(self, *_) -> None:
        self.read = self.copy = None


# ------------------------------------------------------------------------------------------------------- modules


class OwnSlice(nn.Linear):
    """A linear layer without bias whose weight is a DTensor: each process multiplies with what it holds."""

    def __init__(self, weight: nn.Parameter):
        with torch.device("meta"):
            super().__init__(*reversed(weight.shape), bias=False)
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to_local())


class SliceDropout(nn.Module):
    """torch's dropout of a slice of the features, as one process would drop them: the mask is drawn for all of them."""

    def __init__(self, p: float, mesh: DeviceMesh):
        super().__init__()
        self.p, self.mesh = p, mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.p:
            return x
        mask = F.dropout(
            torch.ones((*x.shape[:-1], x.shape[-1] * self.mesh.size()), dtype=x.dtype, device=x.device), self.p
        )
        return x * mask.chunk(self.mesh.size(), -1)[self.mesh.get_local_rank()]


class SliceTokenDropout(TokenDropout):
    """TokenDropout of a slice of the features."""

    def __init__(self, whole: TokenDropout, mesh: DeviceMesh):
        nn.Dropout.__init__(self, whole.p)
        self.key, self.mesh = whole.key, mesh

    def drop_without_keys(self, x: torch.Tensor) -> torch.Tensor:
        return SliceDropout(self.p, self.mesh)(x)

    def mask(self, x: torch.Tensor) -> torch.Tensor | None:
        keys, width = self.keys(x), x.shape[-1]
        begin = width * self.mesh.get_local_rank()
        return None if keys is None else token_mask(keys, width, self.p, begin=begin, kernels=self.kernels)


def split_frozen(module: nn.Module, split: Split, mesh: DeviceMesh, copier: Copier) -> None:
    """Let a frozen linear layer that holds a slice take part in the whole: hooks around its product, and its bias."""
    bias = None if module.bias is None else module.bias.detach()
    if split.along == COLUMNS:
        module.register_forward_pre_hook(lambda _, args: (copier(args[0]), *args[1:]))
        if bias is not None:
            module.bias = nn.Parameter(bias.chunk(mesh.size())[mesh.get_local_rank()].clone(), requires_grad=False)
    else:
        module.bias = None  # added once, to the sum
        module.register_forward_hook(
            lambda _, args, y: (
                all_reduce_in_backward(y, mesh) if bias is None else all_reduce_in_backward(y, mesh) + bias.to(y.dtype)
            )
        )


def split_adapter(layer: LoraLayer, split: Split | None, mesh: DeviceMesh) -> None:
    """Put a LoRA layer on the mesh, split as its base is: B's rows beside the base's columns, A's columns beside its
    rows. A factor that is not split is whole on every process, and so is its gradient.
    """
    along = split and split.along
    for name in layer.lora_A:
        for factors, of in ((layer.lora_A, ROWS), (layer.lora_B, COLUMNS)):
            placement = Shard(DIMENSION[of]) if along == of else Replicate()
            weight = distribute_tensor(factors[name].weight.detach(), mesh, [placement], src_data_rank=None)
            factors[name] = OwnSlice(nn.Parameter(weight))
        if along == COLUMNS:
            layer.lora_B[name].register_forward_pre_hook(lambda _, args: (copy_to_slices(args[0], mesh),))
        elif along == ROWS:
            layer.lora_A[name].register_forward_hook(lambda _, args, y: all_reduce_in_backward(y, mesh))
            whole = layer.lora_dropout[name]
            layer.lora_dropout[name] = (
                SliceTokenDropout(whole, mesh)
                if isinstance(whole, TokenDropout)
                else SliceDropout(getattr(whole, "p", 0.0), mesh)
            )


def replace_linears(layer: nn.Module, split: Split, mesh: DeviceMesh) -> None:
    """Give a layer that is split alone whole inputs and outputs."""
    if split.alone and split.along == COLUMNS:
        layer.register_forward_hook(lambda _, args, y: gather_slices(y, mesh))
    elif split.alone:
        layer.register_forward_pre_hook(lambda _, args: (slice_for_rank(args[0], mesh), *args[1:]))
