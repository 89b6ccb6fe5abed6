"""The traps in other libraries that anyqlora/on_torch/_compat.py and its users step round: each still there, and not in
ours.

When one of these `still` tests fails, the library has mended it: take our way round out.
"""

import inspect
import logging
import os
import subprocess
import sys

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes import functional as F
from bitsandbytes.nn.modules import has_avx512bf16
from peft import LoraConfig, get_peft_model
from peft.utils.integrations import dequantize_module_weight
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from anyqlora.config.schema import TrainConfig
from anyqlora.models.lora_targets import NOT_LOADABLE
from anyqlora.on_torch._compat import (
    attention_implementation,
    attention_replaced,
    block_classes,
    float32_patterns,
    int8_matmul,
    keep_weights_as_packed,
    multiply_each_,
    softmax_backward,
    version_of,
    without_compiling,
)
from anyqlora.on_torch.quantizers.bnb import Nf4
from tests.support import tiny_models

AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"


def imported(*lines):
    """Modules that a process of its own has after these lines."""
    code = "\n".join(["import sys", *lines, "print(*sys.modules, sep='\\n')"])
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


COMPILER = "torch._inductor.compile_fx"


@pytest.mark.slow
def test_bitsandbytes_still_imports_the_compiler():
    assert COMPILER in imported("import bitsandbytes")


@pytest.mark.distributed
def test_ours_does_not_import_the_compiler():
    ours = imported(
        "import torch",
        "compile = torch.compile",
        "import anyqlora.on_torch.assembly.build",
        "assert torch.compile is compile",
    )
    assert COMPILER not in ours
    assert "bitsandbytes" in ours


def test_what_is_compiled_later_is_compiled():
    """torch.compile's switch is read at each call: only what is handed to it within stays as it is."""
    with without_compiling():
        plain = torch.compile(is_compiled)
    later = torch.compile(is_compiled, backend="eager")
    assert plain is is_compiled and "TORCHDYNAMO_DISABLE" not in os.environ
    assert (plain(torch.ones(2)).tolist(), later(torch.ones(2)).tolist()) == ([0.0, 0.0], [1.0, 1.0])


def test_whoever_switched_compiling_off_finds_it_off(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with without_compiling():
        pass
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"


def is_compiled(x):
    return x if torch.compiler.is_compiling() else 0 * x


def test_bitsandbytes_still_reports_what_nobody_can_mend(caplog):
    """That int8 computes in float16, at every product (and on some CPUs, when it is imported, that the hub has no
    kernel for it)."""
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    assert logger.level == logging.getLogger("bitsandbytes.backends.cpu.ops").level == logging.ERROR
    layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0).to("cpu").eval()
    layer(torch.ones(2, 64))
    assert not caplog.records
    logger.setLevel(logging.WARNING)
    try:
        layer(torch.ones(2, 64))
    finally:
        logger.setLevel(logging.ERROR)
    assert any("float16" in record.getMessage() for record in caplog.records)


def gradient_after_evaluation(module):
    """|gradient of the input after an evaluation forward - before it| / |before|."""
    torch.manual_seed(0)
    x = torch.randn(4, module.in_features, requires_grad=True)

    def gradient():
        x.grad = None
        module.train()(x).square().sum().backward()
        return x.grad.clone() if x.grad is not None else torch.zeros_like(x)

    before = gradient()
    with torch.no_grad():
        module.eval()(x.detach())
    return ((gradient() - before).norm() / before.norm()).item()


def four_bit_linear():
    torch.manual_seed(1)
    module = bnb.nn.Linear4bit(256, 256, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    return module.to("cpu")


@pytest.mark.skipif(not has_avx512bf16(), reason="this CPU has no AVX512-BF16: bitsandbytes does not repack here")
def test_bitsandbytes_still_loses_gradients_after_evaluation():
    assert gradient_after_evaluation(four_bit_linear()) > 0.01


def test_ours_keeps_gradients_after_evaluation():
    assert gradient_after_evaluation(keep_weights_as_packed(four_bit_linear())) == 0


@pytest.mark.parametrize("quantizer", ["nf4", "fp4"])
def test_no_layer_of_a_built_model_may_repack(quantizer, tmp_path, monkeypatch):
    """What bitsandbytes asks before it repacks is off on every layer, on a CPU that says it has AVX512-BF16 too."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base"), quantizer=quantizer)
    layers = [module for module in started.model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert len(layers) == 14
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)
    assert four_bit_linear().support_avx512bf16_for_cpu  # and would be on


@pytest.mark.skipif(not AVX512, reason="the kernel that miscounts is the AVX-512 one")
def test_bitsandbytes_still_miscounts_blocks():
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    codes, state = F.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert (F.dequantize_4bit(codes, state) - weight).norm() > 0.2 * weight.norm()
    assert (Nf4.unpack(codes, state) - weight).norm() < 0.1 * weight.norm()


def bnb_layers():
    """bitsandbytes' own layers [64, 64], of 4 and 8 bits, on the CPU."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    four = bnb.nn.Linear4bit(64, 64, quant_type="nf4")
    codes, state = F.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    four.weight = bnb.nn.Params4bit(codes, requires_grad=False, quant_state=state, bnb_quantized=True, module=four)
    eight = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0)
    codes, scales, _ = F.int8_vectorwise_quant(weight.half())
    eight.weight = bnb.nn.Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
    return {"4 bits": four, "8 bits": eight}


