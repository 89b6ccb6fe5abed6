"""Loading: one process reads and quantizes, the others receive bytes, and what they hold is what it holds."""

import os
import threading
import time

import numpy as np
import pytest
import torch

from anyqlora.on_torch.assembly.build import build, optimizer_factory
from anyqlora.on_torch.loading import stream
from anyqlora.on_torch.runtime import Runtime
from anyqlora.testing import WorldFailed, world
from tests.support import tiny_models
from tests.support.equality import planned, some


def built_under(base, settings, loaded=lambda: None):
    """`loaded()` is called when every rank has its part of the model, before the optimizer is made."""
    plan = planned(base, int(os.environ["WORLD_SIZE"]), **settings)
    runtime = Runtime(plan)
    built = build(plan.config, runtime)
    was_meta = any(p.is_meta for p in built.model.parameters())
    before = {name: str(p.dtype) for name, p in built.model.named_parameters()} if not was_meta else {}
    make = optimizer_factory(plan.config)

    def factory(parameters):
        loaded()
        return make(parameters)

    model, *_ = runtime.prepare(built.model, built.trainable, factory)
    return plan, runtime, built, model, was_meta, before


def outputs(base, settings):
    """What each rank computes from the same ids, and how often it has read the model's files."""
    times, read = [], stream.load_streamed

    def counted(*given, **options):
        times.append(1)
        return read(*given, **options)

    stream.load_streamed = counted
    try:
        _, runtime, built, model, _, _ = built_under(base, settings)
    finally:
        stream.load_streamed = read
    ids = torch.arange(3, 15)[None]
    with torch.no_grad(), runtime.autocast():
        model.eval()
        return runtime.unwrap_model(model)(input_ids=ids, use_cache=False).logits.float().numpy(), len(times)


ARCHITECTURES = {"llama": {}, "gpt2": {}, "gemma2": {}, "phi3": {}, "qwen3": {"tie_word_embeddings": True}}


@pytest.mark.parametrize("architecture", some(ARCHITECTURES, ("gpt2", "qwen3")))
@pytest.mark.parametrize(
    "strategy",
    [{"strategy": "ddp"}, {"strategy": "fsdp"}, {"strategy": "deepspeed", "deepspeed_zero_stage": 3}],
    ids=["ddp", "fsdp", "zero3"],
)
def test_every_rank_has_the_model_that_one_process_reads(architecture, strategy, tmp_path):
    base = tiny_models.make(tmp_path, architecture, **ARCHITECTURES[architecture])
    ((expected, _),) = world(1, outputs, base, {"strategy": "single"})
    (first, one), (second, none) = world(2, outputs, base, strategy)
    assert (one, none) == (1, 0)
    np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(first, second)


OF_WHOLE_BLOCKS = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.parametrize(
    "mesh, quantizer", some([("model=2", "nf4"), ("model=2", "none"), ("model=2,batch=2", "nf4")], [("model=2", "nf4")])
)
@pytest.mark.parametrize("architecture", some(("llama", "gemma2"), ("llama",)))
def test_every_rank_has_its_slices_of_the_model_that_one_process_reads(architecture, mesh, quantizer, tmp_path):
    """Scales of scales are not those of the whole, so there are none."""
    base = tiny_models.make(tmp_path, architecture, **OF_WHOLE_BLOCKS)
    kept = {"double_quant": False} if quantizer == "nf4" else {"train_type": "lora"}
    ((expected, _),) = world(1, outputs, base, {"strategy": "single", **kept})
    (first, one), *others = world(4 if "batch" in mesh else 2, outputs, base, {"strategy": "tp", "mesh": mesh, **kept})
    assert [one, *(times for _, times in others)] == [1] + [0] * len(others)
    np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-5)
    for found, _ in others:
        np.testing.assert_array_equal(first, found)


@pytest.mark.parametrize("strategy", some(("fsdp", "ddp"), ("fsdp",)))
def test_ranks_get_what_the_first_one_has_kept(strategy, tmp_path):
    base, settings = (
        tiny_models.make(tmp_path / "base"),
        {"strategy": strategy, "precision": "bf16", "quantized_cache": str(tmp_path / "kept")},
    )
    without = world(2, outputs, base, {**settings, "quantized_cache": False})
    written = world(2, outputs, base, settings)
    (manifest,) = (tmp_path / "kept").glob("*/manifest.json")
    before = manifest.stat().st_mtime_ns
    for first, second in (written, world(2, outputs, base, settings)):
        np.testing.assert_array_equal(first[0], without[0][0])
        np.testing.assert_array_equal(second[0], without[0][0])
    assert manifest.stat().st_mtime_ns == before


