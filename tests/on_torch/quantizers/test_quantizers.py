"""Quantized weights against bitsandbytes' own, and against a plain linear layer on what they dequantize to."""

from concurrent.futures import ThreadPoolExecutor

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes import functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import BitsAndBytesConfig

from anyqlora.__main__ import main
from anyqlora.config.schema import TrainConfig
from anyqlora.core import registry
from anyqlora.models.architectures import DEMO_BASE
from anyqlora.on_torch._compat import keep_weights_as_packed
from anyqlora.on_torch.kernels.cpu import bindings, nf4_quantize
from anyqlora.on_torch.loading import writer
from anyqlora.on_torch.quantizers import bnb as quantizers
from tests.support import tiny_models

BUILT = registry.offered(registry.QUANTIZERS, "torch")
SHAPES = [(64, 64), (96, 40), (3, 5), (257, 129)]  # blocks of 64 cross rows, and the last one is not full


def quantizer(name, dtype=torch.float32, double_quant=True):
    config = TrainConfig(double_quant=double_quant, affine_group_size=32)  # of which rows of 96 are whole
    return registry.quantizer(name).load()(config, dtype)


def filled(name, weight, bias=None, dtype=torch.float32):
    """(quantizer, module with `weight` in it), as the loader makes it."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=dtype)
    made = quantizer(name, dtype)
    module = made.empty_layer(linear)
    module.weight = made.quantize_into(module, weight)
    if bias is not None:
        module.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    return made, module.train()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("double_quant", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_in_pieces_equal_bitsandbytes_on_the_whole(kind, double_quant, shape, monkeypatch):
    monkeypatch.setattr(quantizers, "CHUNK", 256)  # several pieces, a last one that is not full
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, state = quantizer(kind, double_quant=double_quant).pack(weight)
    expected, theirs = F.quantize_4bit(weight, blocksize=64, compress_statistics=double_quant, quant_type=kind)
    assert torch.equal(codes, expected)
    ours, theirs = state.as_dict(packed=False), theirs.as_dict(packed=False)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value) if torch.is_tensor(value) else ours[key] == value or key == "dtype", key


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eight_bits_in_pieces_equal_bitsandbytes_on_the_whole(shape, monkeypatch):
    monkeypatch.setattr(quantizers, "CHUNK", 256)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = quantizer("int8").pack(weight)
    expected, expected_scales, _ = F.int8_vectorwise_quant(weight.half())
    assert torch.equal(codes, expected)
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", BUILT)
def test_forward_and_backward_are_those_of_the_dequantized_weight(name, dtype):
    """The contract of every row of the table: the module is a linear layer on `dequantize(module)`, which stays what it
    is.
    """
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(40, 96, generator=generator), torch.randn(40, generator=generator)
    made, module = filled(name, weight, bias, dtype)
    assert isinstance(module, made.module_type)
    packed = made.codes(module)
    assert packed.numel() * packed.element_size() * 8 == weight.numel() * (
        made.bits if made.bits < 16 else 8 * dtype.itemsize
    )
    before = made.dequantize(module)
    assert before.dtype == dtype
    assert (before.float() - weight).norm() < 0.15 * weight.norm()
    x = torch.randn(2, 7, 96, generator=generator).to(dtype).requires_grad_()
    y = x.detach().clone().requires_grad_()
    out, expected = module(x), nn.functional.linear(y, before, bias.to(dtype))
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.1}
    torch.testing.assert_close(out, expected, **close)
    gradient = torch.randn(out.shape, generator=generator).to(dtype)
    out.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(x.grad, y.grad, **close)
    assert torch.equal(made.dequantize(module), before)  # bitsandbytes moves int8's scales at the first forward
    assert not any(p.requires_grad for p in module.parameters() if p is module.weight and made.bits < 16)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_module_equals_bitsandbytes_own(kind):
    weight = torch.randn(
        40, 128, generator=torch.Generator().manual_seed(2)
    )  # rows of whole blocks: see test_compat for others
    _, ours = filled(kind, weight)
    theirs = bnb.nn.Linear4bit(128, 40, bias=False, compute_dtype=torch.float32, quant_type=kind)
    theirs.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type=kind, module=theirs)
    theirs = theirs.to("cpu")
    x = torch.randn(5, 128)
    assert torch.equal(ours(x), theirs(x))


def test_codes_do_not_depend_on_the_precision():
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    for name in ("nf4", "fp4", "int8"):
        codes = {
            dtype: quantizer(name, dtype).pack(weight.float())[0]
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
        assert all(torch.equal(c, codes[torch.float32]) for c in codes.values())


@pytest.mark.parametrize(
    "name, options",
    [
        (
            "nf4",
            {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": True,
                "bnb_4bit_compute_dtype": torch.float32,
            },
        ),
        (
            "fp4",
            {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "fp4",
                "bnb_4bit_use_double_quant": True,
                "bnb_4bit_compute_dtype": torch.float32,
            },
        ),
        ("int8", {"load_in_8bit": True}),
    ],
)
def test_the_whole_model_equals_bitsandbytes_own_load(name, options, tmp_path):
    """The reference is transformers' load_in_4bit and load_in_8bit of the same directory, with the adapter read by
    PEFT.
    """
    directory = tiny_models.make(tmp_path / "base", "qwen2", intermediate_size=128)
    started = tiny_models.Started(tmp_path, directory, quantizer=name, max_steps=1)
    started.step()
    ids = torch.arange(5, 35).reshape(2, 15) * 7 % 500
    reference = tiny_models.plain(
        directory, adapter=started.finish(), quantization_config=BitsAndBytesConfig(**options)
    )
    for module in reference.modules():
        keep_weights_as_packed(module)  # else the reference computes in bf16 where the CPU has AVX512-BF16
    with torch.no_grad():
        torch.testing.assert_close(started.logits(ids), reference(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    with ThreadPoolExecutor(1) as another:
        assert another.submit(torch.get_num_threads).result() == torch.get_num_threads() == request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["affine4", "nf4"])
def test_quantize_says_how_many_tensors_are_as_they_were(kind, tmp_path, capsys):
    """The reference are the tensors that have the same bytes in both files."""
    assert main(["quantize", "demo", "--to", kind, "--out", str(tmp_path / "out")]) == 0
    before, after = load_file(DEMO_BASE / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    same = [
        name
        for name, value in before.items()
        if name in after and torch.equal(value, after[name].to(value.dtype)) and after[name].dtype == value.dtype
    ]
    assert 0 < len(same) < len(before)
    assert (
        f"{len(before) - len(same)} linear weights in {kind}, {len(same)} other tensors as they were"
        in capsys.readouterr().out
    )


in_c = pytest.mark.skipif(not bindings.available("quantize_4bit"), reason="no C compiler is here")
WAYS = [pytest.param(False, id="by table"), pytest.param(True, id="in C", marks=in_c)]


@pytest.mark.parametrize("is_native", WAYS)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_codes_are_bitsandbytes_own_to_the_bit(kind, dtype, is_native, threads, monkeypatch):
    """Random weights of every size, and all borders between codes with their neighbours on either side; the reference
    is bitsandbytes'.
    """
    monkeypatch.setattr(nf4_quantize, "PIECE", 1 << 12)
    generator = torch.Generator().manual_seed(0)
    weight = (
        torch.randn(1 << 16, generator=generator)
        * torch.logspace(-30, 30, 1 << 16)[torch.randperm(1 << 16, generator=generator)]
    )
    values = F.get_4bit_type(kind, device="cpu").sort().values
    borders = (values[1:] + values[:-1]) / 2
    special = torch.stack(
        [borders, borders.nextafter(torch.tensor(2.0)), borders.nextafter(torch.tensor(-2.0))]
    ).flatten()
    special = torch.cat([special, values, torch.tensor([1.0, 0.0, -0.0])])  # the largest is 1, so that the scale is
    blocks = torch.cat([weight, torch.nn.functional.pad(special, (0, 64)), torch.zeros(64)]).to(dtype)
    blocks = blocks[: len(blocks) // 64 * 64]
    if dtype == torch.float16:
        blocks = blocks.clamp(-65504, 65504)  # not all of them are finite in it
    monkeypatch.setattr(nf4_quantize, "reference", None)  # neither asks bitsandbytes
    codes, scales = nf4_quantize.quantize_4bit(blocks, kind, is_native)
    monkeypatch.undo()
    expected, expected_scales = nf4_quantize.reference(blocks, kind)
    assert torch.equal(codes, expected) and torch.equal(scales, expected_scales)


@in_c
def test_who_runs_on_native_kernels_quantizes_by_them(monkeypatch):
    monkeypatch.setattr(nf4_quantize, "_fill", None)
    made, weight = quantizer("nf4"), torch.randn(64, 96, generator=torch.Generator().manual_seed(4))
    assert made.set_kernels("native", torch.device("cpu")) == []
    codes, state = made.pack(weight)
    expected, theirs = F.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    assert torch.equal(codes, expected) and torch.equal(state.absmax, theirs.absmax)
    for config in (
        TrainConfig(model_name="m", dataset="d", quantizer="nf4"),
        TrainConfig(model_name="m", dataset="d", quantizer="nf4", kernels="portable"),
    ):
        assert writer.packed_config(config).is_native == (config.kernels != "portable")


@pytest.mark.parametrize("is_native", WAYS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_weights_that_are_not_finite_are_left_to_bitsandbytes(value, is_native, threads, monkeypatch):
    monkeypatch.setattr(nf4_quantize, "PIECE", 128)
    weight = torch.randn(256)
    weight[70] = value
    ours, theirs = nf4_quantize.quantize_4bit(weight, "nf4", is_native), nf4_quantize.reference(weight, "nf4")
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=0, equal_nan=True)
