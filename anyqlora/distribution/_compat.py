"""Every private part of Keras that this folder touches, with its cause and how we know that it can go.

Keras 3.15 has no distribution on its torch backend: its own are accepted there and do nothing, and nothing public puts
one in its place. Who calls `keras.install` asks for this; nothing of Keras changes before. No other file names a
private part: tests/test_private_names.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from anyqlora.distribution.batches import AgreedBatches, exchanged, local_part, of_process_0, share
from anyqlora.distribution.datasets import SharedBatches, shared
from anyqlora.distribution.processes import DistributionError, num_processes, process_id
from anyqlora.distribution.tensors import distribute_tensor, distribute_variable

# what DTensor (torch 2.13) answers before it has computed or sent anything
_UNSPLIT = ("does not have a sharding strategy registered", "unevenly sharded tensor", "without redistribution")
_mixing: ContextVar[bool] = ContextVar("mixing", default=False)  # plain tensors meet those that are spread
_in_layer: ContextVar[bool] = ContextVar("in_layer", default=False)
_in_method: ContextVar[bool] = ContextVar("in_method", default=False)


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
    on_torch: Any = keras.src.backend.torch
    on_torch.distribution_lib = backend  # where Keras's other backends have theirs
    return True


def lay_out_variables(current: Callable[[], Any]) -> None:
    """From here on Keras (3.15) puts the values of variables on the mesh of the distribution that is `current`, as it
    does on its other backends.

    Can go when tests/distribution/test_distribution.py::test_keras_still_has_no_distribution_on_torch fails.
    """
    from keras.src.backend.torch.core import Variable

    patched: Any = Variable
    patched.__init__ = _marked(Variable.__init__)
    patched._initialize = _laid_out(Variable._initialize, current)
    patched._direct_assign = _assigned
    patched.__array__ = _as_array(Variable.__array__)


def distribute_training(methods: Sequence[str], current: Callable[[], Any]) -> None:
    """From here on these methods of Keras's models (3.15) compute under a distribution what one process would.

    Can go when tests/distribution/test_distribution.py::test_keras_still_has_no_distribution_on_torch fails.
    """
    from keras.src.backend.torch import random as keras_random
    from keras.src.backend.torch.trainer import TorchEpochIterator, TorchTrainer
    from keras.src.layers import Layer
    from keras.src.models.model import Model
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.utils import file_utils
    from keras.src.utils.torch_utils import TorchModuleWrapper

    for name in methods:
        setattr(TorchTrainer, name, _together(name, getattr(TorchTrainer, name), current))
    patched: Any = TorchEpochIterator
    patched.__init__ = _of_whole_data(TorchEpochIterator.__init__, current)
    patched._get_iterator = _agreed(TorchEpochIterator._get_iterator, current)
    patched = Layer
    patched.__call__ = _split(Layer.__call__, current)
    patched.losses = property(_whole_losses(Layer.losses.fget))
    patched = keras_distribution().Distribution
    patched.distribute_dataset = _of_loaders(patched.distribute_dataset)
    patched = Model
    patched.save = _written_once(Model.save, current)
    patched.save_weights = _written_once(Model.save_weights, current)
    file_utils.makedirs = _made_by_either(file_utils.makedirs, current)
    patched = TorchModuleWrapper
    patched._track_module_parameters = _without_torch_modules(TorchModuleWrapper._track_module_parameters, current)
    patched = BaseOptimizer
    patched.apply = _with_reduced_gradients(BaseOptimizer.apply)
    keras_random.dropout = _dropout_as_of_one(keras_random.dropout)


def _laid_out(initialize: Callable[..., Any], current: Callable[[], Any]) -> Callable[..., None]:
    """Variable._initialize that puts the value on the mesh of the distribution that is set."""

    @functools.wraps(initialize)
    def with_layout(variable: Any, value: Any) -> None:
        initialize(variable, value)
        distribution = current()
        if variable._layout is None and distribution is not None and not variable._is_bookkeeping:
            variable._shape = tuple(variable._value.shape)  # which get_variable_layout asks for
            variable._layout = distribution.get_variable_layout(variable)
            variable._is_laid_by_name = True
        if variable._layout is not None:
            variable._value = distribute_variable(
                nn.Parameter(variable._value, requires_grad=variable._value.requires_grad), variable._layout
            )

    return with_layout


@torch.no_grad()
def _assigned(variable: Any, value: Any) -> None:
    """Variable._direct_assign: a plain value is the whole one."""
    own = variable._value
    if isinstance(value, DTensor) and not isinstance(own, DTensor):
        value = value.full_tensor()
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


def _marked(initialize: Callable[..., None]) -> Callable[..., None]:
    """Variable.__init__ that remembers whether it counts for a metric, an optimizer or a seed: every process has such a
    one whole, as a plain tensor.
    """
    from keras.src.backend.common import global_state
    from keras.src.metrics.metric import Metric
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.random.seed_generator import SeedGenerator

    @functools.wraps(initialize)
    def marked(variable: Any, *args: Any, **options: Any) -> None:
        scopes = global_state.get_global_attribute("name_scope_stack") or []
        makers = (Metric, BaseOptimizer, SeedGenerator)
        variable._is_bookkeeping = bool(scopes) and isinstance(scopes[-1].caller, makers)
        initialize(variable, *args, **options)

    return marked


@contextlib.contextmanager
def _set(flag: ContextVar[bool]) -> Iterator[None]:
    before = flag.set(True)
    try:
        yield
    finally:
        flag.reset(before)


@contextlib.contextmanager
def _mixed() -> Iterator[None]:
    """Plain tensors, which are the same on all, may meet those that are spread."""
    if _mixing.get():  # the inner one would end it for the outer one
        yield
        return
    with _set(_mixing), implicit_replication(), _WholeWhereNeeded():
        yield


class _WholeWhereNeeded(TorchDispatchMode):
    """Operations that DTensor cannot split are done by every process on whole tensors, forward and backward; each says
    so once.
    """

    warned: ClassVar[set[str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            spread = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
            if not spread or func._schema.is_mutable or not any(message in str(error) for message in _UNSPLIT):
                raise
        mesh = spread[0].device_mesh
        everywhere = [Replicate()] * mesh.ndim
        if str(func) not in self.warned:
            self.warned.add(str(func))
            warnings.warn(f"torch cannot split {func}: every process does all of it", stacklevel=2)
        with torch.no_grad():
            args, kwargs = tree_map_only(
                DTensor, lambda x: x.redistribute(placements=everywhere).to_local(), (args, kwargs)
            )
            return tree_map_only(
                torch.Tensor, lambda x: DTensor.from_local(x, mesh, everywhere, run_check=False), func(*args, **kwargs)
            )


def _whole(value: Any) -> Any:
    """A plain tensor of what is spread, differentiable; with its mask, which Keras hangs on it."""
    if not isinstance(value, DTensor):
        return value
    plain = value.full_tensor()
    mask = getattr(value, "_keras_mask", None)
    if mask is not None:
        cast(Any, plain)._keras_mask = _whole(mask)
    return plain


def _together(name: str, method: Callable[..., Any], current: Callable[[], Any]) -> Callable[..., Any]:
    """A method of the trainer that all processes enter with the same randomness and leave with the same result."""
    takes = inspect.signature(method)

    @functools.wraps(method)
    def distributed(model: Any, *args: Any, **options: Any) -> Any:
        distribution = current()
        if _in_method.get():
            return method(model, *args, **options)
        if distribution is None:
            _check_undistributed(name, model)
            return method(model, *args, **options)
        if model.compiled and model.jit_compile:
            raise DistributionError(f"{name}: jit_compile does not distribute", cure="jit_compile=False")
        if num_processes() > 1:
            _begin_alike(model)
            bound = takes.bind(model, *args, **options)
            if process_id() and "verbose" in takes.parameters:
                bound.arguments["verbose"] = 0  # process 0 shows the progress
            if "callbacks" in takes.parameters:
                bound.arguments["callbacks"] = _callbacks(bound.arguments.get("callbacks"), name == "fit")
            args, options = bound.args[1:], bound.kwargs
        with _set(_in_method), _mixed():
            if name.endswith("_on_batch"):
                bound = takes.bind(model, *args, **options)
                batch = [bound.arguments.get(part) for part in ("x", "y", "sample_weight")]
                _agreed_batches((), distribution, False).agree(0, batch)
            return method(model, *args, **options)

    return distributed


def _check_undistributed(name: str, model: Any) -> None:
    for variable in _all_variables(model):
        if isinstance(variable._value, DTensor):
            raise DistributionError(
                f"{name}: {variable.path} lies on a mesh, and no distribution is set",
                cure="keras.distribution.set_distribution(...), or with distribution.scope():, around it too",
            )


def _callbacks(callbacks: Any, training: bool) -> Any:
    """Those of this process: files are process 0's, and all stop together."""
    import keras

    class StopTogether(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert self.model is not None
            self.model.stop_training = any(values[0] for values in exchanged([bool(self.model.stop_training)]))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.on_train_batch_end(epoch)

    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise DistributionError("a CallbackList does not distribute", cure="a list of its callbacks")
    callbacks = list(callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else [])
    for callback in callbacks:
        if isinstance(callback, (keras.callbacks.BackupAndRestore, keras.callbacks.TensorBoard)):
            raise DistributionError(
                f"{type(callback).__name__} writes the same files on every process",
                cure="ModelCheckpoint and CSVLogger, of which process 0 writes; to go on: load_weights and "
                "fit(initial_epoch=...)",
            )
    if process_id():
        callbacks = [callback for callback in callbacks if not isinstance(callback, keras.callbacks.CSVLogger)]
    return [*callbacks, StopTogether()] if training else callbacks


def _written_once(save: Callable[..., Any], current: Callable[[], Any]) -> Callable[..., Any]:
    """Model.save that all processes call together, as they hold the parts, and process 0 writes; it is there when they
    return.
    """

    @functools.wraps(save)
    def together(model: Any, filepath: Any, *args: Any, **options: Any) -> None:
        if current() is None or num_processes() == 1 or process_id() == 0:
            save(model, filepath, *args, **options)
        else:
            with tempfile.TemporaryDirectory() as folder:
                save(model, Path(folder) / Path(filepath).name, *args, **options)
        if current() is not None and num_processes() > 1:
            exchanged([0])

    return together


def _made_by_either(makedirs: Callable[..., None], current: Callable[[], Any]) -> Callable[..., None]:
    """file_utils.makedirs of callbacks that run on several processes at once."""

    @functools.wraps(makedirs)
    def made(path: Any) -> None:
        try:
            makedirs(path)
        except FileExistsError:
            if current() is None:
                raise

    return made


def _without_torch_modules(track: Callable[..., None], current: Callable[[], Any]) -> Callable[..., None]:
    @functools.wraps(track)
    def refused(wrapper: Any) -> None:
        if current() is not None:
            raise DistributionError(
                f"the torch module {type(wrapper.module).__name__} in a Keras model does not distribute",
                cure="layers of Keras; or anyqlora.distribution's distribute_module and a loop of your own",
            )
        track(wrapper)

    return refused


def _begin_alike(model: Any) -> None:
    """Every process goes on with process 0's random states and counters."""
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, SeedGenerator

    counters = [v for v in _all_variables(model) if v._value is not None and not isinstance(v._value, DTensor)]
    general = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    device = torch.get_device_module() if torch.accelerator.is_available() else None
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": device and device.get_rng_state(),
        "keras": general and np.array(general.state),
        "counters": {str(i): np.array(v) for i, v in enumerate(counters)},
    }
    state = of_process_0(state)
    if process_id() == 0:
        return
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device:
        device.set_rng_state(state["device"])
    if state["keras"] is not None:
        general = general or SeedGenerator(0)
        general.state.assign(state["keras"])
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, general)
    else:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
    for variable, value in zip(counters, state["counters"].values(), strict=True):
        variable.assign(value)


