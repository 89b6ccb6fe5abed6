"""Whole runs on MLX: resumed, handed over, in every precision and quantizer, evaluated, and stopped by what is not
finite.
"""

import contextlib
import json
import os
import signal

import numpy as np
import pytest

from anyqlora.core.terminal import format_bytes

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'mlx[cpu]' mlx-lm")

import torch
import transformers
from safetensors.torch import load_file

from anyqlora.config.resolve import resolve
from anyqlora.core.errors import NonFinite, NotSupported, Stopped, UsageError
from anyqlora.models.architectures import DEMO_BASE
from anyqlora.on_mlx import evaluate
from anyqlora.on_mlx import memory as on_mlx_memory
from anyqlora.on_mlx.generate import answers
from anyqlora.on_mlx.memory import is_out_of_memory
from anyqlora.on_mlx.mlx_lm_bridge import load_model
from anyqlora.on_mlx.nn.loss import inputs
from anyqlora.on_mlx.runtime import Runtime
from anyqlora.planning.backends import BackendManager
from tests.support import runs, tiny_models
from tests.support.paths import ROOT

SMALL = {
    "model_name": "demo",
    "dataset": "demo",
    "train_type": "lora",
    "precision": "fp32",
    "context_length": 96,
    "batch_size": 2,
    "max_steps": 6,
    "gradient_accumulation_steps": 2,
    "lr": 2e-3,
    "lora_rank": 4,
    "save_steps": 3,
    "warmup_steps": 0,
    "use_gradient_checkpointing": False,
}
MLX = {**SMALL, "backend": "mlx"}


def stopped(output, name, at, **settings):
    """The run up to step `at`, ended by SIGTERM."""
    with pytest.raises(Stopped):
        runs.run(output, name, during=lambda step: step == at - 1 and os.kill(os.getpid(), signal.SIGTERM), **settings)


def same(one, other, *names):
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def state(directory):
    """state.json but for times."""
    return {
        name: value
        for name, value in json.loads((directory / LAST / "state.json").read_text()).items()
        if not name.endswith("seconds")
    }


ADAPTER, LAST = "adapter/adapter_model.safetensors", "checkpoints/step-000006"


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"lora_dropout": 0.1}, id="dropout"),
        pytest.param(
            {"adapter": "dora", "lora_dropout": 0.2, "use_gradient_checkpointing": True},
            id="dora",
            marks=pytest.mark.slow,
        ),
        pytest.param({"optimizer": "adadelta", "lr": 1.0}, id="adadelta", marks=pytest.mark.slow),
        pytest.param({"precision": "fp16"}, id="fp16"),
    ],
)
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path, more):
    whole = runs.run(tmp_path, "whole", **{**MLX, **more})
    stopped(tmp_path, "cut", 4, **{**MLX, **more})
    cut = runs.run(tmp_path, "cut", **{**MLX, **more})
    assert same(whole, cut, ADAPTER, f"{LAST}/optimizer.safetensors") and state(whole) == state(cut)


@pytest.mark.parametrize(
    ("more", "is_last"),
    [({}, True), ({"lr": 0.03, "lr_scheduler": "constant", "max_grad_norm": 100}, False)],
    ids=["last", "earlier"],
)
def test_keep_best_ends_with_the_best_step(tmp_path, more, is_last):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(tiny_models.TASK.read_text().splitlines(keepends=True)[:6]))
    directory = runs.run(
        tmp_path,
        **{
            **MLX,
            "eval_dataset": str(held_out),
            "eval_steps": 2,
            "exact_match": False,
            "num_samples": 0,
            "load_best_model_at_end": True,
            "save_steps": 0,
            **more,
        },
    )
    losses = {e["step"]: e["loss"] for e in runs.evaluations(directory) if e["step"] > 0}
    best, after = min(losses, key=losses.get), runs.result(directory)["eval"]["after"]
    assert list(losses) == [2, 4, 6] and (best == 6) is is_last
    assert (after["step"], after["loss"]) == (best, losses[best])
    assert (directory / ADAPTER).read_bytes() == (
        directory / f"checkpoints/step-{best:06d}/adapter_model.safetensors"
    ).read_bytes()


