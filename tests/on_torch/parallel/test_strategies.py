"""Every strategy against one process that sees the rows of all ranks: NF4 + LoRA, micro-batch plans that change."""

import numpy as np
import pytest

from anyqlora.planning.backends import BackendManager
from anyqlora.testing import world
from tests.support import tiny_models
from tests.support.equality import PLANS, distance, some, train


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.make(
        tmp_path_factory.mktemp("base"),
        "llama",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="module")
def alone(base):
    """(ranks, settings) -> what one process makes of the rows that are dealt to so many ranks."""
    kept = {}

    def of(ranks, **settings):
        key = ranks, repr(sorted(settings.items(), key=repr))
        if key not in kept:
            (kept[key],) = world(1, in_a_world, base, {"strategy": "single", "dealt_to": ranks, **settings})
        return kept[key]

    return of


def in_a_world(base, settings):
    return train(base, **settings)


FSDP = {
    f"fsdp {kind}": {"strategy": "fsdp", "sharding_strategy": kind}
    for kind in ("full_shard", "shard_grad_op", "hybrid_full_shard", "hybrid_shard_grad_op")
}
ZERO = {f"zero {stage}": {"strategy": "deepspeed", "deepspeed_zero_stage": stage} for stage in range(4)}
OFFLOADING = {
    "fsdp offloading": {"strategy": "fsdp", "use_cpu_offload": True},
    "zero 2 offloading": {"strategy": "deepspeed", "deepspeed_zero_stage": 2, "strategy_opt": "offload_optimizer=true"},
    "zero 3 offloading": {
        "strategy": "deepspeed",
        "deepspeed_zero_stage": 3,
        "strategy_opt": "offload_optimizer=true,offload_param=true",
    },
}
DDP = {
    "accelerate": {"strategy": "accelerate"},
    "ddp": {"strategy": "ddp"},
    "ddp overlapping": {"strategy": "ddp", "strategy_opt": "overlap=true"},
}
STRATEGIES = {**DDP, **FSDP, **ZERO, **OFFLOADING}
MAIN = ("ddp", "fsdp full_shard", "zero 1", "zero 3")
SGD = {"optimizer": "sgd", "lr": 0.1, "plans": [3, 1]}


def compare(ranks, expected, *, adapter, norm, loss=1e-5):
    first = ranks[0]
    np.testing.assert_allclose(np.sum([rank.losses for rank in ranks], axis=0), expected.losses, rtol=loss)
    for rank in ranks:
        np.testing.assert_allclose(rank.norms, expected.norms, rtol=norm)
    found = distance(expected.adapter, first.adapter, expected.start)
    print("adapter", found, "norms", np.abs(np.array(first.norms) / expected.norms - 1).max())
    assert found < adapter
    assert {name: value.shape for name, value in first.moments.items()} == {
        name: value.shape for name, value in expected.moments.items()
    }
    assert first.adapter and not any(rank.adapter or rank.moments for rank in ranks[1:])


EVERY_KIND = [
    name
    for name in STRATEGIES
    if name not in ("fsdp hybrid_shard_grad_op", "zero 2 offloading", "ddp overlapping", "fsdp offloading")
]


@pytest.mark.parametrize("name", some(STRATEGIES, EVERY_KIND))
def test_adamw_equals_one_process(name, base, alone):
    """5 steps; the norm of every step, the adapter, and the names and shapes of what is gathered."""
    compare(world(2, in_a_world, base, STRATEGIES[name]), alone(2), adapter=1e-4, norm=1e-5)


FAST = {"fused_lora": True, "padding_free": True}
IN_C = {
    **FAST,
    "precision": "bf16",
    "kernels": "native",
    "lora_dropout": 0,
}  # of its masks, 0.1 tips a rounding at step 5


@pytest.mark.parametrize("name", DDP)
def test_fast_paths_of_whole_models_equal_one_process_without(name, base, alone):
    ranks = world(2, in_a_world, base, {**STRATEGIES[name], **FAST})
    assert all(
        rank.fast == {"fused": 14, "rounded": 0, "in_c": 0, "kernels": 0, "unpadded": True, "last_mlp": True}
        for rank in ranks
    )
    compare(ranks, alone(2), adapter=1e-4, norm=1e-5)


