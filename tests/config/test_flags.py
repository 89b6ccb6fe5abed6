"""Every setting does what its help says: seen in files, plans, tensors and forward passes of real runs, never in the
checks.
"""

import contextlib
import dataclasses
import json
import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from anyqlora.config import strategy_options
from anyqlora.config.resolve import resolve
from anyqlora.config.schema import SETTINGS, settings_with
from anyqlora.core.errors import DiskFull, NotSupported, UsageError
from anyqlora.data import stream
from anyqlora.data.packing import shuffled
from anyqlora.models import architectures
from anyqlora.models.architectures import DEMO_BASE
from anyqlora.on_torch.device_batch import padding_rows
from anyqlora.planning import memory
from anyqlora.planning.backends import BackendManager
from anyqlora.planning.machine import Machine
from anyqlora.recipes import sft
from anyqlora.runs.provenance import resolved_yaml
from tests.support import local_hub, runs
from tests.support.data_fixtures import write
from tests.support.paths import MACHINES, MODELS

TINY = {
    "model_name": "demo",
    "dataset": "demo",
    "context_length": 96,
    "batch_size": 4,
    "max_steps": 3,
    "lr": 2e-3,
    "lora_dropout": 0,
    "save_steps": 0,
    "precision": "fp32",
    "warmup_steps": 0,
    "weight_decay": 0,
    "use_gradient_checkpointing": False,
}
SHOWN: set[str] = set()


def shows(*names):
    """Marks a test as the one that shows these settings' effects."""
    SHOWN.update(names)
    return lambda test: test


def run(output, name="run", during=None, **settings):
    return runs.run(output, name, during, **{**TINY, **settings})


def losses(directory):
    return [m["loss"] for m in runs.metrics(directory)]


def rates(directory):
    return [m["lr"] for m in runs.metrics(directory)]


def read(directory, name):
    return json.loads((directory / name).read_text())


def adapter_config(directory):
    return read(directory, "adapter/adapter_config.json")


@contextlib.contextmanager
def forwards(kind):
    """[(shape of the input, whether gradients are recorded)] of every forward pass of a module of this class."""
    seen = []

    def look(module, inputs):
        if (
            type(module).__name__ == kind and inputs[0].shape[1] > 12
        ):  # a dozen tokens go through a model when it is built
            seen.append((tuple(inputs[0].shape), torch.is_grad_enabled()))

    handle = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


