"""Fast paths against their definitions, in float64 and float32, and against PEFT's own modules."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from anyqlora.config.resolve import resolve
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.data import stream
from anyqlora.on_torch import device, unpadded
from anyqlora.on_torch import loss as losses
from anyqlora.on_torch.adapters.fused_layers import fused_layers
from anyqlora.on_torch.assembly import fast_paths
from anyqlora.on_torch.assembly.context import BuildContext
from anyqlora.on_torch.device_batch import padding_rows
from anyqlora.on_torch.kernels import attention, deterministic, fused_lora
from anyqlora.on_torch.kernels.cpu import bindings
from anyqlora.on_torch.kernels.cross_entropy import LogitTransform, cross_entropy, reference
from anyqlora.on_torch.kernels.deterministic import DEVICES, REFUSE, WARN, refuse_from, refuse_until
from anyqlora.on_torch.kernels.documents import Documents
from tests.support import tiny_models

AFTERS = {
    "nothing": LogitTransform(),
    "scaled": LogitTransform(scale=0.25),
    "capped": LogitTransform(cap=3.0),
    "both": LogitTransform(scale=2.0, cap=5.0),
}


def gradients(value, *tensors):
    return torch.autograd.grad(value, tensors)


@pytest.mark.parametrize("rows", [1, 7, 32, 1000])
@pytest.mark.parametrize("after", AFTERS, ids=str)
@pytest.mark.parametrize("learns", [False, True], ids=["frozen head", "trained head"])
def test_cross_entropy_is_its_definition(after, rows, learns):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((33, 24), (50, 24), (50,))
    )
    targets = torch.randint(50, (33,), generator=generator)
    inputs = [hidden.requires_grad_(), *([weight.requires_grad_(), bias.requires_grad_()] if learns else [])]
    ours = cross_entropy(hidden, weight, bias, targets, transform=AFTERS[after], rows=rows) / 7
    theirs = reference(hidden, weight, bias, targets, transform=AFTERS[after]) / 7
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    for mine, other in zip(gradients(ours, *inputs), gradients(theirs, *inputs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_cross_entropy_in_float32_is_exact_and_in_16_bits_within_rounding():
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(64, 32, generator=generator), torch.randn(4000, 32, generator=generator)
    targets = torch.randint(4000, (64,), generator=generator)
    exact = hidden.double().requires_grad_()
    expected = reference(exact, weight.double(), None, targets)
    (grad_hidden,) = gradients(expected / 1000, exact)
    for dtype, loss_within, gradient_within in (
        (torch.float32, 1e-6, 1e-5),
        (torch.bfloat16, 3e-3, 0.02),
        (torch.float16, 1e-3, 5e-3),
    ):
        h = hidden.to(dtype).requires_grad_()
        ours = cross_entropy(h, weight.to(dtype), None, targets, rows=16)
        assert ours.dtype == torch.float32 and ours.item() == pytest.approx(expected.item(), rel=loss_within)
        (found,) = gradients(ours / 1000, h)
        assert (found.double() - grad_hidden).norm() < gradient_within * grad_hidden.norm(), dtype


def test_far_off_logits_give_finite_losses():
    hidden = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    weight, targets = torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0])
    ours = cross_entropy(hidden, weight, None, targets, rows=2)
    assert ours.item() == 800 and gradients(ours, hidden)[0].flatten().tolist() == [2.0, -2.0]


def test_no_gradient_is_made_without_one():
    hidden, weight = torch.randn(4, 8), torch.randn(16, 8, requires_grad=True)
    with torch.no_grad():
        assert not cross_entropy(hidden, weight, None, torch.zeros(4, dtype=torch.long), rows=2).requires_grad


# -------------------------------------------------------------------------------------- through the model's own forward


CHANGED = {"cohere": {"logit_scale": 0.0625, "pad_token_id": 0}, "gemma": {"head_dim": 16}}
ALL = {**dict.fromkeys(tiny_models.ARCHITECTURES, {}), **CHANGED}


@pytest.fixture(scope="module", params=ALL)
def started(request, tmp_path_factory):
    directory = tiny_models.make(tmp_path_factory.mktemp("base"), request.param, **ALL[request.param])
    found = tiny_models.Started(tmp_path_factory.mktemp("run"), directory, train_type="lora", logits_chunk_tokens=16)
    found.architecture = request.param
    return found


def test_the_loss_on_trained_tokens_is_the_loss(started):
    """Every architecture, whatever it does after its head; the reference makes all logits by the
    model's own forward.
    """
    assert isinstance(started.built.loss, losses.TrainedTokenLoss) and not any(
        "logits" in note for note in started.built.notes
    )
    (batch,) = started.run.stream[0]
    for name, parameter in started.built.trainable.items():
        torch.nn.init.normal_(parameter, std=0.05) if "lora_B" in name else None
    device, trainable = torch.device("cpu"), list(started.built.trainable.values())
    ours, theirs = started.built.loss(started.model, batch, device), losses.token_loss(started.model, batch, device)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for mine, other in zip(gradients(ours / 50, *trainable), gradients(theirs / 50, *trainable), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-6 * float(other.abs().max()))


def test_tokens_that_are_not_trained_skip_the_last_mlp_and_nothing_else_changes(started):
    """Against the same loss with the MLP on all tokens."""
    (batch,) = started.run.stream[0]
    batch = replace(batch, targets=np.where(np.arange(batch.ids.shape[1]) % 3 == 0, batch.targets, stream.IGNORE_INDEX))
    loss, seen = started.built.loss, []
    assert (loss.last_mlp is None) == (
        started.architecture in ("gpt_oss", "granitemoe")
    )  # experts that also say how they chose; another name
    if loss.last_mlp is None:
        return
    for name, parameter in started.built.trainable.items():
        torch.nn.init.normal_(parameter, std=0.05) if "lora_B" in name else None
    trainable = list(started.built.trainable.values())
    handle = loss.last_mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[:-1].numel()))
    try:
        ours = loss(started.model, batch, torch.device("cpu"))
        found = gradients(ours, *trainable)
        theirs = replace(loss, last_mlp=None)(started.model, batch, torch.device("cpu"))
        expected = gradients(theirs, *trainable)
    finally:
        handle.remove()
    assert seen[0] == batch.trained < seen[1] / 3
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-6 * float(other.abs().max()))


@pytest.mark.parametrize(
    ("settings", "skips"),
    [
        ({}, True),
        ({"use_gradient_checkpointing": True}, False),
        ({"use_gradient_checkpointing": True, "checkpointed_layers": 1}, True),
        ({"lora_dropout": 0.1}, True),
        ({"lora_dropout": 0.1, "dropout_masks": "process"}, False),
        ({"logits_chunk_tokens": 0}, None),
    ],
)
def test_the_last_mlp_is_not_narrowed_where_it_runs_again_or_draws(settings, skips, tmp_path):
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", "llama"), train_type="lora", **settings)
    mlp = getattr(started.built.loss, "last_mlp", None)
    assert (mlp is not None) == bool(skips) and (skips is not None) == isinstance(
        started.built.loss, losses.TrainedTokenLoss
    )
    assert mlp is None or mlp is started.model.get_submodule("base_model.model.model.layers")[-1].mlp
    assert np.isfinite(started.step())


def test_an_mlp_that_mixes_tokens_is_left_alone(tmp_path):
    model = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", "llama"), train_type="lora").model
    mlp = model.get_submodule("base_model.model.model.layers")[-1].mlp
    assert losses.last_mlp(model) is mlp and losses.can_narrow_last_mlp(model)
    forward = mlp.forward
    mlp.forward = lambda x: forward(x + x.mean(1, keepdim=True))
    assert not losses.can_narrow_last_mlp(model)


def test_what_follows_the_head_is_what_the_configuration_says(started):
    expected = {
        "granite": LogitTransform(scale=0.5),
        "gemma2": LogitTransform(cap=3.0),
        "cohere": LogitTransform(scale=0.0625),
    }
    assert started.built.loss.spec.transform == expected.get(started.architecture, LogitTransform())


def test_an_architecture_that_does_something_else_after_its_head_is_named(tmp_path):
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", "llama"), train_type="lora")
    model = started.model
    model.register_forward_hook(lambda module, arguments, output: setattr(output, "logits", output.logits**3) or output)
    assert losses.logit_transform(model) == (None, "what it does to logits after its head is not known here")


def test_float64_is_made_in_host_memory_only():
    """Metal and Intel's cheaper GPUs have none: asking for it there looks like an architecture that is not known."""
    sources = [path.read_text(encoding="utf-8") for path in Path(losses.__file__).parent.rglob("*.py")]
    assert (
        sum(source.count(".cpu().double()") for source in sources)
        == sum(source.count(".double()") for source in sources)
        > 0
    )
    assert [device.highest_precision(torch.device(name)) for name in ("cpu", "cuda", "mps")] == [
        torch.float64,
        torch.float64,
        torch.float32,
    ]