@pytest.mark.parametrize("kind", ["4 bits", "8 bits"])
def test_peft_still_replaces_the_weight_it_dequantizes(kind):
    """Ours keep it: DoRA in tests/on_torch/parallel/test_strategies.py."""
    layer = bnb_layers()[kind]
    before = layer.weight
    dequantize_module_weight(layer)
    assert layer.weight is not before


def test_dora_still_loses_int8_scales():
    """The second training forward of PEFT's DoRA over bitsandbytes' own int8 layer on a CPU."""
    layer = bnb_layers()["8 bits"]
    model = get_peft_model(torch.nn.ModuleDict({"a": layer}), LoraConfig(target_modules=["a"], use_dora=True))
    dora = model.base_model.model["a"]
    dora(torch.randn(2, 64))
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'unsqueeze'"):
        dora(torch.randn(2, 64))


def test_rows_of_whole_blocks_are_left_to_bitsandbytes():
    with torch.device("meta"):
        whole, cut = (Nf4(TrainConfig(), torch.float32).empty_layer(torch.nn.Linear(n, 40)) for n in (128, 96))
    assert type(whole).forward is bnb.nn.Linear4bit.forward
    assert type(cut).forward is not bnb.nn.Linear4bit.forward


def test_peft_still_reroutes_dense_layers_of_mixtures(tmp_path):
    """An adapter on a dense layer of a Qwen3-MoE (huggingface/peft#3711): PEFT takes the names for the experts' and
    puts none there."""
    directory = tiny_models.make(
        tmp_path, "qwen3_moe", mlp_only_layers=[0], num_experts=4, moe_intermediate_size=48, head_dim=16
    )
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert NOT_LOADABLE["qwen3_moe"] >= {"gate_proj", "up_proj", "down_proj"}
    dense = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    peft = get_peft_model(model, LoraConfig(target_modules=dense, task_type="CAUSAL_LM"))
    assert not any(
        name.startswith("base_model.model.model.layers.0.mlp.gate_proj.lora_A") for name, _ in peft.named_modules()
    )


def test_layers_that_peft_cannot_load_an_adapter_on():
    """The data that plans and runs go by, against the tables of the installed PEFT, which has no public ones."""
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
    from peft.utils import transformers_weight_conversion as conversion

    mixtures = {
        model_type: set(conversion._MOE_TARGET_MODULE_MAPPING[family])
        for model_type, family in conversion._MODEL_TO_CONVERSION_PATTERN.items()
        if family in conversion._MOE_TARGET_MODULE_MAPPING and model_type.islower()  # the others are names of classes
    }

    def refused(model_type):
        model = torch.nn.Module()
        model.config = PretrainedConfig()
        model.config.model_type = model_type
        for name in ("conv1d", "in_proj", "out_proj", "q_proj"):
            try:
                _check_lora_target_modules_mamba(LoraConfig(), model, name)
            except ValueError:
                yield name

    mamba = {model_type: set(refused(model_type)) for model_type in CONFIG_MAPPING}
    assert mixtures | {model_type: names for model_type, names in mamba.items() if names} == NOT_LOADABLE


def test_peft_still_refuses_mamba_out_proj(tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4))
    assert NOT_LOADABLE["mamba"] == {"conv1d", "out_proj"}
    with pytest.raises(ValueError, match="incompatible with Mamba"):
        get_peft_model(model, LoraConfig(target_modules=["out_proj"], task_type="CAUSAL_LM"))


def test_torch_still_keeps_softmax_backward_private():
    p, of_p = torch.randn(3, 5).softmax(-1), torch.randn(3, 5)
    torch.testing.assert_close(softmax_backward(of_p, p), p * (of_p - (of_p * p).sum(-1, keepdim=True)))
    assert not hasattr(torch.nn.functional, "softmax_backward") and not hasattr(torch, "softmax_backward")


def test_torch_still_has_private_names_only_for_what_we_use():
    a = torch.full((32, 64), 10, dtype=torch.int8)  # of 100 two products of AVX2 would leave 16 bits
    assert (a @ a.T).dtype == torch.int8  # and so its sums overflow
    sums = torch.empty(32, 32, dtype=torch.int32)
    assert (int8_matmul(a, a.T, out=sums) == 64 * 10 * 10).all()
    assert not any(hasattr(torch, name) for name in ("int_mm", "foreach_mul_"))
    assert "out" not in inspect.signature(torch.nn.functional.scaled_mm).parameters
    x, y = torch.ones(3), torch.ones(2)
    before = version_of(x)
    multiply_each_([x, y], 2.0)
    assert version_of(x) > before and x.tolist() == [2.0] * 3 and y.tolist() == [2.0] * 2
    assert not hasattr(x, "version")


def test_transformers_still_hides_which_attention_runs(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_models.make(tmp_path))
    assert attention_implementation(model.config) == "sdpa"
    with attention_replaced(model.config, "eager"):
        assert attention_implementation(model.config) == "eager"
    assert attention_implementation(model.config) == "sdpa"
    names = ("attn_implementation", "get_attn_implementation", "attention_implementation")
    assert not any(hasattr(owner, name) for owner in (model, model.config) for name in names)


def test_transformers_still_hides_its_lists_of_modules(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_models.make(tmp_path, "llama"))
    assert block_classes(model) == {"LlamaDecoderLayer"} and float32_patterns(model) == set()
    assert block_classes(torch.nn.Linear(1, 1)) is None
    lists = ("no_split_modules", "keep_in_fp32_modules", "keep_in_fp32_modules_strict", "tied_weights_keys")
    assert not any(hasattr(model, name) for name in lists)
    assert all(hasattr(model, f"_{name}") for name in lists)