KEPT = [
    {"quantizer": "int8"},
    {"adapter": "pissa"},
    {"quantizer": "fp4", "double_quant": False},
    {"train_type": "lora"},
    {"train_type": "full"},
    {"adapter": "dora", "train_type": "lora"},
]


@pytest.mark.parametrize("settings", some(KEPT, KEPT[:2]), ids=str)
def test_every_way_of_keeping_weights_reaches_the_other_ranks(settings, tmp_path):
    base = tiny_models.make(tmp_path)
    ((expected, _),) = world(1, outputs, base, {"strategy": "single", **settings})
    for found, _ in world(2, outputs, base, {"strategy": "ddp", **settings}):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_quantized_experts_reach_the_other_ranks(tmp_path):
    base = tiny_models.make(tmp_path, "mixtral")
    ((expected, _),) = world(1, outputs, base, {"strategy": "single"})
    for found, _ in world(2, outputs, base, {"strategy": "ddp"}):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"strategy": "fsdp", "quantizer": "int8"}, "int8 weights cannot be sharded"),
        ({"strategy": "deepspeed", "deepspeed_zero_stage": 3, "quantizer": "int8"}, "int8 weights cannot be sharded"),
        ({"strategy": "fsdp", "optimizer": "adamw_8bit"}, "it does not know a sharded optimizer state"),
    ],
)
def test_what_cannot_be_sharded_is_refused(settings, why, tmp_path):
    with pytest.raises(WorldFailed, match=why):
        world(2, outputs, tiny_models.make(tmp_path), settings)


def test_a_model_that_cannot_be_read_ends_all_ranks(tmp_path):
    base = tiny_models.make(tmp_path)
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    began = time.monotonic()
    with pytest.raises(
        WorldFailed, match="cut short or damaged|rank 1 ends"
    ):  # each looks at the file before it waits for the others
        world(2, outputs, base, {"strategy": "ddp"})
    assert time.monotonic() - began < 30


# ------------------------------------------------------------------------------------------------------------- memory


def loading_memory(base, small, settings):
    """Bytes: the most that this rank's own pages rose while it was given its part of the model, that part, and the
    largest layer.
    """
    from anyqlora.on_torch.device import own_pages

    built_under(small, settings)  # what is imported, allocated once and kept
    before, highest, stopped = own_pages(), [0], threading.Event()

    def sample():
        while not stopped.wait(0.001):
            highest[0] = max(highest[0], own_pages())

    thread = threading.Thread(target=sample)
    thread.start()
    _, runtime, built, _, _, _ = built_under(base, settings, stopped.set)
    thread.join()
    inner = runtime.unwrap_model()
    layer = max(
        sum(whole(p) for p in block.parameters())
        for block in next(m for m in inner.modules() if isinstance(m, torch.nn.ModuleList))
    )
    shard = sum(held(p) for p in inner.parameters()) + sum(b.numel() * b.element_size() for b in inner.buffers())
    states = sum(
        v.numel() * v.element_size()
        for m in inner.modules()
        if getattr(m, "quant_state", None) is not None
        for v in m.quant_state.as_dict(packed=True).values()
    )
    return {
        "risen": highest[0] - before,
        "shard": shard + states,
        "layer": layer,
        "whole": sum(whole(p) for p in inner.parameters()) + states,
    }


def whole(p) -> int:
    shape = getattr(p, "ds_shape", p.shape)
    return int(np.prod(shape)) * p.element_size()


def held(p) -> int:
    local = p.ds_tensor if hasattr(p, "ds_tensor") else p.to_local() if hasattr(p, "to_local") else p
    return local.numel() * local.element_size()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"strategy": "fsdp"}, {"strategy": "deepspeed", "deepspeed_zero_stage": 3}, {"strategy": "tp", "mesh": "model=2"}],
    ids=["fsdp", "zero3", "tp"],
)
def test_a_rank_that_receives_holds_its_shard_and_a_layer(settings, tmp_path):
    """113 million weights, of which the full-precision model is 450 MB and the codes are 57 MB."""
    shape = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 9,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    }
    base, small = (
        tiny_models.make(tmp_path / "base", "llama", **shape),
        tiny_models.make(tmp_path / "small", "llama", vocab_size=512, **OF_WHOLE_BLOCKS),
    )
    first, second = world(2, loading_memory, base, small, {**settings, "optimizer": "sgd"}, timeout=500)
    print(first, second)
    assert second["risen"] <= 1.25 * second["shard"] + second["layer"]
