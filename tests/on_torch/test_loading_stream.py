"""Reading weights: every linear layer is quantized, nothing else is, and neither precision nor shards change a code."""

import subprocess
import sys

import bitsandbytes as bnb
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, FalconConfig
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.llama4.modeling_llama4 import Llama4Router

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import UsageError
from anyqlora.on_torch.linears import float32_modules, is_linear, linears, text_linears
from anyqlora.on_torch.loading.stream import (
    LoadPolicy,
    QuantizeOp,
    StreamingQuantizer,
    _StreamConfig,
    exact_dtype,
    load_streamed,
)
from anyqlora.on_torch.quantizers.bnb import Nf4
from tests.support import tiny_models
from tests.support.paths import ROOT


def nf4(directory, dtype=torch.float32):
    quantizer = Nf4(TrainConfig(), dtype)
    return load_streamed(
        str(directory),
        LoadPolicy(quantizer, lambda name, module, weight: quantizer.quantize_into(module, weight), lambda model: None),
        dtype=dtype,
        device=torch.device("cpu"),
    )


def codes(model):
    return {name: module.weight.data for name, module in model.named_modules() if isinstance(module, bnb.nn.Linear4bit)}


@pytest.mark.parametrize("tied", [True, False])
def test_linear_layers_are_packed_and_the_rest_is_not(tied, tmp_path):
    model = nf4(tiny_models.make(tmp_path, "qwen2", tie_word_embeddings=tied), torch.bfloat16)
    assert len(codes(model)) == 14
    assert type(model.lm_head) is nn.Linear and (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    others = {name: p for name, p in model.named_parameters() if p.dtype != torch.uint8}
    assert {p.dtype for p in others.values()} == {torch.bfloat16}
    assert all(
        "norm" in name or "bias" in name or name in ("model.embed_tokens.weight", "lm_head.weight") for name in others
    )


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_depend_on_the_files_alone(stored, tmp_path):
    """Not on the precision, and not on how many shards there are; the reference is bitsandbytes' quantization of each
    whole tensor.
    """
    directory = tiny_models.make(tmp_path / "one", "llama", dtype=stored)
    shards = tiny_models.make(tmp_path / "shards", "llama", dtype=stored, max_shard_size="40KB")
    assert len(list(shards.glob("*.safetensors"))) > 5
    found = [codes(nf4(path, dtype)) for path in (directory, shards) for dtype in (torch.float32, torch.bfloat16)]
    tensors = load_file(directory / "model.safetensors")
    for name, value in found[0].items():
        expected, _ = bnb.functional.quantize_4bit(tensors[f"{name}.weight"].float(), blocksize=64, quant_type="nf4")
        assert torch.equal(value, expected)
        assert all(torch.equal(value, other[name]) for other in found)


def test_tensors_are_read_in_bf16_only_where_that_is_exact(tmp_path):
    wide, narrow = tiny_models.make(tmp_path / "wide"), tiny_models.make(tmp_path / "narrow", dtype=torch.bfloat16)
    assert (
        exact_dtype(wide, torch.bfloat16)
        == exact_dtype(narrow, torch.float32)
        == exact_dtype(narrow, torch.float16)
        == torch.float32
    )
    assert exact_dtype(narrow, torch.bfloat16) == torch.bfloat16


def test_square_weights_of_gpt2_are_turned_too(tmp_path):
    """GPT-2 keeps [in, out], which a square weight's shape does not tell."""
    directory = tiny_models.make(tmp_path, "gpt2")
    weight = AutoModelForCausalLM.from_pretrained(directory).transformer.h[0].attn.c_proj.weight.detach()
    module = nf4(directory).transformer.h[0].attn.c_proj
    assert weight.shape == (64, 64)
    assert (Nf4.unpack(module.weight.data, module.weight.quant_state) - weight.T).norm() < 0.1 * weight.norm()


def test_weights_do_not_change_with_their_files(tmp_path):
    directory = tiny_models.make(tmp_path)
    model = nf4(directory)
    before = {name: p.clone() for name, p in model.named_parameters()}
    file = directory / "model.safetensors"
    size = file.stat().st_size
    with open(file, "r+b") as opened:
        opened.seek(size // 2)
        opened.write(b"\xff" * (size - size // 2))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_weight_of_another_shape_is_refused(tmp_path):
    directory = tiny_models.make(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(64, 112)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UsageError, match=r"up_proj.weight has shape \[64, 112\] in the files and \[112, 64\] in the model"
    ):
        nf4(directory)


def test_a_gpu_would_reserve_the_packed_size(tmp_path):
    """transformers asks how many bytes each parameter will take, and takes them all before loading."""
    directory = tiny_models.make(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    stream = StreamingQuantizer(
        _StreamConfig(LoadPolicy(Nf4(TrainConfig(), torch.float32), None, lambda model: None), torch.bfloat16),
        pre_quantized=False,
    )
    stream._process_model_before_weight_loading(model)
    size = {name: stream.param_element_size(model, name, p) for name, p in model.named_parameters()}
    assert size["model.layers.0.mlp.up_proj.weight"] == 0.5
    assert size["model.embed_tokens.weight"] == size["model.layers.0.self_attn.q_proj.bias"] == 2


def test_what_counts_as_a_linear_layer():
    """A subclass with a forward of its own may compute anything: Llama 4's router returns scores."""
    assert is_linear(nn.Linear(2, 2)) and is_linear(FalconLinear(2, 2))
    assert (
        not is_linear(Llama4Router(AutoConfig.for_model("llama4_text")))
        and not is_linear(nn.Conv1d(2, 2, 1))
        and not is_linear(nn.Embedding(2, 2))
    )


def test_falcon_is_quantized(tmp_path):
    config = FalconConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, alibi=False)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    assert len(codes(nf4(tmp_path))) == len(linears(model)) == 4


def test_towers_of_other_senses_take_no_adapter():
    with torch.device("meta"):
        small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = AutoConfig.for_model(
            "gemma3",
            text_config={**small, "vocab_size": 64, "num_key_value_heads": 1, "head_dim": 32},
            vision_config={**small, "image_size": 28, "patch_size": 14},
        )
        model = AutoModelForCausalLM.from_config(config)
    assert any("vision_tower" in name for name in linears(model))
    assert text_linears(model) and all("language_model" in name for name in text_linears(model))


def test_parameters_that_an_architecture_keeps_in_float32():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(
                "deepseek_v3",
                **{
                    **tiny_models.SHAPE,
                    "n_routed_experts": 4,
                    "moe_intermediate_size": 48,
                    "first_k_dense_replace": 1,
                    "num_key_value_heads": 4,
                },
            )
        )
    kept = [name for name, _ in [*model.named_parameters(), *model.named_buffers()] if float32_modules(model, name)]
    assert kept and all(name.endswith("e_score_correction_bias") for name in kept)


HOLES = """
import contextlib, sys
import numpy
from anyqlora.on_torch.memory.malloc import return_freed_pages

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

def grown(around):
    before = anonymous()
    with around:
        blocks = [numpy.ones(1 << n) for n in range(14, 18) for _ in range(32)]  # 128 KiB to 1 MiB
        kept = blocks[::4]
        full = anonymous() - before
        del blocks
        return (anonymous() - before) / full

grown(contextlib.nullcontext())  # glibc's own threshold has risen by now
print(grown(contextlib.nullcontext()), grown(return_freed_pages()))
"""


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_memory_leaves_the_process():
    """Every fourth of many blocks stays: the holes do too without `return_freed_pages`, and not with it."""
    out = subprocess.run([sys.executable, "-c", HOLES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    without, with_it = map(float, out.split())
    assert without > 0.5 > 0.35 > with_it


def test_a_weight_of_whole_numbers_is_not_packed():
    """transformers 5.17 casts a weight to the type of the parameter that it is for: to whole numbers, which are 0,
    where that is packed.
    """
    stream = StreamingQuantizer(_StreamConfig(LoadPolicy(None, lambda *given: pytest.fail("it was packed"), None)))
    stream.directory = "somewhere"
    with pytest.raises(UsageError, match="somewhere: model.q_proj.weight comes as int32"):
        QuantizeOp(stream).quantize("model.q_proj.weight", torch.zeros(2, 2, dtype=torch.int32))