def test_torch_to_mlx_to_torch(tmp_path):
    settings = {**SMALL, "max_steps": 20, "save_steps": 0, "lora_dropout": 0}
    whole, start = (
        runs.run(tmp_path, "whole", **settings),
        runs.run(tmp_path, "start", **{**settings, "max_steps": 1, "lr": 0}),
    )
    stopped(tmp_path, "handed", 7, **settings)
    stopped(tmp_path, "handed", 13, **settings, backend="mlx")
    handed = runs.run(tmp_path, "handed", **settings)
    assert [m["step"] for m in runs.metrics(handed)] == list(range(1, 21))
    assert [(m["tokens"], m["lr"]) for m in runs.metrics(handed)] == [
        (m["tokens"], m["lr"]) for m in runs.metrics(whole)
    ]
    np.testing.assert_allclose(
        [m["loss"] for m in runs.metrics(handed)], [m["loss"] for m in runs.metrics(whole)], rtol=1e-5
    )
    far = runs.distance(runs.adapter(whole), runs.adapter(handed), runs.adapter(start))
    print("adapter", far)
    assert far < 1e-4


def test_the_rows_of_each_step_are_torchs(tmp_path):
    """By row id: what each loop's batches name, step by step."""
    seen = {}
    for backend in ("cpu", "mlx"):
        rows = seen.setdefault(backend, [])
        with watched(rows):
            runs.run(tmp_path, backend, **{**SMALL, "backend": backend, "max_steps": 3})
    assert seen["cpu"] == seen["mlx"] and len(seen["cpu"]) == 3


@contextlib.contextmanager
def watched(rows):
    from anyqlora.training.session import TrainingSession

    plain = TrainingSession.batches

    def batches(self, step):
        found = plain(self, step)
        rows.append([batch.rows for batch in found])
        return found

    TrainingSession.batches = batches
    try:
        yield
    finally:
        TrainingSession.batches = plain


@pytest.mark.slow
def test_recomputing_with_dropout_changes_nothing(tmp_path):
    """The dropout of a recomputed block is that of its forward pass."""
    one, *others = (
        runs.run(
            tmp_path,
            str(layers),
            **{
                **MLX,
                "lora_dropout": 0.3,
                "max_steps": 4,
                "use_gradient_checkpointing": layers > 0,
                "checkpointed_layers": layers,
            },
        )
        for layers in (0, 1, 9)
    )
    for other in others:
        np.testing.assert_allclose(
            [m["loss"] for m in runs.metrics(one)], [m["loss"] for m in runs.metrics(other)], rtol=1e-5
        )
    plain = runs.run(tmp_path, "plain", **{**MLX, "lora_dropout": 0, "max_steps": 4})
    assert abs(runs.metrics(one)[2]["loss"] / runs.metrics(plain)[2]["loss"] - 1) > 1e-4


@pytest.mark.slow  # the CPU build compiles with g++
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"lora_dropout": 0.2, "use_gradient_checkpointing": True},
        {"packing": True},
        {"quantizer": "nf4", "train_type": "qlora"},
    ],
    ids=["plain", "checkpointed", "packed", "nf4"],
)
def test_a_compiled_step_is_the_same(tmp_path, monkeypatch, more):
    """What a GPU runs: the step compiled, for rows of few widths. MLX's CPU build compiles too."""
    settings = {**MLX, "max_steps": 3, "lora_dropout": 0, **more}
    plain = runs.run(tmp_path, "plain", **settings)
    widths = []
    monkeypatch.setattr(Runtime, "compiles", True)
    monkeypatch.setattr(
        Runtime,
        "_loss",
        lambda self, values, key, factor, ids, *others, traced=Runtime._loss: (
            widths.append(ids.shape[1]) or traced(self, values, key, factor, ids, *others)
        ),
    )
    compiled = runs.run(tmp_path, "compiled", **settings)
    np.testing.assert_allclose(
        [m["loss"] for m in runs.metrics(compiled)], [m["loss"] for m in runs.metrics(plain)], rtol=1e-6
    )
    assert set(widths) <= {32, 64, 96} and len(widths) <= 2 * len(set(widths)), (
        "it is traced for each shape, not for each batch"
    )


