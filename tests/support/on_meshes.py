"""What processes of a world do with anyqlora.distribution, on its own and through Keras; each returns what it saw, as
numpy and plain values.
"""

import os

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from anyqlora import distribution as spread
from tests.support.steps_on_ranks import joined

LEARNING_RATE = 0.1


def vocabulary():
    """Devices, meshes, layouts, tensors and variables on two processes."""
    rank = joined()
    mesh = spread.DeviceMesh((1, 2), ("batch", "model"))
    rows = torch.arange(8.0).reshape(2, 4) + 100 * rank  # process 0's counts
    by_columns = spread.distribute_tensor(rows, spread.TensorLayout((None, "model"), mesh))
    whole = spread.distribute_tensor(by_columns, spread.TensorLayout((None, None), mesh))
    variable = spread.distribute_variable(torch.nn.Parameter(rows), spread.TensorLayout(("model", None), mesh))
    own = spread.distribute_data_input(rows[:1], spread.TensorLayout(("model", None), mesh))
    return {
        "devices": spread.list_devices(),
        "count": spread.get_device_count("cpu"),
        "who": (spread.num_processes(), spread.process_id()),
        "columns": by_columns.to_local().numpy(),
        "whole": whole.to_local().numpy(),
        "variable": variable.detach().to_local().numpy(),
        "is_parameter": isinstance(variable, torch.nn.Parameter) and variable.requires_grad,
        "own": own.full_tensor().numpy(),
        "moved": spread.DeviceMesh((2,), ("batch",), ["cpu:1", "cpu:0"]).backend_mesh.mesh.tolist(),
    }


def refused():
    """The errors of what cannot be in effect on two processes."""
    rank = joined()
    mesh = spread.DeviceMesh((2,), ("batch",))
    layout = spread.TensorLayout(("batch",), mesh)
    tries = {
        "too many": lambda: spread.DeviceMesh((4,), ("batch",), [f"cpu:{i}" for i in range(4)]).backend_mesh,
        "shape": lambda: spread.DeviceMesh((3,), ("batch",)),
        "axis": lambda: spread.TensorLayout(("model",), mesh),
        "no mesh": lambda: spread.distribute_tensor(torch.ones(2), spread.TensorLayout(("batch",))),
        "dimensions": lambda: spread.distribute_tensor(torch.ones(()), layout),
        "twice": lambda: spread.TensorLayout(("batch", "batch"), mesh).backend_layout,
        "device": lambda: spread.initialize("127.0.0.1:1", 2, rank, device_type="gpu"),
        "kind": lambda: spread.list_devices("abacus"),
        "again": lambda: spread.initialize("127.0.0.1:1", 2, 1 - rank),
        "uneven": lambda: spread.DataParallel().distribute_dataset(
            DataLoader(TensorDataset(torch.arange(7)), batch_size=4)
        ),
        "odd": lambda: spread.DataParallel().distribute_dataset(
            DataLoader(TensorDataset(torch.arange(6)), batch_size=3)
        ),
        "iterable": lambda: spread.DataParallel().distribute_dataset([1, 2]),
        "none set": lambda: spread.distribute_dataset([1, 2]),
        "other mesh": lambda: spread.distribute_tensor(
            spread.distribute_tensor(torch.ones(2), layout),
            spread.TensorLayout((None,), spread.DeviceMesh((1, 2), ("a", "b"))),
        ),
    }
    found = {}
    for name, attempt in tries.items():
        with pytest.raises(ValueError) as caught:
            attempt()
        found[name] = str(caught.value)
    return found


def alone():
    """One process, without a group, that asks for two."""
    with pytest.raises(ValueError) as caught:
        spread.DataParallel(devices=["cpu:0", "cpu:1"])
    one = spread.DataParallel()  # a world of one
    return str(caught.value), type(spread.distribute_tensor(torch.ones(2), one.get_data_layout((2,)))).__name__


def rows_seen(shuffle):
    """The rows of two passes over a loader on this process."""
    rank = joined()
    torch.manual_seed(rank)  # processes that were not seeded alike
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=4, shuffle=shuffle)
    with spread.DataParallel().scope():
        mine = spread.distribute_dataset(loader)
    return [[batch[0].tolist() for batch in mine] for _ in range(2)], len(mine)


