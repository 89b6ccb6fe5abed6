"""Dropout by tokens: its masks against their definition in whole numbers, their statistics, and whose they are."""

import numpy as np
import pytest
import torch

from anyqlora.data.stream import BatchStream
from anyqlora.on_torch.device_batch import DeviceBatch
from anyqlora.on_torch.kernels import dropout
from anyqlora.on_torch.kernels.cpu import bindings
from anyqlora.on_torch.kernels.dropout import TokenDropout, current_tokens, token_mask
from tests.support import runs, tiny_models

CPU = torch.device("cpu")
WORD = (1 << 32) - 1


@pytest.fixture(autouse=True)
def no_tokens():
    current_tokens.set(None)
    yield
    current_tokens.set(None)


def keys_of(tokens, seed=0):
    return torch.randint(-(1 << 63), (1 << 63) - 1, (tokens,), generator=torch.Generator().manual_seed(seed))


def definition(keys, columns, below):
    """In Python's numbers, which do not overflow."""
    rows = []
    for key in keys.tolist():
        low, high, row = key & WORD, key >> 32 & WORD, []
        for column in columns:
            h = column // 2 * 0x9E3779B9 + low & WORD
            h = ((h ^ h >> 16) * 0x21F0AAAD & WORD) ^ high
            h = (h ^ h >> 15) * 0x735A2D97 & WORD
            h ^= h >> 15
            row.append((h >> 16 if column % 2 else h & 0xFFFF) >= below)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.uint8)


needs_c = pytest.mark.skipif(not bindings.available("token_mask"), reason="no C compiler is here")


@pytest.mark.parametrize("kernels", ["portable", pytest.param("native", marks=needs_c)])
@pytest.mark.parametrize("begin, width", [(0, 8), (0, 9), (4, 30), (3, 9), (5, 32), (7, 1)])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.999])
def test_a_mask_is_the_defined_one(kernels, begin, width, rate, monkeypatch):
    monkeypatch.setattr(dropout, "PIECE", 2 * width)  # keys of several pieces
    keys, columns = keys_of(7), range(begin, begin + width)
    found = token_mask(keys, width, rate, begin=begin, kernels=kernels)
    assert torch.equal(found, definition(keys, columns, round(rate * 65536)))
    assert token_mask(keys[:0], width, rate, begin=begin, kernels=kernels).shape == (0, width)


def masks_of_a_step(seed=1, step=0):
    """float64 [layer, token, column] of 0 and 1 for 3 layers, 8 rows of 64 tokens, 256 columns; 0.5 is dropped."""
    stream = stream_of(rows=8, batch_size=8, seed=seed)
    keys = torch.from_numpy(stream[step][0].token_keys).flatten()
    layers = [TokenDropout(0.5, name) for name in ("layers.0.q_proj", "layers.0.o_proj", "layers.1.q_proj")]
    return torch.stack([token_mask(keys ^ layer.key, 256, layer.p).double() for layer in layers])


def stream_of(rows=16, length=64, **settings):
    from anyqlora.data.rows import Example

    examples = [
        Example(np.full(length, 5, np.int32), np.ones(length, bool), f"rows:{i}", np.empty(0, np.int32), "", "")
        for i in range(rows)
    ]
    given = {
        "batch_size": 4,
        "gradient_accumulation_steps": 1,
        "num_epochs": 3,
        "max_steps": -1,
        "seed": 1,
        "packing": False,
        "context_length": length,
        "pad_id": 0,
    }
    return BatchStream(examples, **{**given, **settings})


def test_masks_are_as_good_as_random():
    """Every rate, and every correlation of two masks one layer, token or column apart, is within 5 deviations of what
    independent numbers have.
    """
    masks = masks_of_a_step()
    count = masks.numel()
    assert abs(float(masks.mean()) - 0.5) < 5 * 0.5 / count**0.5
    signs = 2 * masks - 1
    others = {
        "layers": signs.roll(1, 0),
        "tokens": signs.roll(1, 1),
        "two tokens": signs.roll(2, 1),
        "rows": signs.roll(64, 1),
        "columns": signs.roll(1, 2),
        "two columns": signs.roll(2, 2),
        "four columns": signs.roll(4, 2),
        "steps": 2 * masks_of_a_step(step=1) - 1,
        "seeds": 2 * masks_of_a_step(seed=2) - 1,
    }
    for name, other in others.items():
        assert abs(float((signs * other).mean())) < 5 / count**0.5, name
    for axes in ((0, 1), (0, 2), (1,)):  # no column, token or layer of its own
        sums = signs.sum(axes)
        of_one = count / sums.numel()
        assert float((sums**2).mean() / of_one) == pytest.approx(1, abs=6 * (2 / sums.numel()) ** 0.5)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.9])
def test_as_much_is_dropped_as_asked(rate):
    kept = token_mask(keys_of(500), 400, rate).double()
    assert abs(float(kept.mean()) - (1 - rate)) < 5 * (rate * (1 - rate) / kept.numel()) ** 0.5


