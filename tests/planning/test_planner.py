"""Plans: pure, idempotent, refused by the table's cells, every change in the ledger - on machines described in
tests/machines.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from anyqlora.__main__ import main as anyqlora
from anyqlora.config import resolve as configuration
from anyqlora.config.resolve import resolve
from anyqlora.config.schema import AUTO
from anyqlora.core.errors import UsageError
from anyqlora.core.terminal import format_bytes
from anyqlora.models import architectures
from anyqlora.planning import memory
from anyqlora.planning.backends import BackendManager
from anyqlora.planning.capabilities import CAPABILITIES, Backend
from anyqlora.planning.fitting import GLOBAL_BATCH, HEADROOM, global_batch
from anyqlora.planning.machine import Machine
from tests.support import paths, tiny_models
from tests.support.paths import MODELS, ROOT

LLAMA_8B = str(MODELS / "llama-3-8b")  # config.json alone, written by hand
MACHINES = {
    path.stem: Machine.from_dict(json.loads(path.read_text())["machine"])
    for path in sorted(paths.MACHINES.glob("*.json"))
}
PLANNED = (
    "backend",
    "precision",
    "batch_size",
    "gradient_accumulation_steps",
    "use_gradient_checkpointing",
    "use_cpu_offload",
    "packing",
    "strategy",
    "world_size",
    "quantizer",
    "adapter",
    "bits",
    "kernels",
)


def asked(**settings):
    return resolve({"model_name": LLAMA_8B, "dataset": "alpaca_sample", **settings}, environ={}, origin="test")


def plan(machine="a100", table=None, backend="auto", **settings):
    return BackendManager(backend, machine=MACHINES[machine], table=table).plan(asked(**settings))


def ledger(plan):
    return {adjustment.field: (adjustment.asked, adjustment.got) for adjustment in plan.adjustments}


# ----------------------------------------------------------------------------------------------------------- invariants


def described(directory, **changes):
    """A model directory that has a config.json only."""
    about = json.loads((Path(LLAMA_8B) / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**about, **changes}))
    return str(directory)


@pytest.mark.parametrize(
    "settings, why",
    [
        (
            {"strategy": "fsdp", "quantizer": "int8"},
            "quantizer int8 with strategy fsdp: int8 weights cannot be sharded",
        ),
        (
            {"strategy": "fsdp", "quantizer": "int8", "sharding_strategy": "shard_grad_op"},
            "int8 weights cannot be sharded",
        ),
        ({"deepspeed_zero_stage": 3, "quantizer": "int8"}, "quantizer int8 with strategy deepspeed"),
        (
            {"strategy": "deepspeed", "strategy_opt": "zero_stage=3", "quantizer": "int8"},
            "quantizer int8 with strategy",
        ),
        ({"strategy": "fsdp", "optimizer": "adamw_8bit"}, "optimizer adamw_8bit with strategy fsdp"),
        ({"deepspeed_zero_stage": 1, "optimizer": "adamw_8bit"}, "optimizer adamw_8bit with strategy deepspeed"),
    ],
)
def test_what_cannot_be_split_is_refused_by_the_plan(settings, why):
    """And planned where the strategy splits nothing of it."""
    with pytest.raises(UsageError, match=why):
        plan("h200", world_size=2, **settings)
    others = {name: value for name, value in settings.items() if name in ("quantizer", "optimizer")}
    for whole in ({"strategy": "ddp"}, {"deepspeed_zero_stage": 0}):
        assert plan("h200", world_size=2, **others, **whole).world_size == 2


@pytest.mark.parametrize(
    "settings, rows", [({"strategy": "tp"}, 4), ({"mesh": "model=2"}, 16), ({"mesh": "model=2,batch=4"}, 16)]
)
def test_rows_of_a_step_are_known_before_the_mesh_is_resolved(settings, rows):
    """By them a run's directory is found again: what was asked and what was planned have the same."""
    given = asked(world_size=8, batch_size=4, gradient_accumulation_steps=1, **settings)
    planned = BackendManager("auto", machine=MACHINES["h200"]).plan(given)
    assert global_batch(given) == global_batch(planned.config) == planned.global_batch == rows


def test_quantized_experts_are_not_split(tmp_path):
    (tmp_path / "config.json").write_text(tiny_models.config_of("mixtral").to_json_string())
    several = {"model_name": str(tmp_path), "world_size": 2}
    for split in ({"strategy": "fsdp"}, {"deepspeed_zero_stage": 3}):
        with pytest.raises(UsageError, match="mixtral.*quantized experts cannot be sharded yet"):
            plan("h200", **several, **split)
        assert plan("h200", **several, **split, train_type="lora").quantizer == "none"


