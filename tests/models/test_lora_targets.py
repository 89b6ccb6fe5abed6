"""lora_target_modules: what the plan counts is what PEFT attaches, and what the run refuses, the plan refuses in the
same words.
"""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from transformers import AutoModelForCausalLM

from anyqlora.config.resolve import resolve
from anyqlora.core.errors import UsageError
from anyqlora.models import lora_targets
from anyqlora.models.architectures import FAMILIES, model_shape
from anyqlora.on_torch.adapters.lora import Dora, Lora
from anyqlora.planning import memory
from anyqlora.planning.backends import BackendManager
from tests.support import tiny_models

MODELS = {
    **{family: (family, {"num_hidden_layers": 3}) for family in FAMILIES},
    "smollm3": ("smollm3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 48, "num_hidden_layers": 3}),
    "qwen2_moe, every second layer": (
        "qwen2_moe",
        {"num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2},
    ),
    "gemma3 with eyes": (
        "gemma3",
        {
            "text_config": tiny_models.config_of("gemma3_text", num_hidden_layers=3).to_dict(),
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 56, "patch_size": 14,
            },
        },
    ),
}  # fmt: skip
STATED = [
    "all",
    "default",
    "q_proj,v_proj",
    "query_key_value, dense",
    "qkv_proj",
    "down_proj",
    "gate_proj",
    "shared_expert_gate",
    "layers.1.self_attn.q_proj",
    "model.layers.0.self_attn.q_proj,o_proj",
    r".*\.[12]\..*(up|o|gate_up)_proj",
    r".*layers\.2[0-9].*",
    r".*shared_expert\..*_proj",
    r"gpt_neox\.layers\.(0|2)\.mlp\.dense_.*",
    "(q",
    "q_prj",
    "lm_head",
]


def model_of(config):
    """transformers' own, without values."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """(transformers' configuration, a directory with it) of a tiny model."""
    config = tiny_models.config_of(MODELS[request.param][0], **MODELS[request.param][1])
    directory = tmp_path_factory.mktemp("model")
    config.save_pretrained(directory)
    return config, directory


@pytest.mark.parametrize("stated", STATED)
def test_the_plan_counts_what_peft_attaches_and_refuses_what_the_run_refuses(stated, model):
    transformers_config, directory = model
    stated_by = {"model_name": str(directory), "dataset": "demo", "lora_target_modules": stated, "lora_rank": "4"}
    config = resolve({**stated_by, "adapter": "lora", "quantizer": "none"}, environ={})
    adapter, here = Lora(config, torch.device("cpu")), model_of(transformers_config)
    try:
        adapter.select_targets(here)
    except UsageError as refused:
        with pytest.raises(UsageError) as planned:
            BackendManager("cpu").plan(config)
        assert (planned.value.message, planned.value.where, planned.value.cure) == (
            refused.message,
            refused.where,
            refused.cure,
        )
        return
    attached = sum(p.numel() for p in adapter.attach(here).parameters() if p.requires_grad)
    shapes = model_shape(json.loads((directory / "config.json").read_text()))
    assert memory.adapter_parameters(shapes, BackendManager("cpu").plan(config).config) == attached > 0

    has_eyes, is_rerouted = "language_model" in shapes.path, shapes.model_type in lora_targets.NOT_LOADABLE
    if not has_eyes and not is_rerouted:  # else PEFT alone goes on its eyes as well, or on experts
        spelled = {"all": "all-linear", "default": None}.get(stated, stated if "*" in stated else stated.split(","))
        if isinstance(spelled, list):
            spelled = [name.strip() for name in spelled]
        peft = LoraConfig(r=4, target_modules=spelled, task_type="CAUSAL_LM")
        alone = get_peft_model(model_of(transformers_config), peft)
        assert sum(p.numel() for p in alone.parameters() if p.requires_grad) == attached


@pytest.mark.parametrize(
    ("stated", "count"),
    [
        (r"model\.layers\.(0|1)\.self_attn\.q_proj", 2),
        (r"model\.layers\.2[0-9]\.mlp\.up_proj", 10),
        ("layers.3.self_attn.q_proj", 1),
        ("q_proj", 32),
    ],
)
def test_every_layer_is_counted_by_its_own_name(stated, count):
    config = tiny_models.config_of("llama", num_hidden_layers=32)
    plan = resolve(
        {"model_name": "demo", "dataset": "demo", "lora_target_modules": stated, "adapter": "dora"}, environ={}
    )
    adapter, model = Dora(plan, torch.device("cpu")), model_of(config)
    adapter.select_targets(model)
    assert len(adapter.chosen) == count
    attached = sum(p.numel() for p in adapter.attach(model).parameters() if p.requires_grad)
    assert memory.adapter_parameters(model_shape(config.to_dict()), plan) == attached


def test_the_defaults_are_those_of_the_installed_peft():
    ours = {
        model_type: names if "\\" in names else names.split(",")
        for model_type, names in lora_targets.PEFT_DEFAULTS.items()
    }
    assert ours == TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING


def test_a_default_that_is_a_regex_is_taken_as_one():
    layers = [f"model.language_model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
    chosen = lora_targets.select_targets("default", "gemma4", [*layers, "model.vision_tower.layers.0.q_proj"])
    assert chosen == {layers[0], layers[2]}


@pytest.mark.parametrize(
    ("stated", "message"), [("default", "PEFT has no default for gpt_oss models"), ("(q", "not a regex")]
)
def test_what_no_model_can_have_is_refused_where_layers_are_unknown_too(stated, message, tmp_path):
    tiny_models.config_of("gpt_oss").save_pretrained(tmp_path)
    config = resolve({"model_name": str(tmp_path), "dataset": "demo", "lora_target_modules": stated}, environ={})
    with pytest.raises(UsageError, match=message):
        BackendManager("cpu").plan(config)
