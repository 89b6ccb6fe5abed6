"""The C kernels against their references in float64, against torch's own operators in bf16, and in whole models."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from anyqlora.config.resolve import resolve
from anyqlora.core.errors import UsageError
from anyqlora.models import architectures
from anyqlora.on_torch import loss, unpadded
from anyqlora.on_torch.assembly.context import BuildContext
from anyqlora.on_torch.assembly.fast_paths import specify_loss
from anyqlora.on_torch.kernels import attention, fused_lora, reference, swap_modules
from anyqlora.on_torch.kernels.cpu import bindings
from anyqlora.on_torch.kernels.cross_entropy import LogitTransform, cross_entropy
from anyqlora.on_torch.kernels.cross_entropy import reference as reference_loss
from anyqlora.on_torch.kernels.documents import Documents
from anyqlora.on_torch.kernels.frozen_matmul import CpuFullMatmul, CpuInt8Matmul
from anyqlora.on_torch.runtime import Runtime
from anyqlora.planning import memory, native_kernels
from anyqlora.planning.backends import BackendManager
from tests.support import tiny_models

pytestmark = pytest.mark.skipif(
    "native" not in BackendManager("cpu").report.kernels, reason="no C compiler, or no AVX512-BF16, is here"
)
ROUNDING = (
    2**-9
)  # half a unit in the last place of bf16's numbers below 1; of a number, one rounding is off by twice that at most


def drawn(*shape, seed=0, scale=1.0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def with_gradients(compute, inputs, weight):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = compute(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, weight.to(out.dtype))]


def as_near_as_torch(ours, theirs, exact, within=1.25):
    """Each of ours is as near to float64 as torch's own, up to a rounding."""
    for mine, other, true in zip(ours, theirs, exact, strict=True):
        off, others = ((x.double() - true).norm() / true.norm() for x in (mine, other))
        assert mine.dtype == torch.bfloat16 and off <= within * others + ROUNDING / 8, (off, others)


needs_head = pytest.mark.skipif(
    not bindings.available("lm_head_cross_entropy"), reason="no C compiler, no AVX512-BF16 or no AVX512-VNNI is here"
)
takes_head = pytest.mark.skipif(
    not bindings.preferred("lm_head_cross_entropy"),
    reason="no fused head is here, or AMX is and oneDNN's products are used",
)
FUSED = pytest.param(True, marks=needs_head, id="fused")


CASES = {
    "norm": (lambda kernels, x, w: kernels.rms_norm(x, w, 1e-5), (37, 96), (96,)),
    "norm, late": (lambda kernels, x, w: kernels.rms_norm(x, w, 1e-6, 1.0, True), (37, 100), (100,)),
    "gate": (lambda kernels, g, u: kernels.swiglu(g, u), (5, 77), (5, 77)),
}


@pytest.mark.parametrize("case", CASES)
def test_modules_kernels_are_their_definitions(case):
    compute, *shapes = CASES[case]
    inputs = [drawn(*shape, seed=seed, scale=3.0) for seed, shape in enumerate(shapes)]
    learned, fixed = (inputs, []) if case == "gate" else (inputs[:1], inputs[1:])
    weight = drawn(*shapes[0], seed=9)
    of = {
        name: with_gradients(
            lambda *x, kernels=kernels, to=to: compute(kernels, *x, *(f.to(to) for f in fixed)),
            [x.to(to) for x in learned],
            weight,
        )
        for name, kernels, to in (
            ("ours", bindings, torch.bfloat16),
            ("torch", reference, torch.bfloat16),
            ("exact", exactly, torch.float64),
        )
    }
    as_near_as_torch(of["ours"], of["torch"], of["exact"])


class exactly:
    """The definitions in float64, where nothing is rounded in between."""

    swiglu = staticmethod(reference.swiglu)

    @staticmethod
    def rms_norm(x, weight, eps, offset=0.0, is_late=False):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight)