def _all_variables(model: Any) -> list[Any]:
    optimizer = getattr(model, "optimizer", None)  # a model that is not compiled has no such attribute
    return [*model.variables, *(optimizer.variables if optimizer is not None else ())]


def _leaves(batch: Any) -> list[torch.Tensor]:
    import keras

    flat = keras.tree.flatten(batch)
    return [torch.as_tensor(np.asarray(x) if not isinstance(x, torch.Tensor) else x) for x in flat if x is not None]


def _mapped(function: Callable[[Any], Any], batch: Any) -> Any:
    import keras

    return keras.tree.map_structure(lambda x: function(x) if isinstance(x, torch.Tensor) else x, batch)


def _agreed_batches(loader: Any, distribution: Any, shares: bool) -> AgreedBatches:
    return AgreedBatches(loader, distribution, shares, _leaves, _mapped)


def _of_whole_data(initialize: Callable[..., None], current: Callable[[], Any]) -> Callable[..., None]:
    """TorchEpochIterator.__init__ that takes arrays, loaders and generators on several processes, which Keras leaves to
    TensorFlow's datasets.
    """

    @functools.wraps(initialize)
    def accepting(iterator: Any, *args: Any, **options: Any) -> None:
        distribution = current()
        keras_distribution().set_distribution(None)
        try:
            initialize(iterator, *args, **options)
        finally:
            keras_distribution().set_distribution(distribution)
        if distribution is not None and num_processes() > 1:
            counts = [values[0] for values in exchanged([iterator.num_batches or 0])]
            if len(set(counts)) > 1:
                raise DistributionError(
                    f"processes have {', '.join(map(str, counts))} batches", cure="as many batches on each process"
                )

    return accepting


