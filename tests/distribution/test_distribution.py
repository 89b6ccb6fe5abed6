"""anyqlora.distribution on real gloo processes: values against numpy's slices, steps against one process, Keras's own
objects.
"""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from anyqlora.distribution import DeviceMesh, DistributionError, LayoutMap, TensorLayout, initialize
from anyqlora.planning.mesh import LayoutError
from anyqlora.testing import world
from tests.support import on_meshes


def test_a_layout_map_takes_the_exact_key_then_the_one_regex_that_matches_fully():
    mesh = DeviceMesh((2, 2), ("batch", "model"), [f"cpu:{i}" for i in range(4)])
    layouts = LayoutMap(mesh)
    layouts["dense.*kernel"] = (None, "model")
    layouts[".*bias"] = ("model",)
    layouts["dense_9/kernel"] = ("model", None)
    assert layouts["dense_1/kernel"].axes == (None, "model") and layouts["dense_1/kernel"].device_mesh is mesh
    assert layouts["dense_9/kernel"].axes == ("model", None)
    assert layouts["a/dense_1/kernel"] is None and layouts["dense_1/kernel/more"] is None
    assert list(layouts) == ["dense.*kernel", ".*bias", "dense_9/kernel"] and len(layouts) == 3
    layouts["dense_1.*"] = TensorLayout((None, None))
    with pytest.raises(
        LayoutError, match=r"'dense_1/kernel' matches several layout keys: 'dense\.\*kernel', 'dense_1\.\*'"
    ):
        layouts["dense_1/kernel"]
    for key, value, said in (
        (".*bias", ("model",), "there already"),
        ("(", (None,), "not a regex"),
        ("x", 3, "not a layout"),
        ("y", ("pipe",), "unknown axes"),
    ):
        with pytest.raises(ValueError, match=said):
            layouts[key] = value
    del layouts["dense_1.*"]
    assert layouts["dense_1/kernel"].axes == (None, "model")


def test_tensors_lie_as_their_layouts_say():
    first, second = world(2, on_meshes.vocabulary)
    whole = np.arange(8.0).reshape(2, 4)
    for rank, found in enumerate((first, second)):
        assert found["devices"] == ["cpu:0", "cpu:1"] and found["count"] == 2 and found["who"] == (2, rank)
        assert found["is_parameter"] and found["moved"] == [1, 0]
        np.testing.assert_array_equal(found["columns"], whole[:, 2 * rank : 2 * rank + 2])
        np.testing.assert_array_equal(found["variable"], whole[rank : rank + 1])
        np.testing.assert_array_equal(found["whole"], whole)
        np.testing.assert_array_equal(found["own"], np.stack([whole[0], whole[0] + 100]))


def test_what_cannot_be_in_effect_is_refused():
    first, second = world(2, on_meshes.refused)
    said = {
        "too many": "there are 2 processes",
        "shape": "needs 3 devices, and there are 2",
        "axis": "unknown axes ['model']",
        "no mesh": "has no mesh",
        "dimensions": "a layout of 1 dimensions",
        "twice": "two dimensions by one axis",
        "device": "no gpu",
        "kind": "unknown device type 'abacus'",
        "again": "already",
        "uneven": "a batch of 3 rows",
        "odd": "a batch of 3 rows",
        "iterable": "list cannot be shared",
        "none set": "no distribution is set",
        "other mesh": "cannot be laid out",
    }
    assert said.keys() == first.keys()
    for name, words in said.items():
        assert words in first[name] and words in second[name], name


def test_one_process_that_asks_for_two_is_an_error():
    ((error, kind),) = world(1, on_meshes.alone)
    assert "there is 1 process" in error and kind == "DTensor"


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_row_is_seen_once(shuffle):
    (first, length), (second, _) = world(2, on_meshes.rows_seen, shuffle)
    assert length == 3
    for one, other in zip(first, second, strict=True):  # each pass
        assert sorted(sum(one + other, [])) == list(range(12)) and all(len(rows) == 2 for rows in one + other)
    assert (first[0] != first[1]) == shuffle
    if not shuffle:
        assert first[0][0] == [0, 1] and second[0][0] == [2, 3]


@pytest.mark.parametrize("environ", [False, True], ids=["arguments", "environment"])
def test_processes_meet_without_a_launcher(environ):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert world(2, on_meshes.meet, f"127.0.0.1:{port},127.0.0.1:{port + 1}", environ) == [(2, 0, 3.0), (2, 1, 3.0)]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("127.0.0.1:1", 2), "does not know process_id"),
        ((None, 2, 0), "does not know job_addresses"),
        (("127.0.0.1", 2, 0), "is not host:port"),
        (("a:1,b:1,c:1", 2, 0), "3 addresses, and num_processes is 2"),
        (("a:1", 2, 2), "process_id 2 is not one of 2"),
        (("a:1", "two", 0), "not a whole number"),
    ],
)
def test_half_of_an_initialization_is_refused(arguments, said, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DistributionError, match=said):
        initialize(*arguments)


@pytest.fixture(scope="module")
def torch_alone():
    ((parameters, _),) = world(1, on_meshes.torch_steps, None)
    return parameters


@pytest.mark.parametrize("kind, size", [("data", 2), ("model", 2), ("model", 4)])
def test_a_torch_module_steps_as_on_one_process(torch_alone, kind, size):
    for parameters, shapes in world(size, on_meshes.torch_steps, kind):
        assert (
            shapes["up.weight"] == ((8, 8) if kind == "model" else (16, 8))
            and shapes["embed.weight"] == (12, 8)
            and parameters["tied"]
        )
        for name, value in torch_alone.items():
            np.testing.assert_allclose(parameters[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_keras_still_has_no_distribution_on_torch():
    """While it has none, distribution/_compat.py is needed."""
    pytest.importorskip("keras")
    code = "from keras.src import backend; from keras.src.distribution import distribution_lib as ours; "
    code += "print(backend.distribution_lib, ours.distribution_lib)"
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["None", "None"]


@pytest.fixture(scope="module")
def keras_alone():
    pytest.importorskip("keras")
    (found,) = world(1, on_meshes.keras_steps, None)
    return found


@pytest.mark.parametrize("kind, size", [("data", 2), ("model", 2), ("model", 4)])
def test_a_keras_model_steps_as_on_one_process(keras_alone, kind, size):
    """Reference: the same loop over the same model without a distribution, in one process."""
    start_alone, after_alone, *_ = keras_alone
    for start, after, shapes, assigned, devices in world(size, on_meshes.keras_steps, kind):
        assert devices == [f"cpu:{i}" for i in range(size)] and assigned == 0
        assert shapes["model/up/kernel"] == ((8, 8) if kind == "model" else (8, 16)) and shapes[
            "model/embed/embeddings"
        ] == (12, 8)
        for path, value in after_alone.items():
            np.testing.assert_array_equal(start[path], start_alone[path])
            assert not np.array_equal(value, start_alone[path])
            np.testing.assert_allclose(after[path], value, rtol=1e-5, atol=1e-6, err_msg=path)
