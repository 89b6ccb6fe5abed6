"""Keras's distribution vocabulary on torch: devices, meshes, layouts, and tensors that are spread over processes by
them (DTensor).

One process has one device. What was asked for and is not in effect is an error: there is no silent single process.
"""

from torch.utils.data import DataLoader

from anyqlora.distribution.layouts import DeviceMesh, LayoutMap, TensorLayout
from anyqlora.distribution.processes import (
    DistributionError,
    get_device_count,
    initialize,
    list_devices,
    num_processes,
    process_id,
)
from anyqlora.distribution.strategies import DataParallel, Distribution, ModelParallel, distribution, set_distribution
from anyqlora.distribution.tensors import distribute_data_input, distribute_tensor, distribute_variable

__all__ = [
    "DataParallel",
    "DeviceMesh",
    "Distribution",
    "DistributionError",
    "LayoutMap",
    "ModelParallel",
    "TensorLayout",
    "distribute_data_input",
    "distribute_dataset",
    "distribute_tensor",
    "distribute_variable",
    "distribution",
    "get_device_count",
    "initialize",
    "list_devices",
    "num_processes",
    "process_id",
    "set_distribution",
]


def distribute_dataset(dataset: DataLoader) -> DataLoader:
    """This process's share of a DataLoader under the distribution that is set.

    Raises DistributionError when none is.
    """
    current = distribution()
    if current is None:
        raise DistributionError(
            "distribute_dataset: no distribution is set", cure="with distribution.scope(): or set_distribution(...)"
        )
    return current.distribute_dataset(dataset)