def planned(machine, **settings):
    described = Machine.from_dict(json.loads((MACHINES / f"{machine}.json").read_text())["machine"])
    return BackendManager(settings.get("backend", "auto"), machine=described).plan(
        resolve({**TINY, **settings}, environ={})
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain"))


# ------------------------------------------------------------------------------------------------- what is trained


@shows("dropout_masks")
def test_masks_by_token_are_those_of_other_micro_batches(tmp_path):
    found = {
        (masks, rows): losses(
            run(
                *(tmp_path, f"{masks} {rows}"),
                dropout_masks=masks,
                lora_dropout=0.5,
                max_steps=3,
                batch_size=rows,
                gradient_accumulation_steps=8 // rows,
            )
        )
        for masks in ("token", "process")
        for rows in (2, 8)
    }
    assert found["token", 2] == pytest.approx(found["token", 8], rel=1e-6)
    assert found["process", 2] != pytest.approx(found["process", 8], rel=1e-4)


@shows("train_type", "quantizer", "bits", "double_quant", "precision", "lora_dropout", "adapter")
def test_each_way_of_keeping_and_learning_weights_gives_other_numbers(plain, tmp_path):
    """The first step sees the frozen weights alone, since an adapter starts at zero; the second sees the adapter
    too.
    """
    ways = {
        name: run(tmp_path, name, max_steps=2, **settings)
        for name, settings in {
            "lora": {"train_type": "lora"},
            "none": {"quantizer": "none"},
            "fp4": {"quantizer": "fp4"},
            "int8": {"quantizer": "int8"},
            "8 bits": {"bits": 8},
            "plain scales": {"double_quant": False},
            "bf16": {"precision": "bf16"},
            "dropout": {"lora_dropout": 0.5},
            "rslora": {"adapter": "rslora"},
            "bnb_dora": {"train_type": "bnb_dora"},
        }.items()
    }
    first, second = (
        {"plain": losses(plain)[step], **{name: losses(found)[step] for name, found in ways.items()}} for step in (0, 1)
    )
    assert first["lora"] == first["none"] and first["8 bits"] == first["int8"]
    assert len({first[name] for name in ("plain", "lora", "fp4", "int8", "plain scales", "bf16")}) == 6
    assert (
        first["dropout"] == first["rslora"] == first["plain"]
        and len({second[name] for name in ("dropout", "rslora", "plain", "bnb_dora")}) == 4
    )
    assert adapter_config(ways["rslora"])["use_rslora"] and adapter_config(ways["bnb_dora"])["use_dora"]
    assert any("magnitude" in name for name in runs.adapter(ways["bnb_dora"]))


@shows("affine_group_size")
def test_smaller_groups_keep_more_of_the_weights(tmp_path):
    """The first step sees the frozen weights alone; how far its loss is from that of the plain ones is what packing
    cost.
    """
    plain = losses(run(tmp_path, "plain", quantizer="none", train_type="lora", max_steps=1))[0]
    packed = [
        losses(run(tmp_path, str(group), quantizer="affine4", affine_group_size=group, max_steps=1))[0]
        for group in (32, 128)
    ]
    assert 0 < abs(packed[0] - plain) < abs(packed[1] - plain)


@shows(
    "lora_rank",
    "lora_alpha",
    "lora_target_modules",
    "lr",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "apply_gradient_clipping",
    "config",
)
def test_one_step_of_adamw_is_the_formula(tmp_path):
    """A has no gradient in the first step, so decay alone moves it; B starts at zero, so the update alone does."""
    file = tmp_path / "run.yaml"
    file.write_text("lora_rank: 3\nlora_alpha: 6\nlora_target_modules: [q_proj, up_proj]\n")
    common = {
        "config": str(file),
        "max_steps": 1,
        "adam_beta1": 0.5,
        "adam_beta2": 0.9,
        "adam_eps": 1e-3,
        "weight_decay": 0.5,
        "apply_gradient_clipping": False,
    }
    start = runs.adapter(run(tmp_path, "start", **common, lr=0))
    directory = run(tmp_path, **common, lr=0.1)
    moments = load_file(next((directory / "checkpoints").iterdir()) / "optimizer.safetensors")
    for name, value in runs.adapter(directory).items():
        assert 3 in value.shape and name.split(".")[-3] in ("q_proj", "up_proj")
        if ".lora_A." in name:
            torch.testing.assert_close(value, start[name] * (1 - 0.1 * 0.5))
        else:
            gradient = torch.from_numpy(moments[f"{name}|exp_avg"]) / (1 - 0.5)
            torch.testing.assert_close(torch.from_numpy(moments[f"{name}|exp_avg_sq"]), (1 - 0.9) * gradient**2)
            torch.testing.assert_close(value, -0.1 * gradient / (gradient.abs() + 1e-3))
    twice = run(tmp_path, "twice", **common, lr=0.1, lora_alpha=12)
    assert runs.metrics(twice)[0]["grad_norm"] == pytest.approx(2 * runs.metrics(directory)[0]["grad_norm"], rel=1e-5)


@shows("optimizer", "max_grad_norm")
def test_one_step_of_sgd_is_as_long_as_the_clipped_gradient(tmp_path):
    directory = run(tmp_path, optimizer="sgd", max_steps=1, lr=1, max_grad_norm=0.01)
    assert runs.metrics(directory)[0]["grad_norm"] > 0.02
    assert resolve({**TINY, "max_grad_norm": 0}, environ={}).clip_norm is None  # as Hugging Face's trainer has it
    moved = [value for name, value in runs.adapter(directory).items() if ".lora_B." in name]
    assert float(torch.nn.utils.get_total_norm(moved)) == pytest.approx(0.01, rel=1e-3)
    assert not load_file(next((directory / "checkpoints").iterdir()) / "optimizer.safetensors")


@shows("lr_scheduler", "lr_power", "cosine_min_lr_ratio", "lr_decay", "lr_cycles", "warmup_steps", "warmup_ratio")
def test_the_rate_of_each_step(tmp_path):
    steps = {"max_steps": 5, "lr": 1e-3, "batch_size": 1}
    polynomial = run(
        tmp_path, "polynomial", **steps, lr_scheduler="polynomial", lr_power=2, cosine_min_lr_ratio=0.2, warmup_steps=1
    )
    assert rates(polynomial) == pytest.approx([1e-3, *(1e-3 * (0.2 + 0.8 * (1 - k / 4) ** 2) for k in range(4))])
    exponential = run(tmp_path, "exponential", **steps, lr_scheduler="exponential", lr_decay=0.01)
    assert rates(exponential) == pytest.approx([1e-3 * 0.01 ** (k / 5) for k in range(5)])
    restarts = run(
        tmp_path,
        "restarts",
        **{**steps, "warmup_steps": -1},
        lr_scheduler="cosine_with_restarts",
        lr_cycles=2,
        warmup_ratio=0.2,
    )
    assert rates(restarts) == pytest.approx([1e-3, 1e-3, 5e-4, 1e-3, 5e-4])


@shows("seed")
def test_the_seed_draws_another_start_and_another_order(plain, tmp_path):
    other = run(tmp_path, seed=2**63 - 1, lr=0)
    start = run(tmp_path, "start", lr=0)
    assert (
        [m["tokens"] for m in runs.metrics(start)]
        == [m["tokens"] for m in runs.metrics(plain)]
        != [m["tokens"] for m in runs.metrics(other)]
    )
    assert all(
        (runs.adapter(start)[name] != value).any() for name, value in runs.adapter(other).items() if ".lora_A." in name
    )


@shows("use_gradient_checkpointing", "checkpointed_layers", "reentrant_checkpointing", "deterministic")
def test_checkpointing_runs_each_block_twice_and_the_reentrant_form_first_without_a_graph(plain, tmp_path):
    with forwards("LlamaMLP") as blocks:
        deterministic = []
        run(
            tmp_path,
            "on",
            max_steps=1,
            use_gradient_checkpointing=True,
            during=lambda step: deterministic.append(torch.are_deterministic_algorithms_enabled()),
        )
        on = [blocks.pop(0)[1] for _ in range(len(blocks))]
        run(tmp_path, "reentrant", max_steps=1, use_gradient_checkpointing=True, reentrant_checkpointing=True)
        reentrant = [blocks.pop(0)[1] for _ in range(len(blocks))]
        run(tmp_path, "first", max_steps=1, use_gradient_checkpointing=True, checkpointed_layers=1)
        first = [blocks.pop(0)[1] for _ in range(len(blocks))]
        run(
            tmp_path,
            "off",
            max_steps=1,
            deterministic=False,
            during=lambda step: deterministic.append(torch.are_deterministic_algorithms_enabled()),
        )
    assert on == [True] * 6 and reentrant == [False] * 3 + [True] * 3 and first == [True] * 4 and len(blocks) == 3
    assert deterministic == [True, False]


@shows("logits_chunk_tokens")
def test_logits_of_so_many_tokens_are_made_at_a_time(plain, tmp_path):
    made = {}
    for rows in (0, 4):
        with logits_made() as sizes:
            found = run(tmp_path, str(rows), logits_chunk_tokens=rows)
        assert losses(found) == pytest.approx(losses(plain), rel=1e-6)
        made[rows] = max(sizes)
    assert made[4] == 4 < made[0]
    assert planned("a100", logits_chunk_tokens=16).memory.needed("loss") < planned(
        "a100", logits_chunk_tokens=0
    ).memory.needed("loss")


@contextlib.contextmanager
def calls_of_a_and_b():
    """(in, out) of each call of LoRA's own two linears, A and B, in training."""
    called = []

    def look(module, inputs):
        if isinstance(module, torch.nn.Linear) and module.weight.requires_grad and torch.is_grad_enabled():
            called.append((module.in_features, module.out_features))

    handle = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        yield called
    finally:
        handle.remove()


@shows("fused_lora")
def test_fused_layers_compute_what_pefts_own_do(plain, tmp_path):
    """PEFT's layer calls two linears of its own beside the frozen one, a fused layer none; the numbers are the same."""
    found, calls = {}, {}
    for is_fused in (True, False):
        with calls_of_a_and_b() as called:
            found[is_fused] = losses(run(tmp_path, str(is_fused), fused_lora=is_fused))
        calls[is_fused] = len(called)
    assert calls[True] == 0 and calls[False] >= 3 * 21 * 2  # steps, linears of the embedded base, A and B
    assert found[True] == losses(plain) and found[False] == pytest.approx(found[True], rel=1e-6)


@shows("fused_linear_cross_entropy")
def test_a_head_that_is_one_with_its_loss_makes_no_logits(tmp_path):
    manager = BackendManager("cpu")
    if "native" not in manager.report.kernels or manager.report.why("fused head"):
        pytest.skip(manager.report.why("fused head") or manager.report.why("native"))
    first, has_logits = {}, {}
    for is_fused in ("auto", False):
        with logits_made() as sizes:
            directory = run(tmp_path, str(is_fused), fused_linear_cross_entropy=is_fused, precision="bf16", max_steps=1)
        first[is_fused], has_logits[is_fused] = runs.metrics(directory)[0], any(sizes)
    assert has_logits == {"auto": False, False: True}
    for number in ("loss", "grad_norm"):  # of the same weights: AdamW's first steps are as long whatever was rounded
        assert first["auto"][number] == pytest.approx(first[False][number], rel=2e-3)


@shows("padding_free")
def test_flat_rows_have_no_padding(plain, tmp_path):
    with forwards("LlamaMLP") as blocks:
        padded = run(tmp_path, padding_free=False, max_steps=1)
        sizes = [shape for shape, _ in blocks]
        del blocks[:]
        run(tmp_path, "flat", padding_free=True, max_steps=1)
    assert losses(padded) == pytest.approx(losses(plain)[:1], rel=1e-6)
    tokens = runs.metrics(plain)[0]["tokens"]
    tokens += padding_rows(tokens)
    assert {shape[0] for shape in sizes} == {4} and {shape[:2] for shape, _ in blocks if shape[1] > 12} == {(1, tokens)}
    assert planned("a100").config.padding_free is False


@shows("frozen_matmul")
def test_rounded_products(tmp_path):
    if "int8" not in BackendManager("cpu").report.products:
        pytest.skip("this processor's int8 products may saturate")
    whole, ours, back = (
        losses(run(tmp_path, kind, frozen_matmul=kind, precision="bf16")) for kind in ("full", "int8", "int8_backward")
    )
    assert ours != whole and ours == pytest.approx(whole, rel=0.02)
    assert back not in (whole, ours) and back[0] == whole[0] and back == pytest.approx(whole, rel=0.02)
    bf16, fp8, int8, both, beside = (
        memory.cache_bytes(
            architectures.model_shape(architectures.read_config(DEMO_BASE)),
            resolve({**TINY, "precision": "bf16", **some, "dequantized_layers": 2}, environ={}),
        )
        for some in (
            {},
            {"frozen_matmul": "fp8"},
            {"frozen_matmul": "int8"},
            {"frozen_matmul": "int8_backward"},
            {"frozen_matmul": "int8_backward", "quantizer": "none"},
        )
    )
    assert (
        fp8 == bf16 == 2 * int8 and both == bf16 + int8 and beside == int8
    )  # float8 is there once for each direction; without a quantizer weights are there anyway


@shows("dequantized_layers")
def test_dequantized_weights_of_so_many_layers_are_kept(tmp_path):
    """Each of the embedded base's layers has seven linears, dequantized in forward and in backward unless they are
    kept.
    """
    from anyqlora.on_torch.quantizers.bnb import Nf4

    made, dequantize = [], Nf4.dequantize
    try:
        Nf4.dequantize = lambda self, module: made.append(module) or dequantize(self, module)
        counts, found = [], []
        for layers in (0, 1, 3):
            found.append(losses(run(tmp_path, str(layers), dequantized_layers=layers, max_steps=2)))
            counts.append(len(made))
            del made[:]
    finally:
        Nf4.dequantize = dequantize
    assert found[0] == found[1] == found[2]
    assert counts[0] > counts[1] + 25 > counts[2] + 50 and counts[2] == 21
    cached, plain = (planned("a100", dequantized_layers=layers).memory.moments["update"] for layers in (3, 0))
    assert "dequantized weights" not in plain and cached["dequantized weights"] == 3 * 4 * (
        2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256
    )


@shows("quantized_cache", "quantized_cache_limit")
def test_quantized_weights_are_kept_where_it_says_and_within_the_limit(plain, tmp_path, capsys):
    """That a run on them has the same bytes, and what may go wrong, is shown in test_quantized_cache.py."""
    kept = tmp_path / "kept"
    for name in ("first", "second"):
        assert losses(run(tmp_path, name, quantized_cache=str(kept))) == losses(plain)
    (entry,) = kept.iterdir()
    assert entry.name.startswith("demo-nf4-") and (entry / "model.safetensors").exists()
    run(tmp_path, "small", quantized_cache=str(tmp_path / "none"), quantized_cache_limit=1e-6)
    assert not (tmp_path / "none").exists() and "quantized_cache_limit is 1.0 KiB" in capsys.readouterr().err
    with pytest.raises(UsageError, match="nothing is kept"):
        resolve({**TINY, "quantized_cache": False, "quantized_cache_limit": 3}, environ={}, origin="test")


@shows("token_cache", "token_cache_limit", "dataset_num_proc")
def test_tokens_are_kept_where_it_says_and_within_the_limit(plain, tmp_path, capsys):
    """That they are the same ones, and what may go wrong, is shown in test_token_cache.py."""
    kept = tmp_path / "kept"
    for number in (1, 2):
        assert losses(run(tmp_path, str(number), token_cache=str(kept), dataset_num_proc=number)) == losses(plain)
    entries = [path for path in kept.iterdir() if path.is_dir()]
    assert entries and all((entry / "rows.arrow").exists() for entry in entries)
    run(tmp_path, "small", token_cache=str(tmp_path / "none"), token_cache_limit=1e-6)
    assert not [path for path in (tmp_path / "none").iterdir() if path.is_dir()]
    assert "token_cache_limit is 1.0 KiB" in capsys.readouterr().err
    with pytest.raises(UsageError, match="nothing is kept"):
        resolve({**TINY, "token_cache": False, "token_cache_limit": 3}, environ={}, origin="test")
    assert resolve({"preprocessing_num_workers": 3}, environ={}).dataset_num_proc == 3


@shows("cpu_threads")
def test_threads_are_those_that_are_stated_or_one_for_narrow_layers(tmp_path):
    before, seen = torch.get_num_threads(), []
    try:
        run(tmp_path, "two", cpu_threads=2, max_steps=1, during=lambda step: seen.append(torch.get_num_threads()))
    finally:
        torch.set_num_threads(before)
    assert seen == [2] and read(tmp_path / "two", "env.json")["cpu_threads"] == 2
    assert planned("nothing", train_type="lora").config.cpu_threads == 1  # the embedded base is narrow
    wide = {
        "model_name": str(MODELS / "llama-3-8b"),
        "dataset": "alpaca_sample",
        "train_type": "lora",
    }
    machine = json.loads((MACHINES / "nothing.json").read_text())["machine"]
    assert planned("nothing", **wide).config.cpu_threads == machine["cores"] > 1
    stated = BackendManager("auto", machine=Machine.from_dict({**machine, "threads": 3}))
    assert stated.plan(resolve({**TINY, **wide}, environ={})).config.cpu_threads == 3


@contextlib.contextmanager
def logits_made():
    """Rows of each product with the embedded base's vocabulary of 512, in training."""
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if (
                function.overloadpacket is torch.ops.aten.mm and out.shape[1] == 512 and out.shape[0] not in (12, 128)
            ):  # as a model is built; the weight's
                sizes.append(len(out))
            return out

    with Watch():
        yield sizes


@shows("kernels")
def test_which_kernels_run_is_planned_by_the_device():
    """That they run, and what they compute, is shown in test_triton.py."""
    for kernels, got in (("auto", "exact"), ("triton", "triton"), ("portable", "portable")):
        assert planned("h200", world_size=1, kernels=kernels).kernels == got
    assert (
        planned("h200").world_size == 8
        and planned("h200").kernels == "exact"
        and planned("h200", strategy="fsdp").kernels == "portable"
    )
    with pytest.raises(UsageError, match="kernels exact: they are for strategies single, ddp, accelerate"):
        planned("h200", kernels="exact", strategy="fsdp")
    for machine, backend in (("m3", "mps"), ("rx7900", "rocm"), ("arc", "xpu"), ("h200", "cpu")):
        assert planned(machine, backend=backend).kernels == "portable"
        for kernels in ("exact", "triton"):
            with pytest.raises(UsageError, match=f"kernels '{kernels}' is not available on backend '{backend}'"):
                planned(machine, backend=backend, kernels=kernels)


@shows("use_activation_cpu_offload")
def test_activations_wait_in_host_memory(tmp_path):
    """Planned where host memory is another memory; here the copies are made for real and the gradients are the same
    bits.
    """
    from anyqlora.data import dataset, tokenizer
    from anyqlora.on_torch.assembly.build import build
    from anyqlora.on_torch.loss import token_loss
    from anyqlora.on_torch.runtime import Runtime

    assert planned("a100", use_activation_cpu_offload=True).memory.total < planned("a100").memory.total
    plan = BackendManager("cpu").plan(resolve({**TINY, "backend": "cpu", "context_length": 512}, environ={}))
    rows = dataset.load_data(plan.config, tokenizer.load_tokenizer("demo"))
    found = []
    for offload in (False, True):
        runtime = Runtime(dataclasses.replace(plan, config=plan.config.with_(use_activation_cpu_offload=offload)))
        built = build(plan.config, runtime)
        with torch.profiler.profile(profile_memory=True) as profile, runtime.forward():
            loss = token_loss(built.model, stream.collate([[row] for row in rows.train[:64]], 0), torch.device("cpu"))
        loss.backward()
        found.append(
            (
                [p.grad for p in built.trainable.values()],
                sum(e.count for e in profile.key_averages() if e.key == "aten::copy_"),
            )
        )
    (kept, few), (offloaded, many) = found
    assert many > few + 20 and all(torch.equal(a, b) for a, b in zip(kept, offloaded, strict=True))


@shows("spike_guard")
def test_a_spike_is_skipped(tmp_path):
    """Eighteen rows that the base finds easy, and then, in the order of this seed, one of noise."""
    seed = next(seed for seed in range(1000) if shuffled(19, seed, 0)[-1] == 18)
    rows = [
        {
            "prompt": "Bren bought two red lamps in Ashford on Monday. Repeat:",
            "completion": "Bren bought two red lamps in Ashford on Monday.",
        }
    ] * 18
    file = write(tmp_path / "rows.jsonl", *rows, {"prompt": "a", "completion": "zq}{]['~!kjx{{}}"})
    common = {"dataset": str(file), "batch_size": 1, "max_steps": 19, "lr": 0, "seed": seed}
    assert [m["rows"] for m in runs.metrics(run(tmp_path, **common, spike_guard=5)) if m["skipped"]] == [f"{file}:19"]
    assert not any(m["skipped"] for m in runs.metrics(run(tmp_path, "off", **common)))


# ---------------------------------------------------------------------------------------------------- model and data


@shows("model_name", "revision", "offline")
def test_a_model_of_the_hub_and_its_revisions(tmp_path, monkeypatch):
    """A cache as the hub's client writes it, with two commits; with offline, no request reaches a hub that would
    answer.
    """
    from huggingface_hub import constants

    cache = tmp_path / "home" / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    model = cache / "models--some--model"
    for commit, layers, ref in (("0" * 40, 3, "main"), ("1" * 40, 1, "small")):
        there = shutil.copytree(DEMO_BASE, model / "snapshots" / commit)
        described = {**read(there, "config.json"), "num_hidden_layers": layers}
        (there / "config.json").write_text(json.dumps(described))
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / ref).write_text(commit)
    main, small = (
        run(tmp_path, name, model_name="some/model", max_steps=1, revision=name) for name in ("main", "small")
    )
    assert (
        len(runs.adapter(main)) == 3 * len(runs.adapter(small))
        and adapter_config(main)["base_model_name_or_path"] == "some/model"
    )
    assert 'AutoModelForCausalLM.from_pretrained("some/model")' in (main / "adapter" / "README.md").read_text()
    for offline in ("true", "false"):
        with local_hub.serving(kind="models", name="other/model", refused=(404, "RepoNotFound")) as (hub, endpoint):
            out = local_hub.python(
                "train.py",
                "--model_name",
                "other/model",
                "--offline",
                offline,
                endpoint=endpoint,
                home=tmp_path / "home",
            )
        assert out.returncode == 2 and bool(hub.asked) == (offline == "false")


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class Config(LlamaConfig):
    model_type = "mine"
