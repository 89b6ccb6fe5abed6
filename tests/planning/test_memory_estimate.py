"""The memory model against independent counts: transformers' parameters, bitsandbytes' bytes, the tensors that autograd
keeps.
"""

import itertools
import tempfile
import weakref
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from anyqlora.config.schema import TrainConfig
from anyqlora.core.terminal import format_bytes
from anyqlora.data import stream
from anyqlora.models import architectures
from anyqlora.on_torch.assembly.build import build
from anyqlora.on_torch.quantizers.bnb import Fp4, Int8, Nf4
from anyqlora.on_torch.runtime import Runtime
from anyqlora.planning import memory
from anyqlora.planning.backends import BackendManager
from tests.support.paths import MODELS

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
    "vocab_size": 320,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
SPECIAL = {
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "qwen3": {"head_dim": 16},
    "mixtral": EXPERTS,
    "olmoe": EXPERTS,
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 48, "head_dim": 16},
    "qwen2_moe": {**EXPERTS, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80},
}
ROWS, LENGTH = 2, 96


def model_config(model_type, **sizes):
    about = {**SIZES, **SPECIAL.get(model_type, {}), **sizes, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if model_type == "gpt_neox":
        about.pop("num_key_value_heads")
    return AutoConfig.for_model(model_type, **about)


@pytest.mark.parametrize("model_type", architectures.FAMILIES)
def test_shapes_have_the_parameters_of_transformers_model(model_type):
    config = model_config(model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = architectures.model_shape(config.to_dict())
    assert shapes.block == type(model.base_model.layers[0]).__name__
    linears = [module.weight for module in model.base_model.modules() if isinstance(module, torch.nn.Linear)]
    linears += [parameter for parameter in model.parameters() if parameter.dim() == 3]  # all experts of a layer
    assert shapes.linear_parameters == sum(weight.numel() for weight in linears)
    assert shapes.parameters == sum(parameter.numel() for parameter in model.parameters())
    for linear in shapes.linears:  # each name is the end of a module's or a parameter's name
        assert any(name.removesuffix(".weight").endswith(linear.name) for name, _ in model.named_parameters()), (
            linear.name
        )


def test_known_models_have_their_known_size():
    described = architectures.read_config(MODELS / "llama-3-8b")
    assert architectures.model_shape(described).parameters == 8_030_261_248  # the model card of Meta-Llama-3-8B
    text = architectures.model_shape({"model_type": "gemma3", "text_config": {**model_config("gemma3_text").to_dict()}})
    assert (text.model_type, text.path) == ("gemma3", "model.language_model.layers")
    alone = replace(text, model_type="gemma3_text", path="model.layers")
    assert alone == architectures.model_shape(model_config("gemma3_text").to_dict())
    assert architectures.model_shape({"model_type": "wholly_new"}) is None


@pytest.mark.parametrize("billions", [0.01, 0.1, 0.5, 1, 3, 7, 8, 13, 34, 70, 405])
def test_a_llama_of_so_many_billions_has_them(billions):
    assert architectures.llama_of(billions).parameters == pytest.approx(billions * 1e9, rel=0.12)


@pytest.mark.parametrize(("kind", "double_quant"), [(Nf4, True), (Nf4, False), (Fp4, True), (Int8, True)])
def test_quantized_bytes_are_those_of_bitsandbytes(kind, double_quant):
    linear = torch.nn.Linear(512, 384, bias=False)
    quantizer = kind(TrainConfig(double_quant=double_quant), torch.float32)
    module = quantizer.empty_layer(linear)
    weight = quantizer.quantize_into(module, linear.weight)
    tensors = [weight.data]
    if kind is Int8:
        tensors.append(weight.SCB)
    else:
        state = weight.quant_state
        tensors += [state.absmax] + ([state.state2.absmax] if double_quant else [])
    config = TrainConfig(quantizer=kind.__name__.lower(), double_quant=double_quant)
    held = memory.quantized_bytes(architectures.LinearShape("x", 384, 512), config)
    assert held == sum(t.numel() * t.element_size() for t in tensors)


# ------------------------------------------------------------------------- what autograd keeps, counted on a real model


@cache
def directory(model_type):
    config = model_config(model_type, hidden_size=128, intermediate_size=384, vocab_size=500, num_hidden_layers=2)
    torch.manual_seed(0)
    path = tempfile.mkdtemp()
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


class Kept:
    """One tensor that autograd keeps, for as long as it does."""

    def __init__(self, tensor):
        self.tensor = tensor


def kept_bytes(model, loss):
    """Bytes of the distinct storages that the graph of loss() holds, without parameters and buffers."""
    held = [
        t.untyped_storage() for t in [*model.parameters(), *model.buffers()]
    ]  # int8 frees some, whose place another may take
    own = {storage.data_ptr() for storage in held}
    kept = weakref.WeakSet()

    def pack(tensor):
        box = Kept(tensor)
        kept.add(box)
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        value = loss()
    storages = {box.tensor.untyped_storage().data_ptr(): box.tensor.untyped_storage().nbytes() for box in kept}
    assert value.requires_grad
    return sum(size for pointer, size in storages.items() if pointer not in own)


def activations(model_type, **settings):
    """(predicted, counted) bytes of one micro-batch's activations."""
    default = {
        "model_name": directory(model_type),
        "dataset": "none",
        "quantizer": "nf4",
        "adapter": "lora",
        "precision": "fp32",
        "batch_size": ROWS,
        "context_length": LENGTH,
        "lora_dropout": 0.0,
        "use_gradient_checkpointing": False,
    }
    config = TrainConfig(**{**default, **settings})
    plan = BackendManager("cpu").plan(config)
    runtime = Runtime(plan)
    built = build(plan.config, runtime)
    ids = np.random.default_rng(0).integers(3, 500, (ROWS, LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape).copy()
    batch = stream.Batch(
        ids=ids, targets=ids.copy(), positions=positions, segments=np.zeros_like(ids), rows=("x:1", "x:2")
    )
    shapes = architectures.model_shape(architectures.read_config(architectures.model_directory(plan.config)))
    with runtime.autocast():
        counted = kept_bytes(built.model, lambda: built.loss(built.model, batch, runtime.device))
    becomes_a_gradient = (
        4 * shapes.vocab * shapes.hidden if plan.adapter == "full" else 0
    )  # the head's, computed in the forward pass
    return memory.activation_bytes(shapes, plan.config), counted - becomes_a_gradient


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16"},
        {"precision": "fp16_autocast"},
        {"precision": "bf16_buffers_autocast"},
        {"quantizer": "none"},
        {"quantizer": "none", "precision": "bf16_autocast"},
        {"quantizer": "int8", "precision": "bf16"},
        {"lora_dropout": 0.1},
        {"lora_dropout": 0.1, "precision": "bf16_autocast"},
        {"use_gradient_checkpointing": True},
        {"use_gradient_checkpointing": True, "precision": "bf16"},
        {"use_gradient_checkpointing": True, "checkpointed_layers": 1},
        {"use_gradient_checkpointing": True, "checkpointed_layers": 1, "precision": "bf16"},
        {"adapter": "dora"},
        {"adapter": "dora", "precision": "bf16"},
        {"adapter": "full", "quantizer": "none"},
        {"adapter": "full", "quantizer": "none", "precision": "bf16"},
        {"lora_target_modules": "q_proj,v_proj"},
        {"lora_rank": 128},
    ],
    ids=str,
)
def test_activations_of_a_llama_are_what_autograd_keeps(settings):
    predicted, counted = activations("llama", **settings)
    is_first_special = (
        "lora_dropout" in settings or settings.get("adapter") == "full"
    )  # the first layer keeps fewer masks, and more norms
    assert predicted == pytest.approx(counted, rel=0.06 if is_first_special else 0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "starcoder2", "gpt_neox"])