@pytest.mark.parametrize("turns", [2, 1], ids=["positions of each row", "one for all rows"])
def test_rotation_has_the_bits_of_its_definition(turns):
    x, cos, sin, weight = (
        drawn(2, 7, 3, 16),
        drawn(turns, 7, 16, seed=1),
        drawn(turns, 7, 16, seed=2),
        drawn(2, 7, 3, 16, seed=3),
    )
    ours, theirs = (
        with_gradients(lambda x, kernels=kernels: kernels.rotate(x, cos, sin), [x], weight)
        for kernels in (bindings, reference)
    )
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("turns", [2, 1], ids=["positions of each row", "one for all rows"])
def test_rotation_by_float32_angles_is_rounded_once(turns):
    x, weight = drawn(2, 7, 3, 16), drawn(2, 7, 3, 16, seed=3)
    cos, sin = (drawn(turns, 7, 16, seed=seed).float() + 1e-3 for seed in (1, 2))
    ours, theirs = (
        with_gradients(lambda x, kernels=kernels: kernels.rotate(x, cos, sin), [x], weight)
        for kernels in (bindings, reference)
    )
    exact = with_gradients(lambda x: reference.rotate(x, cos.double(), sin.double()), [x.double()], weight)
    for mine, other, true in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == other.dtype == torch.bfloat16 and true.dtype == torch.float64
        assert all(
            bool(((made.double() - true).abs() <= 2.001 * ROUNDING * true.abs() + 1e-6).all()) for made in (mine, other)
        )


@pytest.mark.parametrize("width", [8, 20])
def test_a_rotation_of_another_width_is_refused_and_not_read_past_its_end(width):
    x, cos, sin = drawn(1, 7, 3, 16), drawn(1, 7, width), drawn(1, 7, width, seed=1)
    with pytest.raises(RuntimeError, match="must match the size"):
        bindings.rotate(x, cos, sin)