@pytest.mark.skipif(
    not {"native", "int8"} <= {*BackendManager("cpu").report.kernels, *BackendManager("cpu").report.products},
    reason="no C compiler, or no VNNI, is here",
)
@pytest.mark.parametrize("products", ["full", "int8", "int8_backward"])
def test_kernels_and_rounded_products_equal_one_process(products, base, alone):
    """The same numbers are rounded in the same places: what is summed over ranks is all that differs.

    Not by AdamW, which makes whole steps of what is left of two gradients that cancel, and those tip roundings to bf16.
    """
    settings = {**IN_C, "optimizer": "sgd", "lr": SGD["lr"], "frozen_matmul": products}
    ranks, expected = world(2, in_a_world, base, {"strategy": "ddp", **settings}), alone(2, **settings)
    assert (
        expected.fast["kernels"] > 4
        and expected.fast["in_c"] == 14
        and (expected.fast["rounded"] == 14) == (products != "full")
        and all(rank.fast == expected.fast for rank in ranks)
    )
    compare(ranks, expected, adapter=1e-5, norm=1e-5)


@pytest.mark.parametrize("name", some(STRATEGIES, ("ddp", "fsdp full_shard", "zero 2")))
def test_sgd_equals_one_process(name, base, alone):
    """AdamW hides a constant factor; SGD does not."""
    compare(world(2, in_a_world, base, {**STRATEGIES[name], **SGD}), alone(2, **SGD), adapter=1e-5, norm=1e-5)


@pytest.mark.parametrize(
    "name", some(["ddp", "fsdp full_shard", "zero 0", "zero 1", "zero 2", "zero 3"], ("fsdp full_shard", "zero 0"))
)
def test_what_is_not_to_be_clipped_is_not(name, base, alone):
    """DeepSpeed clips at 1.0 unless it is told not to; one of the gradients here is longer."""
    settings = {**SGD, "apply_gradient_clipping": False}
    expected = alone(2, **settings)
    assert max(expected.norms) > 1.1
    compare(world(2, in_a_world, base, {**STRATEGIES[name], **settings}), expected, adapter=1e-5, norm=1e-5)


LATE = [
    *((name, "late") for name in MAIN),
    ("ddp overlapping", "late"),
    ("fsdp full_shard", "setter"),
    ("ddp", "setter"),
]


@pytest.mark.parametrize(
    "name, form",
    some(
        LATE,
        [("ddp overlapping", "late"), ("fsdp full_shard", "late"), ("zero 1", "late"), ("fsdp full_shard", "setter")],
    ),
)
def test_boundaries_that_are_known_late_or_set_by_hand(name, form, base, alone):
    compare(world(2, in_a_world, base, {**STRATEGIES[name], "form": form}), alone(2), adapter=1e-4, norm=1e-5)


@pytest.mark.parametrize("name", some(STRATEGIES, ("fsdp hybrid_full_shard", "zero 3")))
def test_four_processes_equal_one(name, base, alone):
    options = {"strategy_opt": "hybrid_shard_size=2"} if "hybrid" in name else {}
    compare(world(4, in_a_world, base, {**STRATEGIES[name], **options}), alone(4), adapter=1e-4, norm=1e-5)


@pytest.mark.parametrize(
    "name",
    some(
        ["ddp", "fsdp full_shard", "zero 0", "zero 1", "zero 2", "zero 3", "zero 2 offloading", "zero 3 offloading"],
        ("ddp", "zero 1", "zero 3 offloading"),
    ),
)
def test_a_step_that_is_to_be_skipped_changes_nothing(name, base, alone):
    """Finite gradients and `skip`, as for a loss that is a spike: the steps before and after are those of one process
    that skips too.
    """
    settings = {"skips": (0, 2), "plans": [2, 1, 2, 1]}
    ranks = world(2, in_a_world, base, {**STRATEGIES[name], **settings})
    compare(ranks, alone(2, **settings), adapter=1e-4, norm=1e-5)
    assert all(rank.skipped == [True, False, True, False] for rank in ranks)


@pytest.mark.parametrize("name", some(["ddp", "fsdp full_shard", "zero 3"], ("fsdp full_shard",)))
@pytest.mark.parametrize("reentrant", some([False, True], [False]))
def test_recomputed_activations(reentrant, name, base, alone):
    settings = {"use_gradient_checkpointing": True, "reentrant_checkpointing": reentrant, "plans": [2, 1]}
    compare(world(2, in_a_world, base, {**STRATEGIES[name], **settings}), alone(2, **settings), adapter=1e-4, norm=1e-5)


