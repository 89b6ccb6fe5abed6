"""Precision, accumulation, checkpointing, optimizers and schedules: real short runs on the embedded base."""

import importlib.util
import math

import numpy as np
import pytest
import torch
import transformers

from anyqlora.config.resolve import resolve
from anyqlora.core import registry
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.data import stream
from anyqlora.on_torch.assembly.build import build
from anyqlora.on_torch.parallel.base import Strategy
from anyqlora.on_torch.runtime import Runtime
from anyqlora.planning.backends import BackendManager
from anyqlora.runs.checkpoints import Checkpoints
from anyqlora.training.schedule import learning_rate, seed_at, uniform_start
from tests.support import runs

SHORT = {
    "model_name": "demo",
    "dataset": "demo",
    "context_length": 128,
    "batch_size": 4,
    "max_steps": 3,
    "lr": 2e-3,
    "lora_rank": 4,
    "lora_dropout": 0,
    "save_steps": 0,
    "use_gradient_checkpointing": False,
}


@pytest.fixture(scope="module")
def float32(tmp_path_factory):
    return runs.run(tmp_path_factory.mktemp("float32"), **SHORT, precision="fp32")


def planned(**settings):
    return BackendManager("cpu").plan(resolve({**SHORT, "backend": "cpu", **settings}, environ={}, origin="test"))


def losses(directory):
    return np.array([m["loss"] for m in runs.metrics(directory)])


def norms(directory):
    return np.array([m["grad_norm"] for m in runs.metrics(directory)])


@pytest.mark.parametrize("precision", ["bf16", "bf16_autocast", "bf16_buffers_autocast"])
def test_every_precision_learns_like_float32_with_float32_adapters(precision, float32, tmp_path):
    directory = runs.run(tmp_path, **SHORT, precision=precision)
    np.testing.assert_allclose(losses(directory), losses(float32), rtol=0.02)
    np.testing.assert_allclose(
        norms(directory), norms(float32), rtol=0.05
    )  # unscaled before it is measured and clipped
    assert {t.dtype for t in runs.adapter(directory).values()} == {torch.float32}
    saved = Checkpoints(directory / "checkpoints").read(3)
    assert {v.dtype for v in saved.moments.values()} == {np.dtype("float32")}
    assert not saved.state["loop"]["scaler"]
    assert [m["loss_scale"] for m in runs.metrics(directory)] == [1.0] * 3


def test_fp16_skips_what_overflows_and_saves_its_scale(tmp_path):
    """At 65536 the first step overflows where whole logits are differentiated; the second starts from the same weights,
    as float32 does at a rate of zero.
    """
    directory = runs.run(
        tmp_path, "fp16", **SHORT, precision="fp16", logits_chunk_tokens=0, padding_free=False, fused_lora=False
    )
    still = runs.run(tmp_path, "still", **{**SHORT, "lr": 0}, precision="fp32")
    steps = runs.metrics(directory)
    assert [m["skipped"] for m in steps] == [True, False, False]
    assert [m["loss_scale"] for m in steps] == [65536, 32768, 32768]
    np.testing.assert_allclose(losses(directory)[:2], losses(still)[:2], rtol=0.01)
    assert steps[0]["grad_norm"] in ("inf", "nan") and steps[1]["grad_norm"] == pytest.approx(norms(still)[1], rel=0.05)
    saved = Checkpoints(directory / "checkpoints").read(3)
    assert saved.state["loop"]["scaler"]["scale"] == 32768 and saved.state["loop"]["scaler"]["_growth_tracker"] == 2
    assert runs.result(directory)["tokens_trained"] == sum(m["trained_tokens"] for m in steps[1:])


@pytest.mark.parametrize(
    "precision, stored, computed",
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("fp16_autocast", torch.float32, torch.float16),
        ("bf16_autocast", torch.float32, torch.bfloat16),
        ("bf16_buffers_autocast", torch.bfloat16, torch.bfloat16),
    ],
)
def test_stored_and_computed_types(precision, stored, computed):
    plan = planned(precision=precision)
    runtime = Runtime(plan)
    model = build(plan.config, runtime).model
    layer = model.base_model.model.model.layers[0]
    assert layer.input_layernorm.weight.dtype == stored and model.get_input_embeddings().weight.dtype == stored
    linear = layer.mlp.down_proj.base_layer
    with runtime.autocast():
        out = linear(torch.ones(2, linear.in_features, dtype=stored, requires_grad=True))
    assert linear.compute_dtype == linear.weight.quant_state.dtype == computed
    assert out.dtype == stored  # bitsandbytes computes in its own type and gives back the input's