def attended(inputs, weight, **options):
    """Output and gradients of C kernels, of portable ones, and of the definition in float64."""
    return [
        with_gradients(
            lambda *x, compute=compute, more=more: compute(*x, **options, **more), [x.to(to) for x in inputs], weight
        )
        for compute, more, to in (
            (attention.attention, {"is_native": True}, torch.bfloat16),
            (attention.attention, {}, torch.bfloat16),
            (attention.reference, {}, torch.float64),
        )
    ]


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "length, queries, keys, width",
    [(40, 6, 2, 16), (300, 4, 4, 16), (129, 9, 3, 64), (1, 2, 1, 16), (200, 4, 1, 80), (130, 2, 2, 40)],
)
def test_attention_is_as_near_to_float64_as_the_portable_one(
    length, queries, keys, width, documents, window, monkeypatch
):
    monkeypatch.setattr(attention, "SCORES", 1 << 14)  # several groups of heads in the portable one
    inputs = [drawn(2, count, length, width, seed=seed, scale=2.0) for seed, count in enumerate((queries, keys, keys))]
    weight = drawn(2, length, queries, width, seed=9)
    thirds = Documents.read((torch.arange(length) * 3 // length).int().expand(2, -1)) if documents else None
    for mine, other, true in zip(*attended(inputs, weight, scale=0.25, documents=thirds, window=window), strict=True):
        off, others = ((x.double() - true).norm() / true.norm().clamp_min(1e-9) for x in (mine, other))
        assert mine.dtype == torch.bfloat16 and off < max(1.25 * others, 0.004), (off, others)


@pytest.mark.parametrize("length", [64, 130, 700])
def test_attention_in_c_is_nearer_than_blocks(length):
    """Scores stay in float32: a rounding less than where a product writes them in bf16."""
    inputs, weight = [drawn(1, count, length, 64, seed=count) for count in (4, 2, 2)], drawn(1, length, 4, 64, seed=9)
    ours, blocks, exact = attended(inputs, weight, scale=0.125)
    for mine, other, true in zip(ours, blocks, exact, strict=True):
        assert (mine.double() - true).norm() < 0.8 * (other.double() - true).norm()


def test_no_token_sees_another_document_or_padding():
    """Not a bit of what comes out of a document changes with what is beside it, and of padding comes nothing."""
    documents = Documents.read(torch.tensor([[0] * 70 + [1] * 100 + [-1] * 30], dtype=torch.int32))
    inputs, weight = [drawn(1, count, 200, 32, seed=count) for count in (4, 2, 2)], drawn(1, 200, 4, 32, seed=9)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:, :, :70], x[:, :, 170:] = float("nan"), 7.0
    (out, *of_inputs), (others_out, *of_others) = (
        with_gradients(lambda *x: attention.attention(*x, scale=0.2, documents=documents, is_native=True), x, weight)
        for x in (inputs, changed)
    )
    assert (
        torch.equal(out[:, 70:], others_out[:, 70:]) and (out[:, 170:] == 0).all() and (out[:, :170] != 0).any(-1).all()
    )
    assert others_out[:, :70].isnan().all()  # a number that is not one is not lost
    for mine, other in zip(of_inputs, of_others, strict=True):
        assert (
            torch.equal(mine[:, :, 70:], other[:, :, 70:])
            and (mine[:, :, 170:] == 0).all()
            and (mine[:, :, 70:170] != 0).any()
        )


def test_attention_has_the_same_bits_on_any_number_of_threads():
    inputs, weight = [drawn(2, count, 150, 16, seed=count) for count in (4, 2, 2)], drawn(2, 150, 4, 16, seed=9)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(with_gradients(lambda *x: attention.attention(*x, scale=0.2, is_native=True), inputs, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("after", [LogitTransform(), LogitTransform(scale=0.25), LogitTransform(cap=3.0)], ids=str)
@pytest.mark.parametrize("rows", [5, 64])
def test_the_loss_is_its_definition(after, rows):
    hidden, weight, targets = drawn(33, 24), drawn(301, 24, seed=1), torch.arange(33) * 9
    exact = hidden.double().requires_grad_()
    expected = reference_loss(exact, weight.double(), None, targets, transform=after)
    (of_exact,) = torch.autograd.grad(expected, exact)
    ways, offs = ((True, bindings.available("lm_head_cross_entropy")), (True, False), (False, False)), []
    for is_native, is_fused in ways:
        h = hidden.clone().requires_grad_()
        found = cross_entropy(
            h, weight, None, targets, transform=after, rows=rows, is_native=is_native, is_fused=is_fused
        )
        assert found.item() == pytest.approx(expected.item(), rel=2e-3)
        (grad_hidden,) = torch.autograd.grad(found, h)
        offs.append(float((grad_hidden.double() - of_exact).norm() / of_exact.norm()))
    assert max(offs[:2]) <= 1.1 * offs[2]


HEADS = {  # tokens, hidden size, vocabulary
    "one part": (7, 40, 131),
    "parts": (61, 66, 2301),
    "rows half a page apart": (30, 512, 1500),
    "a vocabulary smaller than a register": (5, 32, 7),
    "one token": (1, 2, 300),
}


def head_and_exact(tokens, width, vocab, scale=1.0, rows=25, grow=0.0, has_bias=False):
    """(the losses and gradient in C, the same in float64); grow: by how much logits grow from the first token of the
    vocabulary to the last.
    """
    hidden, weight, targets = drawn(tokens, width), drawn(vocab, width, seed=1), torch.arange(tokens) * 37 % vocab
    hidden[:, 0] = 1.0
    weight[:, 0] = torch.linspace(0, grow, vocab)
    grad_hidden = torch.empty_like(hidden)
    bias = 5 * drawn(vocab, seed=2) if has_bias else None
    losses = bindings.lm_head_cross_entropy(hidden, weight, bias, targets, scale, rows, grad_hidden)
    exact = hidden.double().requires_grad_()
    logits = torch.nn.functional.linear(exact, weight.double(), bias.double() if has_bias else None)
    expected = torch.nn.functional.cross_entropy(scale * logits, targets, reduction="none")
    return (losses, grad_hidden), (expected.detach(), *torch.autograd.grad(expected.sum(), exact))


@needs_head
@pytest.mark.parametrize("grow", [0.0, 90.0, -90.0], ids=["even", "growing", "falling"])
@pytest.mark.parametrize("case", HEADS)
def test_the_head_is_exact_but_for_probabilities_and_gradients_in_bf16(case, grow):
    """Logits are not rounded, and of growing ones many are larger than all before."""
    (losses, grad_hidden), (expected, of_exact) = head_and_exact(
        *HEADS[case], scale=0.5, grow=grow, has_bias=case == "parts"
    )
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=2e-5)
    off = (grad_hidden.double() - of_exact).norm(dim=1) / of_exact.norm(dim=1)
    assert off.median() < 2**-8 and off.max() < 2**-7, off


@needs_head
def test_what_is_left_to_learn_of_a_certain_token_is_not_rounded_away():
    """Its gradient is a difference of numbers that are almost the same."""
    hidden, weight = drawn(40, 64), drawn(1000, 64, seed=1)
    sure = (hidden.double() @ weight.double().T).argmax(1)
    grad_hidden = torch.empty_like(hidden)
    bindings.lm_head_cross_entropy(hidden, weight, None, sure, 4.0, 40, grad_hidden)
    exact = hidden.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(4.0 * exact @ weight.double().T, sure, reduction="none")
    (of_exact,) = torch.autograd.grad(losses.sum(), exact)
    assert losses.median() < 0.01
    off = ((grad_hidden.double() - of_exact).norm(dim=1) / of_exact.norm(dim=1))[
        losses > 1e-12
    ]  # below, float64's own difference is rounded
    assert off.max() < 2**-8, off


@needs_head
def test_the_head_has_the_same_bits_on_any_number_of_threads_and_however_tokens_are_split():
    threads, made = torch.get_num_threads(), []
    try:
        for number, rows in ((1, 200), (2, 200), (3, 200), (7, 200), (2, 64)):
            torch.set_num_threads(number)
            made.append(head_and_exact(200, 64, 3000, rows=rows)[0])
    finally:
        torch.set_num_threads(threads)
    for losses, grad_hidden in made[1:]:
        assert torch.equal(losses, made[0][0]) and torch.equal(grad_hidden, made[0][1])


@needs_head
def test_losses_alone_are_those_with_a_gradient():
    hidden, weight, targets = drawn(30, 64), drawn(1000, 64, seed=1), torch.arange(30)
    alone, both = (
        bindings.lm_head_cross_entropy(hidden, weight, None, targets, 1.0, 16, grad_hidden)
        for grad_hidden in (None, torch.empty_like(hidden))
    )
    assert torch.equal(alone, both)


@needs_head
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("width", [64, 576, 2048, 4096])
@pytest.mark.parametrize("vocab", [500, 4000, 49152, 128256])
def test_the_plan_counts_what_the_head_asks_for(vocab, width, learns):
    shapes = replace(architectures.llama_of(8), hidden=width, vocab=vocab)
    config = resolve(
        {"model_name": "demo", "precision": "bf16", "kernels": "native", "fused_linear_cross_entropy": True}, environ={}
    )
    room = bindings.library().lm_head_workspace(512, width, vocab, learns)
    packed = 2 * 2 * native_kernels.constants()["HEAD_VOCAB_BLOCK"] * width  # of one thread
    assert memory.head_room(shapes, config, 512, learns) - packed == pytest.approx(room, rel=0.03, abs=512 * 192)
    assert (
        memory.head_room(shapes, config.with_(cpu_threads=8), 512, learns)
        - memory.head_room(shapes, config, 512, learns)
        == 7 * packed
    )


@needs_head
@pytest.mark.parametrize("width", [24, 25])
@pytest.mark.parametrize("learns", ["nothing else", "weight", "bias"])
def test_a_head_that_learns_and_one_of_odd_width_get_gradients_all_the_same(learns, width):
    inputs = [drawn(9, width), drawn(61, width, seed=1), drawn(61, seed=2)]
    exact = [x.double() for x in inputs]
    wanted = [0] if learns == "nothing else" else [0, 1 if learns == "weight" else 2]
    found = []
    for (hidden, weight, bias), compute in (
        (inputs, lambda *x: cross_entropy(*x, torch.arange(9), rows=4, is_native=True, is_fused=True)),
        (exact, lambda *x: reference_loss(*x, torch.arange(9))),
    ):
        given = [x.requires_grad_(number in wanted) for number, x in enumerate((hidden, weight, bias))]
        found.append(torch.autograd.grad(compute(*given), [given[number] for number in wanted]))
    for ours, true in zip(*found, strict=True):
        assert (ours.double() - true).norm() < 0.01 * true.norm()


@needs_head
@pytest.mark.parametrize("is_fused", [True, False])
def test_a_wider_head_input_is_rounded_to_the_weights_dtype(is_fused):
    """Some rows at a time where there are logits: a copy of all would lie beside them."""
    hidden, weight = drawn(9, 24).float(), drawn(61, 24, seed=1)
    found = []
    for x in (hidden, hidden.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            total = cross_entropy(
                x.requires_grad_(), weight, None, torch.arange(9), rows=4, is_native=True, is_fused=is_fused
            )
        found.append((total.detach(), torch.autograd.grad(total, x)[0]))
    (total, gradient), (expected, of_rounded) = found
    assert total == expected and gradient.dtype == torch.float32 and torch.equal(gradient, of_rounded.float())


@takes_head
@pytest.mark.parametrize("asked", [{}, {"logits_chunk_tokens": 40}])
def test_where_the_kernels_turn_out_not_to_run_logits_are_few_at_a_time(asked, tmp_path):
    """The plan took more, since there were to be none; a number that was asked for stays."""
    plan = BackendManager("cpu").plan(
        resolve(
            {"model_name": str(tiny_models.make(tmp_path)), "dataset": "none", "precision": "bf16", **asked}, environ={}
        )
    )
    model, specs = AutoModelForCausalLM.from_pretrained(tmp_path), []
    for kernels in ("native", "portable"):
        context = BuildContext(plan.config, Runtime(plan), kernels=kernels, model=model)
        assert specify_loss(context) == []
        specs.append(context.loss_spec)
    assert [spec.is_fused for spec in specs] == [True, False]
    assert [spec.chunk_tokens for spec in specs] == ([40, 40] if asked else [512, 64])


@needs_head
def test_words_that_are_masked_out_do_not_count():
    """A bias of minus infinity on all words of a block, the first ones among them."""
    hidden, weight, targets = drawn(20, 64), drawn(2000, 64, seed=1), torch.arange(20) + 1000
    bias = torch.zeros(2000).bfloat16()
    bias[:300] = bias[1500:] = -torch.inf
    grad_hidden = torch.empty_like(hidden)
    losses = bindings.lm_head_cross_entropy(hidden, weight, bias, targets, 1.0, 20, grad_hidden)
    exact = hidden.double().requires_grad_()
    expected = reference_loss(exact, weight[300:1500].double(), None, targets - 300)
    assert float(losses.sum()) == pytest.approx(expected.item(), rel=1e-5)
    (of_exact,) = torch.autograd.grad(expected, exact)
    assert (grad_hidden.double() - of_exact).norm() < 0.005 * of_exact.norm()


@pytest.mark.parametrize("is_fused", [False, FUSED])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad, is_fused):
    """A guard must see it: nothing turns it into a number."""
    hidden, weight, targets = drawn(3, 16), drawn(50, 16, seed=1), torch.zeros(3, dtype=torch.long)
    hidden[1, 0] = bad
    h = hidden.requires_grad_()
    found = cross_entropy(h, weight, None, targets, rows=8, is_native=True, is_fused=is_fused)
    assert not torch.isfinite(found) and not torch.isfinite(torch.autograd.grad(found, h)[0][1]).any()
    for made in (bindings.rms_norm(hidden, torch.ones(16).bfloat16(), 1e-5)[1], bindings.swiglu(hidden, hidden)[1, 0]):
        assert not torch.isfinite(made).all()


REPLACED = {  # gemma's gate is another; OLMo 2 norms queries and keys whole; GPT-2 has none of them
    "llama": {"FastRMSNorm", "FastGatedMLP", "FastAttention"},
    "qwen3": {"FastRMSNorm", "FastGatedMLP", "FastAttention"},
    "gemma3_text": {"FastRMSNorm", "FastAttention"},
    "olmo2": {"FastRMSNorm", "FastGatedMLP"},
    "mixtral": {"FastRMSNorm", "FastAttention"},
    "gpt2": set(),
}


@pytest.mark.parametrize("architecture", REPLACED)
def test_models_learn_what_they_learn_on_portable_kernels(architecture, tmp_path):
    """Loss and gradients of a whole model; what has no norm or gate of ours keeps its own."""
    base = tiny_models.make(tmp_path / "base", architecture)
    found = {}
    for kernels in ("native", "portable"):
        started = tiny_models.Started(tmp_path / kernels, base, kernels=kernels, precision="bf16")
        for name, parameter in started.built.trainable.items():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(len(name)))
        assert isinstance(started.built.loss, loss.TrainedTokenLoss) and started.built.loss.spec.is_native == (
            kernels == "native"
        )
        replaced = [
            type(module).__name__ for module in started.model.modules() if isinstance(module, swap_modules.FastModule)
        ]
        names = {started.model.get_base_model().config._attn_implementation}
        assert (set(replaced), names) == (
            (REPLACED[architecture], {unpadded.NATIVE}) if kernels == "native" else (set(), {unpadded.NAME})
        )
        (batch,) = started.run.stream[0]
        value = started.built.loss(started.model, batch, torch.device("cpu"))
        found[kernels] = (
            value.item(),
            torch.cat([g.flatten() for g in torch.autograd.grad(value, list(started.built.trainable.values()))]),
        )
    (ours, of_ours), (theirs, of_theirs) = found["native"], found["portable"]
    assert ours == pytest.approx(theirs, rel=2e-3)
    assert torch.nn.functional.cosine_similarity(of_ours, of_theirs, 0) > 0.999


def test_they_are_planned_where_they_are_of_use():
    def kernels(**settings):
        return BackendManager("cpu").plan(resolve({"backend": "cpu", **settings}, environ={})).kernels

    assert kernels(precision="bf16") == kernels(precision="bf16", kernels="native") == "native"
    with pytest.raises(UsageError, match="kernels native: they are for precision bf16, and this is fp32"):
        kernels(precision="fp32", kernels="native")
    assert kernels(precision="fp32") == "portable" and kernels(precision="bf16", kernels="portable") == "portable"
    assert (
        kernels(precision="bf16", strategy="ddp", world_size=2) == "native"
        and kernels(precision="bf16", strategy="fsdp", world_size=2) == "portable"
    )


def test_modules_are_asked_what_they_do_without_their_weights():
    """Reading all weights of a model at each start takes longer than training a step of it; and they are back
    afterwards.
    """
    model = (
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
            )
        )
        .bfloat16()
        .eval()
    )
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    read = []
    for name, module in linears.items():
        module.register_forward_pre_hook(lambda module, x, name=name: read.append(name))
    assert swap_modules.install(model, "native") == [] and read == []
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(swap_modules.FastGatedMLP), kinds.count(swap_modules.FastAttention)) == (2, 2)
    assert {name: model.get_submodule(name) for name in linears} == linears
    model(torch.arange(4)[None])
    assert set(read) == set(linears)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_positions_are_turned_by_float32_angles(architecture, tmp_path):
    """Those that the same model gives in float32 (Gemma 3's layers have two kinds), in a run that recomputes, too."""
    base = tiny_models.make(tmp_path / "base", architecture)
    started = tiny_models.Started(tmp_path, base, kernels="native", precision="bf16", use_gradient_checkpointing=True)
    assert not any("angles" in note for note in started.built.notes)
    layers = [module for module in started.model.modules() if isinstance(module, swap_modules.FastAttention)]
    seen = {module.layer_idx: [] for module in layers}
    for module in layers:
        module.rotate = lambda x, cos, sin, to=seen[module.layer_idx]: (
            to.append((cos, sin)) or bindings.rotate(x, cos, sin)
        )
    (batch,) = started.run.stream[0]
    started.built.loss(started.model, batch, torch.device("cpu")).backward()

    given = started.built.loss.prepare(batch, torch.device("cpu"))
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    expected = {}
    for module in whole.modules():
        if type(module).__name__.endswith("Attention"):
            module.register_forward_pre_hook(
                lambda module, _, options: expected.update({module.layer_idx: options["position_embeddings"]}),
                with_kwargs=True,
            )
    whole(given.ids, position_ids=given.positions)
    assert len(layers) == len(expected) == 2
    for layer, angles in seen.items():
        assert len(angles) == 4  # q and k, and both again
        assert all(
            a.dtype == torch.float32 and torch.equal(a, b)
            for both in angles
            for a, b in zip(both, expected[layer], strict=True)
        )