def test_activations_of_other_architectures_are_what_autograd_keeps(model_type, precision):
    predicted, counted = activations(model_type, precision=precision)
    assert predicted == pytest.approx(counted, rel=0.04)


@pytest.mark.parametrize(
    ("stated", "names"),
    [
        ("all", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        ("default", "q_proj v_proj"),
        ("up_proj, o_proj", "o_proj up_proj"),
        (r".*\.mlp\..*_proj", "gate_proj up_proj down_proj"),
        (r"model\.layers\.\d+\.self_attn\.[qk]_proj", "q_proj k_proj"),
    ],
)
def test_targets_are_those_that_lora_target_modules_names(stated, names):
    shapes = architectures.llama_of(1)
    targets = memory.targets(shapes, TrainConfig(lora_target_modules=stated))
    assert [[linear.name.rpartition(".")[2] for linear in layer] for layer in targets] == [
        names.split()
    ] * shapes.layers


def test_layers_without_adapters_keep_nothing_for_them():
    """A layer's part is a tenth of what ten layers with adapters keep more than none."""
    shapes = architectures.llama_of(0.5)
    settings = {"quantizer": "nf4", "adapter": "lora", "precision": "fp32", "context_length": 64, "batch_size": 1}
    one, five, ten = (
        memory.activation_bytes(
            shapes, TrainConfig(**settings, use_gradient_checkpointing=False, lora_target_modules=stated)
        )
        for stated in (r".*\.9\..*\.down_proj", r".*\.[0-4]\..*\.down_proj", "down_proj")
    )
    assert shapes.layers == 10 and ten - one > 9 * 64 * 4270 * 4
    assert five - one == pytest.approx((ten - one) * 4 / 9, rel=1e-4)


# ---------------------------------------------------------------------------------------------------------- the moments


def estimate(**settings):
    default = {
        "model_name": "x",
        "quantizer": "nf4",
        "adapter": "lora",
        "precision": "bf16",
        "batch_size": 2,
        "context_length": 1024,
        "use_gradient_checkpointing": False,
    }
    config = TrainConfig(**{**default, **settings})
    return memory.estimate(architectures.llama_of(8), config)


@pytest.mark.parametrize(
    ("settings", "counted"),
    [
        ({}, False),
        ({"fused_linear_cross_entropy": False}, True),
        ({"fused_lora": False}, True),
        ({"lora_target_modules": "default"}, True),
        ({"lora_rank": 3}, True),
        ({"precision": "fp32"}, False),
    ],
)
def test_what_onednn_compiles_is_counted_where_it_has_something_to_compile(settings, counted):
    """Every product of a layer is C's where all its linears are fused, of an even rank; and the head's is."""
    found = estimate(
        **{
            "backend": "cpu",
            "kernels": "native",
            "fused_lora": True,
            "fused_linear_cross_entropy": True,
            "lora_target_modules": "all",
            **settings,
        }
    )
    parts = found.moments["backward"]
    beside = parts["heap and libraries"] - round(
        memory.HOLES * sum(size for part, size in parts.items() if part != "heap and libraries")
    )
    assert beside == (memory.COMPILED * memory.OF_PRODUCT if counted else memory.LIBRARIES)


def test_every_lever_moves_memory_the_way_it_should():
    base = estimate().total
    for smaller in (
        {"batch_size": 1},
        {"context_length": 512},
        {"use_gradient_checkpointing": True},
        {"lora_dropout": 0.0},
        {"use_activation_cpu_offload": True},
        {"lora_rank": 4},
        {"optimizer": "sgd"},
        {"optimizer": "adamw_8bit"},
    ):
        assert estimate(**smaller).total < base, smaller
    for larger in (
        {"quantizer": "int8"},
        {"quantizer": "none"},
        {"double_quant": False},
        {"precision": "fp32"},
        {"adapter": "dora"},
    ):
        assert estimate(**larger).total > base, larger
    for larger in ({"gradient_accumulation_steps": 2}, {"logits_chunk_tokens": 0}):
        assert estimate(**larger).needed("loss") > estimate().needed("loss"), larger
    assert estimate(eval_dataset="x", eval_batch_size=512).peak == "evaluation"
    assert (
        estimate(adapter="full", quantizer="none", precision="fp32", batch_size=1, context_length=16).peak == "update"
    )


def test_the_more_layers_recompute_the_less_is_kept_and_the_last_of_them_is_alone_at_work():
    needed = [estimate(use_gradient_checkpointing=n > 0, checkpointed_layers=n) for n in range(33)]
    assert all(
        more.needed("loss") < less.needed("loss") and more.needed("backward") < less.needed("backward")
        for less, more in itertools.pairwise(needed)
    )
    assert all(
        more.needed("recomputation") > less.needed("recomputation") for less, more in itertools.pairwise(needed[1:])
    )
    assert needed[0].needed("recomputation") == 0
    assert [needed[n].needed("recomputation") > needed[n].needed("backward") for n in (1, 16, 32)] == [
        False,
        False,
        True,
    ]
    assert (
        needed[32].moments
        == estimate(use_gradient_checkpointing=True).moments
        == estimate(use_gradient_checkpointing=True, checkpointed_layers=99).moments
    )


def test_bytes_are_shown_with_units():
    assert [format_bytes(n) for n in (5, 2048, 3 << 20, int(4.5 * 2**30), 2**41)] == [
        "5 B",
        "2.0 KiB",
        "3.0 MiB",
        "4.5 GiB",
        "2048.0 GiB",
    ]


def test_a_mixture_keeps_more_products_and_the_plan_has_them():
    """Each expert has tokens of its own number, so its products have more shapes."""
    found = {
        name: memory.products(architectures.model_shape(model_config(name).to_dict())) for name in ("llama", "mixtral")
    }
    assert found == {"llama": 128, "mixtral": 512}
