"""Mixtures of experts: their weights are quantized, stay so through forward and backward, or the model is refused by
name.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.on_torch.quantizers.bnb import Int8, Nf4
from anyqlora.on_torch.quantizers.experts import PackedExperts
from tests.support import tiny_models

OTHERS = {  # architectures whose experts are written otherwise than in the matrix
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0],
        "head_dim": 16,
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 80,
        "intermediate_size": 48,
        "head_dim": 16,
        "interleave_moe_layer_step": 1,
    },
    "jetmoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "kv_channels": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
    },
}
REFUSED = {
    "zamba": (
        {"mamba_d_state": 4, "attention_head_dim": 32, "pad_token_id": 0, "layer_types": ["linear_attention"] * 2},
        r"x_proj_weight \[2, 12, 64\].* would stay unquantized",
    ),
    "deepseek_v4": (
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "head_dim": 32,
            "q_lora_rank": 24,
            "o_groups": 2,
            "o_lora_rank": 16,
            "pad_token_id": 0,
        },
        "would stay unquantized",
    ),
    "inkling_text": (
        {
            "n_routed_experts": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "pad_token_id": 0,
            "head_dim": 16,
        },
        "cannot run with quantized experts",
    ),
}


def packed(quantizer, weights):
    experts = PackedExperts("experts", weights.shape, quantizer)
    experts.fill(weights)
    return experts


@pytest.mark.parametrize("kind", [Nf4, Int8])
@pytest.mark.parametrize("way", ["linear", "matmul", "transposed"])
def test_products_and_gradients_are_those_of_the_dequantized_weights(kind, way):
    """The reference is the same product with a plain weight."""
    torch.manual_seed(0)
    experts = packed(kind(TrainConfig(), torch.float32), torch.randn(3, 40, 96))
    forms = {
        "linear": lambda x, w: F.linear(x, w, torch.ones(40)),
        "matmul": lambda x, w: x @ w,
        "transposed": lambda x, w: x @ w.T,
    }
    for expert in torch.arange(3):
        plain = experts.dequantize(int(expert))
        x = torch.randn(5, 40 if way == "matmul" else 96, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        ours, theirs = forms[way](x, experts[expert]), forms[way](y, plain)
        assert torch.equal(ours, theirs)
        gradient = torch.randn_like(ours)
        ours.backward(gradient)
        theirs.backward(gradient)
        torch.testing.assert_close(x.grad, y.grad)


def test_each_expert_is_quantized_by_itself():
    weights = torch.randn(3, 40, 96, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1e-3, 1.0, 1e3]
    ).reshape(3, 1, 1)
    experts = packed(Nf4(TrainConfig(), torch.float32), weights)
    for number in range(3):
        assert (experts.dequantize(number) - weights[number]).norm() < 0.1 * weights[number].norm()
        assert torch.equal(experts.codes[number], Nf4(TrainConfig(), torch.float32).pack(weights[number])[0])
    assert experts.codes.numel() == weights.numel() // 2


def test_nothing_dequantized_is_kept_for_backward(tmp_path):
    """What autograd saves between forward and backward holds no tensor of an expert's or a linear layer's float
    shape.
    """
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", "mixtral"))
    shapes = {tuple(value.shape[-2:]) for name, value in started.held().items()}
    shapes |= {shape[::-1] for shape in shapes}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
    ):
        started.loss(started.run.stream[0][0])
    assert len(kept) > 50
    assert not shapes & set(kept)


def test_under_autocast_products_are_in_its_dtype():
    experts = packed(Nf4(TrainConfig(), torch.bfloat16), torch.randn(2, 40, 96))
    x = torch.randn(5, 96, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = F.linear(x, experts[0])
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    assert torch.equal(out, F.linear(x.bfloat16(), experts.dequantize(0)))


@pytest.mark.parametrize("quantizer", ["nf4", "int8"])
def test_an_expert_that_no_token_chooses(quantizer, tmp_path):
    """All tokens of the batch go to two of eight experts; step, save and reload are as ever."""
    directory = tiny_models.make(tmp_path / "base", "olmoe", num_experts=8)
    started = tiny_models.Started(tmp_path, directory, quantizer=quantizer)
    routers = [module for name, module in started.model.named_modules() if name.endswith("mlp.gate")]
    for router in routers:
        router.weight.data.zero_()  # equal logits: the first two experts get every token
    touched, packed = [], [module for module in started.model.modules() if isinstance(module, PackedExperts)]
    for experts in packed:
        original = experts.dequantize
        experts.dequantize = lambda number, original=original: touched.append(number) or original(number)
    started.step()
    assert len(set(touched)) == 2
    for experts in packed:
        del experts.dequantize
    reference = tiny_models.plain(directory, started.held(), started.finish())
    for name, module in reference.named_modules():
        if name.endswith("mlp.gate"):
            module.weight.data.zero_()
    ids = torch.arange(5, 35).reshape(2, 15) * 7 % 500
    with torch.no_grad():
        theirs = reference(input_ids=ids).logits
    torch.testing.assert_close(
        started.logits(ids, training=quantizer == "int8"), theirs, rtol=1e-4, atol=2e-5 * float(theirs.abs().max())
    )


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_mixtures(architecture, tmp_path):
    """As in the matrix: the reference is transformers' model with PEFT's adapter on the same dequantized weights."""
    directory = tiny_models.make(tmp_path / "base", architecture, **OTHERS[architecture])
    started = tiny_models.Started(tmp_path, directory)
    assert any(isinstance(module, PackedExperts) for module in started.model.modules())
    started.step()
    ids = torch.arange(5, 35).reshape(2, 15) * 7 % 500
    reference = tiny_models.plain(directory, started.held(), started.finish())
    with torch.no_grad():
        theirs = reference(input_ids=ids).logits
    torch.testing.assert_close(started.logits(ids), theirs, rtol=1e-4, atol=2e-5 * float(theirs.abs().max()))


def test_adapters_never_go_on_experts(tmp_path):
    directory = tiny_models.make(tmp_path / "base", "mixtral")
    for quantizer in ("nf4", "none"):
        started = tiny_models.Started(tmp_path / quantizer, directory, quantizer=quantizer)
        assert {name.split(".lora_")[0].rpartition(".")[2] for name in started.built.trainable} == {
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
        }
        assert not started.built.adapter.adapter_config()["target_parameters"]


def test_a_dense_layer_that_peft_takes_for_an_expert_is_refused(tmp_path):
    directory = tiny_models.make(tmp_path / "base", "qwen3_moe", **OTHERS["qwen3_moe"])
    with pytest.raises(UsageError, match="PEFT cannot load an adapter on model.layers.0.mlp.gate_proj"):
        tiny_models.Started(tmp_path, directory, lora_target_modules="q_proj,gate_proj")


@pytest.mark.parametrize("architecture", REFUSED)
def test_weights_that_cannot_be_quantized_are_refused_by_name(architecture, tmp_path):
    changes, message = REFUSED[architecture]
    directory = tiny_models.make(tmp_path / "base", architecture, **changes)
    with pytest.raises(NotSupported, match=message):
        tiny_models.Started(tmp_path, directory)


def test_experts_left_in_sixteen_bits_would_be_seen(tmp_path):
    """The check after building is independent of the reading: it looks for float parameters on experts modules."""
    from anyqlora.core.errors import RunError
    from anyqlora.on_torch.assembly.checks import assert_in_effect

    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", "mixtral"))
    experts = next(module for name, module in started.model.named_modules() if name.endswith("mlp.experts"))
    del experts._modules["down_proj"]
    experts.down_proj = nn.Parameter(torch.zeros(4, 64, 112), requires_grad=False)
    with pytest.raises(RunError, match="experts' weights are not quantized"):
        assert_in_effect(started.model, started.built.trainable, started.built.quantizer)