class Turns(torch.nn.Module):
    """A rotary module that is called by names, and gives float32 where it is told to."""

    def __init__(self, dtype=None):
        super().__init__()
        self.dtype, self.calls = dtype, 0

    def forward(self, x, position_ids):
        self.calls += 1
        angles = (position_ids[..., None] * torch.ones(32)).float()
        return angles.cos().to(self.dtype or x.dtype), angles.sin().to(self.dtype or x.dtype)


Turns.__name__ = "TurnsRotaryEmbedding"


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_angles_are_made_twice_only_where_they_are_rounded(dtype):
    model = (
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
            )
        )
        .bfloat16()
        .eval()
    )
    rotary = model.model.rotary_emb = Turns(dtype)
    assert swap_modules.install(model, "native") == []
    rotary.calls = 0
    x, positions = torch.zeros(1, 3, 64).bfloat16(), torch.arange(3)[None]
    for angles in (rotary(x, positions), rotary(x, position_ids=positions), rotary(x=x, position_ids=positions)):
        exact = angles if dtype else angles.exact
        assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(angles, exact, strict=True))
        assert all(angles.dtype == torch.float32 for angles in exact) and torch.equal(
            exact[0], positions[..., None].float().cos().expand(1, 3, 32)
        )
    assert rotary.calls == (3 if dtype else 6)