def test_no_more_logits_than_asked_for_are_made(tmp_path):
    """Not by the head in training, and not by anything else: the largest tensor of the vocabulary's width has
    `logits_chunk_tokens` rows.
    """
    started = tiny_models.Started(
        tmp_path, tiny_models.make(tmp_path / "base", "llama"), train_type="lora", logits_chunk_tokens=8
    )
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            seen.extend(
                t.shape for t in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(t, torch.Tensor)
            )
            return out

    (batch,) = started.run.stream[0]
    with Watch():
        (started.built.loss(started.model, batch, torch.device("cpu")) / batch.trained).backward()
    vocabulary = started.model.get_output_embeddings().out_features
    weight = torch.Size((started.model.config.hidden_size, vocabulary))  # as the product takes it
    assert (
        max(shape.numel() // vocabulary for shape in seen if shape[-1:] == (vocabulary,) and shape != weight)
        == 8
        < batch.trained
    )


def test_full_fine_tuning_learns_a_tied_head_as_by_the_definition(tmp_path):
    started = tiny_models.Started(
        tmp_path, tiny_models.make(tmp_path / "base", "qwen2"), train_type="full", logits_chunk_tokens=16
    )
    (batch,) = started.run.stream[0]
    trainable = list(started.built.trainable.values())
    assert stream.IGNORE_INDEX in batch.targets
    found = [
        gradients(loss(started.model, batch, torch.device("cpu")), *trainable)
        for loss in (started.built.loss, losses.token_loss)
    ]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


# ----------------------------------------------------------------------------------------------------------- fused LoRA


def layers(generator, inputs, outputs, rank=4, dtype=torch.float64, bias=True):
    """Linear layers of one input with random weights, and their learned factors."""
    found = []
    for size in outputs:
        weight = torch.randn(size, inputs, generator=generator, dtype=dtype)
        a, b = (
            torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
            for shape in ((rank, inputs), (size, rank))
        )
        found.append(
            fused_lora.LoraLinear(
                lambda weight=weight: weight,
                torch.randn(size, generator=generator, dtype=dtype) if bias else None,
                a,
                b,
                1.5,
            )
        )
    return found, [factor for layer in found for factor in (layer.a, layer.b)]


@pytest.mark.parametrize("outputs", [(24,), (24, 8, 8), (40, 40)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_fused_linears_are_their_definition(outputs, bias):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 5, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    parts, factors = layers(generator, 16, outputs, bias=bias)
    weights = [torch.randn(2, 5, size, generator=generator, dtype=torch.float64) for size in outputs]
    found = []
    for ys in (fused_lora.lora_linears(x, parts), fused_lora.reference(x, parts)):
        total = sum((y * weight).sum() for y, weight in zip(ys, weights, strict=True))
        found.append([total.detach(), *ys, *gradients(total, x, *factors)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_an_output_that_nobody_uses_gives_no_gradient():
    parts, factors = layers(torch.Generator().manual_seed(3), 8, (8, 8))
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    found = torch.autograd.grad(fused_lora.lora_linears(x, parts)[0].sum(), [x, *factors], allow_unused=True)
    expected = torch.autograd.grad(fused_lora.reference(x, parts[:1])[0].sum(), [x, *factors[:2]])
    assert found[3:] == (None, None)
    for ours, theirs in zip(found[:3], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("narrow", [fused_lora.WITHOUT_INT64, ("cpu",)], ids=["64 bits", "as Metal draws"])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_drops_what_it_says_and_its_backward_drops_the_same(rate, narrow, monkeypatch):
    """The reference applies the mask of the same seed by hand."""
    monkeypatch.setattr(fused_lora, "WITHOUT_INT64", narrow)
    generator = torch.Generator().manual_seed(4)
    parts, factors = layers(generator, 64, (8, 8))
    x = torch.randn(500, 64, generator=generator, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(5)
    ours = fused_lora.lora_linears(x, parts, fused_lora.Dropout(rate))
    torch.manual_seed(5)
    seen = x * fused_lora.draw_mask(x, fused_lora.Dropout(rate)) / (1 - rate)
    theirs = [
        torch.nn.functional.linear(x, layer.weight(), layer.bias) + 1.5 * (seen @ layer.a.T @ layer.b.T)
        for layer in parts
    ]
    found = [gradients(ys[0].sum() + ys[1].square().sum(), x, *factors) for ys in (ours, theirs)]
    for mine, other in zip([*ours, *found[0]], [*theirs, *found[1]], strict=True):
        torch.testing.assert_close(
            mine, other, rtol=1e-4, atol=1e-4 * float(other.detach().abs().max())
        )  # 1 - rate in 16 bits
    kept = fused_lora.draw_mask(x, fused_lora.Dropout(rate)).double()
    assert abs(kept.mean() - (1 - rate)) < 4 * (rate * (1 - rate) / x.numel()) ** 0.5
    assert kept.mean(0).std() < 0.03 and kept.mean(1).std() < 0.08  # no column and no row of its own


def step_of(directory, tmp_path, dtype=None, **settings):
    """(what was started, loss, {name: gradient}) of one batch, all in `dtype` if it is given, with factors that are not
    zero.
    """
    started = tiny_models.Started(tmp_path, directory, **settings)
    started.model.to(dtype)
    generator = torch.Generator().manual_seed(6)
    for parameter in started.built.trainable.values():
        parameter.data = (0.1 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    (batch,) = started.run.stream[0]
    with started.runtime.autocast():
        loss = started.built.loss(started.model, batch, torch.device("cpu")) / batch.trained
    loss.backward()
    return started, loss.item(), {name: p.grad for name, p in started.built.trainable.items()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3", "gpt_neox", "gemma3_text", "starcoder2"])
def test_in_float64_fused_layers_are_pefts_own(architecture, tmp_path):
    directory = tiny_models.make(tmp_path / "base", architecture)
    found = [
        step_of(directory, tmp_path / str(fused), torch.float64, train_type="lora", fused_lora=fused)
        for fused in (True, False)
    ]
    (ours, loss, mine), (theirs, expected, others) = found
    assert len(fused_layers(ours.model)) == len(mine) // 2 and not fused_layers(theirs.model)
    assert loss == pytest.approx(expected, rel=1e-12) and mine.keys() == others.keys()
    for name, gradient in others.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-10, atol=1e-10 * float(gradient.abs().max()), msg=name)


@pytest.mark.parametrize(
    ("precision", "within"),
    [("fp32", 1e-5), ("bf16", 0.03), ("bf16_autocast", 0.03), ("bf16_buffers_autocast", 0.03), ("fp16_autocast", 0.01)],
)
@pytest.mark.parametrize("quantizer", ["nf4", "fp4", "none"])
def test_in_every_precision_fused_layers_are_pefts_own_within_rounding(quantizer, precision, within, tmp_path):
    directory = tiny_models.make(tmp_path / "base", "llama", intermediate_size=128)
    settings = {"quantizer": quantizer, "precision": precision}
    (_, loss, mine), (_, expected, others) = (
        step_of(directory, tmp_path / str(fused), **settings, fused_lora=fused) for fused in (True, False)
    )
    assert loss == pytest.approx(expected, rel=within / 5)
    off = sum((mine[name].double() - g.double()).square().sum() for name, g in others.items()).sqrt()
    assert off < within * torch.nn.utils.get_total_norm(list(others.values()))


@pytest.mark.parametrize("kind", ["rslora", "pissa", "loftq"])
def test_other_starts_and_scales_are_fused_too(kind, tmp_path):
    directory = tiny_models.make(tmp_path / "base", "llama", intermediate_size=128)
    losses_of = []
    for fused in (True, False):
        started = tiny_models.Started(tmp_path / str(fused), directory, adapter=kind, fused_lora=fused)
        losses_of.append([started.step(number) for number in range(3)])
        assert bool(fused_layers(started.model)) == fused
    assert losses_of[0] == pytest.approx(losses_of[1], rel=1e-5)


def test_what_cannot_be_fused_is_refused_where_it_is_demanded_and_else_said(tmp_path):
    for wrong in (
        {"adapter": "dora"},
        {"quantizer": "int8"},
        {"train_type": "custom_qlora", "adapter": "dora"},
        {"train_type": "custom_qlora", "fused_lora": False},
    ):
        with pytest.raises(UsageError, match="fused|means quantizer"):
            resolve(
                {
                    "model_name": "demo",
                    "dataset": "demo",
                    **({} if "train_type" in wrong else {"fused_lora": True}),
                    **wrong,
                },
                environ={},
                origin="test",
            )
    llama = tiny_models.make(tmp_path / "llama", "llama", intermediate_size=128)
    dora = tiny_models.Started(tmp_path / "dora", llama, adapter="dora")
    assert not fused_layers(dora.model)
    demanded, planned = (
        dora.plan.config.with_(fused_lora=True, sources={"fused_lora": source}) for source in ("command line", "plan")
    )
    parts = {"runtime": dora.runtime, "model": dora.model, "quantizer": dora.built.quantizer}
    with pytest.raises(NotSupported, match="14 LoRA layers"):
        fast_paths.fuse_lora_layers(BuildContext(demanded, **parts))
    assert "14 LoRA layers are not fused" in fast_paths.fuse_lora_layers(BuildContext(planned, **parts))[0]
    for name in ("custom_lora", "custom_qlora"):
        assert fused_layers(tiny_models.Started(tmp_path / name, llama, train_type=name).model)


def test_without_its_adapter_a_fused_model_is_the_base(tmp_path):
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", "llama", intermediate_size=128))
    started.step()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad(), started.model.disable_adapter():
        torch.testing.assert_close(
            started.model(input_ids=ids).logits,
            tiny_models.plain(tmp_path / "base", started.held())(input_ids=ids).logits,
            rtol=1e-4,
            atol=1e-4,
        )


# ------------------------------------------------------------------------------------- documents, and attention in them


DOCUMENTS = {
    "one": None,
    "some": [[0] * 9 + [1] * 20 + [2] + [3] * 10, [0] * 40],
    "padded": [[0] * 25 + [-1] * 15, [0] * 7 + [1] * 33],
}


def heads(dtype, rows=2, length=40, queries=6, keys=2, width=16):
    generator = torch.Generator().manual_seed(7)
    q, k, v = (
        torch.randn(rows, count, length, width, generator=generator).to(dtype).requires_grad_()
        for count in (queries, keys, keys)
    )
    return (q, k, v), torch.randn(rows, length, queries, width, generator=generator).to(dtype)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_attention_is_its_definition(documents, window):
    (inputs, weight), numbers = heads(torch.float64), DOCUMENTS[documents]
    lie = Documents.read(torch.tensor(numbers)) if numbers else None
    found = []
    for compute in (attention.attention, attention.reference):
        out = compute(*inputs, scale=0.3, documents=lie, window=window)
        found.append([out.detach(), *gradients((out * weight).sum(), *inputs)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length, queries, keys", [(40, 6, 2), (300, 4, 4), (129, 9, 3), (1, 2, 1)])
@pytest.mark.parametrize("documents", [False, True])
def test_blocks_in_bf16_are_as_near_to_float64_as_torchs_own_kernel(length, queries, keys, documents, monkeypatch):
    monkeypatch.setattr(attention, "SCORES", 1 << 14)  # several groups of heads
    inputs, weight = heads(torch.bfloat16, length=length, queries=queries, keys=keys)
    thirds = Documents.read((torch.arange(length) * 3 // length).int().expand(2, -1)) if documents else None
    exact = [x.detach().double().requires_grad_() for x in inputs]

    def torchs(q, k, v, scale, documents):
        ends = (
            [0, length]
            if documents is None
            else [0, *(documents.numbers[0].diff().nonzero().flatten() + 1).tolist(), length]
        )
        return torch.cat(
            [
                torch.nn.functional.scaled_dot_product_attention(
                    q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=b - a > 1, scale=scale, enable_gqa=True
                )
                for a, b in zip(ends, ends[1:], strict=False)
            ],
            2,
        ).transpose(1, 2)

    found = []
    for compute, given in ((attention.reference, exact), (attention.attention, inputs), (torchs, inputs)):
        out = compute(*given, scale=0.25, documents=thirds)
        found.append([out.detach(), *gradients((out * weight).sum(), *given)])
    for true, ours, theirs in zip(*found, strict=True):
        off, torchs_off = (((x.double() - true).norm() / true.norm().clamp_min(1e-9)).item() for x in (ours, theirs))
        assert off < max(2.5 * torchs_off, 0.006)


@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma3_text",
        "phi3",
        "olmo2",
        "granite",
        "smollm3",
        "mixtral",
        "gpt_neox",
        "starcoder2",
        "gpt2",
        "qwen2_moe",
    ],
)
def test_flat_rows_have_the_loss_and_the_gradient_of_padded_rows(architecture, tmp_path):
    """Every row by itself is the reference: lengths differ, two of four are packed, windows are shorter than rows
    (Qwen2-MoE's layers tell theirs only to the mask).
    """
    own = (
        {"use_sliding_window": True, "sliding_window": tiny_models.WINDOW, "max_window_layers": 0}
        if architecture == "qwen2_moe"
        else {}
    )
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", architecture, **own), train_type="lora")
    assert started.built.loss.spec.is_unpadded and started.built.notes == []
    rows, device = started.run.data.train[:4], torch.device("cpu")
    trainable = list(started.built.trainable.values())
    found = []
    for batches in ([stream.collate([rows[:2], rows[2:3], rows[3:]], 0)], [stream.collate([[row]], 0) for row in rows]):
        loss = sum(started.built.loss(started.model, batch, device) for batch in batches)
        found.append((loss.item(), torch.cat([g.flatten() for g in gradients(loss, *trainable)])))
    (ours, gradient), (theirs, expected) = found
    assert ours == pytest.approx(theirs, rel=1e-6) and float((gradient - expected).norm() / expected.norm()) < 1e-5


def test_flat_rows_compute_nothing_for_padding(tmp_path):
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", "llama"), train_type="lora")
    rows = sorted(started.run.data.train, key=lambda row: len(row.ids))
    batch = stream.collate([[rows[0]], [rows[-1]]], 0)
    seen = []
    started.model.get_submodule("base_model.model.model.layers.0.mlp").register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0].shape[:-1].numel())
    )
    started.built.loss(started.model, batch, torch.device("cpu"))
    assert seen == [batch.tokens + padding_rows(batch.tokens)] and seen[0] < batch.ids.size


@pytest.mark.parametrize(
    ("settings", "few"),
    [
        ({}, False),
        ({"kernels": "portable"}, True),
        ({"fused_lora": False}, True),
        ({"lora_target_modules": ["q_proj"]}, True),
    ],
)
def test_flat_rows_have_few_lengths_only_where_products_are_compiled_for_each(settings, few, tmp_path):
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", "llama"), precision="bf16", **settings)
    rows = started.run.data.train
    batches = (stream.collate([[row] for row in rows[:count]], 0) for count in range(2, 30))
    batch = next(batch for batch in batches if padding_rows(batch.tokens) >= 16)
    ids = started.built.loss.prepare(batch, torch.device("cpu")).ids
    assert ids.numel() == batch.tokens + (
        padding_rows(batch.tokens) if few or not bindings.preferred("frozen_matmul") else -batch.tokens % 16
    )


@pytest.mark.parametrize(
    ("architecture", "own", "why"),
    [
        (
            "phimoe",
            {
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": 64,
                "router_jitter_noise": 0.0,
                "input_jitter_noise": 0.0,
            },
            "keep documents",
        ),
        ("llama", {"attention_dropout": 0.1}, "its attention has dropout"),
        ("gpt2", {"attn_pdrop": 0.1}, "its attention has dropout"),
    ],
)
def test_attention_that_flat_rows_would_change_keeps_its_padding(architecture, own, why, tmp_path):
    """A window that layers do not know of, longer than what the model is shown in a dozen tokens, and dropout, which
    evaluation does not show.
    """
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", architecture, **own), train_type="lora")
    assert not started.built.loss.spec.is_unpadded and any(
        "rows are padded" in note and why in note for note in started.built.notes
    )
    windows = [getattr(config, "sliding_window", None) for config in unpadded._configs(started.model)]
    assert set(windows) == {own.get("sliding_window")} and math.isfinite(started.step())


def test_a_process_without_rows_takes_part_in_a_flat_step(tmp_path):
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", "llama"), train_type="lora")
    loss = started.loss(stream.collate([], 0))
    loss.backward()
    assert loss.item() == 0 and all(p.grad is not None and not p.grad.any() for p in started.built.trainable.values())


class Asked(torch.autograd.Function):
    """Notes in forward and in backward whether torch would refuse what has no deterministic form."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        seen.append(torch.get_deterministic_debug_mode() == REFUSE)
        return x.clone()

    @staticmethod
    def backward(ctx, grad_y):
        ctx.seen.append(torch.get_deterministic_debug_mode() == REFUSE)
        return grad_y, None


@pytest.fixture
def warned():
    """torch as a run sets it."""
    device.set_deterministic(True)
    yield
    device.set_deterministic(False)


def test_torch_refuses_in_the_backward_of_attention_and_nowhere_else(warned):
    """On a GPU its attention is deterministic where it may refuse, and only there; other operations
    shall end no run.
    """
    before, inside, after, x = [], [], [], torch.ones(3, requires_grad=True)
    q, k, v = refuse_until(*(Asked.apply(part * x, before) for part in (1, 2, 3)))
    out = Asked.apply(refuse_from(Asked.apply(q * k + v, inside)), after)
    out.sum().backward()
    assert x.grad.tolist() == [7.0] * 3  # of 2 x^2 + 3 x
    assert (before, inside, after) == ([False] * 6, [False, True], [False, False])
    refuse_from(x * 1).sum().backward()  # and is broken off
    assert torch.get_deterministic_debug_mode() == REFUSE
    refuse_until(x)
    assert torch.get_deterministic_debug_mode() == WARN


@pytest.mark.parametrize(("devices", "marked"), [(("cuda", "cpu"), True), (DEVICES, False)])
@pytest.mark.parametrize("name", [unpadded.NAME, unpadded.VARLEN, unpadded.PLAIN])
def test_attention_is_marked_so_on_a_gpu_only(name, devices, marked, warned, monkeypatch):
    monkeypatch.setattr(deterministic, "DEVICES", devices)
    (inputs, _), module = heads(torch.float32), torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 3, True
    out, _ = ALL_ATTENTION_FUNCTIONS[name](module, *inputs, None, scaling=0.25)
    assert (out.grad_fn.name() == "_BeginBackward") == marked
    torch.testing.assert_close(out, attention.reference(*inputs, scale=0.25))


def test_torchs_own_attention_becomes_deterministic_and_nothing_else_changes(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_models.make(tmp_path, "mistral"))
    ids = torch.arange(3, 27)[None]
    theirs = model(ids).logits
    unpadded.make_deterministic(model)
    assert model.config._attn_implementation == unpadded.PLAIN and torch.equal(model(ids).logits, theirs)
    model.set_attn_implementation("eager")
    unpadded.make_deterministic(model)
    assert model.config._attn_implementation == "eager"


def test_attention_that_is_more_than_that_stays_the_architectures_own(tmp_path):
    for architecture in ("gemma2", "gpt_oss"):
        started = tiny_models.Started(
            tmp_path / architecture,
            tiny_models.make(tmp_path / f"base-{architecture}", architecture),
            train_type="lora",
        )
        assert (
            not started.built.loss.spec.is_unpadded
            and "rows are padded: this architecture's attention is eager" in started.built.notes
        )