def test_a_model_is_split_for_want_of_memory_only_where_it_can_be(tmp_path):
    """290 billion weights fit no H200; those of int8 cannot be split."""
    large = described(
        tmp_path, hidden_size=8192, intermediate_size=28672, num_hidden_layers=320, num_attention_heads=64
    )
    assert plan("h200", model_name=large, quantizer="nf4").strategy == "fsdp"
    assert plan("h200", model_name=large, quantizer="int8").strategy == "ddp"


def test_what_is_changed_does_not_contradict_what_was_asked():
    with pytest.raises(UsageError, match="adapter = loftq contradicts quantizer = none"):
        plan("nothing", adapter="loftq")


@pytest.mark.parametrize(
    "wrong",
    [{"quantizer": "nf4", "adapter": "full"}, {"precision": "fp8"}, {"batch_size": 0}, {"lora_rank": 1.5}],
    ids=str,
)
def test_a_config_that_code_has_made_is_checked_too(wrong):
    config = configuration.TrainConfig(model_name=LLAMA_8B, dataset="alpaca_sample", **wrong)
    with pytest.raises(UsageError, match=next(iter(wrong))):
        BackendManager("cpu").plan(config)


def test_rows_are_no_longer_than_the_model_has_positions(tmp_path):
    short = described(tmp_path, max_position_embeddings=256)
    planned = plan(model_name=short)
    assert (
        planned.config.context_length == 256
        and planned.adjustments == ()
        and any("256 tokens" in warning for warning in planned.warnings)
    )
    assert BackendManager(machine=MACHINES["a100"]).plan(planned.config).config == planned.config
    asked_for = plan(model_name=short, context_length=300)
    assert asked_for.config.context_length == 300 and any("256 positions" in warning for warning in asked_for.warnings)
    table = described(tmp_path, max_position_embeddings=None, n_positions=256, model_type="gpt2")
    with pytest.raises(UsageError, match="context_length 300: the model has 256 positions") as refused:
        plan(model_name=table, context_length=300)
    assert refused.value.cure == "--context_length 256"


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ("q_prj,v_proj", "no linear layer is called q_prj"),
        ("layers.1.self_attn.q_prj", "no linear layer is called layers.1"),
        ("(q", "is not a regex"),
    ],
)
def test_a_name_of_no_linear_layer_is_refused_before_anything_is_loaded(stated, message):
    with pytest.raises(UsageError, match=message) as refused:
        BackendManager(machine=MACHINES["a100"]).plan(
            resolve({"model_name": LLAMA_8B, "dataset": "dummy", "lora_target_modules": stated}, environ={})
        )
    assert refused.value.where == "command line: --lora_target_modules"
    if "regex" not in message:
        assert refused.value.cure == "names among: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"


EVERY_CONFIG = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("path", EVERY_CONFIG, ids=lambda path: path.stem)
def test_example_configs_plan_everywhere_or_are_refused_by_name(path, machine, capsys):
    try:
        config = resolve({"config": str(path)}, environ={})
        manager = BackendManager(config.backend, machine=MACHINES[machine])
        first = manager.plan(config)
    except UsageError as error:
        assert len(str(error)) > 20
        return
    assert not [name for name in PLANNED if getattr(first.config, name) == AUTO]
    again = manager.plan(first.config)
    assert again.config == first.config
    assert again.config.sources == first.config.sources
    assert again.adjustments == ()
    assert again.memory == first.memory
    assert manager.plan(config) == first
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_size": 64},
        {"batch_size": 6, "gradient_accumulation_steps": 3},
        {"gradient_accumulation_steps": 4},
        {"precision": "bf16"},
        {"use_gradient_checkpointing": True},
        {"context_length": 4096},
        {"lora_rank": 256},
        {"train_type": "full"},
        {"bits": 8},
        {"optimizer": "sgd"},
    ],
    ids=str,
)
@pytest.mark.parametrize("machine", ["t4", "a100", "h200", "m3", "nothing"])
def test_planning_a_plan_changes_nothing(machine, settings):
    manager = BackendManager(machine=MACHINES[machine])
    try:
        first = manager.plan(asked(**settings))
    except UsageError as error:
        assert machine == "nothing"
        assert "bitsandbytes is not installed" in str(error)
        return
    again = manager.plan(first.config)
    assert (again.config, again.adjustments, again.memory) == (first.config, (), first.memory)
    if "batch_size" in settings:
        assert (
            first.global_batch
            == settings["batch_size"] * settings.get("gradient_accumulation_steps", 1) * first.world_size
        )
        assert first.world_size == {"h200": 8}.get(machine, 1)  # one for each device