def test_a_kernel_that_turns_wrongly_by_float32_angles_is_not_used(monkeypatch):
    assert bindings.self_check() == ""
    right = bindings._rotate
    monkeypatch.setattr(
        bindings,
        "_rotate",
        lambda x, cos, sin, *, is_backward: right(
            x, cos, cos if cos.dtype == torch.float32 else sin, is_backward=is_backward
        ),
    )
    assert "other numbers" in bindings.self_check()


@pytest.mark.parametrize("products", [CpuFullMatmul(), CpuInt8Matmul()], ids=["full", "int8"])
def test_no_product_of_a_layer_is_torchs_under_dropout(products):
    """oneDNN would compile each for each number of tokens."""
    if not bindings.preferred("frozen_matmul"):
        pytest.skip("here are no own products, or oneDNN's are faster")
    x, weights = drawn(1, 40, 64).requires_grad_(), [drawn(96, 64, seed=1), drawn(32, 64, seed=2)]
    layers = [
        fused_lora.LoraLinear(
            lambda w=w: products.prepare_weight(w),
            None,
            torch.nn.Parameter(drawn(6, 64, seed=3).float()),
            torch.nn.Parameter(drawn(len(w), 6, seed=4).float()),
            0.5,
        )
        for w in weights
    ]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        sum(y.sum() for y in fused_lora.lora_linears(x, layers, fused_lora.Dropout(0.1), products)).backward()
    assert x.grad.isfinite().all() and not {event.key for event in seen.key_averages()} & {
        "aten::mm",
        "aten::addmm",
        "aten::linear",
        "aten::matmul",
        "aten::_int_mm",
    }


