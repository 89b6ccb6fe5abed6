"""Which device holds which part of a tensor: a mesh with named axes, and for each dimension the axis that splits it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from anyqlora.distribution.processes import DistributionError, list_devices
from anyqlora.distribution.tensors import Sharding, to_backend_layout, to_backend_mesh
from anyqlora.planning.mesh import RegexMap


class DeviceMesh:
    """Devices ("gpu:0", one for each process) in an array of `shape`, whose dimensions are called `axis_names`.

    Raises DistributionError (a ValueError) when shape, names and devices do not go together.
    """

    def __init__(self, shape: Sequence[int], axis_names: Sequence[str], devices: Sequence[str] | None = None):
        self.shape, self.axis_names = tuple(shape), tuple(axis_names)
        if (
            not self.shape
            or len(self.shape) != len(self.axis_names)
            or len(set(self.axis_names)) != len(self.axis_names)
        ):
            raise DistributionError(
                f"a mesh of shape {self.shape} cannot have the axes {self.axis_names}",
                cure="one name, of its own, for each dimension",
            )
        device_array = np.array(list_devices() if devices is None else devices)
        if math.prod(self.shape) != device_array.size:
            raise DistributionError(
                f"a mesh of shape {self.shape} needs {math.prod(self.shape)} devices, and there are "
                f"{device_array.size}",
                cure="a shape whose product is the number of processes",
            )
        self.devices = device_array.reshape(self.shape)
        self._backend = None

    @property
    def backend_mesh(self) -> TorchMesh:
        """torch's DeviceMesh."""
        if self._backend is None:
            self._backend = to_backend_mesh(self)
        return self._backend

    def __repr__(self) -> str:
        return f"<DeviceMesh shape={self.shape}, axis_names={self.axis_names}>"


class TensorLayout:
    """For each dimension of a tensor the name of the mesh's axis that splits it, or None."""

    def __init__(self, axes: Sequence[str | None], device_mesh: DeviceMesh | None = None):
        self.axes, self._mesh = tuple(axes), None
        if device_mesh is not None:
            self.device_mesh = device_mesh

    @property
    def device_mesh(self) -> DeviceMesh | None:
        return self._mesh

    @device_mesh.setter
    def device_mesh(self, mesh: DeviceMesh) -> None:
        if self._mesh is not None:
            raise DistributionError(f"this layout is on {self._mesh} already")
        unknown = {axis for axis in self.axes if axis is not None} - set(mesh.axis_names)
        if unknown:
            raise DistributionError(
                f"unknown axes {sorted(unknown)} in the layout {self.axes}", cure=f"among: {', '.join(mesh.axis_names)}"
            )
        self._mesh = mesh

    @property
    def backend_layout(self) -> Sharding:
        return to_backend_layout(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorLayout) and (self.axes, self._mesh) == (other.axes, other._mesh)

    def __hash__(self) -> int:
        return hash((self.axes, id(self._mesh)))

    def __repr__(self) -> str:
        return f"<TensorLayout axes={self.axes}, device_mesh={self._mesh}>"


class LayoutMap(RegexMap):
    """{name or regex: TensorLayout}: the exact key, else the one regex that matches a whole name, else None; several
    are an error.

    A tuple of axes is taken for a layout on `device_mesh`.
    """

    def __init__(self, device_mesh: DeviceMesh | None = None):
        self.device_mesh = device_mesh
        super().__init__()

    def __setitem__(self, key: str, layout: TensorLayout | tuple) -> None:
        layout = TensorLayout(layout) if isinstance(layout, (tuple, list)) else layout
        if not isinstance(layout, TensorLayout):
            raise DistributionError(
                f"{key}: {layout!r} is not a layout", cure='a TensorLayout, or axes such as (None, "model")'
            )
        if layout.device_mesh is None and self.device_mesh is not None:
            layout.device_mesh = self.device_mesh
        super().__setitem__(key, layout)