@pytest.mark.parametrize(
    "name", some(["ddp", "ddp overlapping", "fsdp full_shard", "zero 2", "zero 3"], ("fsdp full_shard", "zero 2"))
)
def test_full_fine_tuning_equals_one_process(name, base, alone):
    settings = {**SGD, "train_type": "full"}
    compare(world(2, in_a_world, base, {**STRATEGIES[name], **settings}), alone(2, **settings), adapter=1e-5, norm=1e-5)


DORA = [
    (quantizer, name)
    for quantizer in ("nf4", "fp4", "int8")
    for name in STRATEGIES
    if quantizer != "int8" or not name.startswith(("fsdp", "zero 3"))
]


@pytest.mark.parametrize(
    "quantizer, name", some(DORA, [("nf4", "ddp"), ("nf4", "fsdp full_shard"), ("nf4", "zero 3"), ("int8", "zero 2")])
)
def test_dora_on_packed_weights_equals_one_process(quantizer, name, base, alone):
    """Its magnitudes start from the norms of the weights' rows, which only the first process knows at first."""
    settings = {**SGD, "quantizer": quantizer, "adapter": "dora"}
    expected = alone(2, **settings)
    assert sum("magnitude" in key for key in expected.adapter) == 14
    compare(world(2, in_a_world, base, {**STRATEGIES[name], **settings}), expected, adapter=1e-5, norm=1e-5)


# ---------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("precision", some(["bf16", "fp16_autocast", "bf16_autocast"], ("bf16", "fp16_autocast")))
@pytest.mark.parametrize("name", some(MAIN, ("ddp", "fsdp full_shard", "zero 3")))
def test_16_bits(name, precision, base, alone):
    """What one process computes in 16 bits; a last digit of an adapter's float32 now and then tips a 16-bit one.

    All make whole logits here, as ZeRO 3 must: a loss that is made in parts rounds otherwise. And all run on portable
    kernels, as those must that split weights: C ones turn positions by angles that are not rounded.
    """
    settings = {
        **SGD,
        "precision": precision,
        "kernels": "portable",
        "plans": [2, 1, 3],
        "logits_chunk_tokens": 0,
        "lora_dropout": 0,  # of 16 bits, the sum of fewer numbers rounds more
        **({"initial_loss_scale": 1024} if precision == "fp16_autocast" else {}),
    }
    compare(
        world(2, in_a_world, base, {**STRATEGIES[name], **settings}),
        alone(2, **settings),
        adapter=1e-2,
        norm=1e-3,
        loss=1e-3,
    )


def infinite_on_one(step, rank, loss):
    return loss * float("inf") if (step, rank) == (1, 1) else loss


@pytest.mark.parametrize(
    "name",
    some(
        ["ddp", "ddp overlapping", "fsdp full_shard", "zero 0", "zero 1", "zero 2", "zero 3"],
        ("fsdp full_shard", "zero 2", "zero 3"),
    ),
)
def test_fp16_overflow_on_one_rank_is_skipped_by_all(name, base):
    """The scale halves in the step that overflowed, and doubles after two good ones; the adapter stays finite."""
    settings = {
        **STRATEGIES[name],
        "precision": "fp16_autocast",
        "initial_loss_scale": 256,
        "loss_scale_growth_interval": 2,
        "plans": [1] * 5,
    }
    for found in world(2, in_a_world, base, {**settings, "spoil": infinite_on_one}):
        assert found.skipped == [False, True, False, False, False]
        assert found.scales == [256, 256, 128, 128, 256]
        assert all(np.isfinite(value).all() for value in found.adapter.values())


@pytest.mark.parametrize("name", ["ddp", "fsdp full_shard", "zero 2"])
def test_fp32_step_that_is_not_finite_on_one_rank_is_skipped_by_all(name, base):
    for found in world(2, in_a_world, base, {**STRATEGIES[name], "plans": [1, 1, 1], "spoil": infinite_on_one}):
        assert found.skipped == [False, True, False] and not np.isfinite(found.norms[1])
        assert all(np.isfinite(value).all() for value in found.adapter.values())