def test_plan_is_json_and_words():
    planned = plan("t4", precision="bf16", batch_size=64)
    stored = json.loads(json.dumps(planned.to_dict()))
    assert stored["backend"] == "cuda"
    assert stored["device"] == "cuda:0"
    assert stored["memory"]["total"] == planned.memory.total == sum(planned.memory.parts.values())
    assert stored["adjustments"][0] == {
        "field": "precision",
        "asked": "bf16",
        "got": "fp16_autocast",
        "why": "Tesla T4 (7.5) has no bf16 in hardware",
    }
    text = "\n".join(planned.explain())
    for part in planned.memory.parts:
        assert part in text
    assert "precision: asked bf16, got fp16_autocast: Tesla T4 (7.5) has no bf16 in hardware" in text


def test_a_planned_value_says_so_and_a_stated_one_keeps_its_source():
    planned = plan("a100", batch_size=2)
    assert planned.config.sources["batch_size"] == "test"
    assert planned.config.sources["precision"] == "plan"
    assert planned.config.sources["lr"] == "default"


# -------------------------------------------------------------------------------------------------------- the decisions


@pytest.mark.parametrize(
    ("machine", "precision"),
    [
        ("t4", "fp16_autocast"),
        ("a100", "bf16"),
        ("rx7900", "bf16"),
        ("arc", "bf16"),
        ("m3", "bf16"),
        ("linux_mlx", "fp32"),
    ],
)
def test_precision_auto(machine, precision):
    assert plan(machine).precision == precision
    assert ledger(plan(machine)) == {}


@pytest.mark.parametrize("precision", ["bf16", "bf16_autocast", "bf16_buffers_autocast"])
def test_bf16_without_hardware_becomes_fp16(precision):
    assert ledger(plan("t4", precision=precision)) == {"precision": (precision, "fp16_autocast")}
    assert plan("a100", precision=precision).precision == precision
    on_cpu = plan("linux_mlx", precision=precision)
    assert on_cpu.precision == precision
    assert any("emulated" in warning for warning in on_cpu.warnings)


def test_strict_makes_an_adjustment_an_error():
    with pytest.raises(UsageError, match="strict.*precision: asked bf16, got fp16_autocast") as caught:
        plan("t4", precision="bf16", strict=True)
    assert caught.value.exit_code == 2
    assert plan("a100", precision="bf16", strict=True).adjustments == ()
    with pytest.raises(UsageError, match="batch_size: asked 4096"):
        plan("a100", batch_size=4096, strict=True)


def test_batch_auto_fills_memory_and_keeps_the_global_batch():
    sizes = {machine: plan(machine, context_length=1024, strategy="single") for machine in ("t4", "a100", "h200")}
    assert plan("h200", context_length=1024).global_batch == GLOBAL_BATCH  # over its eight devices, too
    assert all(p.global_batch == GLOBAL_BATCH for p in sizes.values())
    assert [p.use_gradient_checkpointing for p in sizes.values()] == [True, False, False]
    assert sizes["a100"].batch_size < sizes["h200"].batch_size
    for p in sizes.values():
        assert p.memory.total <= HEADROOM * p.memory_free
        if p.batch_size < GLOBAL_BATCH:
            larger = p.config.with_(batch_size=2 * p.batch_size)
            assert (
                memory.estimate(architectures.model_shape(architectures.read_config(Path(LLAMA_8B))), larger).total
                > HEADROOM * p.memory_free
            )