class Model(LlamaForCausalLM):
    config_class = Config
"""


@shows("trust_remote_code")
def test_code_of_a_model_is_run_only_when_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    base = shutil.copytree(DEMO_BASE, tmp_path / "base")
    described = {
        **read(base, "config.json"),
        "model_type": "mine",
        "architectures": ["Model"],
        "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"},
    }
    (base / "config.json").write_text(json.dumps(described))
    (base / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{CODE}")
    with pytest.raises(UsageError, match="--trust_remote_code true"):
        run(tmp_path, model_name=str(base))
    assert not (tmp_path / "ran").exists()
    assert (
        runs.result(run(tmp_path, model_name=str(base), trust_remote_code=True))["status"] == "finished"
        and (tmp_path / "ran").exists()
    )


@shows("columns")
def test_columns_go_by_the_names_that_are_stated(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"q": str(i), "a": [{"text": f"yes {i}"}]}) + "\n" for i in range(8)))
    asked = {"dataset": str(path), "max_steps": 1}
    with pytest.raises(UsageError, match="--columns prompt=COLUMN"):
        run(tmp_path, "unknown", **asked)
    directory = run(tmp_path, "stated", **asked, columns="prompt=q,completion=a[0].text")
    assert json.loads((directory / "data_report.json").read_text())["train"]["examples"] == 8
    assert json.loads((directory / "identity.json").read_text())["columns"] == "prompt=q,completion=a[0].text"


@shows("mix_strategy", "mix_temperature")
def test_sources_have_the_shares_that_are_stated(tmp_path):
    for name, count in (("many", 80), ("few", 20)):
        write(tmp_path / f"{name}.jsonl", *({"prompt": f"{name} {i}?", "completion": " Tam."} for i in range(count)))
    both = f"{tmp_path / 'many.jsonl'},{tmp_path / 'few.jsonl'}"

    def shares(dataset, **more):
        name = "-".join(map(str, ["run", dataset.count("="), *more.values()]))
        directory = run(tmp_path, name, dataset=dataset, max_steps=1, **more)
        return read(directory, "data_report.json")["train"]["examples"]

    assert shares(both) == 100
    assert shares(both, mix_strategy="interleave_under") == 40  # 20 of each
    assert shares(both, mix_strategy="interleave_over") == 160  # 80 of each
    assert shares(both, mix_temperature=1.0) == shares(both, mix_temperature=4.0) == 100
    assert shares(both.replace("l,", "l=3,"), mix_strategy="interleave_under") == 80  # 60 and 20


@shows("group_by_length")
def test_rows_of_about_one_length_share_a_step(tmp_path):
    rows = [{"prompt": "Who?", "completion": " Tam" * (1 + i % 16)} for i in range(64)]
    asked = {"dataset": str(write(tmp_path / "rows.jsonl", *rows)), "batch_size": 8, "max_steps": 8}
    asked |= {"gradient_accumulation_steps": 1}
    seen = {}
    for grouped in (False, True):
        directory = run(tmp_path, str(grouped), **asked, group_by_length=grouped)
        seen[grouped] = [line["tokens"] for line in runs.metrics(directory)]
    assert sum(seen[True]) == sum(seen[False])
    assert max(seen[True]) - min(seen[True]) > 1.5 * (max(seen[False]) - min(seen[False]))
    assert "group_by_length" not in read(tmp_path / "False", "identity.json")
    assert read(tmp_path / "True", "identity.json")["group_by_length"] is True


@shows("chat_template_kwargs", "multi_turn")
def test_a_template_is_told_what_is_stated_and_only_the_last_answer_learned(tmp_path):
    talk = [{"role": role, "content": f"{role} {i}"} for i in range(2) for role in ("user", "assistant")]
    path, template = write(tmp_path / "rows.jsonl", *[{"messages": talk}] * 8), tmp_path / "own.jinja"
    template.write_text(
        "{{ mood }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    asked = {"dataset": str(path), "max_steps": 1, "chat_template": str(template)}
    told = json.dumps({"mood": "glad"})
    reports = {
        name: read(run(tmp_path, name, **asked, **more), "data_report.json")["train"]
        for name, more in {
            "as it is": {},
            "told": {"chat_template_kwargs": told},
            "last": {"multi_turn": "last"},
        }.items()
    }
    assert reports["told"]["tokens"] > reports["as it is"]["tokens"] == reports["last"]["tokens"]
    assert 0 < reports["last"]["trained_tokens"] < reports["as it is"]["trained_tokens"]
    assert read(tmp_path / "told", "identity.json")["chat_template_kwargs"] == told
    with pytest.raises(UsageError, match="does not read 'temper'"):
        run(tmp_path, "wrong", **asked, chat_template_kwargs='{"temper": 1}')


@shows("preference_data", "ignore_columns")
def test_what_rows_say_beside_their_answers_is_refused_or_passed_over(tmp_path):
    rows = [{"prompt": str(i), "chosen": f"yes {i}", "rejected": "no", "score": i} for i in range(1, 9)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"dataset": str(path), "max_steps": 1}
    for missing, more in (
        ("--preference_data chosen", {}),
        ("--ignore_columns score", {"preference_data": "chosen"}),
    ):
        with pytest.raises(UsageError) as refused:
            run(tmp_path, "refused", **asked, **more)
        assert missing in str(refused.value)
    directory = run(tmp_path, "chosen", **asked, preference_data="chosen", ignore_columns="score")
    report = json.loads((directory / "data_report.json").read_text())
    assert report["train"]["examples"] == 8
    identity = json.loads((directory / "identity.json").read_text())
    assert identity["preference_data"] == "chosen" and identity["ignore_columns"] == "score"
    assert resolve({"use": "chosen"}, environ={}).preference_data == "chosen"


@shows("dataset", "dataset_format", "prompt_format", "context_length", "on_bad_row", "on_long_row")
def test_what_becomes_of_the_rows(tmp_path):
    rows = [
        {"instruction": "Say a.", "output": "a", "text": "A lamp."},
        {"instruction": "Say it.", "output": "c " * 90, "text": "A kite."},
        {"instruction": "", "output": "e", "text": "A coin."},
    ]
    common = {"dataset": str(write(tmp_path / "rows.jsonl", *rows)), "max_steps": 1, "lr": 0}

    def report(name, **settings):
        return read(run(tmp_path, name, **common, **settings), "data_report.json")

    text = report("text", dataset_format="text")
    assert (
        text["sources"][0]["format"] == "text"
        and text["train"]["examples"] == 3
        and text["dataset"] == common["dataset"]
    )
    with pytest.raises(UsageError, match="rows.jsonl:3"):
        report("bad", prompt_format="plain")
    plain = report("plain", prompt_format="plain", on_bad_row="skip")
    assert [bad["where"] for bad in plain["skipped"]] == [f"{common['dataset']}:3"] and plain["sources"][0][
        "format"
    ] == "alpaca"
    assert plain["train"]["truncated"]["count"] == 1 and plain["train"]["longest"] == 96
    longer = report("longer", prompt_format="plain", on_bad_row="skip", context_length=400)
    assert (
        longer["train"]["truncated"]["count"] == 0
        and 96
        < longer["train"]["longest"]
        < report("alpaca", on_bad_row="skip", context_length=400)["train"]["longest"]
    )
    assert report("short", prompt_format="plain", on_bad_row="skip", on_long_row="skip")["train"]["examples"] == 1
    with pytest.raises(UsageError, match="rows.jsonl:2: .*over the context of 96"):
        report("long", prompt_format="plain", on_bad_row="skip", on_long_row="error")


@shows("chat_template", "init_adapter")
def test_how_conversations_are_written_and_where_a_run_starts(plain, tmp_path):
    talk = write(
        tmp_path / "talk.jsonl",
        {"messages": [{"role": "user", "content": "Rosa"}, {"role": "assistant", "content": "sold"}]},
    )
    tuned = run(tmp_path, dataset=str(talk), chat_template="zephyr", init_adapter=str(plain), max_steps=1, lr=0)
    assert "<|assistant|>" in (tuned / "adapter" / "chat_template.jinja").read_text()
    one, other = runs.adapter(tuned), runs.adapter(plain)
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@shows(
    "dataset_samples",
    "num_epochs",
    "max_steps",
    "batch_size",
    "gradient_accumulation_steps",
    "packing",
    "log_every_n_steps",
    "save_steps",
    "save_total_limit",
)
def test_steps_and_their_batches(tmp_path):
    """Seven rows, two at a time, two times a step: two steps an epoch."""
    common = {
        "dataset": "dummy",
        "dataset_samples": 7,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_epochs": 2,
        "max_steps": -1,
        "context_length": 400,
        "padding_free": False,
    }
    with forwards("Embedding") as shapes:
        directory = run(tmp_path, **common, log_every_n_steps=3, save_steps=1)
    assert [shape[0] for shape, _ in shapes] == [2, 2, 2, 1] * 2
    assert read(directory, "data_report.json")["rows"] == 7 and runs.result(directory)["steps"] == 4
    assert [m["step"] for m in runs.metrics(directory)] == [3, 4]
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == ["step-000003", "step-000004"]
    kept = run(tmp_path, "three", **{**common, "max_steps": 3}, save_steps=1, save_total_limit=3)
    assert len(list((kept / "checkpoints").iterdir())) == runs.result(kept)["steps"] == 3
    packed = run(tmp_path, "packed", **common, packing=True)
    assert (
        runs.result(packed)["steps"] == 2
        and runs.result(packed)["tokens_seen"] == runs.result(directory)["tokens_seen"]
    )


@shows(
    "eval_dataset",
    "eval_fraction",
    "eval_steps",
    "eval_batch_size",
    "num_samples",
    "exact_match",
    "max_new_tokens",
    "early_stopping_patience",
    "load_best_model_at_end",
)
def test_evaluation(tmp_path):
    held_out = write(
        tmp_path / "held.jsonl",
        *(
            {"prompt": f"{name} bought a lamp. Repeat:", "completion": f"{name} bought a lamp."}
            for name in ("Bren", "Tam", "Sam")
        ),
    )
    with forwards("Embedding") as shapes:
        directory = run(
            tmp_path,
            eval_dataset=str(held_out),
            eval_steps=1,
            eval_batch_size=2,
            num_samples=2,
            exact_match=False,
            max_new_tokens=2,
        )
    assert [shape[0] for shape, training in shapes if not training][:2] == [2, 1] and max(
        shape[0] for shape, training in shapes if not training
    ) == 2
    assert [e["step"] for e in runs.evaluations(directory)] == [0, 1, 2, 3] and not any(
        "exact_match" in e for e in runs.evaluations(directory)
    )
    lines = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 8 and max(len(line["answer"]) for line in lines) < 16
    longer = run(
        tmp_path,
        "longer",
        eval_fraction=0.25,
        dataset=str(held_out),
        num_samples=1,
        max_new_tokens=40,
        exact_match=True,
    )
    assert (
        all("exact_match" in e for e in runs.evaluations(longer))
        and read(longer, "data_report.json")["held_out"]["examples"] == 1
    )
    assert len(json.loads((longer / "samples.jsonl").read_text().splitlines()[0])["answer"]) > 16
    worse = run(
        tmp_path,
        "worse",
        eval_dataset=str(held_out),
        eval_steps=1,
        exact_match=False,
        lr=3,
        lr_scheduler="constant",
        max_steps=9,
        early_stopping_patience=1,
        load_best_model_at_end=True,
    )
    assert runs.result(worse)["steps"] < 9
    seen = {e["step"]: e["loss"] for e in runs.evaluations(worse) if e["step"]}
    best = min(seen, key=seen.get)
    assert runs.result(worse)["eval"]["after"]["step"] == best < runs.result(worse)["steps"]


# ------------------------------------------------------------------------------------------------ where and how it runs


@shows("backend", "strategy", "world_size", "strict", "use_cpu_offload")
def test_what_the_plan_decides(plain):
    assert read(plain, "plan.json")["backend"] == "cpu" and runs.result(plain)["strategy"] == "single"
    assert (planned("m3").backend, planned("m3", backend="mps").backend, planned("m3", backend="cpu").backend) == (
        "mlx",
        "mps",
        "cpu",
    )
    with pytest.raises(UsageError, match="Backend 'cuda' is not available"):
        planned("m3", backend="cuda")
    assert planned("t4", precision="bf16").precision == "fp16_autocast"
    with pytest.raises(UsageError, match="strict: .*bf16"):
        planned("t4", precision="bf16", strict=True)
    assert planned("h200", world_size=1, strategy="single").world_size == 1
    assert planned("h200", world_size=1, strategy="fsdp", use_cpu_offload=True).config.use_cpu_offload
    with pytest.raises(UsageError, match="keeps all weights on the device"):
        planned("h200", world_size=1, strategy="ddp", use_cpu_offload=True)


@pytest.mark.distributed
@shows("mesh", "tensor_layout")
def test_a_mesh_and_a_layout_split_the_model_over_processes(tmp_path):
    """Two processes that train.py starts, by a layout in a file, against one."""
    layout = tmp_path / "layout.yaml"
    layout.write_text(".*mlp.(gate|up)_proj.weight: [model, null]\n.*mlp.down_proj.weight: [null, model]\n")
    directory = run(
        tmp_path, "split", mesh="model=2", tensor_layout=str(layout), double_quant=False, train_type="qlora"
    )
    alone = run(tmp_path, "alone", double_quant=False, train_type="qlora")
    plan = read(directory, "plan.json")
    assert (plan["strategy"], plan["world_size"], plan["config"]["mesh"], plan["config"]["tensor_layout"]) == (
        "tp",
        2,
        "batch=1,model=2",
        str(layout),
    )
    np.testing.assert_allclose(losses(directory), losses(alone), rtol=1e-5)
    assert (
        runs.distance(runs.adapter(directory), runs.adapter(alone), dict.fromkeys(runs.adapter(alone), torch.zeros(())))
        < 1e-3
    )


OTHER = {"llama_pro_path": "x", "hqq_group_size": 32, "low_memory": False, "loading_workers": 2}


@shows(*OTHER)
@pytest.mark.parametrize("name", OTHER)
def test_what_is_not_built_is_refused_by_name(name):
    assert {*OTHER} == {*settings_with("only")}
    only, _ = SETTINGS[name].metadata["only"]
    for value in {OTHER[name], SETTINGS[name].default} - {*only}:
        with pytest.raises(NotSupported, match=f"test: {name}: ") as refused:
            resolve({**TINY, name: value}, environ={}, origin="test")
        assert refused.value.exit_code == 2 and refused.value.cure
    for value in only:
        assert getattr(resolve({**TINY, name: value}, environ={}, origin="test"), name) == value


@shows("strategy_config", "strategy_opt", "sharding_strategy", "deepspeed_zero_stage", "find_unused_parameters")
def test_options_of_strategies(tmp_path):
    """What they do is shown where several train: tests/distributed."""
    file = tmp_path / "options.yaml"
    file.write_text("bucket_cap_mb: 7\n")
    found = strategy_options.strategy_options(
        resolve(
            {
                **TINY,
                "strategy": "ddp",
                "strategy_config": str(file),
                "strategy_opt": "overlap=true",
                "find_unused_parameters": True,
            },
            environ={},
        )
    )
    assert (found.bucket_cap_mb, found.overlap, found.find_unused_parameters) == (7, "true", True)
    implied = {
        name: planned("h200", world_size=1, **{name: value}).strategy
        for name, value in {
            "sharding_strategy": "shard_grad_op",
            "deepspeed_zero_stage": 0,
            "find_unused_parameters": True,
        }.items()
    }
    assert implied == {
        "sharding_strategy": "fsdp",
        "deepspeed_zero_stage": "deepspeed",
        "find_unused_parameters": "ddp",
    }
    assert planned("h200", world_size=1, sharding_strategy="ddp").strategy == "ddp"
    for settings in (
        {"strategy": "ddp", "sharding_strategy": "full_shard"},
        {"strategy": "fsdp", "deepspeed_zero_stage": 1},
        {"strategy": "fsdp", "find_unused_parameters": True},
    ):
        with pytest.raises(UsageError, match="contradicts strategy"):
            resolve({**TINY, **settings}, environ={}, origin="test")


@shows("initial_loss_scale", "loss_scale_growth_interval")
def test_the_loss_scale_starts_and_doubles_as_it_is_told(tmp_path):
    directory = run(tmp_path, precision="fp16", max_steps=4, initial_loss_scale=64, loss_scale_growth_interval=2)
    assert [m["loss_scale"] for m in runs.metrics(directory)] == [64, 64, 128, 128] and not any(
        m["skipped"] for m in runs.metrics(directory)
    )
    with pytest.raises(UsageError, match="only fp16 scales the loss"):
        resolve({**TINY, "initial_loss_scale": 64}, environ={}, origin="test")


@shows("timeline")
def test_a_timeline_has_the_phases_of_each_step(tmp_path):
    directory = run(tmp_path, "timed", timeline="trace.json", gradient_accumulation_steps=2, max_steps=3)
    trace = read(directory, "trace.json")
    phases = [event["name"] for event in trace["traceEvents"] if event["cat"] == "phase"]
    assert (
        phases.count("data") == phases.count("backward") == phases.count("accumulate") == phases.count("step") == 3
        and phases.count("forward") == 6
    )
    assert trace["otherData"]["collectives"] == {}
    for settings in ({"timeline": "../trace.json"}, {"timeline": "a/b.json"}):
        with pytest.raises(UsageError, match="not a plain name"):
            resolve({**TINY, **settings}, environ={})


BETWEEN = {"master_addr": "h", "master_port": "1", "dist_timeout": 5, "max_restarts": 2, "no_sync": True}


@shows(*BETWEEN)
@pytest.mark.parametrize("name", BETWEEN)
def test_what_is_between_processes_needs_several(name):
    """What they do for several is shown where several train: tests/distributed."""
    with pytest.raises(UsageError, match=f"test: {name} = .* contradicts world_size = 1"):
        resolve({**TINY, "world_size": 1, name: BETWEEN[name]}, environ={}, origin="test")
    assert getattr(resolve({**TINY, "world_size": 2, name: BETWEEN[name]}, environ={}), name) == BETWEEN[name]


@pytest.mark.parametrize(
    "useless",
    [
        {"optimizer": "sgd", "adam_beta1": 0.8},
        {"lr_cycles": 2},
        {"lr_power": 2},
        {"lr_decay": 0.5},
        {"lr_scheduler": "constant", "cosine_min_lr_ratio": 0.1},
        {"apply_gradient_clipping": False, "max_grad_norm": 0.5},
        {"quantizer": "int8", "double_quant": True},
        {"dataset_samples": 5},
        {"train_type": "full", "lora_rank": 16},
    ],
    ids=str,
)
def test_what_would_do_nothing_is_refused(useless, tmp_path):
    """On the command line even with its default; in a file that states every setting with its default it is no harm."""
    with pytest.raises(UsageError, match="contradicts"):
        resolve({**TINY, **useless}, environ={}, origin="test")
    (tmp_path / "all.yaml").write_text(resolved_yaml(resolve(TINY, environ={})))
    given = {
        name: value
        for name, value in useless.items()
        if name in ("optimizer", "lr_scheduler", "apply_gradient_clipping", "quantizer", "train_type")
    }
    resolve({"config": str(tmp_path / "all.yaml"), **given}, environ={})


class Cut(Exception):
    """The run ends here, as by a crash."""


@shows("resume", "output_dir", "run_name", "save_model", "overwrite_profiling_output", "on_disk_full")
def test_a_run_that_broke_off_and_where_it_lies(tmp_path):
    def cut(step):
        if step == 2:
            raise Cut

    common = {"save_steps": 1, "max_steps": 4, "save_model": False}
    profiled = {**common, "profile": True, "profile_active": 1, "profiling_frequency": 2, "export_trace": False}
    with pytest.raises(Cut):
        run(tmp_path / "here", "mine", cut, **profiled)
    directory = tmp_path / "here" / "mine"
    profiles = sorted((directory / "profiles").iterdir())
    with pytest.raises(UsageError, match="already holds a run"):
        run(tmp_path / "here", "mine", **common, resume="never")
    with pytest.raises(UsageError, match="holds another run"):
        run(tmp_path / "here", "mine", **common, lr=1e-4)
    again = []
    run(tmp_path / "here", "mine", again.append, **profiled, overwrite_profiling_output=False)
    assert min(again) == 2 and not (directory / "adapter").exists()
    assert profiles and sorted((directory / "profiles").iterdir()) == profiles
    with pytest.raises(Cut):
        run(tmp_path / "here", "other", cut, **common)
    run(tmp_path / "here", "other", **common, lr=1e-4, resume="force")
    assert rates(tmp_path / "here" / "other")[-1] < 1e-4 < rates(directory)[-1]
    full = run(
        tmp_path, "full", **{**common, "save_model": True}, during=lambda step: step == 1 and block(tmp_path / "full")
    )
    assert runs.result(full)["steps"] == 4 and (full / "checkpoints").is_file() and (full / "adapter").is_dir()
    with pytest.raises(DiskFull, match="step 2 cannot be written"):
        run(
            tmp_path,
            "stopped",
            **common,
            on_disk_full="stop",
            during=lambda step: step == 1 and block(tmp_path / "stopped"),
        )


def block(directory):
    """No further checkpoint can be written: where they lie is a file."""
    shutil.rmtree(directory / "checkpoints")
    (directory / "checkpoints").write_text("")


# --------------------------------------------------------------------------------------------------------- what is seen

WANDB = """
import json, pathlib, types
util = types.SimpleNamespace(generate_id=lambda: "id")
Settings = dict
class Recorder:
    def __init__(self, **about): self.about = about
    def log(self, values, step): self.about.setdefault("logged", []).append(step)
    def finish(self): pathlib.Path(self.about["dir"], "told.json").write_text(json.dumps(self.about, default=str))
