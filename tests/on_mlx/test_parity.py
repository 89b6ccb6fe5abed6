"""The MLX loop against the torch loop: the same rows, base and start in float32; and one run handed from one to the
other.
"""

import shutil

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'mlx[cpu]' mlx-lm")

import torch
from safetensors.torch import load_file

from anyqlora.config.resolve import resolve
from anyqlora.core.registry import OPTIMIZERS
from anyqlora.on_mlx.optimizers import Rates
from tests.support import runs, tiny_models

STEPS = 20
SETTINGS = {
    "dataset": "demo",
    "lora_dropout": 0.1,
    "max_steps": STEPS,
    "precision": "fp32",
    "context_length": 128,
    "weight_decay": 0.01,
    "lora_rank": 8,
    "lora_alpha": 16,
    "warmup_steps": 3,
    "save_steps": 0,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "use_gradient_checkpointing": False,
}
SHAPE = {"intermediate_size": 128}  # whole affine groups


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.make(tmp_path_factory.mktemp("base"), "llama", **SHAPE)


def both(tmp_path, base, **settings):
    """The same job on torch and on MLX, and where its adapter starts."""
    common = {**SETTINGS, "model_name": str(base), **settings}
    return (
        runs.run(tmp_path, "torch", **common),
        runs.run(tmp_path, "mlx", backend="mlx", **common),
        runs.run(tmp_path, "start", **{**common, "max_steps": 1, "lr": 0}),
    )


def compare(one, other, start, *, loss, norm, adapter):
    ours, theirs = runs.metrics(other), runs.metrics(one)
    assert [m["step"] for m in ours] == [m["step"] for m in theirs] and [m["tokens"] for m in ours] == [
        m["tokens"] for m in theirs
    ]
    far = runs.distance(trained(one), trained(other), trained(start))
    print(
        "loss",
        max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(ours, theirs, strict=True)),
        "norm",
        max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(ours, theirs, strict=True)),
        "adapter",
        far,
    )
    np.testing.assert_allclose([m["loss"] for m in ours], [m["loss"] for m in theirs], rtol=loss)
    np.testing.assert_allclose([m["grad_norm"] for m in ours], [m["grad_norm"] for m in theirs], rtol=norm)
    assert far < adapter


def trained(directory):
    """What a run learned: its adapter, or its whole model."""
    return (
        runs.adapter(directory)
        if (directory / "adapter").is_dir()
        else load_file(directory / "model" / "model.safetensors")
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"train_type": "lora"},
        pytest.param({"train_type": "lora", "adapter": "rslora"}, marks=pytest.mark.slow),
        {"train_type": "lora", "adapter": "dora"},
        pytest.param({"train_type": "full", "lr": 1e-4}, marks=pytest.mark.slow),
        # With dropout, too, the losses are within 1e-6; gradients near zero, of which AdamW takes the sign, part the
        # adapters by 1.2e-4.
        {"train_type": "qlora", "double_quant": False, "lora_dropout": 0},
        pytest.param({"train_type": "lora", "packing": True}, marks=pytest.mark.slow),
        pytest.param({"train_type": "lora", "use_gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
    ids=["lora", "rslora", "dora", "full", "nf4", "packed", "checkpointed"],
)
def test_mlx_equals_torch_in_float32(base, tmp_path, settings):
    if settings["train_type"] == "full":
        settings = {name: value for name, value in {**SETTINGS, **settings}.items() if not name.startswith("lora_")}
        one, other, start = (
            runs.run(tmp_path, name, **{**settings, "model_name": str(base), **more})
            for name, more in (("torch", {}), ("mlx", {"backend": "mlx"}), ("start", {"max_steps": 1, "lr": 0}))
        )
    else:
        one, other, start = both(tmp_path, base, **settings)
    compare(one, other, start, loss=1e-6, norm=1e-5, adapter=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adadelta"])
def test_every_update_rule_is_torchs(base, tmp_path, optimizer):
    rate = {"adam": 2e-4, "sgd": 0.1, "adadelta": 1.0}[optimizer]
    compare(
        *both(tmp_path, base, train_type="lora", optimizer=optimizer, lr=rate, max_steps=8),
        loss=1e-6,
        norm=1e-5,
        adapter=1e-4,
    )


def test_files_are_the_same_but_for_rounding(base, tmp_path):
    one, other, _ = both(tmp_path, base, train_type="lora", max_steps=2)
    assert (one / "adapter/adapter_config.json").read_bytes() == (other / "adapter/adapter_config.json").read_bytes()
    for name in ("adapter_model", "optimizer"):
        here, there = (load_file(run / "checkpoints/step-000002" / f"{name}.safetensors") for run in (one, other))
        assert here.keys() == there.keys()
        assert all(
            here[key].shape == there[key].shape and here[key].dtype == there[key].dtype == torch.float32 for key in here
        )


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("adamw", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        pytest.param("adam", torch.optim.Adam, marks=pytest.mark.slow),
        pytest.param("adadelta", torch.optim.Adadelta, marks=pytest.mark.slow),
    ],
)
def test_updates_are_torchs_compiled_or_not(name, theirs):
    """With decay, at a rate that changes: a compiled update is traced once, so nothing of a step may be a constant in
    it.
    """
    config = resolve({"model_name": "demo", "dataset": "demo", "optimizer": name, "weight_decay": 0.1}, environ={})
    start, *gradients = (np.random.default_rng(n).normal(size=(8, 16)).astype(np.float32) for n in range(5))
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    reference = theirs([parameter], weight_decay=0.1)
    rule, calls = OPTIMIZERS[name].load("mlx"), []

    def update(value, state, gradient, *rates):
        calls.append(name)
        state = dict(state)
        return rule(value, gradient, state, Rates(*rates), config), state

    compiled = mx.compile(update)
    ours = [(mx.array(start), {}), (mx.array(start), {})]
    for step, gradient in enumerate(gradients, 1):
        reference.param_groups[0]["lr"] = rate = 0.1 / step
        parameter.grad = torch.from_numpy(gradient)
        reference.step()
        ours = [
            call(value, state, mx.array(gradient), *Rates.at(step, rate, config))
            for call, (value, state) in zip((update, compiled), ours, strict=True)
        ]
        for value, _ in ours:
            np.testing.assert_allclose(np.array(value), parameter.detach().numpy(), rtol=2e-6, atol=2e-7)
    if shutil.which("g++"):  # by which MLX's build for CPUs compiles; without it each step is traced again
        assert len(calls) <= len(gradients) + 2, "it is traced without moments and with them, and not at each step"