def test_fp16_overflow_skips_the_step_and_shrinks_the_scale():
    """A gradient that is infinite in fp16's range: no update, scale halved, and the next step goes through."""
    strategy = Strategy(planned(precision="fp16"))
    weight = torch.nn.Parameter(torch.ones(4))
    strategy.prepare(torch.nn.Identity(), {"w": weight}, lambda p: torch.optim.SGD(p, lr=1.0))
    strategy.backward((weight * torch.tensor([1.0, 1, 1, 1e38])).sum() * 1e3, is_final_micro_batch=True)
    result = strategy.step(max_grad_norm=1.0)
    assert result.skipped and result.loss_scale == 65536 and not math.isfinite(result.grad_norm)
    assert torch.equal(weight.detach(), torch.ones(4)) and strategy.scaler.get_scale() == 32768 and weight.grad is None
    strategy.backward((weight * 3).sum(), is_final_micro_batch=True)
    result = strategy.step(max_grad_norm=1.0)
    assert not result.skipped and result.grad_norm == pytest.approx(6.0)  # |(3, 3, 3, 3)|, free of the scale
    torch.testing.assert_close(weight.detach(), torch.ones(4) - 3 / 6)


@pytest.mark.parametrize("batch, accumulation", [(2, 2), (1, 4)])
def test_splitting_the_step_changes_only_rounding(batch, accumulation, float32, tmp_path):
    split = runs.run(
        tmp_path, **{**SHORT, "batch_size": batch, "gradient_accumulation_steps": accumulation}, precision="fp32"
    )
    np.testing.assert_allclose(losses(split), losses(float32), rtol=1e-6)
    np.testing.assert_allclose(norms(split), norms(float32), rtol=1e-5)


def test_packing_changes_only_rounding(tmp_path):
    """The same four rows as one packed sequence and as four padded rows: equal loss and gradient."""
    from anyqlora.data import dataset, tokenizer
    from anyqlora.on_torch.loss import token_loss

    plan = planned(precision="fp32")
    built = build(plan.config, Runtime(plan))
    rows = dataset.load_data(plan.config, tokenizer.load_tokenizer("demo")).train[:4]
    found = []
    for batch in (stream.collate([rows], 0), stream.collate([[row] for row in rows], 0)):
        loss = token_loss(built.model, batch, torch.device("cpu"))
        loss.backward()
        found.append(
            (
                loss.item(),
                torch.nn.utils.get_total_norm([p.grad for p in built.trainable.values()]).item(),
                batch.ids.shape,
            )
        )
        built.model.zero_grad()
    (packed, packed_norm, shape), (padded, padded_norm, other) = found
    assert shape[0] == 1 and other[0] == 4
    assert packed == pytest.approx(padded, rel=1e-6) and packed_norm == pytest.approx(padded_norm, rel=1e-5)


@pytest.mark.parametrize("layers", ["auto", 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_every_block_or_the_first_ones_and_changes_nothing(
    reentrant, layers, float32, tmp_path
):
    settings = {
        **SHORT,
        "use_gradient_checkpointing": True,
        "checkpointed_layers": layers,
        "reentrant_checkpointing": reentrant,
    }
    directory = runs.run(tmp_path, **settings, precision="fp32")
    np.testing.assert_allclose(losses(directory), losses(float32), rtol=1e-6)
    plan = planned(use_gradient_checkpointing=True, checkpointed_layers=layers, reentrant_checkpointing=reentrant)
    model = build(plan.config, Runtime(plan)).model
    calls = []
    for number, block in enumerate(model.base_model.model.model.layers):
        block.self_attn.register_forward_hook(
            lambda *_, number=number: calls.append(number)
        )  # early enough in the block to be recomputed whole
    blocks = list(range(len(model.base_model.model.model.layers)))
    logits = model(input_ids=torch.arange(8)[None], use_cache=False).logits
    assert calls == blocks
    logits.sum().backward()
    assert calls == blocks + (blocks if layers == "auto" else blocks[:layers])[::-1]


def test_dropout_is_a_function_of_the_step_with_and_without_checkpointing(tmp_path):
    settings = {**SHORT, "lora_dropout": 0.3, "precision": "fp32"}
    plain = runs.run(tmp_path, "plain", **settings)
    recomputed = runs.run(tmp_path, "recomputed", **{**settings, "use_gradient_checkpointing": True})
    np.testing.assert_allclose(losses(recomputed), losses(plain), rtol=1e-6)
    assert (
        np.abs(losses(plain) / losses(runs.run(tmp_path, "none", **{**settings, "lora_dropout": 0})) - 1).max() > 1e-6
    )


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "adadelta", "fused_adamw"])
def test_optimizers_are_torchs_with_our_settings(name):
    """One update from a known gradient equals the optimizer made by hand."""
    from anyqlora.on_torch.assembly.build import optimizer_factory

    adam = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-6} if "adam" in name else {}
    config = resolve({**SHORT, "optimizer": name, "weight_decay": 0.1, "lr": 0.01, **adam}, environ={})
    betas = {"betas": (0.8, 0.95), "eps": 1e-6}
    byhand = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, **betas),
        "fused_adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, **betas),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, **betas),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1),
        "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.01, weight_decay=0.1),
    }[name]
    results = []
    for make in (optimizer_factory(config), byhand):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = make([weight])
        for _ in range(3):
            weight.grad = weight.detach().cos()
            optimizer.step()
        results.append(weight.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)
    assert optimizer.defaults["lr"] == 0.01