# -------------------------------------------------------------------------------------------------------- collectives


IN_THE_LAST, IN_STEP, IN_EVERY = "the last micro-batch", "step", "every micro-batch"
WHERE = {
    ("ddp", "early"): IN_STEP,
    ("ddp", "late"): IN_STEP,
    ("ddp overlapping", "early"): IN_THE_LAST,
    ("ddp overlapping", "late"): IN_STEP,
    ("fsdp full_shard", "early"): IN_THE_LAST,
    ("fsdp full_shard", "late"): IN_THE_LAST,
    ("fsdp shard_grad_op", "late"): IN_THE_LAST,
    ("zero 0", "early"): IN_STEP,
    ("zero 0", "late"): IN_STEP,
    ("zero 1", "early"): IN_STEP,
    ("zero 1", "late"): IN_STEP,
    ("zero 2", "early"): IN_EVERY,
    ("zero 2", "late"): IN_EVERY,
    ("zero 3", "early"): IN_EVERY,
    ("zero 3", "late"): IN_EVERY,
}


@pytest.mark.parametrize(
    "name, form", some(WHERE, [("ddp", "late"), *((name, "early") for name in ("ddp", "fsdp full_shard", "zero 2"))])
)
def test_where_gradients_are_communicated(name, form, base):
    """Counted by torch's profiler: all-reduce, reduce and reduce-scatter, inside each micro-batch and in each step."""
    plans = [3, 1]
    found = world(2, in_a_world, base, {**STRATEGIES[name], "form": form, "count": True, "plans": plans})[0]
    print(found.in_micro_batches, found.in_steps)
    for inside, micro_batches in zip(found.in_micro_batches, plans, strict=True):
        *before, last = inside
        assert len(inside) == micro_batches
        assert all(before) if WHERE[name, form] == IN_EVERY else not any(before)
        assert (last > 0) == (WHERE[name, form] != IN_STEP)
    if name == "ddp" or (name, form) == ("zero 0", "late"):
        assert found.in_steps == [1, 1]


# ------------------------------------------------------------------------------------------------------ what is kept


CHAINS = [
    (("ddp", 2), ("fsdp full_shard", 4)),
    (("fsdp full_shard", 2), ("zero 3", 2)),
    (("zero 3", 2), ("single", 1)),
    (("zero 1", 2), ("ddp", 2)),
    (("single", 1), ("zero 2", 2)),
    (("zero 2", 4), ("fsdp hybrid_full_shard", 2)),
    (("fsdp offloading", 2), ("zero 0", 2)),
    (("ddp", 2), ("zero 3 offloading", 2)),
    (("ddp", 2), ("zero 2 offloading", 2)),
    (("zero 3 offloading", 2), ("zero 1", 4)),
]


@pytest.mark.parametrize("first, then", some(CHAINS, CHAINS[:1]))
def test_goes_on_under_another_strategy_and_world_size(first, then, base, alone):
    """Three steps, full tensors in between, two more: as if one process had done all five on the rows of four."""
    strategies = {"single": {"strategy": "single"}, **STRATEGIES}
    before = world(first[1], in_a_world, base, {**strategies[first[0]], "dealt_to": 4, "plans": PLANS[:3]})[0]
    after = world(
        then[1], in_a_world, base, {**strategies[then[0]], "dealt_to": 4, "load": (before.adapter, before.moments, 3)}
    )[0]
    expected = alone(4)
    np.testing.assert_allclose(before.norms + after.norms, expected.norms, rtol=1e-5)
    assert distance(expected.adapter, after.adapter, expected.start) < 1e-4
    assert all(after.start[name].tobytes() == value.tobytes() for name, value in before.adapter.items())


@pytest.mark.parametrize(
    "name, ranks",
    some(
        [("fsdp full_shard", 2), ("fsdp full_shard", 4), ("zero 3", 2), ("zero 3", 4)],
        [("fsdp full_shard", 2), ("zero 3", 4)],
    ),
)
def test_codes_are_sharded(name, ranks, base, alone):
    """Bytes of packed codes on each rank: 1 / N within 5 %."""
    whole = alone(4).codes
    for found in world(ranks, in_a_world, base, {**STRATEGIES[name], "plans": [1]}):
        assert found.codes == pytest.approx(whole / ranks, rel=0.05)