def test_batch_auto_with_stated_accumulation_is_the_same_global_batch_on_every_machine():
    planned = plan("h200", gradient_accumulation_steps=4, strategy="single")
    assert (planned.batch_size, planned.gradient_accumulation_steps) == (4, 4)
    assert plan("h200", gradient_accumulation_steps=64, world_size=1).batch_size == 1
    small = plan("t4", gradient_accumulation_steps=2, context_length=2048)
    assert small.batch_size < 8
    assert small.global_batch == GLOBAL_BATCH
    assert ledger(small) == {"gradient_accumulation_steps": (2, GLOBAL_BATCH // small.batch_size)}


def test_stated_batch_that_does_not_fit_is_split_and_the_global_batch_kept():
    planned = plan("t4", batch_size=48, gradient_accumulation_steps=2)
    assert planned.use_gradient_checkpointing
    assert 48 % planned.batch_size == 0
    assert planned.batch_size < 48
    assert planned.global_batch == 96
    assert set(ledger(planned)) == {"batch_size", "gradient_accumulation_steps"}
    assert "needed" in planned.adjustments[0].why


def test_checkpointing_auto_only_when_it_does_not_fit_otherwise():
    assert not plan("h200", batch_size=4).use_gradient_checkpointing
    assert plan("a100", batch_size=4, context_length=4096).use_gradient_checkpointing
    assert not plan("a100", context_length=512).use_gradient_checkpointing
    assert plan("h200", batch_size=4, use_gradient_checkpointing=True).use_gradient_checkpointing
    assert plan("h200", reentrant_checkpointing=True).use_gradient_checkpointing


def test_as_few_layers_recompute_as_make_a_run_fit_in_quarters():
    """Llama-3-8B has 32. What the plan chose with fewer does not fit."""
    chosen = {
        length: plan("a100", batch_size=4, context_length=length, strategy="single")
        for length in range(1024, 4609, 128)
    }
    counts = [p.config.checkpointed_layers for p in chosen.values()]
    assert counts == sorted(counts) and set(counts) == {0, 8, 16, 24, 32}
    shapes = architectures.model_shape(architectures.read_config(Path(LLAMA_8B)))
    for p in chosen.values():
        assert p.use_gradient_checkpointing == (p.config.checkpointed_layers > 0)
        if p.config.checkpointed_layers and p.batch_size == 4:
            fewer = p.config.checkpointed_layers - 8
            less = p.config.with_(use_gradient_checkpointing=fewer > 0, checkpointed_layers=fewer, dequantized_layers=0)
            assert p.memory.total <= HEADROOM * p.memory_free < memory.estimate(shapes, less).total
    eight = next(p for p in chosen.values() if p.config.checkpointed_layers == 8)
    assert "layers recomputed: the first 8: no second forward pass through others" in "\n".join(eight.explain())
    assert (
        plan("h200", checkpointed_layers=5).use_gradient_checkpointing
        and plan("h200", checkpointed_layers=5).config.checkpointed_layers == 5
    )
    assert plan("h200", use_gradient_checkpointing=True).config.checkpointed_layers == 32
    assert plan(
        "a100", batch_size=4, context_length=2048, use_activation_cpu_offload=True
    ).config.checkpointed_layers in (0, 32)


def test_evaluation_takes_fewer_rows_where_memory_is_short_and_training_does_not_pay_for_it():
    without = plan("t4", context_length=2048)
    planned = plan("t4", context_length=2048, eval_fraction=0.1, eval_batch_size=64)
    assert ledger(planned) == {"eval_batch_size": (64, planned.config.eval_batch_size)}
    assert planned.memory.needed("evaluation") <= HEADROOM * planned.memory_free
    assert (planned.batch_size, planned.use_gradient_checkpointing) == (
        without.batch_size,
        without.use_gradient_checkpointing,
    )
    assert plan("h200", context_length=2048, eval_fraction=0.1).adjustments == ()


def test_fast_paths_are_chosen_where_they_apply_and_said():
    chosen = plan("nothing", train_type="lora", context_length=128)
    c = chosen.config
    assert (c.fused_lora, c.padding_free, c.dequantized_layers) == (True, True, 0) and c.logits_chunk_tokens == 64
    said = "\n".join(chosen.explain())
    assert "LoRA fused with its weight" in said and "rows without padding" in said and "logits of 64 tokens" in said
    assert c.fused_linear_cross_entropy is False
    dora = plan("a100", adapter="dora").config
    assert (dora.fused_lora, dora.padding_free, dora.dequantized_layers) == (
        False,
        False,
        0,
    ) and dora.logits_chunk_tokens == 512
    with pytest.raises(UsageError, match="fused_lora = True contradicts adapter = dora"):
        plan("a100", adapter="dora", fused_lora=True)


FAST = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni")


@pytest.mark.parametrize(
    ("features", "settings", "why"),
    [
        (FAST, {}, ""),
        ((*FAST, "amx_bf16"), {}, "AMX"),
        (FAST[:3], {}, "no AVX512-VNNI"),
        (("avx2",), {}, "portable ones"),
        (FAST, {"precision": "fp32"}, "portable ones"),
        (FAST, {"kernels": "portable"}, "portable ones"),
        (FAST, {"logits_chunk_tokens": 0}, "all logits"),
        (FAST, {"model": {"model_type": "gemma2", "final_logit_softcapping": 30.0}}, "caps its logits"),
    ],
)
def test_head_and_loss_are_one_where_c_does_that(features, settings, why, tmp_path):
    """Else it is refused by name, and auto leaves it out."""
    manager = BackendManager("cpu", machine=replace(MACHINES["nothing"], cpu_features=features, compiler="/usr/bin/cc"))
    settings = {"train_type": "lora", "batch_size": 1, **settings}
    settings["model_name"] = described(tmp_path, **settings.pop("model", {}))
    found = manager.plan(asked(**settings))
    said = "\n".join(found.explain())
    assert found.config.fused_linear_cross_entropy is ("output head and loss in one" in said) is (not why)
    if why:
        with pytest.raises(UsageError, match=f"fused_linear_cross_entropy: .*{why}") as refused:
            manager.plan(asked(**settings, fused_linear_cross_entropy=True))
        assert refused.value.cure == "--fused_linear_cross_entropy auto"
    else:
        assert found.config.logits_chunk_tokens == 512 and "logits of" not in said
        assert "logits of 256 tokens" in "\n".join(
            manager.plan(asked(**settings, fused_linear_cross_entropy=False)).explain()
        )


ZEN_4 = {"cpu_features": FAST, "compiler": "/usr/bin/cc"}
NO_COMPILER = ("no C compiler is here", "1.3 to 1.5 times", "apt-get install gcc", "the wheel that carries")
DAMAGED = {"prebuilt": {"error": "x.so is damaged"}}


@pytest.mark.parametrize(
    ("changes", "settings", "kernels", "said"),
    [
        ({"compiler": ""}, {}, "portable", NO_COMPILER),
        ({"compiler": "", **DAMAGED}, {}, "portable", (*NO_COMPILER, "x.so is damaged")),
        ({"cpu_features": ("avx2",)}, {}, "portable", ("no AVX512-BF16", "1.3 to 1.5 times", "Zen 4")),
        ({"cpu_features": ("avx2",)}, {"precision": "bf16"}, "portable", ("no AVX512-BF16",)),
        ({"cpu_features": ("avx2",), "cpu_limit": "avx2"}, {}, "portable", ("that ANYQLORA_CPU_FEATURES=avx2 allows",)),
        (DAMAGED, {}, "native", ("kernels are compiled here at first use: x.so is damaged",)),
        ({}, {}, "native", ()),
        ({"compiler": "", "prebuilt": {"level": "avx512_bf16"}}, {}, "native", ()),
        ({"compiler": ""}, {"kernels": "portable"}, "portable", ()),
        ({"compiler": ""}, {"precision": "fp32"}, "portable", ()),
        ({"compiler": ""}, {"strategy": "fsdp", "world_size": 2}, "portable", ()),
        ({"compiler": "", "system": "Darwin"}, {}, "portable", ()),
    ],
    ids=str,
)
def test_what_is_missing_for_the_c_kernels_is_told_with_its_price_and_cure(changes, settings, kernels, said):
    """Where `kernels auto` would have taken them; it is no adjustment, since nobody has asked for them."""
    manager = BackendManager("cpu", machine=replace(MACHINES["nothing"], **{**ZEN_4, **changes}))
    planned = manager.plan(asked(train_type="lora", **settings))
    warnings = [warning for warning in planned.warnings if "kernels" in warning]
    assert len(warnings) == bool(said) and all(part in warnings[0] for part in said)
    assert all(f"warning     {warning}" in planned.explain() for warning in warnings)
    assert planned.adjustments == () and manager.plan(planned.config).warnings == planned.warnings
    assert planned.kernels == kernels


def test_what_is_missing_for_triton_is_told_with_its_cure():
    absent = replace(MACHINES["a100"], triton={"error": "triton is not installed"})
    planned = BackendManager("cuda", machine=absent).plan(asked())
    (warning,) = planned.warnings
    assert planned.kernels == "portable" and "triton is not installed" in warning and "pip install triton" in warning
    for machine, settings in (
        (absent, {"kernels": "portable"}),
        (absent, {"strategy": "fsdp"}),
        (MACHINES["a100"], {}),
    ):
        assert BackendManager("cuda", machine=machine).plan(asked(**settings)).warnings == ()


def test_weights_stay_dequantized_where_there_is_plenty_of_room_and_runs_choose_alike():
    """Free memory that differs by less than a fifth: the choices are the same, but where a power of two lies
    between.
    """
    machine = MACHINES["h200"]

    def choices(part):
        free = int(part * machine.cuda[0].memory_total)
        config = (
            BackendManager(machine=replace(machine, cuda=(replace(machine.cuda[0], memory_free=free),)))
            .plan(asked(batch_size=4))
            .config
        )
        return [
            getattr(config, name)
            for name in (
                "fused_lora",
                "padding_free",
                "logits_chunk_tokens",
                "dequantized_layers",
                "use_gradient_checkpointing",
                "cpu_threads",
            )
        ]

    assert choices(0.98) == choices(0.95) == choices(0.93) and choices(0.98)[3] == 32  # 128 GiB lies at 0.91 of it
    assert choices(0.2)[3] == 0


def test_what_cannot_fit_is_warned_of_not_refused():
    planned = plan("t4", train_type="full")
    assert planned.batch_size == 1
    assert any("expect to run out of memory" in warning for warning in planned.warnings)


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_a_model_that_sees_ahead_is_refused(model_type, tmp_path):
    shape = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **shape}))
    with pytest.raises(UsageError, match="sees the tokens that it would have to predict"):
        plan(model_name=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "is_decoder": True, **shape}))
    assert plan(model_name=str(tmp_path)).world_size == 1


