"""What MLX holds at most, by its allocator's own count: while a model is packed, in a step that is compiled or not, in
an answer.
"""

import gc

import numpy as np
import pytest

from anyqlora.planning.memory import activations

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'mlx[cpu]' mlx-lm")

import mlx.nn as nn
import torch

from anyqlora.config.resolve import resolve
from anyqlora.core import registry
from anyqlora.data.stream import Batch
from anyqlora.on_mlx.build import build, materialize
from anyqlora.on_mlx.generate import continue_sequences
from anyqlora.on_mlx.mlx_lm_bridge import load_model
from anyqlora.on_mlx.nn.quantizers import UnpackedLinear
from anyqlora.on_mlx.runtime import Runtime
from anyqlora.planning.backends import BackendManager
from anyqlora.processes.group import SingleProcess
from tests.support import tiny_models

COUNT = 60  # layers in a row
LAYER = 4 * 256 * 1024  # bytes in float32 of the wide model's largest weight


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A bf16 base whose blocks have 10 million weights."""
    return tiny_models.make(
        tmp_path_factory.mktemp("wide"),
        "llama",
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=10,
        dtype=torch.bfloat16,
    )


def taken(call) -> tuple[object, int, int]:
    """(what `call` returns, bytes that are held after it, bytes at most while it ran), beyond those before it."""
    gc.collect()  # models have cycles
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = call()
    held, most = mx.get_active_memory() - before, mx.get_peak_memory() - before
    print("held", held, "at most", most)
    return found, held, most


@pytest.mark.parametrize("quantizer", ["affine4", "affine8", "nf4"])
def test_a_model_is_never_whole_in_memory_while_it_is_packed(wide, quantizer):
    kind = registry.quantizer(quantizer).load("mlx")(
        resolve({"model_name": str(wide), "dataset": "demo", "quantizer": quantizer}, environ={}), mx.bfloat16
    )
    model = load_model.load_model(wide, longest=64)
    _, held, most = taken(lambda: materialize(model, kind, mx.bfloat16, already=False))
    assert most < held + 4 * LAYER


def begun(base, monkeypatch, compiled=False, **settings) -> tuple[Runtime, Batch]:
    """A runtime before its first step, and rows for it."""
    settings = {
        "model_name": str(base),
        "dataset": "demo",
        "backend": "mlx",
        "precision": "bf16",
        "lora_rank": 4,
        "lora_dropout": 0,
        "context_length": 64,
        "batch_size": 2,
        "use_gradient_checkpointing": True,
        **settings,
    }
    plan = BackendManager("mlx").plan(resolve(settings, environ={}))
    monkeypatch.setattr(Runtime, "compiles", compiled)
    runtime = Runtime(plan)
    runtime.prepare(build(plan.config, runtime), SingleProcess())
    runtime.seed(0)
    ids = (
        np.random.default_rng(0).integers(3, 400, (plan.config.batch_size, plan.config.context_length)).astype(np.int32)
    )
    return runtime, Batch(
        ids=ids, targets=np.roll(ids, -1, 1), positions=np.zeros_like(ids), segments=np.zeros_like(ids), rows=()
    )


def test_dora_measures_one_weight_at_a_time(wide, monkeypatch):
    """When the model is built; sixteen at most: MLX starts ten operations before a processor has ended the first."""
    _, held, most = taken(lambda: begun(wide, monkeypatch, precision="fp32", quantizer="affine4", adapter="dora"))
    assert most < held + 16 * LAYER


UNPACKED = {
    "nf4": {"quantizer": "nf4"},
    "affine4": {"quantizer": "affine4"},
    "dora": {"quantizer": "affine4", "adapter": "dora"},
}


@pytest.mark.slow  # the CPU build compiles with g++
@pytest.mark.parametrize("settings", UNPACKED.values(), ids=UNPACKED)
def test_a_compiled_step_takes_what_one_does_that_is_not_compiled(wide, monkeypatch, settings):
    peaks, losses = [], []
    for compiled in (False, True):
        runtime, batch = begun(wide, monkeypatch, compiled, **settings)
        loss, _, most = taken(lambda runtime=runtime, batch=batch: runtime.backward(batch, 128))
        peaks.append(most)
        losses.append(loss)
    assert peaks[1] < 1.5 * peaks[0] and losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(
    ("adapter", "quantizer", "dropout"),
    [("lora", "affine4", 0), ("lora", "nf4", 0), ("dora", "affine4", 0), ("dora", "affine4", 0.1)],
)
def test_backward_keeps_no_weight_that_forward_unpacked(adapter, quantizer, dropout):
    """Nor does it where compiling joins equal expressions, as those that unpack a weight in forward and in backward
    are. In float32, that few kernels are compiled.
    """
    settings = {"quantizer": quantizer, "adapter": adapter, "lora_rank": 4, "lora_dropout": dropout}
    config = resolve({"model_name": "demo", "dataset": "demo", **settings}, environ={})
    kind = registry.quantizer(quantizer).load("mlx")(config, mx.float32)
    layers = []
    for _ in range(COUNT):
        base = kind.pack(nn.Linear(256, 256, bias=False))
        base.__class__ = UnpackedLinear if type(base) is nn.QuantizedLinear else type(base)
        layers.append(
            registry.adapter(adapter)
            .load("mlx")(config, kind)
            .wrap(base, mx.random.normal((4, 256)) / 16, mx.zeros((256, 4)))
        )
    model = nn.Sequential(*layers)
    model.freeze()
    model.apply_to_modules(lambda name, module: module.unfreeze(keys=["lora_A", "lora_B"], recurse=False))
    x = mx.random.normal((2, 256))
    mx.eval(model.parameters(), x)

    def gradients(values, x):
        model.update(values)
        return model(x).sum()

    values = model.trainable_parameters()
    of_step = mx.value_and_grad(gradients)
    for step in (of_step, mx.compile(of_step)):
        assert taken(lambda step=step: mx.eval(step(values, x)))[2] < COUNT / 3 * 4 * 256 * 256


@pytest.mark.parametrize(
    ("precision", "checkpointing", "mib", "compiled"),
    [
        ("fp32", False, 128, False),
        ("fp32", False, 8, False),
        ("fp32", True, 8, False),
        pytest.param("bf16", True, 128, False, marks=pytest.mark.slow),
        pytest.param("fp32", False, 128, True, marks=pytest.mark.slow),
        pytest.param("fp32", False, 8, True, marks=pytest.mark.slow),
    ],
)
def test_what_attention_takes_for_pairs_of_tokens_is_planned(
    tmp_path, monkeypatch, precision, checkpointing, mib, compiled
):
    """Of long rows it is most of what a step needs: 32 MiB for each array of the scores of all heads, of which backward
    has four.
    """
    monkeypatch.setattr(activations, "SCORES_ON_MLX", mib << 20)
    base = tiny_models.make(tmp_path, "llama", num_attention_heads=8, num_hidden_layers=3, max_position_embeddings=1024)
    settings = {
        "precision": precision,
        "context_length": 1024,
        "batch_size": 1,
        "use_gradient_checkpointing": checkpointing,
    }

    def step():
        runtime, batch = begun(base, monkeypatch, compiled, **settings)
        runtime.backward(batch, 1024)
        return runtime.plan.memory

    planned, _, most = taken(step)
    print("planned", planned.total, planned.peak)
    assert (0.7 if compiled else 0.8) < most / planned.total < 1.2, (
        "compiled, operations on single numbers are one, which the plan does not count on"
    )
    assert mib > 32 or most < 80 << 20


def test_an_answer_makes_logits_of_no_token_but_the_last(tmp_path):
    """The answers are those of the whole rows, each alone, without a cache."""
    vocabulary, longest = 20_000, 120
    model = load_model.load_model(tiny_models.make(tmp_path, "llama", vocab_size=vocabulary), longest=256)
    prompts = [
        np.random.default_rng(n).integers(3, vocabulary, length).tolist()
        for n, length in enumerate((longest, 1, 60, 119))
    ]
    mx.eval(model.parameters())
    found, _, most = taken(lambda: continue_sequences(model, prompts, 3, [], 0.0, mx.random.key(0)))
    assert most < len(prompts) * longest * vocabulary * 4 / 3
    for prompt, answer in zip(prompts, found, strict=True):
        for token in answer:
            assert token == model(mx.array([prompt]))[0, -1].argmax().item()
            prompt.append(token)