def meet(addresses, environ):
    """Start a world from addresses alone, without a launcher's environment."""
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    if environ:
        values = {"JOB_ADDRESSES": addresses, "NUM_PROCESSES": "2", "PROCESS_ID": str(rank)}
        os.environ.update({f"KERAS_DISTRIBUTION_{name}": value for name, value in values.items()})
    spread.initialize(*(() if environ else (addresses, 2, rank)), timeout=60)
    total = torch.tensor([rank + 1.0])
    torch.distributed.all_reduce(total)
    return spread.num_processes(), spread.process_id(), total.item()


# ------------------------------------------------------------------------------------------------ steps of a loop


def network():
    """A torch model with an embedding that is tied to its output."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.embed = torch.nn.Embedding(12, 8)
    model.up, model.norm, model.down = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 8)
    model.out = torch.nn.Linear(8, 12, bias=False)
    model.out.weight = model.embed.weight
    return model


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(12, (8, 5), generator=generator), torch.randint(12, (8, 5), generator=generator)


def distribution_of(kind, library, separator, names):
    """A distribution of `library` (ours or Keras's): "data", or "model" over a mesh of two axes where there are four
    processes.
    """
    if kind == "data":
        return library.DataParallel()
    count = len(library.list_devices())
    mesh = library.DeviceMesh((count // 2, 2), ("batch", "model"))
    layouts = library.LayoutMap(mesh)
    for pattern, axes in names.items():
        layouts[pattern.replace("/", separator)] = axes
    return library.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def torch_steps(kind):
    """Three SGD steps of a torch module under `kind`; None: undistributed.

    Returns ({name: value}, {name: local shape}).
    """
    joined()
    model, (x, y) = network(), data()
    found = kind and distribution_of(
        kind, spread, ".", {r"up\.weight": ("model", None), r"up\.bias": ("model",), r"down\.weight": (None, "model")}
    )
    if found:
        found.distribute_module(model)
        x, y = (spread.distribute_tensor(t, found.get_data_layout(t.shape)) for t in (x, y))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for _ in range(3):
        hidden = model.down(model.norm(torch.nn.functional.gelu(model.up(model.embed(x)))))
        torch.nn.functional.cross_entropy(model.out(hidden).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    tied = model.out.weight is model.embed.weight
    return {**gathered(model.named_parameters()), "tied": np.array(tied)}, local_shapes(model.named_parameters())


def keras_steps(kind):
    """Three SGD steps of our own loop over a Keras model under Keras's own distribution; None: undistributed."""
    rank = joined()
    import keras

    from anyqlora.distribution import keras as bridge

    bridge.install()
    bridge.install()  # a second time changes nothing
    keras.utils.set_random_seed(rank)  # processes that start differently end with process 0's variables
    names = {
        ".*/up/kernel": (None, "model"),
        ".*/up/bias": ("model",),
        ".*/down/kernel": ("model", None),
        "model/down/output": ("batch", None, None),
    }
    found = kind and distribution_of(kind, keras.distribution, "/", names)
    keras.distribution.set_distribution(found)
    model = keras.Sequential(
        [
            keras.layers.Embedding(12, 8, name="embed"),
            keras.layers.Dense(16, activation="gelu", name="up"),
            keras.layers.LayerNormalization(name="norm"),
            keras.layers.Dense(12, name="down"),
        ],
        name="model",
    )
    model.build((8, 5))
    (x, y) = data()
    if found:
        x, y = (keras.distribution.distribute_tensor(t, found.get_data_layout(t.shape)) for t in (x, y))
    start = {v.path: v.numpy() for v in model.trainable_variables}
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for _ in range(3):
        torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = {v.path: v.numpy() for v in model.trainable_variables}
    shapes = {
        v.path: tuple(v.value.to_local().shape) if isinstance(v.value, DTensor) else tuple(v.value.shape)
        for v in model.trainable_variables
    }
    model.trainable_variables[0].assign(np.zeros((12, 8)))
    return start, after, shapes, model.trainable_variables[0].numpy().sum(), keras.distribution.list_devices()


def gathered(named):
    return {name: np.array(p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()) for name, p in named}


def local_shapes(named):
    return {name: tuple(p.to_local().shape) if isinstance(p, DTensor) else tuple(p.shape) for name, p in named}
