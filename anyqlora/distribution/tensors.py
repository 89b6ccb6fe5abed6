"""Tensors that are spread over processes: torch's DTensor by a layout's names."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as spread

from anyqlora.distribution.processes import KINDS, DistributionError


class Sharding(NamedTuple):
    """A layout in torch's words: for each axis of the mesh, which dimension of a tensor it splits."""

    mesh: TorchMesh
    placements: tuple[Placement, ...]


def to_backend_mesh(mesh: Any) -> TorchMesh:
    """torch's mesh of a DeviceMesh, ours or Keras's: the number of a device is the process that has it.

    Raises DistributionError when there are not just as many processes: what was asked for would not be distributed.
    """
    names = [str(device) for device in mesh.devices.flatten()]
    kinds, numbers = {name.partition(":")[0] for name in names}, [int(name.partition(":")[2] or 0) for name in names]
    if len(kinds) != 1 or not kinds <= KINDS.keys():
        raise DistributionError(f"a mesh of {sorted(kinds)}", cure=f"devices of one type, among {', '.join(KINDS)}")
    if len(numbers) == 1 and not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage] - documented, and not in __all__
            rank=0,
            world_size=1,
        )  # a world of one, so that one device is no special case
    there = dist.get_world_size() if dist.is_initialized() else 1
    if kinds == {"mps"} and there > 1:
        raise DistributionError("torch has no collectives for mps", cure="devices of type cpu")
    if sorted(numbers) != list(range(there)):
        raise DistributionError(
            f"the mesh has the devices {', '.join(names)}, and there "
            f"{'is 1 process' if there == 1 else f'are {there} processes'}",
            cure="one process for each device: initialize(...) in each, or torchrun",
        )
    return TorchMesh(
        KINDS[kinds.pop()], torch.tensor(numbers).reshape(mesh.devices.shape), mesh_dim_names=tuple(mesh.axis_names)
    )


def to_backend_layout(layout: Any) -> Sharding:
    """A TensorLayout, ours or Keras's, in torch's words.

    Raises DistributionError for one that has no mesh, or splits two dimensions by one axis.
    """
    if layout.device_mesh is None:
        raise DistributionError(f"the layout {layout.axes} has no mesh", cure="TensorLayout(axes, device_mesh)")
    named = [axis for axis in layout.axes if axis is not None]
    if len(set(named)) != len(named):
        raise DistributionError(f"the layout {layout.axes} splits two dimensions by one axis", cure="each axis once")
    places = [
        Shard(layout.axes.index(axis)) if axis in named else Replicate() for axis in layout.device_mesh.axis_names
    ]
    return Sharding(layout.device_mesh.backend_mesh, tuple(places))


def _sharding(layout: Any) -> Sharding:
    return layout if isinstance(layout, Sharding) else layout.backend_layout


def _check(tensor: torch.Tensor, layout: Any) -> None:
    axes = getattr(layout, "axes", ())  # dimensions beyond them are not split
    if len(axes) > tensor.ndim:
        raise DistributionError(f"a layout of {len(axes)} dimensions {axes} for a tensor of shape {list(tensor.shape)}")


def distribute_tensor(tensor: Any, layout: Any) -> DTensor:
    """`tensor` (DTensor, tensor or array) by `layout`: differentiable, and nothing is copied that lies right already.

    A plain tensor is the whole value; process 0's counts. One in the middle of a graph must be the same on all, and is
    sent nowhere.
    """
    tensor = tensor if isinstance(tensor, torch.Tensor) else torch.as_tensor(tensor)
    _check(tensor, layout)
    mesh, places = _sharding(layout)
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh:
            raise DistributionError(
                f"a tensor on {tensor.device_mesh} cannot be laid out on {mesh}",
                cure="one mesh for all that meets in a computation",
            )
        return tensor if tensor.placements == places else tensor.redistribute(placements=places)
    if tensor.requires_grad and not tensor.is_leaf:
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(
            placements=places
        )
    return spread(tensor, mesh, places)


def distribute_variable(value: Any, layout: Any) -> DTensor:
    """A leaf that is trained, or not, as `value` is, with process 0's value, by `layout`; of a Parameter a
    Parameter.
    """
    value = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    laid = distribute_tensor(value.detach(), layout)
    if isinstance(value, nn.Parameter):
        return cast(DTensor, nn.Parameter(laid, requires_grad=value.requires_grad))
    return cast(DTensor, laid.requires_grad_(value.requires_grad))


def distribute_data_input(per_process_batch: Any, layout: Any, batch_dim_name: str | None = None) -> DTensor:
    """The whole batch, of which each process has its own rows already; those along other axes than the layout's have
    the same.
    """
    tensor = per_process_batch if isinstance(per_process_batch, torch.Tensor) else torch.as_tensor(per_process_batch)
    _check(tensor, layout)
    mesh, places = _sharding(layout)
    return DTensor.from_local(tensor, mesh, places, run_check=False)
