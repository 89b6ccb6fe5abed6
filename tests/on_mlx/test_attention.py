"""Attention by some heads at a time on MLX against MLX's own of all of them, and against float64."""

import itertools

import numpy as np
import pytest

from anyqlora.planning.memory import activations

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'mlx[cpu]' mlx-lm")

from anyqlora.on_mlx.nn.attention import attention, own, parts, recomputed_attention
from tests.on_mlx.test_run import MLX
from tests.support import runs

LENGTH, WIDTH = 12, 8
HEAD = LENGTH * LENGTH * 4  # bytes of its scores
BUDGETS = {"all": 100 * HEAD, "rows": 13 * HEAD, "groups": 4 * HEAD, "heads": 2 * HEAD, "a head": 1}
SHAPES = [(3, 6, 6), (3, 6, 2), (2, 5, 1)]  # rows, heads, heads of keys and values


def documents(rows):
    """bool [rows, 1, T, T] of two documents each, which end at places of their own."""
    segments = np.stack([np.arange(LENGTH) >= 3 + 2 * row for row in range(rows)])
    return mx.array((segments[:, :, None] == segments[:, None]) & np.tril(np.ones((LENGTH, LENGTH), bool)))[:, None]


MASKS = {
    "none": lambda rows, heads: None,
    "causal": lambda rows, heads: "causal",
    "documents": lambda rows, heads: documents(rows),
    "one for all": lambda rows, heads: documents(1),
    "of two sides": lambda rows, heads: documents(1)[0, 0],
    "each head its own": lambda rows, heads: documents(heads)[:, 0],
}


def of(rows, heads, kv_heads, kind=mx.float32):
    rng = np.random.default_rng(0)
    return [mx.array(rng.standard_normal((rows, count, LENGTH, WIDTH)), kind) for count in (heads, kv_heads, kv_heads)]