def test_a_row_has_the_same_keys_whoever_has_it():
    """By process and micro-batch, also in the last step of an epoch, which is shorter."""
    whole = stream_of(rows=13, batch_size=8)
    ways = {
        "halves": [stream_of(rows=13, batch_size=4, gradient_accumulation_steps=2)],
        "two processes": [stream_of(rows=13, batch_size=4, rank=rank, world_size=2) for rank in (0, 1)],
        "both": [
            stream_of(rows=13, batch_size=1, gradient_accumulation_steps=4, rank=rank, world_size=2) for rank in (0, 1)
        ],
    }
    seen = set()
    for step in range(whole.total_steps):
        (batch,) = whole[step]
        keys = dict(zip(batch.rows, batch.row_keys.tolist(), strict=True))
        assert len({*keys.values()} | seen) == len(keys) + len(seen)  # no step has another's
        seen |= {*keys.values()}
        for name, streams in ways.items():
            shares = [share for stream in streams for share in stream[step] if share.rows]
            pairs = [pair for s in shares for pair in zip(s.rows, s.row_keys.tolist(), strict=True)]
            assert len(pairs) == len(keys) and dict(pairs) == keys, name
    resized = stream_of(rows=13, batch_size=8)
    resized.resize(2)
    assert np.array_equal(np.concatenate([b.row_keys for b in resized[0]]), whole[0][0].row_keys)


def test_tokens_keep_their_keys_without_padding():
    (batch,) = stream_of(rows=4, length=20)[0]
    batch.segments[1, 7:] = -1  # a shorter row
    padded, flat = DeviceBatch.padded(batch, CPU), DeviceBatch.unpadded(batch, CPU)
    own = torch.from_numpy(batch.segments >= 0)
    assert flat.keys.shape == flat.ids.shape and padded.keys.shape == padded.ids.shape
    assert torch.equal(flat.keys[0, : own.sum()], padded.keys[own]) and len(padded.keys.unique()) == padded.keys.numel()


def test_a_layer_drops_by_the_current_tokens_and_else_by_torchs_generator():
    layer, x = TokenDropout(0.3, "q_proj"), torch.randn(2, 5, 64, dtype=torch.float64, requires_grad=True)
    current_tokens.set(keys_of(10).view(2, 5))
    once, again = layer(x), layer(x)
    mask = token_mask(keys_of(10) ^ layer.key, 64, 0.3).view(x.shape)
    expected = x * mask / (1 - dropout.representable(0.3))
    torch.testing.assert_close(once, expected, rtol=1e-15, atol=0)
    assert torch.equal(once, again) and torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (once, expected)))
    assert torch.equal(TokenDropout(0.3, "q_proj")(x), once) and not torch.equal(TokenDropout(0.3, "k_proj")(x), once)
    others = torch.randn(7, 64)  # tokens that a router has chosen
    torch.manual_seed(1)
    routed = layer(others)
    torch.manual_seed(1)
    assert torch.equal(routed, torch.nn.functional.dropout(others, 0.3))
    current_tokens.set(None)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert layer(x) is x


def test_a_loop_of_its_own_gets_no_masks_of_a_batch_before(tmp_path):
    """Runtime.backward ends what the keys are for: the same model called with other tokens drops others each time."""
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", "llama"), lora_dropout=0.5)
    started.step()
    assert current_tokens.keys is None
    (batch,) = started.run.stream[0]
    ids = torch.from_numpy(batch.ids).long()
    for parameter in started.built.trainable.values():
        torch.nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        one, other = (started.model(input_ids=ids).logits for _ in range(2))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("recomputed", [False, True])
def test_two_batches_before_one_backward_each_drop_what_is_theirs(recomputed, tmp_path):
    """As a loop of somebody's own may have it; the reference is a backward after each forward."""
    base = tiny_models.make(tmp_path / "base", "llama")
    settings = {"train_type": "lora", "lora_dropout": 0.5, "use_gradient_checkpointing": recomputed, "batch_size": 2}
    found = []
    for together in (True, False):
        started = tiny_models.Started(tmp_path / str(together), base, **settings, max_steps=2)
        generator = torch.Generator().manual_seed(1)
        for parameter in started.built.trainable.values():
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
        (one,), (other,) = started.run.stream[0], started.run.stream[1]
        if together:
            (started.loss(one) + started.loss(other)).backward()
        else:
            for batch in (one, other):
                started.loss(batch).backward()
        found.append({name: parameter.grad for name, parameter in started.built.trainable.items()})
    for name, gradient in found[1].items():
        torch.testing.assert_close(found[0][name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


SETTINGS = {
    "model_name": "demo",
    "dataset": "demo",
    "context_length": 96,
    "max_steps": 4,
    "lr": 2e-3,
    "lora_dropout": 0.3,
    "save_steps": 0,
    "precision": "fp32",
}
WAYS = {
    "micro-batches": {"batch_size": 2, "gradient_accumulation_steps": 4},
    "with padding": {"batch_size": 8, "padding_free": False},
    "PEFT's own layers": {"batch_size": 8, "fused_lora": False},
    "recomputed": {"batch_size": 8, "use_gradient_checkpointing": True},
    "recomputed, reentrant": {"batch_size": 8, "use_gradient_checkpointing": True, "reentrant_checkpointing": True},
    "whole logits": {"batch_size": 8, "logits_chunk_tokens": 0, "padding_free": False},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return runs.metrics(runs.run(tmp_path_factory.mktemp("plain"), **SETTINGS, batch_size=8))


@pytest.mark.parametrize("way", WAYS)
def test_a_run_drops_the_same_however_it_is_computed(way, plain, tmp_path):
    found = runs.metrics(runs.run(tmp_path, **SETTINGS, **WAYS[way]))
    for key, within in (("loss", 1e-6), ("grad_norm", 2e-5)):
        assert [m[key] for m in found] == pytest.approx([m[key] for m in plain], rel=within)


def test_dora_drops_the_same_in_any_micro_batches(tmp_path):
    settings = {**SETTINGS, "adapter": "dora", "quantizer": "none", "max_steps": 2}
    found = [
        [m["loss"] for m in runs.metrics(runs.run(tmp_path, str(rows), **settings, batch_size=rows, **more))]
        for rows, more in ((4, {}), (1, {"gradient_accumulation_steps": 4}))
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
