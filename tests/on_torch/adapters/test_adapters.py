"""Every adapter kind: what it starts from, what it saves, and that plain PEFT gives the same logits from the file."""

import json
import os
import subprocess
import sys

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from anyqlora.config.resolve import resolve
from anyqlora.config.schema import TrainConfig
from anyqlora.core import registry
from anyqlora.core.errors import RunError, UsageError
from anyqlora.models.architectures import read_config
from anyqlora.models.lora_targets import shortest
from anyqlora.on_torch.adapters.svd_init import svd_factors
from anyqlora.on_torch.quantizers.bnb import Nf4
from tests.support import runs, tiny_models
from tests.support.paths import ROOT

KINDS = [name for name in registry.offered(registry.ADAPTERS, "torch") if not registry.adapter(name).trains_base]
IDS = torch.arange(5, 35).reshape(2, 15) * 7 % 500


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.make(tmp_path_factory.mktemp("base"), "llama", intermediate_size=128)


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def assert_same(ours, theirs, tolerance=2e-5):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=tolerance * float(theirs.abs().max()))


PAIRS = [
    (quantizer, kind)
    for quantizer in registry.offered(registry.QUANTIZERS, "torch")
    for kind in KINDS
    if (quantizer, kind) != ("none", "loftq")
]


@pytest.mark.parametrize(("quantizer", "kind"), PAIRS)
def test_plain_peft_gives_the_same_logits(quantizer, kind, base, tmp_path):
    """On weights set to what ours dequantize to - for PiSSA, plus what it took out before quantizing."""
    started = tiny_models.Started(tmp_path, base, quantizer=quantizer, adapter=kind)
    held = started.held()
    if kind == "pissa":
        taken = {
            name.replace(".lora_A.", "."): (value, started.built.adapter.initial[name.replace("lora_A", "lora_B")])
            for name, value in started.built.adapter.initial.items()
            if ".lora_A." in name
        }
        held |= {
            name: held[name] + 2.0 * b @ a
            for name in held
            for a, b in [taken.get(f"base_model.model.{name}", (None, None))]
            if a is not None
        }
    for number in range(2):
        started.step(number)
    adapter = started.finish()
    ours = started.logits(IDS, training=quantizer == "int8")  # which rounds activations too, but in evaluation only
    assert_same(ours, logits(tiny_models.plain(base, held, adapter)))
    about = json.loads((adapter / "adapter_config.json").read_text())
    assert about["r"] == (8 if kind == "pissa" else 4) and isinstance(about["lora_alpha"], int)
    assert about["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_before_the_first_step_the_model_is_the_quantized_base(kind, base, tmp_path):
    started = tiny_models.Started(tmp_path, base, adapter=kind)
    assert_same(started.logits(IDS), logits(tiny_models.plain(base, started.held())))


def test_rslora_is_scaled_by_the_root_of_the_rank(base, tmp_path):
    """alpha / sqrt(rank) = 8 / 2, where LoRA has 8 / 4."""
    for kind, scale in (("rslora", 4.0), ("lora", 2.0)):
        started = tiny_models.Started(tmp_path / kind, base, adapter=kind)
        assert {module.scaling["default"] for module in started.model.modules() if isinstance(module, LoraLayer)} == {
            scale
        }
        assert started.built.adapter.adapter_config()["use_rslora"] == (kind == "rslora")


def test_an_adapter_that_gets_no_gradient_is_named(base, tmp_path):
    started = tiny_models.Started(tmp_path, base)
    layer = started.model.get_submodule("base_model.model.model.layers.1.mlp.up_proj")
    layer.forward = layer.base_layer.forward  # what a fused kernel that passes the module by would do
    with pytest.raises(RunError, match=r"2 of 28 trained tensors got no gradient, of model.layers.1.mlp.up_proj"):
        started.step()


def test_dora_learns_magnitudes(base, tmp_path):
    started = tiny_models.Started(tmp_path, base, adapter="dora")
    before = {name: p.detach().clone() for name, p in started.built.trainable.items() if "magnitude" in name}
    name = "base_model.model.model.layers.0.mlp.up_proj"
    row_norms = started.held()["model.layers.0.mlp.up_proj.weight"].norm(dim=1)
    torch.testing.assert_close(before[f"{name}.lora_magnitude_vector"], row_norms)
    started.step()
    assert all((started.built.trainable[name] != p).any() for name, p in before.items()) and len(before) == 14


def test_dora_on_rows_that_end_inside_a_block(tmp_path):
    """The reference is PEFT over plain weights that hold the dequantized ones; down_proj has 112 inputs, and blocks 64
    weights.
    """
    directory = tiny_models.make(tmp_path / "base", "llama", intermediate_size=112)
    started = tiny_models.Started(tmp_path, directory, adapter="dora")
    held = started.held()
    row_norms = held["model.layers.0.mlp.down_proj.weight"].norm(dim=1)
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_magnitude_vector"
    torch.testing.assert_close(started.built.trainable[name].detach(), row_norms)
    for number in range(2):
        started.step(number)
    adapter = started.finish()
    assert_same(started.logits(IDS), logits(tiny_models.plain(directory, held, adapter)))


def test_loftq_starts_from_what_quantization_lost(base, tmp_path):
    """The base is the plain quantized one; B A is the best approximation of W - held of its rank, by torch's own
    decomposition.
    """
    started, plain = (
        tiny_models.Started(tmp_path / "loftq", base, adapter="loftq"),
        tiny_models.Started(tmp_path / "lora", base),
    )
    original = tiny_models.plain(base)
    for name, held in started.held().items():
        assert torch.equal(held, plain.held()[name])
        a, b = (
            started.built.trainable["base_model.model." + name.replace(".weight", f".lora_{which}.weight")].detach()
            for which in "AB"
        )
        lost = original.get_parameter(name).detach() - held
        u, s, vh = torch.linalg.svd(lost)
        best = (lost - u[:, :4] * s[:4] @ vh[:4]).norm()
        assert (lost - 2.0 * b @ a).norm() < 1.01 * best < lost.norm()


def test_loftq_without_quantization_is_refused():
    with pytest.raises(UsageError, match="nothing is quantized"):
        resolve(
            {"model_name": "demo", "dataset": "demo", "adapter": "loftq", "quantizer": "none", "train_type": "lora"},
            environ={},
            origin="test",
        )


def test_pissa_at_step_0_leaves_the_original_model_as_it_is(base, tmp_path):
    """The file on the original, full-precision base: what was taken out is not there, and neither is it added."""
    started = tiny_models.Started(tmp_path, base, adapter="pissa")
    assert_same(logits(tiny_models.plain(base, adapter=started.finish())), logits(tiny_models.plain(base)), 1e-6)


@pytest.mark.parametrize("quantizer", ["none", "nf4"])
def test_pissa_after_training_acts_on_the_original_base(quantizer, base, tmp_path):
    """Without quantization our residual base + what was learned is the original base + the file; with it, up to what
    was lost.
    """
    started = tiny_models.Started(tmp_path, base, adapter="pissa", quantizer=quantizer)
    for number in range(2):
        started.step(number)
    ours, original = started.logits(IDS), logits(tiny_models.plain(base))
    theirs = logits(tiny_models.plain(base, adapter=started.finish()))
    assert (theirs - original).norm() > 0.02 * original.norm()
    if quantizer == "none":
        assert_same(ours, theirs)
    else:
        lost = (logits(tiny_models.plain(base, tiny_models.Started(tmp_path / "lora", base).held())) - original).norm()
        assert (ours - theirs).norm() < lost  # no more than plain NF4 loses


def test_pissa_loses_less_to_quantization_than_plain_nf4(base, tmp_path):
    started, quantizer = (
        tiny_models.Started(tmp_path, base, adapter="pissa", lora_rank=16, lora_alpha=16),
        Nf4(TrainConfig(), torch.float32),
    )
    original, initial = tiny_models.plain(base), started.built.adapter.initial
    for name, held in started.held().items():
        weight = original.get_parameter(name).detach()
        a, b = (initial["base_model.model." + name.replace(".weight", f".lora_{which}.weight")] for which in "AB")
        assert (weight - b @ a - held).norm() < (weight - quantizer.unpack(*quantizer.pack(weight))).norm()


@pytest.mark.parametrize("shape", [(40, 96), (96, 40), (3, 64)], ids=str)
def test_factors_are_the_leading_singular_part(shape):
    """The reference is torch.linalg.svd."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    b, a = svd_factors(matrix, 8, "name", 0)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    assert b.shape == (shape[0], 8) and a.shape == (8, shape[1])
    best = (matrix - u[:, :8] * s[:8] @ vh[:8]).norm()
    assert (matrix - b @ a).norm() <= best + 0.002 * matrix.norm()
    assert all(torch.equal(x, y) for x, y in zip((b, a), svd_factors(matrix, 8, "name", 0), strict=True))


@pytest.mark.parametrize(
    "stated, layers, names",
    [
        ("all", 14, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("default", 4, {"q_proj", "v_proj"}),
        ("q_proj,down_proj", 4, {"q_proj", "down_proj"}),
        (
            r"model\.layers\.1\.self_attn\.[qk]_proj",
            2,
            {"model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"},
        ),
    ],
)
def test_lora_target_modules(stated, layers, names, base, tmp_path):
    started = tiny_models.Started(tmp_path, base, lora_target_modules=stated)
    started.step()
    assert len(started.built.trainable) == 2 * layers
    adapter = started.finish()
    assert set(json.loads((adapter / "adapter_config.json").read_text())["target_modules"]) == names
    assert_same(started.logits(IDS), logits(tiny_models.plain(base, started.held(), adapter)))


@pytest.mark.parametrize(
    "stated, message",
    [
        ("q_prj", "no linear layer is called q_prj"),
        (r"nothing\..*", "matches no linear layer"),
        ("(q", "not a regex"),
        ("lm_head", "no linear layer is called lm_head"),
    ],
)
def test_targets_that_are_not_there_are_refused(stated, message, base, tmp_path):
    with pytest.raises(UsageError, match=message):
        tiny_models.Started(tmp_path, base, lora_target_modules=stated)


def test_whole_names_where_the_last_part_says_too_much():
    model = torch.nn.ModuleDict(
        {
            "a": torch.nn.ModuleDict({"proj": torch.nn.Linear(2, 2), "out": torch.nn.Linear(2, 2)}),
            "b": torch.nn.ModuleDict({"proj": torch.nn.Linear(2, 2)}),
        }
    )
    assert shortest({"a.proj", "a.out"}, (name for name, _ in model.named_modules())) == ["a.proj", "out"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_full_fine_tuning_saves_a_model(dtype, tmp_path):
    """Loads by transformers, in the base's own dtype, tied head included; what is learned is float32 in every
    precision.
    """
    directory = tiny_models.make(tmp_path / "base", "qwen2", dtype=dtype)
    started = tiny_models.Started(
        tmp_path, directory, train_type="full", precision="bf16" if dtype == torch.bfloat16 else "fp32", lr=1e-3
    )
    assert all(p.dtype == torch.float32 for p in started.model.parameters())
    before = {name: p.detach().clone() for name, p in started.model.named_parameters()}
    started.step()
    assert all((p != before[name]).any() for name, p in started.model.named_parameters())
    ours = started.logits(IDS)
    model = started.finish()
    assert model.name == "model"
    assert {tensor.dtype for tensor in load_file(model / "model.safetensors").values()} == {dtype}
    theirs, loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, output_loading_info=True)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    assert_same(ours, logits(theirs.eval()), 2e-5 if dtype == torch.float32 else 0.05)
    own, saved = read_config(directory), read_config(model)
    assert {key for key in saved.keys() | own.keys() if saved.get(key) != own.get(key)} <= {"transformers_version"}


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_hash_seed(base, tmp_path):
    """This process and another one, whose PYTHONHASHSEED is 1: adapter, configuration and card are the same."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {i}", "completion": f" {i}"}) + "\n" for i in range(8)))
    settings = {
        "model_name": str(base),
        "dataset": str(rows),
        "max_steps": 2,
        "batch_size": 2,
        "gradient_accumulation_steps": 1,
        "precision": "fp32",
        "adapter": "pissa",
        "log_to": "none",
        "backend": "cpu",
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    subprocess.run(
        [sys.executable, "train.py", *flags, "--output_dir", tmp_path / "other", "--run_name", "run"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
        capture_output=True,
    )
    here = runs.run(tmp_path / "here", **settings) / "adapter"
    there = tmp_path / "other" / "run" / "adapter"
    names = sorted(path.name for path in here.iterdir())
    assert names == sorted(path.name for path in there.iterdir()) and {
        "adapter_model.safetensors",
        "adapter_config.json",
    } < set(names)
    assert [name for name in names if (here / name).read_bytes() != (there / name).read_bytes()] == []
