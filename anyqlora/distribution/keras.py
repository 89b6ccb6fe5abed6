"""Keras's distribution API on its torch backend: `install()` puts this package where Keras looks for one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from anyqlora.distribution import processes
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

    Keras 3.15 has no distribution_lib for torch: its distributions are accepted there and do nothing. This puts one in its place,
    lays out variables as they are made under a distribution, and refuses `fit` and its like under one, as they would feed each
    process the same plain tensors. Nothing else of Keras changes, and nothing at all before this is called; calling it again does
    nothing. Raises DistributionError for a Keras that is not on torch or not known.
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
    from keras.src import backend
    from keras.src.backend.torch.core import Variable
    from keras.src.backend.torch.trainer import TorchTrainer
    from keras.src.distribution import distribution_lib

    if distribution_lib.distribution_lib is sys.modules[__name__]:
        return
    backend.distribution_lib = distribution_lib.distribution_lib = sys.modules[__name__]
    patched: Any = Variable
    patched._initialize = _laid_out(Variable._initialize, distribution_lib.distribution)
    patched._direct_assign = _assigned
    patched.__array__ = _as_array(Variable.__array__)
    for name in TRAINING:
        setattr(TorchTrainer, name, _refused(name, getattr(TorchTrainer, name), distribution_lib.distribution))


def _laid_out(initialize: Callable[..., Any], current: Callable[..., Any]) -> Callable[..., Any]:
    """Variable._initialize that puts the value on the mesh of the distribution that is set."""

    @functools.wraps(initialize)
    def with_layout(variable: Any, value: Any) -> None:
        initialize(variable, value)
        found = current()
        if variable._layout is None and found is not None:
            variable._shape = tuple(variable._value.shape)  # which get_variable_layout asks for
            variable._layout = found.get_variable_layout(variable)
        if variable._layout is not None:
            variable._value = distribute_variable(
                nn.Parameter(variable._value, requires_grad=variable._value.requires_grad), variable._layout
            )

    return with_layout


@torch.no_grad()
def _assigned(variable: Any, value: Any) -> None:
    """Variable._direct_assign: a plain value is the whole one."""
    own = variable._value
    if isinstance(own, DTensor):
        value = distribute_tensor(torch.as_tensor(value, dtype=own.dtype, device=own.device), variable._layout)
    own.copy_(value)


def _as_array(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Variable.__array__ that gathers what is spread; all processes call it together."""

    @functools.wraps(plain)
    def whole(variable: Any, dtype: Any = None) -> np.ndarray:
        if not isinstance(variable._value, DTensor):
            return plain(variable, dtype)
        value = cast(DTensor, variable._value.detach()).full_tensor().cpu()
        array = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
        return array.astype(dtype) if dtype else array

    return whole


def _refused(name: str, method: Callable[..., Any], current: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def only_undistributed(model: Any, *args: Any, **options: Any) -> Any:
        if current() is not None:
            raise DistributionError(
                f"Keras's {name} on torch does not distribute: each process would do the same",
                cure="a loop of your own over distribute_tensor(x, distribution.get_data_layout(x.shape)); see docs/distribution.md",
            )
        return method(model, *args, **options)

    return only_undistributed