def _agreed(loader_of: Callable[..., Any], current: Callable[[], Any]) -> Callable[..., Any]:
    """TorchEpochIterator._get_iterator of batches that are known to be the same on all, or put together."""

    @functools.wraps(loader_of)
    def agreed(iterator: Any) -> Any:
        loader, distribution = loader_of(iterator), current()
        if distribution is None or num_processes() == 1:
            return loader
        shares = isinstance(getattr(loader, "batch_sampler", None), SharedBatches)
        return _agreed_batches(loader, distribution, shares or not distribution.auto_shard_dataset)

    return agreed


def _of_loaders(distribute: Callable[..., Any]) -> Callable[..., Any]:
    """Distribution.distribute_dataset that takes a torch DataLoader."""

    @functools.wraps(distribute)
    def loaders_too(distribution: Any, dataset: Any) -> Any:
        if not isinstance(dataset, torch.utils.data.DataLoader):
            return distribute(distribution, dataset)
        if not distribution.auto_shard_dataset or distribution.num_model_replicas == 1:
            return dataset
        number = distribution.device_mesh.backend_mesh.get_local_rank(distribution.batch_dim_name)
        return shared(dataset, number, distribution.num_model_replicas)

    return loaders_too


def _split(call: Callable[..., Any], current: Callable[[], Any]) -> Callable[..., Any]:
    """Layer.__call__ of which the outermost splits plain rows over the processes, and gives plain ones back."""
    import keras

    @functools.wraps(call)
    def spread(layer: Any, *args: Any, **options: Any) -> Any:
        distribution = current()
        if distribution is None or _in_layer.get():
            return call(layer, *args, **options)
        inputs = keras.tree.flatten((args, options))
        if any(isinstance(x, keras.KerasTensor) or (isinstance(x, torch.Tensor) and x.is_meta) for x in inputs):
            return call(layer, *args, **options)
        if any(isinstance(x, DTensor) for x in inputs):  # a loop of one's own, which goes on with what is spread
            with _set(_in_layer), _mixed():
                return call(layer, *args, **options)
        _check_variables(layer, distribution)

        def laid(x: Any) -> Any:
            if isinstance(x, (np.ndarray, torch.Tensor)) and x.ndim:
                x = keras.ops.convert_to_tensor(x)
                return share(x, distribution.get_data_layout(x.shape).backend_layout, distribution.batch_dim_name)
            return x

        with _set(_in_layer), _mixed():
            args, options = cast(tuple, keras.tree.map_structure(laid, (args, options)))
            return keras.tree.map_structure(_whole, call(layer, *args, **options))

    return spread


