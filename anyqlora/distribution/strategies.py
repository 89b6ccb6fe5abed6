"""Keras's two distributions: every process sees other rows (DataParallel), and variables may be split by a LayoutMap
too (ModelParallel).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from anyqlora.distribution import processes
from anyqlora.distribution.datasets import shared
from anyqlora.distribution.layouts import DeviceMesh, LayoutMap, TensorLayout
from anyqlora.distribution.processes import DistributionError
from anyqlora.distribution.tensors import distribute_variable

BATCH = "batch"
_current: contextvars.ContextVar[Distribution | None] = contextvars.ContextVar("distribution", default=None)


def distribution() -> Distribution | None:
    """The distribution that is set."""
    return _current.get()


def set_distribution(value: Distribution | None) -> None:
    _current.set(value)


class Distribution:
    """How variables and rows lie on a mesh. `batch_dim_name` is the axis along which processes see different rows."""

    def __init__(self, device_mesh: DeviceMesh, batch_dim_name: str, auto_shard_dataset: bool = True):
        if batch_dim_name not in device_mesh.axis_names:
            raise DistributionError(
                f"the mesh has no axis {batch_dim_name!r}",
                cure=f"batch_dim_name among: {', '.join(device_mesh.axis_names)}",
            )
        self.device_mesh, self.batch_dim_name, self.auto_shard_dataset = device_mesh, batch_dim_name, auto_shard_dataset
        self.num_processes, self._process_id = processes.num_processes(), processes.process_id()
        # raises here, not at the first tensor, when the mesh is not that of the processes
        device_mesh.backend_mesh  # noqa: B018

    @property
    def num_model_replicas(self) -> int:
        """How many groups of processes see different rows."""
        return self.device_mesh.shape[self.device_mesh.axis_names.index(self.batch_dim_name)]

    @property
    def data_shard_id(self) -> int:
        """Which of them this process belongs to."""
        return self.device_mesh.backend_mesh.get_local_rank(self.batch_dim_name)

    def get_data_layout(self, data_shape: Sequence[int]) -> TensorLayout:
        """A batch is split along its first dimension."""
        return TensorLayout((self.batch_dim_name, *[None] * (len(data_shape) - 1)), self.device_mesh)

    def get_variable_layout(self, variable: Any) -> TensorLayout:
        """Whole on every process; a `variable` has a `shape`, and a `path` where layouts are by name."""
        return TensorLayout([None] * len(variable.shape), self.device_mesh)

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        """Of what a layer gives; None leaves it as it is."""
        return None

    def distribute_dataset(self, dataset: DataLoader) -> DataLoader:
        """This process's share of a DataLoader, which makes whole batches; with auto_shard_dataset=False the loader as
        it is.
        """
        if not self.auto_shard_dataset or self.num_model_replicas == 1:
            return dataset
        return shared(dataset, self.data_shard_id, self.num_model_replicas)

    def distribute_module(self, module: nn.Module) -> nn.Module:
        """Put every parameter and buffer of a torch module on the mesh, in place; `model.layers.0.weight` is its path.

        Tied ones stay tied.
        """
        laid: dict[int, torch.Tensor] = {}
        for prefix, owner in module.named_modules():
            parameters = owner.named_parameters(recurse=False, remove_duplicate=False)
            buffers = owner.named_buffers(recurse=False, remove_duplicate=False)
            for name, tensor in [*parameters, *buffers]:
                path = f"{prefix}.{name}" if prefix else name
                if id(tensor) not in laid:
                    layout = self.get_variable_layout(_Named(path, tensor.shape))
                    laid[id(tensor)] = distribute_variable(tensor, layout)
                setattr(owner, name, laid[id(tensor)])
        return module

    @contextlib.contextmanager
    def scope(self) -> Iterator[Distribution]:
        """This distribution is the one that is set, for a while."""
        before = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(before)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} device_mesh={self.device_mesh}>"


class _Named:
    def __init__(self, path: str, shape: Sequence[int]):
        self.path, self.shape = path, shape


class DataParallel(Distribution):
    """Every process has all variables and sees other rows.

    Give a mesh of one axis, or devices; neither: all devices.
    """

    def __init__(
        self,
        device_mesh: DeviceMesh | None = None,
        devices: Sequence[str] | None = None,
        auto_shard_dataset: bool = True,
    ):
        if device_mesh is not None and devices is not None:
            raise DistributionError("a mesh and devices both say where", cure="one of them")
        if device_mesh is None:
            devices = list(devices or processes.list_devices())
            device_mesh = DeviceMesh((len(devices),), (BATCH,), devices)
        if len(device_mesh.shape) != 1:
            raise DistributionError(
                f"data parallelism over a mesh of shape {device_mesh.shape}",
                cure="a mesh of one axis; or ModelParallel with an empty map",
            )
        super().__init__(device_mesh, device_mesh.axis_names[0], auto_shard_dataset)


class ModelParallel(Distribution):
    """Variables lie as a LayoutMap says by their paths; what it does not name is whole on every process."""

    def __init__(self, *, layout_map: LayoutMap, batch_dim_name: str | None = None, auto_shard_dataset: bool = True):
        if not isinstance(layout_map, LayoutMap) or layout_map.device_mesh is None:
            raise DistributionError(
                f"layout_map: {layout_map!r} is no LayoutMap on a mesh", cure="LayoutMap(device_mesh)"
            )
        self.layout_map = layout_map
        super().__init__(
            layout_map.device_mesh, batch_dim_name or layout_map.device_mesh.axis_names[0], auto_shard_dataset
        )

    def get_variable_layout(self, variable: Any) -> TensorLayout:
        return self.layout_map[variable.path] or super().get_variable_layout(variable)

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        return self.layout_map[path]