def init(**about): return Recorder(**about)
"""


@shows("log_to", "project_name", "tracker_name", "tracker_group", "tracker_entity", "verbose")
def test_what_is_said_and_told(tmp_path, monkeypatch, capsys):
    """The tracker is a package of the test's own that writes down what it is told."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text(WANDB)
    (tmp_path / "wandb" / "errors.py").write_text("CommError = OSError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)  # whichever another test has imported
    told = {f"tracker_{key}": f"the-{key}" for key in ("name", "group", "entity")} | {"project_name": "the-project"}

    def said(place, **settings):
        sft.train(
            resolve(
                {**TINY, "max_steps": 2, "output_dir": str(tmp_path), "run_name": place, "backend": "cpu", **settings},
                environ={},
                origin="test",
            )
        )
        return capsys.readouterr().out

    assert said("silent", log_to="none,wandb", **told) == ""
    for name in ("wandb", "wandb.errors"):
        sys.modules.pop(name)
    record = read(tmp_path / "silent", "told.json")
    assert {record[key] for key in ("project", "name", "group", "entity")} == set(told.values()) and record[
        "logged"
    ] == [1, 2]
    lines = said("lines", log_to="stdout")
    assert lines.count("loss ") >= 2 and "System: " not in lines and not (tmp_path / "lines" / "told.json").exists()
    assert "System: " in said("more", log_to="stdout", verbose=True)


@shows(
    "profile_memory",
    "profile",
    "profiling_output",
    "with_stack",
    "with_shapes",
    "export_trace",
    "export_memory_timeline",
    "profile_wait",
    "profiler_warmup_steps",
    "profile_active",
    "profile_repeat",
    "profiling_frequency",
)
def test_profiles(plain, tmp_path):
    """Six steps in cycles of three: one waits, one warms up, one is recorded; once, or in each cycle."""
    common = {
        "profile": True,
        "profiling_output": "seen",
        "profile_wait": 1,
        "profiler_warmup_steps": 1,
        "profile_active": 1,
        "profiling_frequency": 3,
        "batch_size": 1,
        "max_steps": 6,
        "lora_target_modules": "q_proj",
    }
    directory = run(
        tmp_path, **common, profile_repeat=1, with_stack=True, with_shapes=True, export_trace=False, profile_memory=True
    )
    assert [p.name for p in (directory / "seen").iterdir()] == ["step-000003"]
    assert sorted(p.name for p in (directory / "seen/step-000003").iterdir()) == ["operators.txt"]
    table = (directory / "seen/step-000003/operators.txt").read_text()
    assert "Input Shapes" in table and ".py(" in table
    assert {entry["phase"] for entry in read(directory, "memory.json")} >= {"load", "forward", "backward", "step"}
    bare = run(tmp_path, "bare", **common)
    assert sorted(p.name for p in (bare / "seen").iterdir()) == ["step-000003", "step-000006"]
    assert sorted(p.name for p in (bare / "seen/step-000003").iterdir()) == ["operators.txt", "trace.json"]
    table = (bare / "seen/step-000003/operators.txt").read_text()
    assert "Input Shapes" not in table and ".py(" not in table
    timeline = run(
        tmp_path,
        "timeline",
        profile=True,
        max_steps=1,
        lora_target_modules="q_proj",
        export_trace=False,
        export_memory_timeline=True,
    )
    assert sorted(p.name for p in (timeline / "profiles/step-000001").iterdir()) == [
        "memory_timeline.json",
        "operators.txt",
    ]
    assert not (plain / "memory.json").exists() and not (plain / "profiles").exists()


def test_every_setting_is_shown():
    assert set(SETTINGS) == SHOWN
