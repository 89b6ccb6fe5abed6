"""Every private part of Keras that this folder touches, with its cause and how we know that it can go.

Keras 3.15 has no distribution on its torch backend: its own are accepted there and do nothing, and nothing public puts
one in its place. Who calls `keras.install` asks for this; nothing of Keras changes before. No other file names a
private part: tests/test_private_names.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from anyqlora.distribution.processes import DistributionError
from anyqlora.distribution.tensors import distribute_tensor, distribute_variable


def keras_distribution() -> Any:
    """Keras's module of distributions, which knows the one that is set: in 3.15 `keras.distribution` shows its names,
    not the module.

    Can go when tests/distribution/test_distribution.py::test_keras_still_has_no_distribution_on_torch fails.
    """
    from keras.src.distribution import distribution_lib

    return distribution_lib


def put_backend(backend: ModuleType) -> bool:
    """Let Keras's distributions call `backend`, where it has one for each of its other backends (3.15). Returns False
    where they do already.

    Can go when tests/distribution/test_distribution.py::test_keras_still_has_no_distribution_on_torch fails.
    """
    import keras.src.backend.torch

    ours = keras_distribution()
    if ours.distribution_lib is backend:
        return False
    keras.src.backend.distribution_lib = ours.distribution_lib = backend
    keras.src.backend.torch.distribution_lib = backend  # where Keras's other backends have theirs
    return True


def lay_out_variables(current: Callable[[], Any]) -> None:
    """From here on Keras (3.15) puts the values of variables on the mesh of the distribution that is `current`, as it
    does on its other backends.

    Can go when tests/distribution/test_distribution.py::test_keras_still_has_no_distribution_on_torch fails.
    """
    from keras.src.backend.torch.core import Variable

    patched: Any = Variable
    patched._initialize = _laid_out(Variable._initialize, current)
    patched._direct_assign = _assigned
    patched.__array__ = _as_array(Variable.__array__)


def refuse_training(methods: Sequence[str], current: Callable[[], Any]) -> None:
    """From here on these methods of Keras's models (3.15) are refused under a distribution: each process would do the
    same.

    Can go when tests/distribution/test_distribution.py::test_keras_still_has_no_distribution_on_torch fails.
    """
    from keras.src.backend.torch.trainer import TorchTrainer

    for name in methods:
        setattr(TorchTrainer, name, _refused(name, getattr(TorchTrainer, name), current))


def _laid_out(initialize: Callable[..., Any], current: Callable[[], Any]) -> Callable[..., None]:
    """Variable._initialize that puts the value on the mesh of the distribution that is set."""

    @functools.wraps(initialize)
    def with_layout(variable: Any, value: Any) -> None:
        initialize(variable, value)
        distribution = current()
        if variable._layout is None and distribution is not None:
            variable._shape = tuple(variable._value.shape)  # which get_variable_layout asks for
            variable._layout = distribution.get_variable_layout(variable)
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
    def whole(variable: Any, dtype: Any = None) -> Any:
        if not isinstance(variable._value, DTensor):
            return plain(variable, dtype)
        value = cast(DTensor, variable._value.detach()).full_tensor().cpu()
        array = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
        return array.astype(dtype) if dtype else array

    return whole


def _refused(name: str, method: Callable[..., Any], current: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def only_undistributed(model: Any, *args: Any, **options: Any) -> Any:
        if current() is not None:
            raise DistributionError(
                f"Keras's {name} on torch does not distribute: each process would do the same",
                cure="a loop of your own over distribute_tensor(x, distribution.get_data_layout(x.shape)); see "
                "docs/distribution.md",
            )
        return method(model, *args, **options)

    return only_undistributed