def test_angles_that_are_more_than_rounded_stay_as_they_are():
    class OwnRotaryEmbedding(torch.nn.Module):
        def forward(self, x, position_ids):
            cos = (position_ids[..., None] * torch.ones(32)).float().cos()
            return cos.to(x.dtype) + (0.0 if x.dtype == torch.float32 else 0.25), cos.to(x.dtype)

    model = (
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
            )
        )
        .bfloat16()
        .eval()
    )
    model.model.rotary_emb = OwnRotaryEmbedding()
    assert swap_modules.install(model, "native") == [
        "OwnRotaryEmbedding gives no float32 angles: it is no rotation that is known here (1 modules)"
    ]
    cos, _ = model.model.rotary_emb(torch.zeros(1, 3, 64).bfloat16(), torch.arange(3)[None])
    assert cos.dtype == torch.bfloat16 and not hasattr(cos, "exact")


HALF = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "pad_token_id": 0,
}
PARTLY_ROTATED = {
    "nemotron": HALF,
    "glm4_moe": {**HALF, "moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("architecture", PARTLY_ROTATED)
def test_attention_that_rotates_a_part_of_each_head_stays_its_own(architecture, tmp_path):
    """Given cos as wide as a head it computes what ours does; the model gives it half as much."""
    model = AutoModelForCausalLM.from_pretrained(
        tiny_models.make(tmp_path, architecture, dtype=torch.bfloat16, **PARTLY_ROTATED[architecture])
    ).eval()
    ids = torch.arange(3, 15)[None]
    theirs = model(ids).logits.float()
    left = swap_modules.install(model, "native")
    kind = next(type(module).__name__ for module in model.modules() if type(module).__name__.endswith("Attention"))
    assert f"{kind} runs as it is: it may rotate a part of each head (2 modules)" in left
    ours = model(ids).logits.float()
    assert theirs.isfinite().all() and (ours - theirs).norm() <= 0.02 * theirs.norm()
