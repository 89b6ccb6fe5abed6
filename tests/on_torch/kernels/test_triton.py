"""Triton kernels against their definitions and against the modules and libraries whose place they take, in Triton's
interpreter.

On a machine with an NVIDIA GPU (benchmarks/gpu.sh) the same tests run the compiled kernels.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.support import runs, tiny_models
from tests.support.paths import ROOT

pytest.importorskip(
    "triton",
    reason="Triton is not installed: its wheel takes a gigabyte, and torch brings it where it has a GPU for it",
)

import triton
from triton.runtime import interpreter

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import RunError
from anyqlora.on_torch._compat import attention_implementation
from anyqlora.on_torch.assembly.context import BuildContext
from anyqlora.on_torch.assembly.fast_paths import choose_kernels
from anyqlora.on_torch.generate import evaluating
from anyqlora.on_torch.kernels import attention, dropout, fused_lora, reference, swap_modules, varlen
from anyqlora.on_torch.kernels.documents import Documents
from anyqlora.on_torch.kernels.frozen_matmul import FLOAT8, quantize_rows
from anyqlora.on_torch.kernels.gpu import dequantize as dequantizing
from anyqlora.on_torch.kernels.gpu import dropout_lora as dropping
from anyqlora.on_torch.kernels.gpu import float8, rope, swiglu
from anyqlora.on_torch.kernels.gpu import rms_norm as norms
from anyqlora.on_torch.kernels.gpu.dropout_lora import Dropout
from anyqlora.on_torch.kernels.self_check import failure, failure_of_masks
from anyqlora.on_torch.quantizers import bnb
from anyqlora.on_torch.quantizers.bnb import Fp4, Nf4
from anyqlora.on_torch.runtime import Runtime
from tests.support import compiled_kernels

GPU = bool(os.environ.get("TEST_ON_GPU"))
DEVICE = "cuda" if GPU else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDING = {
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
    torch.float32: 2**-22,
}  # of a number; float32: of a sum in another order


@pytest.fixture(autouse=True)
def arithmetic(monkeypatch):
    """Triton's interpreter cuts bfloat16 off where every GPU rounds it to the nearest, and multiplies the bits of
    bfloat16 tiles as integers; float8 that is rounded up to a power of two becomes the one below it.
    """
    if GPU:
        return
    builder = interpreter.interpreter_builder
    cast, convert, dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot

    def rounded(source, kind):
        if source.dtype.scalar.name == "fp32" and kind.scalar.name == "bf16":
            data = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16).numpy()
            return interpreter.TensorHandle(data, kind.scalar)
        return cast(source, kind)

    def rounded_to_8(source, kind, mode):
        if source.dtype.scalar.name != "fp32" or kind.scalar.name != "fp8e4nv":
            return convert(source, kind, mode)
        data = torch.from_numpy(np.ascontiguousarray(source.data)).to(FLOAT8).view(torch.uint8).numpy()
        return interpreter.TensorHandle(data, kind.scalar)

    def multiplied(a, b, *more):
        return dot(
            *(cast(tile, triton.language.float32) if tile.dtype.scalar.name == "bf16" else tile for tile in (a, b)),
            *more,
        )

    monkeypatch.setattr(builder, "cast_impl", rounded)
    monkeypatch.setattr(builder, "create_fp_to_fp", rounded_to_8)
    monkeypatch.setattr(builder, "create_dot", multiplied)


@pytest.mark.skipif(GPU, reason="of the interpreter")
def test_the_interpreter_still_gets_bfloat16_and_float8_wrong(monkeypatch):
    """When this fails, the fixture above can go."""
    monkeypatch.undo()
    one = torch.tensor([1 + 2**-8 + 2**-9])
    out = torch.empty(1, dtype=torch.bfloat16)
    norms._forward[(1,)](one, one, out, torch.empty(1), 1, 0.0, 0.0, LATE=True, WIDTH=1)
    assert one.bfloat16() > out
    ones = torch.ones(1, 8, dtype=torch.bfloat16)
    assert Dropout(torch.zeros(1, dtype=torch.int64), 0).lora_down(ones, ones).item() != 8
    assert float8.quantize_rows(torch.tensor([[float8.MAX, 127.0]]))[0].float()[0, 1] == 64  # 128 is nearest


@pytest.mark.skipif(GPU, reason="there they run")
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(capability, tmp_path):
    """The interpreter runs what a compiler refuses; and exact kernels may not fuse a product with a sum, which would
    round once.
    """
    environ = {**os.environ, "PYTHONPATH": str(Path(str(ROOT / "train.py")).parent), "TRITON_CACHE_DIR": str(tmp_path)}
    environ.pop("TRITON_INTERPRET")
    out = subprocess.run(
        [sys.executable, compiled_kernels.__file__, str(capability), "bf16"],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    exact = [line for line in out.stdout.splitlines() if line.startswith(("bf16 dequantize", "bf16 rotate"))]
    assert len(exact) == 6 and all(" 0 fused multiply-adds" in line for line in exact)
    assert sum(" 0 matrix instructions" not in line for line in out.stdout.splitlines()) == 3  # the products of tiles
    assert (
        max(int(line.split(": ")[1].split()[0]) for line in out.stdout.splitlines() if " bytes shared" in line)
        <= 101_376
    )  # of a GPU of capability 8.6


def some(*shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def near(ours, theirs, roundings=2):
    """Within so many roundings of the larger of each number and a typical one."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    size = theirs.float().abs().clamp(min=theirs.float().square().mean().sqrt())
    assert ((ours.float() - theirs.float()).abs() <= roundings * ROUNDING[theirs.dtype] * size).all()


