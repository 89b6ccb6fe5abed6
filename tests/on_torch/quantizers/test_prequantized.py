"""Checkpoints that bitsandbytes has quantized, as transformers saves them: read as they are, or refused by name."""

import json
import shutil

import bitsandbytes as bnb
import peft
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from anyqlora.__main__ import main
from anyqlora.config.resolve import resolve
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.models.architectures import DEMO_BASE
from anyqlora.on_torch._compat import keep_weights_as_packed
from anyqlora.planning.backends import BackendManager
from anyqlora.runs.finished import read_run
from tests.support import runs, tiny_models

OPTIONS = {
    "nf4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": torch.float32},
    "int8": {"load_in_8bit": True},
}
IDS = torch.arange(5, 35).reshape(2, 15) * 7 % 500


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """{quantizer: directory} of one tiny model, saved by transformers after quantizing; and "none", the original."""
    root = tmp_path_factory.mktemp("prequantized")
    found = {"none": tiny_models.make(root / "original", "qwen2", intermediate_size=128)}
    for name, options in OPTIONS.items():
        model = AutoModelForCausalLM.from_pretrained(
            found["none"], dtype=torch.float32, quantization_config=BitsAndBytesConfig(**options)
        )
        model.save_pretrained(root / name)
        tiny_models.words().save_pretrained(root / name)
        found[name] = root / name
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_a_checkpoint_is_read_as_it_is(name, checkpoints, tmp_path, monkeypatch):
    """A step on it, and the same logits as transformers' own load of it with the adapter in PEFT; the same codes as in
    the files.
    """
    with monkeypatch.context() as cpu:
        cpu.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
        started = tiny_models.Started(tmp_path, checkpoints[name])
    assert started.plan.quantizer == name
    assert not any(getattr(module, "support_avx512bf16_for_cpu", False) for module in started.model.modules())
    reference = AutoModelForCausalLM.from_pretrained(checkpoints[name], dtype=torch.float32)
    layers = {
        name: module
        for name, module in reference.named_modules()
        if isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt))
    }
    assert len(layers) == 14
    for module in layers.values():
        keep_weights_as_packed(module)  # else the reference computes in bf16 where the CPU has AVX512-BF16
    for layer, module in layers.items():
        ours = started.model.get_submodule(f"base_model.model.{layer}").base_layer
        assert torch.equal(ours.weight, module.weight)
    before = started.step()
    assert started.step(1) < before
    theirs = PeftModel.from_pretrained(reference, started.finish()).eval()
    with torch.no_grad():
        torch.testing.assert_close(started.logits(IDS), theirs(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_equals_quantizing_the_original(name, checkpoints, tmp_path):
    """The same losses, step by step, as a run that quantizes the full-precision model itself."""
    read, quantized = (
        tiny_models.Started(tmp_path / str(n), checkpoints[kind], quantizer=name)
        for n, kind in enumerate((name, "none"))
    )
    for number in range(3):
        assert read.step(number) == pytest.approx(quantized.step(number), rel=1e-6)


def test_modules_left_out_by_whoever_quantized_it_stay_as_they_are(checkpoints, tmp_path):
    config = BitsAndBytesConfig(**OPTIONS["nf4"], llm_int8_skip_modules=["o_proj", "lm_head"])
    model = AutoModelForCausalLM.from_pretrained(checkpoints["none"], dtype=torch.float32, quantization_config=config)
    model.save_pretrained(tmp_path / "base")
    tiny_models.words().save_pretrained(tmp_path / "base")
    started = tiny_models.Started(tmp_path, tmp_path / "base")
    kinds = {
        type(module.base_layer) for name, module in started.model.named_modules() if name.endswith("self_attn.o_proj")
    }
    assert kinds == {torch.nn.Linear}
    started.step()


def plan(directory, **settings):
    config = resolve(
        {"model_name": str(directory), "dataset": "demo", "context_length": 128, "backend": "cpu", **settings},
        environ={},
        origin="test",
    )
    return BackendManager("cpu").plan(config)


def test_the_plan_takes_the_checkpoints_quantizer_and_says_so(checkpoints):
    planned = plan(checkpoints["int8"])
    assert (planned.quantizer, planned.config.bits) == ("int8", 8)
    assert [(a.field, a.asked, a.got) for a in planned.adjustments] == [("quantizer", "nf4", "int8")]
    assert plan(checkpoints["nf4"]).adjustments == ()
    again = BackendManager("cpu").plan(planned.config)
    assert again.config == planned.config


@pytest.mark.parametrize(
    "name, settings, message",
    [
        (
            "int8",
            {"quantizer": "nf4"},
            "quantizer = nf4 contradicts the checkpoint, whose weights are quantized already: int8",
        ),
        ("nf4", {"bits": 8}, "bits = 8 contradicts"),
        ("nf4", {"train_type": "lora"}, "train_type = lora contradicts"),
        ("nf4", {"adapter": "pissa"}, "adapter pissa needs the full-precision weights"),
        ("nf4", {"adapter": "loftq"}, "adapter loftq needs the full-precision weights"),
        ("nf4", {"train_type": "full"}, "adapter full needs the full-precision weights"),
    ],
)
def test_contradictions_are_refused_with_a_cure(name, settings, message, checkpoints):
    with pytest.raises(UsageError, match=message) as refused:
        plan(checkpoints[name], **settings)
    assert "unquantized weights" in refused.value.cure


@pytest.mark.parametrize("method", ["gptq", "awq", "mxfp4", "fp8"])
def test_other_methods_are_refused_by_name(method, checkpoints, tmp_path):
    described = json.loads((checkpoints["none"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**described, "quantization_config": {"quant_method": method, "bits": 4}})
    )
    with pytest.raises(NotSupported, match=f"quantized by {method}, which is not read"):
        plan(tmp_path)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_an_adapter_of_a_base_in_mlxs_packing_is_loaded_on_the_model_that_it_was_made_from(is_recorded, tmp_path):
    """The reference is PEFT's own loader, which knows the base by adapter_config.json alone."""
    plain = shutil.copytree(DEMO_BASE, tmp_path / "plain")
    assert main(["quantize", str(plain), "--to", "affine4", "--out", str(tmp_path / "q4")]) == 0
    config = json.loads((tmp_path / "q4" / "config.json").read_text())
    if not is_recorded:  # as in a directory that somebody else has packed
        del config["quantized_from"]
        (tmp_path / "q4" / "config.json").write_text(json.dumps(config))
    directory = runs.run(
        tmp_path, model_name=str(tmp_path / "q4"), dataset="demo", max_steps=1, batch_size=2, lora_rank=4
    )
    card = (directory / "adapter" / "README.md").read_text()
    assert "`q4`, whose weights are packed" in card and str(tmp_path) not in card
    stated = json.loads((directory / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    if not is_recorded:
        assert stated == str(tmp_path / "q4") and "Give it the model from which those were made" in card
        return
    assert stated == str(plain) and 'from_pretrained("PATH/TO/plain")' in card
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(directory / "adapter", dtype=torch.float32)
    weights = load_file(plain / "model.safetensors")
    assert torch.equal(loaded.get_input_embeddings().weight, weights["model.embed_tokens.weight"].float())
    assert read_run(directory).config.model_name == str(
        tmp_path / "q4"
    )  # here it is the packed base that the run goes on with
