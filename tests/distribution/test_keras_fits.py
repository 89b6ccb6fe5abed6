"""Keras's fit, evaluate, predict and train_on_batch under its DataParallel and ModelParallel on real gloo processes.

Reference: Keras alone, in one process, on the same rows.
"""

import numpy as np
import pytest
import torch

from anyqlora.testing import world
from tests.support import keras_fits

pytest.importorskip("keras")
MESHES = [("data", 2), ("model", 2)]


def assert_equal(found, alone):
    """Every value of every cell within 1e-6, or that times the size of the values."""
    assert found.keys() == alone.keys()
    for cell, values in alone.items():
        assert not isinstance(values, str), f"alone, {cell}: {values}"
        assert not isinstance(found[cell], str), f"{cell}: {found[cell]}"
        assert found[cell].keys() == values.keys()
        for name, value in values.items():
            scale = max(1.0, float(np.abs(value).max()))
            np.testing.assert_allclose(found[cell][name], value, rtol=0, atol=1e-6 * scale, err_msg=f"{cell} {name}")


def alone(function, *arguments):
    (found,) = world(1, function, None, *arguments)
    return found


@pytest.fixture(scope="module")
def fits_alone():
    return alone(keras_fits.fits)


@pytest.mark.parametrize("kind, size", [("data", 1), ("data", 2), pytest.param("both", 4, marks=pytest.mark.slow)])
def test_fit_evaluate_and_predict_are_those_of_one_process(fits_alone, kind, size):
    """Arrays, a DataLoader, a generator and a PyDataset whose last batch is smaller; shuffled rows; BatchNormalization;
    a metric with state.
    """
    for found in world(size, keras_fits.fits, kind):
        assert_equal(found, fits_alone)


def test_rows_that_are_shared_out_before_are_put_together():
    """distribute_dataset, auto_shard_dataset=False, and the methods on one batch; and processes that were not seeded
    alike, which begin with process 0's states.
    """
    forms, seeds = alone(keras_fits.data_forms), alone(keras_fits.unseeded)
    for kind, size in MESHES:
        for found in world(size, keras_fits.data_forms, kind):
            assert_equal(found, forms)
    for found in world(2, keras_fits.unseeded, "data"):
        assert_equal(found, seeds)


def test_models_of_ones_own_and_their_checkpoints(tmp_path):
    """A train_step of one's own with add_loss and rows that meet rows; several inputs, outputs and masks; AUC and F1;
    ModelCheckpoint and CSVLogger, whose files process 0 writes, and what is read from them.
    """
    found_alone = alone(keras_fits.own_models, tmp_path)
    for found in world(2, keras_fits.own_models, "data", tmp_path):
        assert_equal(found, found_alone)


def test_options_of_fit():
    """Validation, weights, clipping, callbacks, regularizers, dropout: its masks are those of one process."""
    found_alone = alone(keras_fits.options)
    for found in world(2, keras_fits.options, "data"):
        assert_equal(found, found_alone)


def test_what_cannot_be_right_is_refused():
    first, second = world(2, keras_fits.refusals)
    said = {
        "early": "model/up/kernel was made before the distribution was set",
        "other_rows": "the batch of process 1 is not that of the others",
        "ends_early": "the data of process 1 ended before that of process 0",
        "fails": "process 1 failed while it read its data",
        "other_counts": "processes have 2, 1 batches",
        "own_rows": "rows, and the others' have 8, 7",
        "unset": "lies on a mesh, and no distribution is set",
        "compiled_step": "jit_compile does not distribute",
        "backup": "BackupAndRestore writes the same files on every process",
        "torch_module": "the torch module Linear in a Keras model does not distribute",
        "one_batch": "the batch of process 1 is not that of the others",
    }
    assert said.keys() == first[0].keys()
    for name, words in said.items():
        for rank, errors in enumerate((first[0], second[0])):
            expected = "the disk is gone" if (name, rank) == ("fails", 1) else words
            assert expected in str(errors[name]), name
    assert first[1] == second[1] == [0, 1]  # process 1's callback stopped both after two batches
    np.testing.assert_array_equal(first[2], second[2])
    assert first[4] == second[4] == [4, 7]  # of batches of 8 and 7 rows: half, and all where they cannot be split
    if not torch.cuda.is_available():
        assert first[3]["gpu"] == [] and first[3]["gpus"] == 0
    assert bool(first[3]["mps"]) == torch.backends.mps.is_available()


@pytest.mark.slow
@pytest.mark.parametrize("kind, size", [*MESHES, ("both", 4)])
@pytest.mark.parametrize("name", ["fits", "data_forms", "options", "optimizers", "layered", "unseeded"])
def test_every_layer_optimizer_and_option(name, kind, size):
    found_alone = alone(getattr(keras_fits, name))
    for found in world(size, getattr(keras_fits, name), kind, timeout=1200):
        assert_equal(found, found_alone)
