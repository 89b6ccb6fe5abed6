"""Keras's distribution API on its torch backend: `install()` puts this package where Keras looks for one."""

from __future__ import annotations

import sys

from anyqlora.distribution import _compat, processes
from anyqlora.distribution.processes import (
    DistributionError,
    get_device_count,
    initialize,
    list_devices,
    num_processes,
    process_id,
)
from anyqlora.distribution.tensors import distribute_data_input, distribute_tensor, distribute_variable
from anyqlora.distribution.tensors import to_backend_layout as _to_backend_layout
from anyqlora.distribution.tensors import to_backend_mesh as _to_backend_mesh

__all__ = [
    "_to_backend_layout",
    "_to_backend_mesh",
    "distribute_data_input",
    "distribute_tensor",
    "distribute_variable",
    "get_device_count",
    "initialize",
    "install",
    "list_devices",
    "num_processes",
    "process_id",
    "processes",
]

VERSIONS = ("3.15",)  # of Keras, whose private places are known
TRAINING = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def install() -> None:
    """Let Keras's own DeviceMesh, LayoutMap, DataParallel and ModelParallel spread variables on its torch backend.

    Keras 3.15 has no distribution_lib for torch: its distributions are accepted there and do nothing. This puts one in
    its place, lays out variables as they are made under a distribution, and lets `fit`, `evaluate`, `predict` and
    their like compute over all processes what one would. Nothing else of Keras changes, and nothing at all before this
    is called; calling it again does nothing. Raises DistributionError for a Keras that is not on torch or not known.
    """
    try:
        import keras
    except ImportError:
        raise DistributionError("Keras is not installed", cure="pip install keras") from None
    if keras.backend.backend() != "torch":
        raise DistributionError(
            f"Keras runs on {keras.backend.backend()}", cure="KERAS_BACKEND=torch, before keras is imported"
        )
    if not keras.__version__.startswith(VERSIONS):
        raise DistributionError(f"Keras {keras.__version__} is not known here", cure=f"keras {', '.join(VERSIONS)}")
    if not _compat.put_backend(sys.modules[__name__]):
        return
    current = _compat.keras_distribution().distribution
    _compat.lay_out_variables(current)
    _compat.distribute_training(TRAINING, current)
