"""The loss on MLX by some trained tokens at a time, against logits of all tokens; and products with weights that are
unpacked for them.
"""

import json

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'mlx[cpu]' mlx-lm")

import mlx.nn as nn
from mlx.utils import tree_flatten

from anyqlora.data.stream import IGNORE_INDEX, Batch
from anyqlora.on_mlx.mlx_lm_bridge import load_model
from anyqlora.on_mlx.nn.adapters import LoraLinear
from anyqlora.on_mlx.nn.loss import FullLogitsLoss, TrainedTokenLoss, inputs, loss_for
from anyqlora.on_mlx.nn.quantizers import UnpackedLinear
from tests.on_mlx.test_architectures import TRAINED
from tests.support import runs, tiny_models

LENGTH = 24


def made(tmp_path, architecture="llama", **more) -> nn.Module:
    """A tiny model whose every weight learns."""
    return load_model.load_model(
        tiny_models.make(tmp_path, architecture, **{**TRAINED.get(architecture, {}), **more}), longest=64
    )


def batch(vocabulary=500, trained=0.6, length=LENGTH, packed=False) -> Batch:
    random = np.random.default_rng(0)
    ids = random.integers(3, vocabulary, (3, length))
    targets = np.where(random.random((3, length)) < trained, np.roll(ids, -1, 1), IGNORE_INDEX)
    segments = np.repeat([[0] * 10 + [1] * (length - 10)], 3, 0) if packed else np.zeros_like(ids)
    return Batch(
        ids=ids.astype(np.int32),
        targets=targets.astype(np.int32),
        positions=np.zeros_like(ids),
        segments=segments,
        rows=(),
    )


def gradients(loss, model, given, factor=1.0):
    """((factor times the loss, the loss), {path: gradient})."""
    found, of_values = nn.value_and_grad(model, lambda: loss(given, factor))()
    return [float(value) for value in found], tree_flatten(of_values, destination={})


@pytest.mark.parametrize("rows", [1, 7, 4096])
@pytest.mark.parametrize("architecture", TRAINED)
def test_some_tokens_at_a_time_make_the_same_loss_and_gradients(architecture, rows, tmp_path):
    """Heads of their own and tied ones, capped and scaled logits; everything learns, the head too."""
    model, given = (
        made(tmp_path, architecture),
        inputs(batch(packed=architecture != "gemma2")),
    )  # mlx-lm's takes no mask for each row
    loss, why = loss_for(model, rows)
    assert type(loss) is TrainedTokenLoss and not why
    (scaled, total), ours = gradients(loss, model, given, 3.0)
    (_, whole), theirs = gradients(FullLogitsLoss(model), model, given, 3.0)
    assert (
        total == pytest.approx(whole, rel=1e-6)
        and scaled == pytest.approx(3 * whole, rel=1e-6)
        and loss.total(given) == pytest.approx(whole, rel=1e-6)
    )
    assert ours.keys() == theirs.keys()
    for path, gradient in theirs.items():
        far, largest = float(mx.abs(ours[path] - gradient).max()), float(mx.abs(gradient).max())
        assert far <= 2e-5 * largest, path
    head = "lm_head.weight" if "lm_head.weight" in theirs else "model.embed_tokens.weight"
    assert theirs[head].any()


def test_the_whole_loss_is_cross_entropy(tmp_path):
    """By mlx.nn, and autograd's own gradient of it."""
    model, rows = made(tmp_path), batch()
    given = inputs(rows)

    def plain():
        kept = mx.array(rows.targets != IGNORE_INDEX)
        return (nn.losses.cross_entropy(model(mx.array(rows.ids)), mx.array(np.maximum(rows.targets, 0))) * kept).sum()

    value, theirs = nn.value_and_grad(model, plain)()
    (_, total), ours = gradients(FullLogitsLoss(model), model, given)
    assert total == pytest.approx(float(value), rel=1e-6)
    for path, gradient in tree_flatten(theirs):
        assert float(mx.abs(ours[path] - gradient).max()) <= 2e-5 * float(mx.abs(gradient).max()), path


def test_fillers_and_batches_without_trained_tokens_add_nothing(tmp_path):
    model = made(tmp_path)
    loss, _ = loss_for(model, 5)
    padded, plain = inputs(batch(), 32), inputs(batch())
    assert padded.ids.shape == (3, 32) and len(padded.labels) % 12 == 0 and len(padded.labels) > len(plain.labels)
    assert loss.total(padded) == pytest.approx(loss.total(plain), rel=1e-6)
    (_, total), found = gradients(loss, model, inputs(batch(trained=0)))
    assert total == 0 and not any(gradient.any() for gradient in found.values())


def test_no_logits_of_a_whole_batch_are_made(tmp_path):
    """Peak memory of a loss and its gradient for a vocabulary of 12,000, counted in rows of logits, [1, V] in
    float32.
    """
    model = made(tmp_path, vocab_size=12_000, num_hidden_layers=1)
    model.freeze()
    model.layers[0].self_attn.q_proj.unfreeze()
    mx.eval(model.parameters())

    def peak(loss, given):
        mx.eval(*(part for part in given if part is not None))
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(nn.value_and_grad(model, lambda: loss(given))())
        return (mx.get_peak_memory() - before) / (4 * 12_000)  # in rows of logits

    given = inputs(batch(12_000, 1.0, 160))
    whole, by_eight = peak(FullLogitsLoss(model), given), peak(TrainedTokenLoss(model, 8), given)
    print("rows of logits: whole", whole, "by eight", by_eight)
    assert (
        whole > 2 * 3 * 160 and by_eight < whole / 10
    )  # MLX allocates for some operations ahead, and the head's weight once more