def test_one_process():
    alone = plan("h200", strategy="single")
    assert (alone.world_size, alone.strategy) == (1, "single") and ledger(alone) == {}
    with pytest.raises(UsageError, match="strategy single is one process, and world_size is 8"):
        plan("h200", strategy="single", world_size=8)
    with pytest.raises(UsageError, match="neither -1 nor at least 1"):
        plan("h200", world_size=0)
    with pytest.raises(UsageError, match="has no way for processes to talk"):
        plan("m3", backend="mps", world_size=2)


def test_mlx_has_its_own_way_for_processes_to_talk():
    together = plan("m3", world_size=2)
    assert (together.backend, together.strategy, together.world_size) == ("mlx", "mlx", 2)
    assert (plan("m3").strategy, plan("m3").world_size) == ("single", 1)


def test_bits_that_are_asked_for_are_had_in_a_backends_own_form():
    assert ledger(plan("m3", bits=8)) == {"quantizer": ("int8", "affine8")} and plan("m3", bits=4).quantizer == "nf4"
    with pytest.raises(UsageError, match="backend mlx has no int8"):
        plan("m3", quantizer="int8")


def test_offload_where_there_is_no_other_memory():
    assert plan("a100", use_activation_cpu_offload=True).use_activation_cpu_offload
    for machine in ("m3", "nothing"):
        with pytest.raises(UsageError, match="already are in host memory"):
            plan(
                machine,
                backend="mps" if machine == "m3" else "auto",
                use_activation_cpu_offload=True,
                train_type="lora",
            )
    with pytest.raises(UsageError, match="host and device share one memory"):
        plan("m3", use_activation_cpu_offload=True, train_type="lora")
    with pytest.raises(UsageError, match="strategy single keeps all weights on the device"):
        plan("a100", use_cpu_offload=True, strategy="single")
    with pytest.raises(UsageError, match="use_cpu_offload true asks for strategy fsdp, which backend 'mlx'"):
        plan("m3", use_cpu_offload=True)
    assert plan("a100", use_cpu_offload=True).strategy == "fsdp"  # fsdp_qlora's flag, which meant FSDP's offload
    assert plan("a100", use_cpu_offload=True, strategy="fsdp").config.use_cpu_offload is True


