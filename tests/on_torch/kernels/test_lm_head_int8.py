"""The output head's gradient in 8 bits (kernels/head.c): against its definition on the same codes, against float64, and
in whole runs.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from anyqlora.config.schema import TrainConfig
from anyqlora.models import architectures
from anyqlora.on_torch.assembly import int8_calibration
from anyqlora.on_torch.kernels.cpu import bindings
from anyqlora.on_torch.kernels.cross_entropy import LogitTransform, cross_entropy
from anyqlora.on_torch.kernels.frozen_matmul import rotated
from anyqlora.on_torch.loss import LossSpec, TrainedTokenLoss
from anyqlora.planning import memory, native_kernels
from anyqlora.planning.backends import BackendManager
from tests.on_torch.kernels.test_frozen_matmul import trained

pytestmark = pytest.mark.skipif(
    not bindings.available("lm_head_cross_entropy"), reason="no C compiler, no AVX512-BF16 or no AVX512-VNNI is here"
)
BLOCK = native_kernels.constants()["HEAD_VOCAB_BLOCK"]  # of the vocabulary: a token's probabilities there share a step
HEADS = {  # tokens, hidden size, vocabulary
    "one part": (7, 40, 132),
    "parts": (61, 66, 2300),
    "rows half a page apart": (30, 512, 1500),
    "a vocabulary smaller than a register": (5, 32, 8),
    "one token": (1, 2, 300),
    "a vocabulary of no whole words": (20, 48, 4229),
}


def drawn(*shape, seed=0, scale=1.0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def in_8_bits(hidden, weight, targets, bias=None, scale=1.0, rows=25):
    """(losses, gradient)."""
    grad_hidden = torch.empty_like(hidden)
    return bindings.lm_head_cross_entropy(
        hidden, weight, bias, targets, scale, rows, grad_hidden, bindings.quantize_lm_head(weight)
    ), grad_hidden


def whole(hidden, weight, targets, bias=None, scale=1.0):
    """The same in float64."""
    exact = hidden.double().requires_grad_()
    losses = nn.functional.cross_entropy(
        scale * nn.functional.linear(exact, weight.double(), None if bias is None else bias.double()),
        targets,
        reduction="none",
    )
    return losses.detach(), *torch.autograd.grad(losses.sum(), exact)


def reference(hidden, weight, targets, bias=None, scale=1.0):
    """Its gradient, in float64: of the codes of the weights without their mean, and of those of the other tokens'
    probabilities times the scales of their rows.
    """
    packed, scales, mean = (x.double() for x in bindings.quantize_lm_head(weight))
    codes = packed.permute(0, 2, 4, 1, 3).reshape(-1, packed.shape[1] * packed.shape[3])[
        : len(weight), : weight.shape[1]
    ]
    logits = scale * nn.functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    others = logits.softmax(1).scatter(1, targets[:, None], 0)
    product = torch.zeros(hidden.shape, dtype=torch.float64)
    for block in torch.arange(len(weight)).split(BLOCK):
        products = others[:, block] * scales[block]
        step = products.amax(1, keepdim=True).clamp(min=1e-300) / 255
        product += step * (products / step).round() @ codes[block]
    return scale * (rotated(product) + others.sum(1, keepdim=True) * (mean - weight[targets].double()))


def off(ours, exact):
    return (ours.double() - exact).norm(dim=1) / exact.norm(dim=1)


@pytest.mark.parametrize("grow", [0.0, 90.0, -90.0], ids=["even", "growing", "falling"])
@pytest.mark.parametrize("case", HEADS)
def test_it_is_its_definition_and_the_loss_is_not_rounded(case, grow):
    tokens, width, vocab = HEADS[case]
    hidden, weight, targets = drawn(tokens, width), drawn(vocab, width, seed=1), torch.arange(tokens) * 37 % vocab
    hidden[:, 0], weight[:, 0] = (
        1.0,
        torch.linspace(0, grow, vocab),
    )  # of growing logits many are larger than all before
    how = {"bias": 5 * drawn(vocab, seed=2) if case == "parts" else None, "scale": 0.5}
    losses, grad_hidden = in_8_bits(hidden, weight, targets, **how)
    assert torch.equal(
        losses, bindings.lm_head_cross_entropy(hidden, weight, how["bias"], targets, 0.5, 25, torch.empty_like(hidden))
    )
    found = off(grad_hidden, reference(hidden, weight, targets, **how))
    assert found.median() < 2**-8 and found.max() < 2**-7, found
    assert grow or off(grad_hidden, whole(hidden, weight, targets, **how)[1]).max() < 0.02


@pytest.mark.parametrize("kind", ["outliers", "a common part", "certain"])
def test_it_is_near_the_whole_gradient(kind):
    hidden, weight = drawn(40, 96), drawn(1000, 96, seed=1)
    scale, targets = 0.5, torch.arange(40) * 23
    if kind == "outliers":
        weight[:, 5] *= 10
        hidden[:, 5] /= 10
    elif kind == "a common part":  # it is in no gradient
        weight += 5 * drawn(1, 96, seed=3)
        hidden /= 4
    else:  # what is left to learn is a difference of numbers that are almost the same
        scale, targets = 4.0, (hidden.double() @ weight.double().T).argmax(1)
    losses, grad_hidden = in_8_bits(hidden, weight, targets, scale=scale)
    expected, exact = whole(hidden, weight, targets, scale=scale)
    assert kind != "certain" or expected.median() < 0.01
    assert off(grad_hidden, exact)[expected > 1e-12].max() < 0.02


def test_what_is_too_small_for_a_code_still_leads_away_from_the_target():
    """Half of the probability is a word's, and most of the rest is its neighbours', each of which has less than half of
    a step.
    """
    hidden, weight, targets = drawn(9, 64, scale=0.01), drawn(512, 64, seed=1), torch.full((9,), 300)
    bias = torch.full((512,), -9.0).bfloat16()
    bias[:128], bias[0] = -6.3, 0.0
    _, grad_hidden = in_8_bits(hidden, weight, targets, bias)
    _, exact = whole(hidden, weight, targets, bias)
    ours, against = grad_hidden.double(), -weight[300].double()
    assert ((ours @ against) / (exact @ against) - 1).abs().max() < 0.01
    assert off(grad_hidden, exact).max() < 0.03


def test_the_same_bits_on_any_number_of_threads_and_however_tokens_are_split():
    hidden, weight, targets = drawn(200, 64), drawn(3000, 64, seed=1), torch.arange(200) * 37 % 3000
    threads, made = torch.get_num_threads(), []
    try:
        for number, rows in ((1, 200), (2, 200), (3, 200), (7, 200), (2, 64)):
            torch.set_num_threads(number)
            made.append(in_8_bits(hidden, weight, targets, rows=rows))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(ours, first) for others in made[1:] for ours, first in zip(others, made[0], strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["hidden", "weight"])
def test_what_is_not_finite_stays_so(where, bad):
    hidden, weight, targets = drawn(3, 16), drawn(52, 16, seed=1), torch.zeros(3, dtype=torch.long)
    (hidden if where == "hidden" else weight)[1, 0] = bad
    losses, grad_hidden = in_8_bits(hidden, weight, targets)
    assert where == "weight" or not losses[1].isfinite()  # a word may have a logit of minus infinity
    assert not grad_hidden[1].isfinite().all()


def test_words_that_are_masked_out_do_not_count():
    hidden, weight, targets = drawn(20, 64), drawn(2000, 64, seed=1), torch.arange(20) + 1000
    bias = torch.zeros(2000).bfloat16()
    bias[:300] = bias[1500:] = -torch.inf
    _, grad_hidden = in_8_bits(hidden, weight, targets, bias)
    assert off(grad_hidden, whole(hidden, weight[300:1500], targets - 300)[1]).max() < 0.02


def loss_of(vocab=1000, is_fused=True, after=LogitTransform()):
    head = nn.Linear(64, vocab, bias=False).bfloat16().requires_grad_(False)
    return TrainedTokenLoss(LossSpec(64, after, is_native=True, is_fused=is_fused), head)


@pytest.mark.parametrize("is_near", [True, False])
def test_it_is_taken_where_it_is_near(is_near):
    """All processes do as the first one says."""
    loss, hidden, targets = loss_of(), drawn(30, 64), torch.arange(30)
    weights, (line,) = int8_calibration.calibrate_head(loss, lambda: [(hidden, targets)], lambda own: own and is_near)
    assert line.startswith(
        "the output head's gradient in 8 bits is 0." if is_near else "the output head's gradient is not rounded"
    )
    x = hidden.requires_grad_()
    ours, exact = (
        replace(loss, quantized_head=weights).from_hidden(x, targets),
        cross_entropy(x, loss.head.weight, None, targets, rows=64, is_native=True, is_fused=True),
    )
    assert ours.item() == exact.item()
    assert torch.equal(*(torch.autograd.grad(found, x)[0] for found in (ours, exact))) is not is_near


def test_what_is_far_is_not_taken(monkeypatch):
    monkeypatch.setattr(int8_calibration, "NEAR", 1e-6)
    weights, (line,) = int8_calibration.calibrate_head(loss_of(), lambda: [(drawn(30, 64), torch.arange(30))])
    assert weights is None and "not rounded" in line


@pytest.mark.parametrize("loss", [{"is_fused": False}, {"after": LogitTransform(cap=30.0)}], ids=str)
def test_heads_that_it_is_not_for(loss):
    """Logits are in memory, or something comes after them."""
    rows = [(drawn(30, 64), torch.arange(30))]
    assert int8_calibration.calibrate_head(loss_of(**loss), lambda: rows) == (None, [])


@pytest.mark.parametrize(
    ("settings", "counted"),
    [({}, True), ({"fused_linear_cross_entropy": False}, False), ({"frozen_matmul": "full"}, False)],
    ids=str,
)
def test_its_codes_are_in_the_plan(settings, counted):
    shapes = architectures.llama_of(8)
    bytes_of = [
        memory.weight_bytes(
            shapes,
            TrainConfig(
                model_name="x",
                quantizer="nf4",
                adapter="lora",
                precision="bf16",
                dequantized_layers=0,
                **{"fused_linear_cross_entropy": True, "frozen_matmul": "int8_backward", **asked},
            ),
        )["embedding, head, norms"]
        for asked in (settings, {"frozen_matmul": "full"})
    ]
    assert bytes_of[0] - bytes_of[1] == counted * 128256 * 4096  # 4,088 columns, in whole panels


@pytest.mark.skipif(
    not bindings.preferred("lm_head_cross_entropy") or "int8" not in BackendManager("cpu").report.products,
    reason="AMX is here, and oneDNN's products are used; or its int8 products may saturate",
)
@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.slow), "int8_backward"])
def test_runs_in_8_bits_say_so_and_have_it(kind, tmp_path):
    settings = {"max_steps": 3, "lora_dropout": 0, "frozen_matmul": kind, "log_to": "stdout"}
    ours, other = (
        trained(tmp_path, str(fused), fused_linear_cross_entropy=fused, **settings) for fused in (True, False)
    )
    assert "the output head's gradient in 8 bits is 0." in ours[2] and "head's gradient" not in other[2]
    assert all(abs(x / y - 1) < 0.01 for x, y in itertools.islice(zip(ours[0], other[0], strict=True), 3))