def test_the_head_sees_each_trained_token_once(tmp_path):
    """Forward: what is recorded are the rows that are asked for, of every call."""
    model, rows = made(tmp_path), batch(trained=0.3)
    loss, seen = TrainedTokenLoss(model, 4), []
    plain = loss.logits
    loss.logits = lambda hidden: seen.append(len(hidden)) or plain(hidden)
    gradients(loss, model, inputs(rows))
    assert sum(seen) == rows.trained < rows.ids.size / 2 and max(seen) == 4


class Odd(nn.Module):
    """A head that looks at every token at once."""

    def __init__(self):
        super().__init__()
        self.model = Trunk()
        self.head = nn.Linear(8, 20)

    layers = property(lambda self: self.model.blocks)

    def __call__(self, ids, cache=None):
        hidden = self.model(ids)
        return self.head(hidden - hidden.mean(1, keepdims=True))


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(20, 8), [nn.Linear(8, 8)]

    def __call__(self, ids):
        return self.blocks[0](self.embedding(ids))


class Bare(Trunk):
    layers = property(lambda self: self.blocks)

    def __call__(self, ids, cache=None):
        return super().__call__(ids)


@pytest.mark.parametrize(
    ("model", "why"), [(Odd, "does not make of some tokens"), (Bare, "in no module apart from its head")]
)
def test_a_model_that_cannot_be_taken_apart_says_so(model, why):
    loss, said = loss_for(model(), 8)
    assert type(loss) is FullLogitsLoss and why in said
    assert loss_for(model(), 0)[1] == "", "as asked"


def test_a_run_says_what_the_plan_chose(tmp_path):
    settings = {
        "model_name": "demo",
        "dataset": "demo",
        "train_type": "lora",
        "backend": "mlx",
        "precision": "fp32",
        "context_length": 96,
        "batch_size": 2,
        "max_steps": 2,
        "lora_dropout": 0,
        "save_steps": 0,
    }
    whole, some = (runs.run(tmp_path, str(rows), **settings, logits_chunk_tokens=rows) for rows in (0, 5))
    assert [json.loads((run / "plan.json").read_text())["config"]["logits_chunk_tokens"] for run in (whole, some)] == [
        0,
        5,
    ]
    np.testing.assert_allclose(
        [m["loss"] for m in runs.metrics(some)], [m["loss"] for m in runs.metrics(whole)], rtol=1e-6
    )
    np.testing.assert_allclose(
        [m["grad_norm"] for m in runs.metrics(some)], [m["grad_norm"] for m in runs.metrics(whole)], rtol=1e-5
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_an_unpacked_product_is_as_near_as_rounding(bits):
    """Against float32 of the same codes, both ways; MLX's own packed product stands beside it."""
    mx.random.seed(0)
    whole = nn.Linear(128, 96)
    packed = nn.QuantizedLinear.from_linear(whole, 64, bits)
    for name in ("scales", "biases", "bias"):
        packed[name] = packed[name].astype(mx.bfloat16)
    x, cotangent = mx.random.normal((5, 7, 128)).astype(mx.bfloat16), mx.random.normal((5, 7, 96)).astype(mx.bfloat16)
    weight = mx.dequantize(packed.weight, packed.scales.astype(mx.float32), packed.biases.astype(mx.float32), 64, bits)
    exact = x.astype(mx.float32) @ weight.T + packed.bias.astype(mx.float32), cotangent.astype(mx.float32) @ weight

    def far(module):
        (out,), (of_x,) = mx.vjp(module, [x], [cotangent])
        assert out.dtype == of_x.dtype == mx.bfloat16
        return [
            float(mx.linalg.norm(one.astype(mx.float32) - other) / mx.linalg.norm(other))
            for one, other in zip((out, of_x), exact, strict=True)
        ]

    theirs = far(packed)
    packed.__class__ = UnpackedLinear
    ours = far(packed)
    print("ours", ours, "theirs", theirs)
    assert max(ours) < 0.004 and max(ours) < max(theirs)  # it sums in 16 bits


def test_factors_have_float32_gradients_in_16_bits():
    """Against float64, of 1,500 tokens in bf16: rounded to bf16, gradients would be a thousand times further."""
    x, cotangent = (mx.random.normal((3, 500, 64), key=mx.random.key(n)).astype(mx.bfloat16) for n in range(2))
    layer = LoraLinear(
        nn.Linear(64, 64), mx.random.normal((4, 64)) / 8, mx.random.normal((64, 4)) / 2, scale=2.0, dropout=0.0
    )
    layer.base_layer.set_dtype(mx.bfloat16)

    def forward(a, b):
        layer.lora_A, layer.lora_B = a, b
        return layer(x)

    a, b = layer.lora_A, layer.lora_B
    (out,), (of_a, of_b) = mx.vjp(forward, [a, b], [cotangent])
    middle, of_middle = x @ a.astype(mx.bfloat16).T * 2.0, cotangent @ b.astype(mx.bfloat16) * 2.0
    assert out.dtype == mx.bfloat16
    for gradient, upper, lower in ((of_a, of_middle, x), (of_b, cotangent, middle)):
        upper, lower = (np.array(value.astype(mx.float32), np.float64).reshape(1500, -1) for value in (upper, lower))
        whole = upper.T @ lower
        assert gradient.dtype == mx.float32 and np.abs(np.array(gradient) - whole).max() < 1e-5 * np.abs(whole).max()