def test_warnings_change_nothing():
    assert any("slow" in warning for warning in plan("linux_mlx").warnings)
    assert any("quantized weights" in warning for warning in plan("m3", backend="mps").warnings)
    assert (
        any("affine4 is MLX's own" in warning for warning in plan("m3").warnings)
        and plan("m3", quantizer="affine4").warnings == ()
    )
    assert plan("a100").warnings == ()


def test_a_backend_other_than_the_managers_is_refused():
    with pytest.raises(UsageError, match="backend 'cpu' was asked for, and this plan is for 'cuda'"):
        plan("a100", backend="cuda", quantizer="nf4").config and BackendManager("cuda", machine=MACHINES["a100"]).plan(
            asked(backend="cpu")
        )


# ---------------------------------------------------------------------------------------- what the table does not allow


@pytest.mark.parametrize(
    ("column", "cell", "settings"),
    [
        ("quantizers", "nf4", {"train_type": "qlora"}),
        ("quantizers", "nf4", {"quantizer": "nf4"}),
        ("quantizers", "int8", {"bits": 8}),
        ("quantizers", "none", {"train_type": "lora"}),
        ("optimizers", "adamw", {}),
        ("optimizers", "adamw_8bit", {"optimizer": "adamw_8bit"}),
        ("strategies", "single", {}),
        ("strategies", "single", {"strategy": "single"}),
    ],
)
@pytest.mark.parametrize(
    ("machine", "backend"), [("a100", Backend.CUDA), ("m3", Backend.MPS), ("linux_mlx", Backend.CPU)]
)
def test_a_removed_cell_is_refused(machine, backend, column, cell, settings):
    row = CAPABILITIES[backend]
    if cell in getattr(row, column):
        plan(machine, backend=backend, **settings)  # with the cell it is planned
    table = {**CAPABILITIES, backend: replace(row, **{column: tuple(c for c in getattr(row, column) if c != cell)})}
    with pytest.raises(UsageError, match=f"'{cell}' is not available on backend '{backend}'") as caught:
        plan(machine, table=table, backend=backend, **settings)
    assert caught.value.exit_code == 2


def test_a_removed_dtype_is_adjusted():
    table = {**CAPABILITIES, Backend.CUDA: replace(CAPABILITIES[Backend.CUDA], dtypes=("fp32",))}
    assert ledger(plan("a100", table=table, precision="bf16")) == {"precision": ("bf16", "fp32")}
    table = {**CAPABILITIES, Backend.CUDA: replace(CAPABILITIES[Backend.CUDA], dtypes=())}
    with pytest.raises(UsageError, match="no dtype to compute in"):
        plan("a100", table=table)