def test_an_adapter_of_another_shape_is_refused_tensor_by_tensor(tmp_path):
    runs.run(tmp_path, **{**MLX, "max_steps": 1})
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(UsageError) as refused:
        runs.run(tmp_path, **{**MLX, "max_steps": 2, "lora_rank": 8, "resume": "force"})
    assert "42 differ" in str(
        refused.value
    ) and "layers.2.self_attn.v_proj.lora_B.weight is (64, 4) there, (64, 8) here" in str(refused.value)


@pytest.mark.slow
def test_evaluating_changes_nothing(tmp_path):
    plain = runs.run(tmp_path, "plain", **MLX, lora_dropout=0.1)
    held_out = tmp_path / "rows.jsonl"
    held_out.write_text("".join(tiny_models.TASK.read_text().splitlines(keepends=True)[:6]))
    often = runs.run(
        tmp_path,
        "often",
        **MLX,
        lora_dropout=0.1,
        eval_dataset=str(held_out),
        eval_steps=2,
        num_samples=2,
        max_new_tokens=4,
        exact_match=False,
    )
    assert same(plain, often, ADAPTER) and len(runs.evaluations(often)) == 4


def test_an_evaluation_says_what_torchs_says(tmp_path):
    held_out = tmp_path / "rows.jsonl"
    held_out.write_text("".join(tiny_models.TASK.read_text().splitlines(keepends=True)[:12]))
    settings = {
        **SMALL,
        "lora_dropout": 0,
        "max_steps": 4,
        "eval_dataset": str(held_out),
        "num_samples": 12,
        "max_new_tokens": 24,
        "exact_match": True,
    }
    ours, theirs = (runs.run(tmp_path, name, **{**settings, "backend": name}) for name in ("mlx", "cpu"))
    for one, other in zip(runs.evaluations(ours), runs.evaluations(theirs), strict=True):
        near = 1e-5 if one["step"] else 1e-6  # adapters that were trained differ by up to 1e-4 of the way they moved
        assert one["loss"] == pytest.approx(other["loss"], rel=near) and one["exact_match"] == other["exact_match"]
    assert (ours / "samples.jsonl").read_text() == (theirs / "samples.jsonl").read_text()


def test_special_tokens_are_part_of_an_answer():
    """The reference is the same answer when its words were no special tokens."""
    words, model = transformers.AutoTokenizer.from_pretrained(DEMO_BASE), load_model.load_model(DEMO_BASE, longest=64)
    prompt = words.encode("Bren bought two red lamps in Ashford on Monday. Repeat:")
    expected = answers(model, words, DEMO_BASE, [prompt], max_new_tokens=8)
    said = [token for token in words.tokenize(expected[0]) if token.isascii()]
    words.add_special_tokens({"additional_special_tokens": said})
    assert said and answers(model, words, DEMO_BASE, [prompt], max_new_tokens=8) == expected


PRECISIONS = {"bf16": ("bf16", 0.02), "fp16": ("fp16_autocast", 0.02), "bf16_autocast": ("bf16", 0.02)}


