"""Strategy tp on gloo processes against one process: the same rows, the same adapter."""

import json

import numpy as np
import pytest

from anyqlora.config.resolve import resolve
from anyqlora.core.errors import UsageError
from anyqlora.models.architectures import COLUMNS, FAMILIES, ROWS, model_shape
from anyqlora.planning.backends import BackendManager
from anyqlora.planning.mesh import from_file, mesh_axes
from anyqlora.testing import world
from tests.support import steps_on_ranks, tiny_models

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}  # slices of whole blocks
STEPS = [2, 1]


def mostly_slow(cases, *quick):
    """The names of `cases`; all but `quick` ones are marked slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in cases]


BOUND = {"norm": 1e-5, "adapter": 1e-3}  # with single quantization; measured 1e-7 and 3e-6


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random Llama with grouped queries and biases in attention."""
    return str(tiny_models.make(tmp_path_factory.mktemp("base"), **SHAPE))


@pytest.fixture(scope="module")
def alone(base):
    (found,) = world(1, steps_on_ranks.trained, {"model_name": base})
    return found


@pytest.mark.parametrize("mesh", [pytest.param("model=2", marks=pytest.mark.slow), "model=2,batch=2"])
def test_five_steps_equal_one_process(base, alone, mesh):
    """Micro-batches [3, 1, 4, 2, 3]; the gathered adapter is the same bytes on all ranks, and moments are whole too."""
    ranks = world(4 if "batch" in mesh else 2, steps_on_ranks.trained, {"model_name": base, "mesh": mesh})
    zero = {name: np.zeros_like(value) for name, value in alone["moments"].items()}
    for number, rank in enumerate(ranks):
        assert rank["data"] == (number // 2, len(ranks) // 2)
        np.testing.assert_allclose(rank["norms"], alone["norms"], rtol=BOUND["norm"])
        assert steps_on_ranks.distance(alone["adapter"], rank["adapter"], alone["start"]) < BOUND["adapter"]
        assert bool(rank["gathered"]) == bool(rank["moments"]) == (number == 0)
        for name, value in ranks[0]["adapter"].items():
            assert value.tobytes() == rank["adapter"][name].tobytes()
            np.testing.assert_array_equal(rank["start"][name], alone["start"][name])
    assert steps_on_ranks.distance(alone["moments"], ranks[0]["moments"], zero) < BOUND["adapter"]
    assert all(value.tobytes() == ranks[0]["adapter"][name].tobytes() for name, value in ranks[0]["gathered"].items())
    losses = np.sum([rank["losses"] for rank in ranks[::2]], axis=0)  # of the batch axis
    np.testing.assert_allclose(losses, alone["losses"], rtol=1e-5)


FILES = {
    "as the default": r"""
model\.layers\.\d+\.self_attn\.(q|k|v)_proj\.weight: [model, null]
model\.layers\.\d+\.self_attn\.o_proj\.weight: [null, model]
model\.layers\.\d+\.mlp\.(gate|up)_proj\.weight: [model, null]
model\.layers\.\d+\.mlp\.down_proj\.weight: [null, model]
""",
    "some alone": r"""# one layer's attention stays whole, by an exact name; the rest of it and half of the MLP, too
model.layers.0.self_attn.q_proj.weight: [null, null]
.*\.self_attn\.[qkv]_proj\.weight: [null, model]
.*\.o_proj\.weight: [model, null]
.*\.down_proj\.weight: [null, model]
""",
}


@pytest.mark.parametrize("layout", mostly_slow(FILES, "some alone"))
def test_any_layout_file_equals_one_process(base, tmp_path, layout):
    path = tmp_path / "layout.yaml"
    path.write_text(FILES[layout])
    for norm, adapter in world(2, steps_on_ranks.compared, {"model_name": base}, STEPS, "model=2", str(path)):
        assert norm < BOUND["norm"] and adapter < BOUND["adapter"]


VARIANTS = {
    "dropout": {"lora_dropout": 0.3},
    "dropout by process": {  # the fast paths of one process draw their masks otherwise
        "lora_dropout": 0.3,
        "dropout_masks": "process",
        "fused_lora": False,
        "padding_free": False,
    },
    "checkpointing": {"use_gradient_checkpointing": True},
    "reentrant checkpointing": {"use_gradient_checkpointing": True, "reentrant_checkpointing": True},
    "unquantized": {"quantizer": "none"},
    "rslora on some": {"adapter": "rslora", "lora_target_modules": "q_proj,down_proj", "lora_rank": 3},
    "sgd": {"optimizer": "sgd", "lr": 0.1},
}


@pytest.mark.parametrize("variant", mostly_slow(VARIANTS, "dropout", "reentrant checkpointing"))
def test_variants_equal_one_process(base, variant):
    for norm, adapter in world(2, steps_on_ranks.compared, {"model_name": base, **VARIANTS[variant]}, STEPS):
        assert norm < BOUND["norm"] and adapter < BOUND["adapter"]


@pytest.mark.slow
def test_the_sliced_rank_of_a_ragged_adapter_equals_one_process(base):
    """Rank 3 is not shared evenly by two processes along the batch axis."""
    for norm, adapter in world(
        4, steps_on_ranks.compared, {"model_name": base, "lora_rank": 3}, STEPS, "batch=2,model=2"
    ):
        assert norm < BOUND["norm"] and adapter < BOUND["adapter"]


COARSER = {
    "double quantization": {"double_quant": True},
    "bf16": {"precision": "bf16"},
    "bf16 autocast": {"precision": "bf16_autocast"},
}


@pytest.mark.parametrize("arithmetic", mostly_slow(COARSER, "double quantization"))
def test_coarser_arithmetic_is_near_one_process(base, arithmetic):
    """Scales of scales are those of slices, and sums in 16 bits are rounded before they are added: near, not equal.

    AdamW's first steps are the sign of the gradient, so the adapter shows it more than the norm does (measured: 4e-4
    and 0.11).
    """
    for norm, adapter in world(2, steps_on_ranks.compared, {"model_name": base, **COARSER[arithmetic]}, STEPS):
        assert norm < 2e-3 and adapter < 0.2


ARCHITECTURES = (
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "granite",
    "smollm3",
    "starcoder2",
    "gpt_neox",
    "mistral",
)


@pytest.mark.parametrize("architecture", mostly_slow(ARCHITECTURES, "phi3"))
def test_architectures_equal_one_process(architecture, tmp_path):
    """Tied embeddings, biases, fused projections, norms over all heads: what the default layout splits and joins."""
    base = tiny_models.make(tmp_path, architecture, **SHAPE)
    for norm, adapter in world(2, steps_on_ranks.compared, {"model_name": str(base)}, STEPS):
        assert norm < BOUND["norm"] and adapter < BOUND["adapter"]


@pytest.mark.slow
def test_tied_embeddings_equal_one_process_on_two_axes(tmp_path):
    base = tiny_models.make(tmp_path, "qwen2", **SHAPE)
    for norm, adapter in world(4, steps_on_ranks.compared, {"model_name": str(base)}, STEPS, "batch=2,model=2"):
        assert norm < BOUND["norm"] and adapter < BOUND["adapter"]


@pytest.mark.parametrize(
    "before, after",
    [
        pytest.param("model=2", "", marks=pytest.mark.slow),
        ("", "batch=2,model=2"),
        pytest.param("batch=2,model=2", "model=2", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_in_another_world(base, alone, before, after):
    """Adapter and moments of three steps, gathered in one world and loaded in another, end where one process ends."""
    size = {"": 1, "model=2": 2, "batch=2,model=2": 4}
    first = world(
        size[before], steps_on_ranks.trained, {"model_name": base, "mesh": before}, steps_on_ranks.COUNTS[:3]
    )[0]
    adapters = world(
        size[after],
        steps_on_ranks.continued,
        {"model_name": base, "mesh": after},
        steps_on_ranks.COUNTS,
        3,
        first["adapter"],
        first["moments"],
    )
    for adapter in adapters:
        assert steps_on_ranks.distance(alone["adapter"], adapter, alone["start"]) < BOUND["adapter"]


@pytest.mark.slow
def test_gradients_travel_along_the_batch_axis_at_boundaries_only(base):
    """And a process holds its part of the packed codes: those of linear layers, all of which are split here."""
    for mesh, size in (("model=2", 2), ("batch=2,model=2", 4)):
        ranks = world(size, steps_on_ranks.watched, {"model_name": base, "mesh": mesh}, [3, 1])
        for seen, codes, layers in ranks:
            reduced = [sum(count for key, count in micro.items() if "reduce_scatter" in key) for micro in seen]
            assert layers == 14
            assert (
                codes * size == 2 * (3 * 128 * 128 + 3 * 128 * 256) // 2
            )  # two layers: q + o are 128 x 128 each, k + v together one more
            # two layers: two sums for what attention and the MLP read (the first layer reads what nothing learns from),
            # five for adapters
            assert [micro["c10d::allreduce_"] for micro in seen] == [2 * (2 + 5) - 1] * 4
            if mesh == "model=2":
                assert reduced == [0, 0, 0, 0]
            else:
                assert reduced[0] == reduced[1] == 0 and reduced[2] == reduced[3] > 0


def test_what_is_not_split_as_planned_is_an_error(base):
    for off, whole in world(2, steps_on_ranks.guarded, {"model_name": base, "mesh": "model=2"}):
        assert "is not on the mesh as planned" in off and "is not split as planned" in whole


# ---------------------------------------------------------------------------------------------------- what is refused


def planned(**settings):
    return BackendManager("cpu").plan(resolve({"dataset": "demo", **settings}, environ={}, origin="test"))


def test_the_plan_resolves_mesh_layout_strategy_and_world_size(base):
    for settings in (
        {"mesh": "batch=2,model=2"},
        {"mesh": "model=2", "world_size": 4},
        {"mesh": "model=2,batch=2", "tensor_layout": "default", "strategy": "tp"},
    ):
        plan = planned(model_name=base, batch_size=2, gradient_accumulation_steps=3, **settings)
        found = (
            plan.strategy,
            plan.world_size,
            plan.config.mesh,
            plan.config.tensor_layout,
            plan.data_processes,
            plan.global_batch,
        )
        assert found == ("tp", 4, "batch=2,model=2", "default", 2, 12)
        assert BackendManager("cpu").plan(plan.config).config == plan.config
    assert planned(model_name=base, strategy="tp", world_size=2).config.mesh == "batch=1,model=2"
    assert planned(model_name=base).strategy == "single"


REFUSED = {
    "mesh=pipe=2": "unknown axis 'pipe'",
    "mesh=batch=2": "needs a model axis",
    "mesh=model=0": "does not say how many",
    "mesh=model=2,model=2": "does not say how many",
    "mesh=batch=2,model=2 world_size=6": "world_size 6 is not divisible into the mesh batch=2,model=2",
    "mesh=model=2 world_size=3": "world_size 3 is not divisible",
    "mesh=model=2 strategy=single": "mesh is for strategy tp",
    "strategy=tp": "needs a model axis",
    "tensor_layout=default": "needs a model axis",
    "mesh=model=2 precision=fp16": "cannot mix the gradients",
    "mesh=model=2 train_type=bnb_dora": "adapter dora with strategy tp",
    "mesh=model=2 adapter=pissa": "adapter pissa with strategy tp",
    "mesh=model=2 bits=8": "quantizer int8 with strategy tp",
    "mesh=model=2 train_type=full": "adapter full with strategy tp",
    "mesh=model=2 optimizer=adamw_8bit": "optimizer adamw_8bit with strategy tp",
    "mesh=model=4": "4 heads and 2 key heads cannot be shared evenly by 4",
    "mesh=model=2 tensor_layout=/nowhere/layout.yaml": "/nowhere/layout.yaml: the layout cannot be read",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_done_is_refused_before_anything_is_loaded(base, flags):
    settings = dict(flag.split("=", 1) for flag in flags.split())
    wide = {"quantizer": "none"} if flags == "mesh=model=4" else {}
    with pytest.raises(UsageError) as caught:
        planned(model_name=base, **settings, **wide)
    assert REFUSED[flags] in str(caught.value) and "cure:" in str(caught.value)


def test_slices_of_part_of_a_block_are_refused(tmp_path):
    base = tiny_models.make(tmp_path, hidden_size=64, intermediate_size=128)
    with pytest.raises(UsageError, match="self_attn.o_proj: 64 / 2 = 32 inputs per process are no multiple of 64"):
        planned(model_name=str(base), mesh="model=2")
    assert planned(model_name=str(base), mesh="model=2", quantizer="none").strategy == "tp"


def test_experts_and_architectures_without_a_plan_are_refused(tmp_path):
    mixture = tiny_models.make(tmp_path / "mixture", "mixtral", **SHAPE)
    with pytest.raises(UsageError, match="experts would stay whole"):
        planned(model_name=str(mixture), mesh="model=2")
    gpt2 = tiny_models.make(tmp_path / "gpt2", "gpt2")
    assert all(
        "no tensor parallel plan for gpt2" in error
        for error in world(2, steps_on_ranks.error_of, {"model_name": str(gpt2), "mesh": "model=2"})
    )
    packed = tiny_models.make(tmp_path / "packed", **SHAPE)
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (packed / "config.json").write_text(json.dumps(config))
    assert all(
        "quantized in the files" in error
        for error in world(2, steps_on_ranks.error_of, {"model_name": str(packed), "mesh": "model=2"})
    )


BAD_FILES = {
    "": ": no map of names to axes",
    "- a\n": ":1: no map",
    "a: [\n": "not YAML",
    "a: [model, null]\nb: model\n": ":2: b: 'model' is not one of",
    "a: [model]\n": ':1: a: ["model"] is not one of',
    "a: [batch, null]\n": ":1:",
    "a: [null, model]\n\na: [model, null]\n": ":3: layout key 'a' is there already",
    "a(: [model, null]\n": ":1: layout key 'a(' is not a regex",
    "a: {x: 1}\n": ":1:",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_bad_layout_file_is_named_with_its_line(tmp_path, text):
    path = tmp_path / "layout.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        from_file(str(path))
    assert str(path) in str(caught.value) and BAD_FILES[text] in str(caught.value) and "cure:" in str(caught.value)


def test_a_layout_that_does_not_fit_the_model_is_refused(base, tmp_path):
    path = tmp_path / "layout.yaml"
    for text, said in (
        (
            ".*up_proj.weight: [model, null]\n.*up_porj.weight: [model, null]\n",
            f"{path}:2: .*up_porj.weight matches no linear layer",
        ),
        (".*up_proj.weight: [null, null]\n", "the layout splits no layer"),
        (".*up_proj.weight: [model, null]\n.*layers.0.*up.*: [null, model]\n", "matches several layout keys"),
    ):
        path.write_text(text)
        errors = world(2, steps_on_ranks.error_of, {"model_name": base, "mesh": "model=2", "tensor_layout": str(path)})
        assert all(said in error for error in errors), errors


def test_axes_are_read_as_they_are_written():
    assert mesh_axes("batch=2, model=4") == {"batch": 2, "model": 4}


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if FAMILIES[name].style != "experts"])
def test_what_the_plan_thinks_of_a_split_is_what_transformers_does(architecture):
    """Reference: base_model_tp_plan of transformers' own configuration class."""
    from transformers import AutoConfig

    from anyqlora.on_torch.parallel.tp_plan import STYLES

    config = AutoConfig.for_model(architecture)
    theirs = {
        name.removeprefix("layers.*."): STYLES[style].along
        for name, style in config.base_model_tp_plan.items()
        if style in STYLES
    }
    ours = {
        linear.name: linear.split for linear in model_shape(config.to_dict()).linears if linear.split in (COLUMNS, ROWS)
    }
    assert ours == theirs