# --------------------------------------------------------------------------------------------------------------- float8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 96, 1024, 2500])
def test_float8_codes_are_those_of_the_definition(dtype, width):
    x = some(9, width, dtype=dtype, scale=3.0)
    x[0], x[1, 0], x[2, -1], x[3] = 0, torch.nan, -torch.inf, 1e-6
    for columns in (None, some(width, seed=1).abs()):
        (ours, mine), (theirs, others) = float8.quantize_rows(x, columns), quantize_rows(x, FLOAT8, columns)
        torch.testing.assert_close(mine, others, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(ours.view(torch.uint8) & 0x7F, theirs.view(torch.uint8) & 0x7F) and torch.equal(
            ours.float(), theirs.float()
        )


# ------------------------------------------------------------------------------------------------------- dequantization


SHAPES = {
    "square": (64, 64),
    "rows end inside blocks": (37, 96),
    "three axes": (3, 5, 14),
    "more scales than one block": (300, 192),
    "part of a block": (1, 30),
    "Llama-3-8B q": (16, 4096),
    "Llama-3-8B down": (5, 14336),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nested", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("kind", [Nf4, Fp4])
def test_dequantization_is_bitsandbytes_own_bit_for_bit(kind, nested, dtype, shape):
    quantizer = kind(TrainConfig(double_quant=nested), dtype)
    codes, state = quantizer.quantize(some(*shape, scale=0.02))
    buffer = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    ours = dequantizing.dequantize(codes, state, buffer)
    assert ours.data_ptr() == buffer.data_ptr()
    assert torch.equal(ours, dequantizing.reference(codes, state)) and torch.equal(ours, quantizer.unpack(codes, state))
    assert torch.equal(ours, dequantizing.dequantize(codes, state))


def test_a_buffer_that_does_not_fit_is_refused():
    codes, state = Nf4(TrainConfig(), torch.float32).quantize(some(8, 64))
    for wrong in (torch.empty(8, 63), torch.empty(64, 8).T):
        with pytest.raises(ValueError, match="contiguous buffer of 512 numbers"):
            dequantizing.dequantize(codes, state, wrong.to(DEVICE))


# ----------------------------------------------------------------------------------------------- norms, gates, rotation


@pytest.mark.parametrize("width", [8, 64, 96, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [(0.0, False), (1.0, True), (0.0, True)], ids=["Llama", "Gemma", "OLMo 2"])
def test_rms_norm(form, dtype, width):
    found = []
    for norm in (norms.rms_norm, reference.rms_norm):
        x, weight = some(3, 7, width, dtype=dtype).requires_grad_(), some(width, dtype=dtype, seed=1).requires_grad_()
        y = norm(x, weight, 1e-5, *form)
        y.backward(some(3, 7, width, dtype=dtype, seed=2))
        found.append((y.detach(), x.grad, weight.grad))
    (y, grad_x, grad_weight), (y_reference, grad_x_reference, grad_weight_reference) = found
    near(y, y_reference)
    near(grad_x, grad_x_reference, 4)
    near(grad_weight, grad_weight_reference, 21)  # the definition rounds each of the 21 rows' parts and their sum


def test_rms_norm_of_a_frozen_weight_and_of_another_dtype():
    x = some(5, 48, dtype=torch.bfloat16).requires_grad_()
    weight = some(48, seed=1)
    y = norms.rms_norm(x.transpose(0, 1).contiguous().transpose(0, 1), weight, 1e-6)
    near(y, reference.rms_norm(x, weight, 1e-6), 2)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad is not None and weight.grad is None


def test_a_row_of_zeros_has_a_norm():
    assert torch.equal(norms.rms_norm(some(2, 16) * 0, some(16), 1e-6), torch.zeros(2, 16, device=DEVICE))


@pytest.mark.parametrize("shape", [(1,), (2, 3, 100), (5, 1024)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(dtype, shape):
    found = []
    for gating in (swiglu.swiglu, reference.swiglu):
        gate, up = (
            some(*shape, dtype=dtype, scale=4).requires_grad_(),
            some(*shape, dtype=dtype, seed=1).requires_grad_(),
        )
        y = gating(gate, up)
        y.backward(some(*shape, dtype=dtype, seed=2))
        found.append((y.detach(), gate.grad, up.grad))
    for ours, theirs in zip(*found, strict=True):
        near(ours, theirs, 4)


def test_far_gates_are_open_or_shut():
    gate = torch.tensor([-200.0, 200.0, -1e30, 1e30], device=DEVICE, requires_grad=True)
    with np.errstate(over="ignore"):
        y = swiglu.swiglu(gate, torch.ones(4, device=DEVICE))
        y.sum().backward()
    assert y.tolist() == [0.0, 200.0, 0.0, float(torch.tensor(1e30))] and gate.grad.tolist() == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("width", [2, 12, 64])
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2], ids=["one line of positions", "positions of each row"])
@pytest.mark.parametrize("exact", [False, True], ids=["angles of its dtype", "float32 angles"])
def test_rotation_is_its_definition_bit_for_bit(exact, rows, dtype, heads, width):
    cos, sin = (some(rows, 5, width, dtype=torch.float32 if exact else dtype, seed=seed) for seed in (1, 2))
    found = []
    for rotation in (rope.rotate, reference.rotate):
        x = some(2, 5, heads, width, dtype=dtype).requires_grad_()
        y = rotation(x, cos, sin)
        y.backward(some(2, 5, heads, width, dtype=dtype, seed=3))
        found.append((y.detach(), x.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_exact_rotation_by_float32_angles_has_the_bits_of_a_models_own(dtype):
    """A model in float32 under autocast has such, and its own formula, as transformers writes it, rounds what comes
    back part by part.
    """
    cos, sin, weight = (some(1, 5, 12, seed=seed) for seed in (1, 2, 4))
    found = []
    for rotation in (
        swap_modules.kernel_set("exact").rotate,
        lambda x, cos, sin: apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0],
    ):
        x = some(2, 5, 3, 12, dtype=dtype).requires_grad_()
        y = rotation(x, cos, sin)
        (y * weight[:, :, None]).sum().backward()
        found.append((y.detach(), x.grad))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("wrong", [torch.bfloat16, torch.float32], ids=str)
def test_a_kernel_that_turns_wrongly_by_either_angles_is_not_used(wrong, monkeypatch):
    assert failure("triton", torch.device(DEVICE), torch.bfloat16) == ""
    right = rope._launch
    monkeypatch.setattr(
        rope,
        "_launch",
        lambda x, cos, sin, *, is_backward: right(x, cos, cos if cos.dtype == wrong else sin, is_backward=is_backward),
    )
    assert "other numbers" in failure("triton", torch.device(DEVICE), torch.bfloat16)


# ------------------------------------------------------------------------------------------- dropout in LoRA's products


def keys_of(tokens):
    return torch.randint(-(1 << 63), (1 << 63) - 1, (tokens,), generator=torch.Generator().manual_seed(8)).to(DEVICE)


@pytest.mark.parametrize("begin, width", [(0, 96), (0, 1), (6, 130), (7, 70), (3, 9)])
@pytest.mark.parametrize("rate", [0.1, 0.999])
def test_masks_are_those_of_torchs_own_operations(rate, begin, width):
    masks = (dropout.token_mask(keys_of(70), width, rate, begin=begin, kernels=one) for one in ("triton", "portable"))
    assert torch.equal(*masks)
    assert failure_of_masks(torch.device(DEVICE)) == ""


@pytest.mark.parametrize(
    "sizes", [(70, 96, 5), (64, 64, 16), (33, 50, 20), (130, 200, 48), (1, 8, 1), (40, 72, 200)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.9])
def test_products_drop_what_the_definition_drops(rate, dtype, sizes):
    """In each of the three the same; the reference is float64 with the mask of torch's own operations."""
    (m, k, r), keys = sizes, keys_of(sizes[0])
    drop = Dropout(keys, dropout.threshold(rate))
    x, a, middle, to = (
        some(m, k, dtype=dtype),
        some(r, k, dtype=dtype, seed=1),
        some(m, r, dtype=dtype, seed=2),
        some(m, k, dtype=dtype, seed=3),
    )
    kept = dropout.token_mask(keys, k, rate)
    seen = x.double() * kept
    expected = to.double() + middle.double() @ a.double() * kept
    within = 2 * ROUNDING[dtype]
    for ours, theirs in (
        (drop.lora_down(x, a), seen @ a.double().T),
        (drop.lora_weight_grad(middle, x), middle.double().T @ seen),
        (drop.add_lora_input_grad(to, middle, a), expected),
    ):
        assert (ours.double() - theirs).norm() <= within * theirs.norm()
    assert drop.add_lora_input_grad(to, middle, a).data_ptr() == to.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_lora_with_dropout_and_its_gradients(dtype):
    """q, k and v of different widths and ranks; the reference is autograd in float64 with the mask of torch's own
    operations.
    """
    keys = keys_of(70)
    x, ranks, widths = some(2, 35, 48, dtype=dtype), (3, 4, 3), (32, 16, 17)
    weights = [some(width, 48, seed=width, scale=0.1, dtype=dtype) for width in widths]
    factors = [
        some(*shape, seed=sum(shape))
        for rank, width in zip(ranks, widths, strict=True)
        for shape in ((rank, 48), (width, rank))
    ]
    gradients = [some(2, 35, width, seed=width + 1, dtype=dtype) for width in widths]
    mask = dropout.token_mask(keys, 48, 0.25).view(x.shape)

    def run(product, kind, factor_kind):
        learned = [factor.to(factor_kind).requires_grad_() for factor in (x.to(kind), *factors)]
        learned[0] = x.to(kind).requires_grad_()
        layers = [
            fused_lora.LoraLinear(lambda w=w: w.to(kind), None, a, b, 2.0)
            for w, a, b in zip(weights, learned[1::2], learned[2::2], strict=True)
        ]
        out = product(learned[0], layers)
        return [*out, *torch.autograd.grad(out, learned, [g.to(kind) for g in gradients])]

    def reference(x, layers):
        seen = x * mask / (1 - 0.25)
        return tuple(x @ layer.weight().T + layer.scale * seen @ layer.a.T @ layer.b.T for layer in layers)

    by_keys = fused_lora.Dropout(0.25, keys)
    ours = run(lambda x, layers: dropping.lora_linears(x, layers, by_keys), dtype, torch.float32)
    for one, other in zip(ours, run(reference, torch.float64, torch.float64), strict=True):
        assert (one.double() - other).norm() <= 4 * ROUNDING[dtype] * other.norm()


def test_without_dropout_fused_lora_is_the_portable_one():
    x, layer = some(3, 16), fused_lora.LoraLinear(lambda: some(8, 16), None, some(2, 16), some(8, 2), 1.0)
    assert torch.equal(*dropping.lora_linears(x, [layer]), *fused_lora.lora_linears(x, [layer]))


# ---------------------------------------------------------------------------------------------- documents in one launch


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.skipif(not GPU, reason="torch has attention of variable lengths on CUDA only")
def test_attention_within_documents_in_one_launch(window):
    numbers = torch.tensor([[1] * 9 + [2] * 30 + [3] * 25, [1] * 50 + [-1] * 14], device=DEVICE, dtype=torch.int32)
    documents = Documents.read(numbers)
    found = []
    for product in (varlen.attention, attention.reference):
        q, k, v = (
            some(2, heads, 64, 32, seed=seed, dtype=torch.bfloat16).requires_grad_()
            for seed, heads in ((0, 4), (1, 2), (2, 2))
        )
        y = product(q, k, v, scale=0.2, documents=documents, window=window)
        y.backward(some(2, 64, 4, 32, seed=3, dtype=torch.bfloat16))
        found.append((y, q.grad, k.grad, v.grad))
    for ours, theirs in zip(*found, strict=True):
        assert (ours.float() - theirs.float()).norm() <= 2e-2 * theirs.float().norm()


def test_without_it_documents_run_one_by_one_and_that_is_said(tmp_path):
    """On a CPU, which has no attention of variable lengths; with float32 nobody asks for it."""
    directory = tiny_models.make(tmp_path / "base", "llama", dtype=torch.bfloat16)
    notes = {
        precision: tiny_models.Started(
            tmp_path / precision,
            directory,
            train_type="lora",
            kernels="triton",
            precision=precision,
            padding_free=True,
            backend=TINY["backend"],
        ).built.notes
        for precision in ("bf16", "fp32")
    }
    assert notes["fp32"] == [] and (
        GPU or [line.partition(":")[0] for line in notes["bf16"]] == ["attention runs a document at a time"]
    )


# ----------------------------------------------------------------------------------------------------------- whole runs


TINY = {
    "model_name": "demo",
    "dataset": "demo",
    "context_length": 56,
    "batch_size": 1,
    "max_steps": 2,
    "lr": 2e-3,
    "lora_dropout": 0.1,
    "save_steps": 0,
    "backend": "cuda" if GPU else "cpu",
}


SMALL = {"batch_size": 1, "context_length": 56, "backend": TINY["backend"]}


@pytest.fixture
def everywhere(monkeypatch):
    """Our product in every layer, however few the tokens."""
    monkeypatch.setattr(bnb, "MANY", 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", pytest.param("bf16_autocast", marks=pytest.mark.slow)])
def test_a_run_on_exact_kernels_writes_the_same_bytes(precision, tmp_path, everywhere):
    portable, exact = (
        runs.run(tmp_path, kernels, **TINY, precision=precision, kernels=kernels) for kernels in ("portable", "exact")
    )
    assert json.loads((exact / "plan.json").read_text())["kernels"] == "exact"
    assert runs.result(exact)["adapter_sha256"] == runs.result(portable)["adapter_sha256"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_on_all_kernels_is_the_same_within_rounding(precision, tmp_path, everywhere):
    """In bf16 of float32's run: ours turn positions by float32 angles, portable ones do not."""
    settings = {**TINY, "lora_dropout": 0, "lr": 2e-4}
    portable, ours = (
        runs.run(tmp_path, kernels, **settings, precision=kind, kernels=kernels)
        for kernels, kind in (("portable", "fp32"), ("triton", precision))
    )
    for key, within in (("loss", {"fp32": 1e-6, "bf16": 3e-3}), ("grad_norm", {"fp32": 1e-5, "bf16": 3e-2})):
        theirs, found = ([m[key] for m in runs.metrics(directory)] for directory in (portable, ours))
        assert found == pytest.approx(theirs, rel=within[precision])
    assert precision != "fp32" or runs.result(ours)["adapter_sha256"] != runs.result(portable)["adapter_sha256"]


REPLACED = {  # architecture -> how many of our attentions, gates and norms its two blocks and last norm take
    "llama": (2, 2, 5),
    "mistral": (2, 2, 5),
    "qwen2": (2, 2, 5),
    "qwen3": (2, 2, 9),
    "gemma2": (0, 0, 9),
    "gemma3_text": (2, 0, 13),
    "phi3": (0, 0, 5),
    "olmo2": (0, 2, 9),
    "granite": (2, 2, 5),
    "smollm3": (1, 2, 5),
    "mixtral": (2, 0, 5),
    "qwen2_moe": (2, 2, 5),
    "olmoe": (0, 0, 9),
    "gpt_oss": (0, 0, 5),
    "granitemoe": (2, 0, 5),
    "gpt_neox": (0, 0, 0),
    "starcoder2": (2, 0, 0),
    "gpt2": (0, 0, 0),
}


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_every_architecture_computes_the_same_with_what_fits_it(architecture, tmp_path):
    """The reference is transformers' own modules on the same weights."""
    directory = tiny_models.make(tmp_path / "base", architecture)
    theirs, ours = (
        tiny_models.Started(tmp_path / kernels, directory, train_type="lora", kernels=kernels, backend=TINY["backend"])
        for kernels in ("portable", "triton")
    )
    found = [
        sum(isinstance(module, kind) for module in ours.model.modules())
        for kind in (swap_modules.FastAttention, swap_modules.FastGatedMLP, swap_modules.FastRMSNorm)
    ]
    capped_by_sdpa = architecture == "gemma2" and attention_implementation(ours.model.config) == "sdpa"
    assert tuple(found) == ((2, 0, 9) if capped_by_sdpa else REPLACED[architecture])  # transformers before 5.23
    left = {line.split()[0] for line in ours.built.notes if " runs as it is: " in line}
    looks_like_ours = {
        type(m).__name__ for m in theirs.model.modules() if type(m).__name__.endswith(("RMSNorm", "MLP", "Attention"))
    }
    assert left <= looks_like_ours and all(
        not isinstance(m, swap_modules.FastModule) or m.training for m in ours.model.modules()
    )
    assert {
        type(m).__name__ for m in ours.model.modules()
    } & looks_like_ours == left  # nothing stays as it is without being named
    assert [*ours.built.trainable] == [*theirs.built.trainable]
    ids = torch.arange(3, 15, device=DEVICE)[None]
    torch.testing.assert_close(ours.logits(ids), theirs.logits(ids), rtol=1e-4, atol=1e-4)
    with evaluating(ours.model), evaluating(theirs.model):
        written = [
            one.model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, eos_token_id=-1)
            for one in (ours, theirs)
        ]  # on keys kept from before
    assert torch.equal(*written) and written[0].shape == (1, 16)


@pytest.mark.parametrize("architecture", ["mistral", "gemma3_text"])
def test_windows_reach_as_far_back(architecture, tmp_path):
    """Rows are longer than the windows, and lie in one row without padding."""
    directory = tiny_models.make(tmp_path / "base", architecture)
    theirs, ours = (
        tiny_models.Started(
            tmp_path / kernels,
            directory,
            train_type="lora",
            kernels=kernels,
            padding_free=True,
            **{**SMALL, "batch_size": 2},
        )
        for kernels in ("portable", "triton")
    )
    (batch,) = ours.run.stream[0]
    assert min(map(len, batch.ids)) > tiny_models.WINDOW
    assert float(ours.loss(batch).detach()) == pytest.approx(float(theirs.loss(batch).detach()), rel=1e-5)


def test_a_layer_with_work_enough_unpacks_its_weight_by_the_kernel():
    quantizer = Nf4(TrainConfig(), torch.float32)
    quantizer.set_kernels("exact", torch.device(DEVICE))
    kernel, asked = quantizer.unpack, []
    quantizer.unpack = lambda codes, state: asked.append(state.shape) or kernel(codes, state)
    layer = quantizer.empty_layer(torch.nn.Linear(64, 8, bias=True))
    layer.bias = torch.nn.Parameter(some(8), requires_grad=False)
    layer.weight = quantizer.quantize_into(layer, some(8, 64, seed=1))
    for rows, times in ((3, 0), (bnb.MANY, 1)):
        x = some(rows, 64, seed=2)
        expected = torch.nn.functional.linear(
            x, bnb.unpacked_linear(layer.weight.data, layer.weight.quant_state), layer.bias
        )
        torch.testing.assert_close(layer(x), expected)
        assert len(asked) == times


def test_a_norm_whose_weights_learn_learns_the_same(tmp_path):
    """Full fine-tuning: the weights of norms are trained, and saved under their own names."""
    directory = tiny_models.make(tmp_path / "base", "qwen3")
    theirs, ours = (
        tiny_models.Started(tmp_path / kernels, directory, train_type="full", kernels=kernels, **SMALL)
        for kernels in ("portable", "triton")
    )
    (batch,) = ours.run.stream[0]
    for one in (theirs, ours):
        (one.loss(batch) / batch.trained).backward()
    assert [*ours.built.trainable] == [*theirs.built.trainable] and any("norm" in name for name in ours.built.trainable)
    for name, parameter in ours.built.trainable.items():
        expected = theirs.built.trainable[name].grad
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_recomputed_blocks_give_the_same_gradients(tmp_path):
    directory = tiny_models.make(tmp_path / "base", "llama")
    kept, recomputed = (
        tiny_models.Started(
            tmp_path / str(again),
            directory,
            train_type="lora",
            kernels="triton",
            lora_dropout=0.3,
            use_gradient_checkpointing=again,
            **SMALL,
        )
        for again in (False, True)
    )
    (batch,) = kept.run.stream[0]
    for one in (kept, recomputed):
        torch.manual_seed(3)  # the same is dropped, and again when a block is computed again
        (one.loss(batch) / batch.trained).backward()
    for name, parameter in kept.built.trainable.items():
        assert torch.equal(parameter.grad, recomputed.built.trainable[name].grad), name


def test_a_kernel_that_gives_something_else_on_this_device_is_named_and_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(norms, "rms_norm", lambda x, weight, eps, *form: reference.rms_norm(x, weight, 1.0, *form))
    started = tiny_models.Started(
        tmp_path,
        tiny_models.make(tmp_path / "base", "llama"),
        train_type="lora",
        kernels="triton",
        backend=TINY["backend"],
    )
    assert started.built.notes == [
        "LlamaRMSNorm runs as it is: the kernel for it gives something else on this device (5 modules)"
    ]
    assert not any(isinstance(module, swap_modules.FastRMSNorm) for module in started.model.modules())


def test_kernels_that_do_not_run_are_refused_when_asked_for_and_named_when_not(tmp_path, monkeypatch):
    def no_compiler(*arguments, **options):
        raise RuntimeError("Failed to find C compiler.\nPlease specify one.")

    monkeypatch.setattr(rope, "_launch", no_compiler)
    directory = tiny_models.make(tmp_path / "base", "llama")
    with pytest.raises(RunError, match="kernels exact cannot be used on .*: Failed to find C compiler") as refused:
        tiny_models.Started(tmp_path / "asked", directory, train_type="lora", kernels="exact", backend=TINY["backend"])
    assert refused.value.cure == "--kernels portable"
    plan = tiny_models.Started(tmp_path / "portable", directory, train_type="lora", backend=TINY["backend"]).plan
    chosen = Runtime(dataclasses.replace(plan, config=plan.config.with_(kernels="exact")))
    context = BuildContext(chosen.plan.config, chosen)
    assert choose_kernels(context) == ["portable kernels instead of exact ones: Failed to find C compiler."]
    assert context.kernels == "portable"


def test_a_dequantization_that_gives_something_else_is_named_and_not_used(monkeypatch):
    monkeypatch.setattr(dequantizing, "dequantize", lambda codes, state: dequantizing.reference(codes, state) * 1.01)
    quantizer = Nf4(TrainConfig(), torch.float32)
    assert quantizer.set_kernels("exact", torch.device(DEVICE)) == [
        "bitsandbytes unpacks the weights: the kernel for it gives something else on this device"
    ]
    assert quantizer.unpack is bnb.unpacked_linear