def gradients(call, values):
    """(what `call` returns, gradients of its weighted sum)."""
    weights = mx.array(np.random.default_rng(1).standard_normal(values[0].shape), mx.float32)
    found = mx.grad(lambda *values: (call(*values) * weights).sum(), argnums=(0, 1, 2))(*values)
    return call(*values), *found


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_some_heads_at_a_time_are_all_of_them(shape, budget, mask, monkeypatch):
    monkeypatch.setattr(activations, "SCORES_ON_MLX", BUDGETS[budget])
    values, masked = of(*shape), MASKS[mask](*shape[:2])
    wanted = gradients(lambda *values: own(*values, scale=0.3, mask=masked), values)
    found = gradients(lambda *values: attention(*values, 0.3, masked), values)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and np.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_head_is_in_one_part(shape, budget, monkeypatch):
    """With its own keys and values, and no part has more than the budget, unless one head has."""
    monkeypatch.setattr(activations, "SCORES_ON_MLX", BUDGETS[budget])
    rows, heads, kv_heads = shape
    seen = []
    for (row, head), (of_row, of_head) in parts((rows, heads, LENGTH, WIDTH), (rows, kv_heads, LENGTH, WIDTH), 4):
        its_rows, its_heads, theirs = range(rows)[row], range(heads)[head], range(kv_heads)[of_head]
        assert row == of_row and sorted({one * kv_heads // heads for one in its_heads}) == list(theirs)
        assert len(its_rows) * len(its_heads) * HEAD <= max(BUDGETS[budget], HEAD)
        seen += itertools.product(its_rows, its_heads)
    assert sorted(seen) == list(itertools.product(range(rows), range(heads)))


def test_the_scores_are_those_of_a_plain_product(monkeypatch):
    """In float64, by numpy."""
    monkeypatch.setattr(activations, "SCORES_ON_MLX", HEAD)
    values = of(2, 4, 2)
    queries, keys, wanted = (np.array(value, np.float64) for value in values)
    keys, wanted = keys.repeat(2, axis=1), wanted.repeat(2, axis=1)
    scores = np.where(np.tril(np.ones((LENGTH, LENGTH), bool)), 0.3 * queries @ keys.swapaxes(2, 3), -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    assert np.allclose(attention(*values, 0.3, "causal"), powers / powers.sum(-1, keepdims=True) @ wanted, atol=1e-6)


def test_gradients_of_a_group_add_up_in_16_bits(monkeypatch):
    """One head at a time adds its own to what the others of its group have left."""
    monkeypatch.setattr(activations, "SCORES_ON_MLX", 1)
    shape = (2, 8, 1)
    wanted = gradients(lambda *values: own(*values, scale=0.3), of(*shape))
    found = gradients(lambda *values: attention(*values, 0.3, None), of(*shape, mx.bfloat16))
    for one, other in zip(found, wanted, strict=True):
        other = np.array(other)
        assert (
            one.dtype == mx.bfloat16
            and np.abs(np.array(one.astype(mx.float32)) - other).max() < 0.02 * np.abs(other).max()
        )


def test_mlx_still_keeps_all_scores_for_a_gradient(monkeypatch):
    """While it does, on_mlx._compat.attention_replaced is needed. Ours has those of one head at a time."""
    monkeypatch.setattr(activations, "SCORES_ON_MLX", 1)
    heads, length = 16, 512
    values = [mx.random.normal((1, heads, length, 16), key=mx.random.key(seed)) for seed in range(3)]
    mx.eval(values)
    scores = 4 * heads * length * length  # bytes, float32
    peaks = []
    for call in (lambda *v: own(*v, scale=0.3), lambda *v: attention(*v, 0.3, None)):
        mx.clear_cache()
        mx.reset_peak_memory()
        mx.eval(mx.grad(lambda *v, call=call: call(*v).sum(), (0, 1, 2))(*values))
        peaks.append(mx.get_peak_memory())
    assert peaks[0] > 3 * scores > scores > peaks[1]


def test_types_are_what_they_would_be(monkeypatch):
    """Normalized queries may be wider than values."""
    monkeypatch.setattr(activations, "SCORES_ON_MLX", 1)
    queries, keys, values = of(1, 2, 2)
    values = [queries, keys, values.astype(mx.bfloat16)]
    one, other = (
        gradients(call, values) for call in (lambda *v: attention(*v, 0.3, None), lambda *v: own(*v, scale=0.3))
    )
    assert [a.dtype for a in one] == [b.dtype for b in other] == [mx.float32] * 3 + [mx.bfloat16]
    assert all(
        np.allclose(a.astype(mx.float32), b.astype(mx.float32), rtol=0.01, atol=1e-5)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"use_gradient_checkpointing": True},
        {"packing": True},
        pytest.param({"train_type": "full"}, marks=pytest.mark.slow),
    ],
    ids=["plain", "checkpointed", "packed", "full"],
)
def test_a_run_learns_the_same(more, tmp_path, monkeypatch):
    """By all heads at a time and by one; and MLX has its own function back."""
    taken = []
    for budget in (1 << 30, 1):
        monkeypatch.setattr(activations, "SCORES_ON_MLX", budget)
        settings = {**MLX, "max_steps": 3, **more}
        if "train_type" in more:
            del settings["lora_rank"]
        directory = runs.run(tmp_path, str(budget), **settings)
        taken.append([(line["loss"], line["grad_norm"]) for line in runs.metrics(directory)])
    assert np.allclose(*taken, rtol=1e-5) and taken[0][0] != taken[0][2]
    assert mx.fast.scaled_dot_product_attention is own


def test_what_may_learn_is_left_to_mlx():
    """Sinks: of what a custom function closes over there is no gradient."""
    values, sinks = of(1, 4, 4), mx.zeros(4)
    with recomputed_attention():
        call = mx.fast.scaled_dot_product_attention
    assert call is not own
    found, wanted = (
        mx.grad(lambda sinks, call=call: call(*values, scale=0.3, sinks=sinks).sum())(sinks) for call in (call, own)
    )
    assert np.array_equal(found, wanted) and np.abs(np.array(found)).max() > 0