def test_without_bitsandbytes_the_preset_gives_way_and_what_was_asked_is_refused():
    assert ledger(plan("nothing")) == {"quantizer": ("nf4", "none")}
    assert plan("nothing").config.bits == 16
    for settings in (
        {"train_type": "qlora"},
        {"quantizer": "fp4"},
        {"bits": 8},
        {"optimizer": "adamw_8bit", "train_type": "lora"},
    ):
        with pytest.raises(UsageError, match="bitsandbytes is not installed"):
            plan("nothing", **settings)


def test_paged_optimizers_only_where_memory_can_be_paged():
    assert plan("a100", optimizer="paged_adamw_8bit").config.optimizer == "paged_adamw_8bit"
    for machine in ("linux_mlx", "m3"):
        with pytest.raises(UsageError, match=r"paged_adamw_8bit.*not available"):
            plan(machine, optimizer="paged_adamw_8bit")


# ------------------------------------------------------------------------------------------------------------ the model


def test_unknown_memory_is_not_guessed():
    planned = plan("a100", model_name="someone/not-in-the-cache")
    assert planned.memory is None
    assert (planned.batch_size, planned.global_batch) == (1, GLOBAL_BATCH)
    assert (
        "memory      unknown: someone/not-in-the-cache is not on this machine, so micro-batches are 1 row"
        in "\n".join(planned.explain())
    )
    assert json.dumps(planned.to_dict())


def test_unknown_architecture_is_not_guessed(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "wholly_new", "hidden_size": 8}')
    planned = plan("a100", model_name=str(tmp_path))
    assert planned.memory is None
    line = "memory      unknown: no formulas for model_type 'wholly_new'"
    assert (
        f"{line}, so micro-batches are 1 row (--batch_size and --gradient_accumulation_steps state others)"
        in planned.explain()
    )
    assert planned.batch_size == 1 and planned.to_dict()["memory_unknown"] == "no formulas for model_type 'wholly_new'"
    assert line in plan(model_name=str(tmp_path), batch_size=4).explain()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/model", "no such model directory"),
        ("./nor-this", "no such model directory"),
        ("a b c", "neither a directory nor a hub id"),
    ],
)
def test_paths_without_a_model_are_refused(name, message):
    with pytest.raises(UsageError, match=message):
        plan("a100", model_name=name)