@pytest.mark.parametrize(
    "asked", ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp16", "bf16_autocast"))]
)
def test_sixteen_bits_learn_like_thirty_two(tmp_path, asked):
    planned, near = PRECISIONS[asked]
    whole, half = (
        runs.run(tmp_path, name, **{**MLX, "precision": name, "lora_dropout": 0, "max_steps": 6})
        for name in ("fp32", asked)
    )
    assert runs.result(half)["adjustments"] == [] or asked == "bf16_autocast"
    assert [m for m in runs.metrics(half) if not m["skipped"]], "every step overflowed"
    assert runs.metrics(half)[0]["loss"] == pytest.approx(runs.metrics(whole)[0]["loss"], rel=near)
    assert runs.metrics(half)[0]["loss"] != runs.metrics(whole)[0]["loss"]
    plan = BackendManager("mlx").plan(resolve({**MLX, "precision": asked}, environ={}))
    assert plan.precision == planned
    assert all(value.dtype == torch.float32 for value in runs.adapter(half).values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_full_fine_tuning_writes_a_model_that_transformers_loads(tmp_path, precision):
    settings = {name: value for name, value in MLX.items() if not name.startswith("lora_")}
    run = runs.run(tmp_path, **{**settings, "train_type": "full", "precision": precision, "lr": 1e-4, "max_steps": 3})
    tuned, base = (
        load_file(path) for path in (run / "model/model.safetensors", ROOT / "anyqlora/demo/base/model.safetensors")
    )
    assert tuned.keys() == base.keys() and all(tuned[name].dtype == base[name].dtype for name in base)
    assert any((tuned[name] != base[name]).any() for name in base)
    assert tiny_models.plain(run / "model")(input_ids=torch.arange(5, 20)[None]).logits.isfinite().all()


@pytest.fixture(scope="module")
def whole_loss(tmp_path_factory):
    """The first loss on weights that are not quantized."""
    return runs.metrics(runs.run(tmp_path_factory.mktemp("none"), **{**MLX, "max_steps": 1}))[0]["loss"]


QUANTIZERS = [
    pytest.param(name, marks=pytest.mark.slow if name in ("affine2", "affine3", "affine5", "affine6") else ())
    for name in BackendManager("mlx").report.quantizers
    if name != "none"
]


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_every_quantizer_learns(tmp_path, quantizer, whole_loss):
    run = runs.run(
        tmp_path,
        quantizer,
        **{**MLX, "train_type": "qlora", "quantizer": quantizer, "lora_dropout": 0, "max_steps": 2, "save_steps": 0},
    )
    coarse = {"affine2": 1.0, "affine3": 0.3}.get(quantizer, 0.1)
    first = runs.metrics(run)[0]["loss"]
    assert first == pytest.approx(whole_loss, rel=coarse) and first != whole_loss
    assert all(value.any() for name, value in runs.adapter(run).items() if ".lora_B." in name)


def test_three_steps_that_are_not_finite_end_the_run(tmp_path):
    with pytest.raises(NonFinite, match="3 steps in a row"):
        runs.run(tmp_path, **{**MLX, "lr": 1e30, "apply_gradient_clipping": False})


def test_the_loss_scale_starts_and_doubles_as_it_is_told(tmp_path):
    """As torch's does; a run that goes on keeps the scale, and takes how often it grows from its own settings."""
    settings = {**MLX, "precision": "fp16", "initial_loss_scale": 64, "loss_scale_growth_interval": 3}
    stopped(tmp_path, "run", 2, **settings)
    directory = runs.run(tmp_path, **{**settings, "loss_scale_growth_interval": 2})
    assert [m["loss_scale"] for m in runs.metrics(directory)] == [64, 64, 64, 64, 128, 128] and not any(
        m["skipped"] for m in runs.metrics(directory)
    )


# Metal's words (mlx/backend/metal/allocator.cpp, and its command buffers'); the CPU build does not ask whether it got
# memory
OUT_OF_MEMORY = (
    "[metal::malloc] Attempting to allocate 41943040000 bytes which is greater than the maximum allowed buffer size of "
    "22906503168 bytes.",
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
)


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_numbers(tmp_path, monkeypatch):
    with pytest.raises(ValueError) as other:
        mx.ones((2, 3)) @ mx.ones((2, 3))
    assert not is_out_of_memory(other.value) and all(is_out_of_memory(RuntimeError(words)) for words in OUT_OF_MEMORY)
    settings = {**MLX, "batch_size": 4, "max_steps": 2, "lora_dropout": 0}
    whole = runs.run(tmp_path, "whole", **settings)
    plain = Runtime.backward

    def short_of_memory(self, batch, trained):
        if len(batch.ids) > 2:
            raise RuntimeError(OUT_OF_MEMORY[0])
        return plain(self, batch, trained)

    monkeypatch.setattr(Runtime, "backward", short_of_memory)
    halved = runs.run(tmp_path, "halved", **settings)
    np.testing.assert_allclose(
        [m["loss"] for m in runs.metrics(halved)], [m["loss"] for m in runs.metrics(whole)], rtol=1e-6
    )


@pytest.mark.slow
def test_out_of_memory_halves_the_rows_of_an_evaluation(tmp_path, monkeypatch, capfd):
    settings = {**MLX, "max_steps": 1, "eval_dataset": "demo", "eval_batch_size": 8, "exact_match": False}
    whole = runs.run(tmp_path, "whole", **settings)

    def short_of_memory(batch):
        if len(batch.ids) > 2:
            raise RuntimeError(OUT_OF_MEMORY[1])
        return inputs(batch)

    monkeypatch.setattr(evaluate, "inputs", short_of_memory)
    halved = runs.run(tmp_path, "halved", **settings)
    assert "in an evaluation: 2 rows at a time from here on" in capfd.readouterr().err
    np.testing.assert_allclose(
        [e["loss"] for e in runs.evaluations(halved)], [e["loss"] for e in runs.evaluations(whole)], rtol=1e-6
    )


def test_more_than_stays_resident_is_told_once_and_limits_are_put_back(tmp_path, monkeypatch, capsys):
    """As on Metal, where that much is a MiB."""
    monkeypatch.setattr(on_mlx_memory, "recommended", lambda: 1 << 20)
    limits, plain = [], mx.set_cache_limit(12345)

    def look(step):
        limits.append(mx.set_cache_limit(0))
        mx.set_cache_limit(limits[-1])

    try:
        runs.run(tmp_path, during=look, **{**MLX, "max_steps": 2})
    finally:
        after = mx.set_cache_limit(plain)
    assert set(limits) == {1 << 18} and after == 12345
    assert capsys.readouterr().err.count("1.0 MiB stay resident for the GPU") == 1


@pytest.mark.parametrize(
    "more",
    [
        {"lora_dropout": 0},
        {"precision": "bf16", "train_type": "qlora", "quantizer": "affine4"},
        pytest.param({"use_gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"adapter": "dora"}, marks=pytest.mark.slow),
    ],
    ids=["fp32", "affine4", "checkpointed", "dora"],
)
def test_memory_is_predicted_and_measured(tmp_path, more):
    """Of rows that fill the context, as the plan takes them to."""
    base = tiny_models.make(tmp_path / "base", "llama", hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    run = runs.run(
        tmp_path,
        **{
            **MLX,
            "model_name": str(base),
            "context_length": 48,
            "batch_size": 8,
            "max_steps": 1,
            "gradient_accumulation_steps": 1,
            **more,
        },
    )
    result = runs.result(run)
    print(
        "planned", format_bytes(result["planned_memory_bytes"]), "measured", format_bytes(result["peak_memory_bytes"])
    )
    assert 0.8 < result["peak_memory_bytes"] / result["planned_memory_bytes"] < 1.25


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "fsdp"}, "fsdp"),
        ({"strategy": "deepspeed"}, "deepspeed"),
        ({"strategy": "tp"}, "tp"),
        ({"quantizer": "int8", "train_type": "qlora"}, "backend mlx has no int8"),
        ({"quantizer": "fp4", "train_type": "qlora"}, "backend mlx has no fp4"),
        ({"adapter": "pissa"}, "backend mlx has no pissa"),
        ({"optimizer": "adamw_8bit"}, "backend mlx has no adamw_8bit"),
        ({"profile": True}, "profile has no effect"),
        (
            {"reentrant_checkpointing": True, "use_gradient_checkpointing": True},
            "reentrant_checkpointing has no effect",
        ),
        ({"quantizer": "affine4", "train_type": "qlora", "affine_group_size": 48}, "affine_group_size"),
        ({"affine_group_size": 32}, "only affine quantizers"),
    ],
)
def test_what_mlx_does_not_do_is_refused_before_weights_are_read(tmp_path, settings, said):
    with pytest.raises((UsageError, NotSupported)) as refused:
        runs.run(tmp_path, **{**MLX, **settings})
    assert said in str(refused.value) and refused.value.exit_code == 2 and not (tmp_path / "run").exists()


def test_layers_that_do_not_fit_groups_are_named(tmp_path):
    base = tiny_models.make(tmp_path / "base", "llama", intermediate_size=112)
    with pytest.raises(UsageError, match="mlp.down_proj has 112"):
        runs.run(tmp_path, **{**MLX, "model_name": str(base), "train_type": "qlora", "quantizer": "affine4"})