@pytest.mark.parametrize("name", ["paged_adamw", "paged_adamw_8bit"])
def test_optimizers_without_a_cpu_form_are_refused(name):
    with pytest.raises((NotSupported, UsageError), match=name):
        planned(optimizer=name)


@pytest.mark.parametrize(("options", "place"), [({}, "cpu"), ({"capturable": True}, "meta")])
def test_steps_go_back_to_where_the_optimizer_reads_them(options, place):
    """One launch on the device reads `step` there (as torch.optim.Optimizer.load_state_dict has it for fused and
    capturable); else it stays in host memory.
    """
    weight = torch.nn.Parameter(torch.empty(3, device="meta"))
    strategy = Strategy(planned())
    strategy.prepare(torch.nn.Module(), {"w": weight}, lambda parameters: torch.optim.AdamW(parameters, **options))
    strategy.load_moments({"w|step": torch.tensor(2.0), "w|exp_avg": torch.ones(3)})
    state = strategy.optimizer.state[weight]
    assert {key: value.device.type for key, value in state.items()} == {"step": place, "exp_avg": "meta"}


@pytest.mark.parametrize(
    "schedule, theirs, options",
    [
        ("constant", "constant", {}),
        ("linear", "linear", {}),
        ("cosine", "cosine", {}),
        ("polynomial", "polynomial", {"power": 2.0, "lr_end": 0.0}),
        ("cosine_with_restarts", "cosine_with_restarts", {"num_cycles": 3}),
    ],
)
def test_schedules_equal_transformers_after_warm_up(schedule, theirs, options):
    """Reference: transformers.get_scheduler, whose warm-up starts at 0 where ours starts at lr / warm-up."""
    own = {"polynomial": {"lr_power": 2.0}, "cosine_with_restarts": {"lr_cycles": 3}}.get(schedule, {})
    config = resolve({**SHORT, "lr_scheduler": schedule, "lr": 0.5, "warmup_steps": 4, **own}, environ={})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    warmed = 4 if schedule != "constant" else 0
    reference = transformers.get_scheduler(
        theirs, optimizer, num_warmup_steps=warmed, num_training_steps=24, scheduler_specific_kwargs=options
    )
    for step in range(24):
        ours = learning_rate(step, 24, config)
        if step >= 4:
            assert ours == pytest.approx(reference.get_last_lr()[0], rel=1e-9, abs=1e-12)
        else:
            assert ours == pytest.approx(0.5 * (step + 1) / 4)
        optimizer.step()
        reference.step()


def test_exponential_and_floor():
    config = resolve(
        {**SHORT, "lr_scheduler": "exponential", "lr": 1.0, "warmup_steps": 0, "lr_decay": 0.01}, environ={}
    )
    assert learning_rate(50, 100, config) == pytest.approx(0.1)
    config = resolve(
        {**SHORT, "lr_scheduler": "cosine", "lr": 1.0, "warmup_steps": 0, "cosine_min_lr_ratio": 0.2}, environ={}
    )
    assert learning_rate(99, 100, config) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 0.99)))


def test_seeds_and_starts_are_functions():
    assert len({seed_at(s, k, r) for s in range(4) for k in range(50) for r in range(4)}) == 800
    a = uniform_start("layer", (64, 128), 0.25, 1)
    assert a.dtype == np.float32 and np.abs(a).max() <= 0.25 and abs(a.mean()) < 0.01
    assert np.array_equal(a, uniform_start("layer", (64, 128), 0.25, 1)) and not np.array_equal(
        a, uniform_start("other", (64, 128), 0.25, 1)
    )
    assert a.std() == pytest.approx(0.25 / math.sqrt(3), rel=0.02)


HAS_MLX = importlib.util.find_spec("mlx") is not None


def test_every_name_in_the_tables_resolves():
    for table in (registry.QUANTIZERS, registry.ADAPTERS, registry.STRATEGIES, registry.OPTIMIZERS):
        for name, row in table.items():
            frameworks = [framework for framework in ("torch", "mlx") if row.target(framework)]
            assert bool(frameworks) != bool(row.refused), name
            for framework in frameworks:
                if framework == "torch" or HAS_MLX:
                    assert callable(row.load(framework)), name