def test_directories_without_a_readable_config_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        plan("a100", model_name=str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json: cannot be read"):
        plan("a100", model_name=str(tmp_path))


def test_hub_id_is_looked_up_in_the_local_cache(tmp_path):
    """In a process of its own: the cache's place is read when huggingface_hub is imported."""
    snapshot = tmp_path / "hub" / "models--meta-llama--Meta-Llama-3-8B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text((Path(LLAMA_8B) / "config.json").read_text())
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    code = (
        "import sys; from anyqlora.config.resolve import TrainConfig; from anyqlora.models.architectures import "
        "model_directory; "
        "print(model_directory(TrainConfig(model_name='meta-llama/Meta-Llama-3-8B'))); "
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, env=environment
    )
    assert out.stdout.splitlines() == [str(snapshot), "False False"]


# ------------------------------------------------------------------------------------------------------------- the verb


def test_plan_verb_prints_memory_part_by_part(capsys):
    stated = ["--model_name", LLAMA_8B, "--dataset", "alpaca_sample", "--batch-size", "2", "--context_length", "2048"]
    assert anyqlora(["plan", *stated]) == 0
    out = capsys.readouterr().out
    for word in (
        "backend     cpu",
        "linear weights",
        "adapter",
        "optimizer",
        "activations",
        "predicted",
        "free",
        "2 rows x 1 micro-batches",
    ):
        assert word in out
    assert anyqlora(["plan", "--batchsize", "2"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert anyqlora(["plan", "--help"]) == 0
    assert "usage: python -m anyqlora plan" in capsys.readouterr().out


@pytest.mark.distributed
def test_plan_verb_takes_under_a_second_beyond_torch_and_imports_no_other_framework():
    """Processor seconds of a fresh process, so that a busy machine does not show."""
    code = (
        "import sys, time, torch; start = time.process_time(); from anyqlora.__main__ import main; "
        f"code = main(['plan', '--model_name', {LLAMA_8B!r}, '--dataset', 'alpaca_sample']); "
        "others = ('transformers', 'peft', 'bitsandbytes', 'mlx', 'accelerate'); "
        "print(code, time.process_time() - start, *(name for name in others if name in sys.modules))"
    )
    start = time.time()
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    out = printed.splitlines()[-1].split()
    assert out[0] == "0"
    assert float(out[1]) < 1
    assert out[2:] == []
    assert time.time() - start < 60


def test_unknown_backend_is_answered_without_torch():
    code = (
        "import sys; from anyqlora.__main__ import main; main(['plan', '--backend', 'gpu']); print('torch' in "
        "sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert out.stdout == "False\n"
    assert "unknown backend 'gpu'" in out.stderr


def test_settings_that_a_plan_resolves_are_the_ones_that_may_be_auto():
    """What stays auto is decided by the data or by the terminal, not by the plan."""
    later = {"prompt_format", "dataset_format", "multi_turn", "token_cache", "resume", "log_to", "exact_match"}
    planned = plan("a100").config
    autos = {name for name, f in configuration.SETTINGS.items() if getattr(planned, name) == AUTO}
    assert autos <= later


# ----------------------------------------------------------------------------------------------------------- strategies


def test_several_devices_hold_the_model_each_or_shards_of_it(tmp_path):
    """Eight H200: 8 billion weights in bf16 fit each of them, 140 billion fit only together."""
    large = described(
        tmp_path, hidden_size=8192, intermediate_size=28672, num_hidden_layers=160, num_attention_heads=64
    )
    small, sharded = plan("h200", train_type="lora"), plan("h200", train_type="lora", model_name=str(large))
    assert (small.strategy, small.world_size) == ("ddp", 8) and (sharded.strategy, sharded.world_size) == ("fsdp", 8)
    assert (
        sharded.memory.total
        < HEADROOM * sharded.memory_free
        < plan("h200", train_type="lora", model_name=str(large), strategy="ddp").memory.total
    )
    assert BackendManager("auto", machine=MACHINES["h200"]).plan(sharded.config).config == sharded.config
    assert (small.kernels, small.config.fused_lora) == ("exact", True) and (
        sharded.kernels,
        sharded.config.fused_lora,
    ) == (
        "portable",
        False,
    )


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_batch_auto_is_the_same_global_batch_on_any_number_of_devices(processes):
    assert (
        plan("h200", world_size=processes).global_batch
        == plan("h200", world_size=processes, gradient_accumulation_steps=2).global_batch
        == GLOBAL_BATCH
    )


@pytest.mark.parametrize(
    "settings, weights, optimizer",
    [
        ({"strategy": "ddp"}, 1, 1),
        ({"strategy": "fsdp"}, 8, 8),
        ({"strategy": "fsdp", "sharding_strategy": "shard_grad_op"}, 1, 8),
        ({"strategy": "deepspeed", "deepspeed_zero_stage": 1}, 1, 8),
        ({"strategy": "deepspeed", "deepspeed_zero_stage": 3}, 8, 8),
    ],
)
def test_what_is_sharded_is_predicted_in_parts(settings, weights, optimizer):
    one, many = (
        plan("h200", world_size=n, batch_size=1, **s).memory.moments["update"]
        for n, s in ((1, {"strategy": "single"}), (8, settings))
    )
    assert many["linear weights"] == pytest.approx(one["linear weights"] / weights, rel=1e-3)
    assert many["optimizer"] == pytest.approx(one["optimizer"] / optimizer, rel=1e-3)
    assert ("layers put together" in many) == (weights > 1)


@pytest.mark.parametrize(("backend", "machine"), [("cpu", "a100"), ("mlx", "m3")])
def test_processes_of_one_machine_share_its_memory_and_its_cores(backend, machine):
    """As many as a launcher says are here, all of them where nobody does; a GPU's memory is one process's."""

    def planned(world_size, here=0, backend=backend, **settings):
        found = replace(MACHINES[machine], processes=here)
        return BackendManager(backend, machine=found).plan(
            asked(backend=backend, world_size=world_size, strategy="auto", **settings)
        )

    alone, two, far = planned(1), planned(2), planned(2, here=1)
    assert two.memory_free == alone.memory_free // 2 and far.memory_free == alone.memory_free
    assert f"{format_bytes(two.memory_free)} free for each of 2 processes here" in str(
        two.explain()
    ) and "for each of" not in str([*alone.explain(), *far.explain()])
    if backend == "cpu":
        cores, wide = MACHINES[machine].cores, {"model_name": LLAMA_8B}
        assert cores >= 8 and [planned(n, here, **wide).config.cpu_threads for n, here in ((1, 0), (4, 0), (4, 2))] == [
            cores,
            cores // 4,
            cores // 2,
        ]
        gpus = planned(4, here=4, backend="cuda")
        assert gpus.sharing == 1 and gpus.memory_free == planned(1, backend="cuda").memory_free