def _check_variables(layer: Any, distribution: Any) -> None:
    for variable in layer.trainable_variables:
        if variable._value is not None and not isinstance(variable._value, DTensor):
            raise DistributionError(
                f"{variable.path} was made before the distribution was set: it lies on no mesh",
                cure="keras.distribution.set_distribution(...) before the model is made",
            )


def _whole_losses(losses: Callable[..., Any] | None) -> Callable[..., Any]:
    assert losses is not None

    @functools.wraps(losses)
    def plain(layer: Any) -> Any:
        return losses(layer) if _in_layer.get() else [_whole(loss) for loss in losses(layer)]

    return plain


def _with_reduced_gradients(apply: Callable[..., Any]) -> Callable[..., Any]:
    """BaseOptimizer.apply to gradients that lie as their variables do: summed over the processes, once."""

    @functools.wraps(apply)
    def reduced(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        if not any(isinstance(gradient, DTensor) for gradient in grads):
            return apply(optimizer, grads, trainable_variables)
        variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
        for counter in optimizer.variables:
            # one that `build` made outside of the optimizer's name scope (Nadam's product): plain as the others are
            if isinstance(counter._value, DTensor) and getattr(counter, "_is_laid_by_name", False):
                counter._value, counter._layout = nn.Parameter(counter._value.full_tensor(), requires_grad=False), None
        grads = [
            gradient.redistribute(placements=variable.value.placements) if isinstance(gradient, DTensor) else gradient
            for gradient, variable in zip(grads, variables, strict=True)
        ]
        with _mixed():
            return apply(optimizer, grads, trainable_variables)

    return reduced


def _dropout_as_of_one(dropout: Callable[..., Any]) -> Callable[..., Any]:
    """random.dropout that drops of spread inputs what one process would: it draws the whole mask and takes its part."""

    @functools.wraps(dropout)
    def alike(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        if not isinstance(inputs, DTensor):
            return dropout(inputs, rate, noise_shape, seed)
        ones = torch.ones(inputs.shape, dtype=inputs.dtype, device=inputs.device)
        return inputs * local_part(dropout(ones, rate, noise_shape, seed), inputs)

    return alike
