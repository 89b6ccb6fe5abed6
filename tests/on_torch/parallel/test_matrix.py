"""Every cell of what is trained x strategy x precision x kernels x packing on two processes: refused by name before
anything is read, or one process's losses and adapter. The cells come from the registry's rows.
"""

import pytest

from anyqlora.core import registry
from anyqlora.core.errors import UsageError
from anyqlora.planning import cells as matrix_cells
from anyqlora.planning.backends import BackendManager
from anyqlora.planning.capabilities import CAPABILITIES
from anyqlora.planning.cells import USUAL, Cell
from tests.support import tiny_models
from tests.support.equality import planned
from tests.support.matrix import Matrix

CPU = CAPABILITIES["cpu"]
KINDS = {matrix_cells.label(kind): kind for kind in matrix_cells.strategies(CPU)}
TRAINED = {matrix_cells.label(what): what for what in matrix_cells.trained(CPU)}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Widths that tensor parallelism splits into whole blocks of 64."""
    return tiny_models.make(
        tmp_path_factory.mktemp("base"),
        "llama",
        vocab_size=128,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        tie_word_embeddings=True,
    )


def cell(what, kind, **ways) -> Cell:
    return Cell(TRAINED[what], KINDS[kind], **{**USUAL, **ways})


SAMPLE = [  # each strategy, each train type, each quantizer, precision, set of kernels, and packing
    cell("qlora", "ddp", precision="bf16", kernels="auto", packing=True),
    cell("custom_qlora", "ddp"),
    cell("custom_lora", "accelerate"),
    cell("bnb_dora", "fsdp full_shard", packing=True),
    cell("full", "fsdp shard_grad_op"),
    cell("qlora", "fsdp hybrid_full_shard", precision="fp16_autocast"),
    cell("fp4 + rslora", "fsdp hybrid_shard_grad_op"),
    cell("int8 + dora", "deepspeed 0"),
    cell("lora", "deepspeed 1", packing=True),
    cell("nf4 + pissa", "deepspeed 2"),
    cell("bnb_dora", "deepspeed 3", precision="bf16_autocast"),
    cell("qlora", "tp", packing=True),
    cell("affine4 + loftq", "ddp", precision="bf16_buffers_autocast"),
    cell("int8 + lora", "deepspeed 3"),  # refused
    cell("bnb_dora", "tp"),  # refused
]


def test_the_sample_has_each_strategy_and_each_train_type():
    assert {one.strategy for one in SAMPLE} == set(KINDS.values())
    presets = {what for what in TRAINED.values() if what[0][0] == "train_type"}
    assert presets <= {one.trained for one in SAMPLE}


def test_a_sample_of_cells_equals_one_process_or_is_refused(base):
    found = Matrix(base, SAMPLE)
    print(found.said())
    assert not found.failed, found.said()
    assert len(found.refused) == 2 and len(found.distances) == len(SAMPLE) - 2


@pytest.mark.slow
@pytest.mark.parametrize("what", TRAINED)
@pytest.mark.parametrize("precision", registry.PRECISIONS)
def test_every_cell_equals_one_process_or_is_refused(precision, what, base):
    """On every strategy, set of kernels that is here, with packing and without."""
    here = "auto", *BackendManager("cpu").report.kernels
    every = (one for one in matrix_cells.cells(CPU) if one.kernels in here)
    of = [one for one in every if (one.trained, one.precision) == (TRAINED[what], precision)]
    found = Matrix(base, of)
    print("MATRIX", precision, what, found.said())
    assert not found.failed, found.said()
    assert len(found.refused) + len(found.distances) == len(of)


def test_what_a_backend_does_not_offer_is_refused_by_name(base):
    for settings in matrix_cells.others(CPU):
        with pytest.raises(UsageError) as refusal:
            planned(base, 2, **settings)
        assert any(
            f"{value!r}" in str(refusal.value) or str(value) in str(refusal.value) for value in settings.values()
        )


@pytest.mark.slow
def test_a_cell_is_refused_where_one_of_the_two_tables_refuses_it():
    """What `backends --cells` prints of qlora, and of float32, is all that there is to know."""
    usual = dict(TRAINED)["qlora"]
    for one in matrix_cells.cells(CPU):
        what = Cell(one.trained, one.strategy, **USUAL)
        way = Cell(usual, one.strategy, one.precision, one.kernels, one.packing)
        assert bool(matrix_cells.refusal(one)) == bool(matrix_cells.refusal(what) or matrix_cells.refusal(way)), one
