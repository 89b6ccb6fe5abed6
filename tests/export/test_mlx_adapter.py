"""Adapters across: PEFT's files as mlx-lm's and back, bit for bit, and the same logits through plain mlx-lm."""

import json
import re

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'mlx[cpu]' mlx-lm")

import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from anyqlora.__main__ import main
from tests.support import runs, tiny_models

DEFAULT_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}  # what plain mlx-lm takes for granted


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.make(tmp_path_factory.mktemp("base"), "llama", **DEFAULT_ROPE)


@pytest.mark.parametrize(
    "more",
    [
        {"adapter": "lora"},
        {"adapter": "rslora"},
        {"adapter": "dora"},
        {"lora_target_modules": "q_proj,down_proj"},
        {"lora_target_modules": r".*\.1\.mlp\.\w+_proj"},
    ],
    ids=["lora", "rslora", "dora", "some", "one layer"],
)
def test_there_and_back(base, tmp_path, capsys, more):
    run = runs.run(
        tmp_path,
        model_name=str(base),
        dataset="demo",
        train_type="lora",
        precision="fp32",
        lora_rank=4,
        max_steps=3,
        lr=5e-2,
        batch_size=2,
        context_length=96,
        warmup_steps=0,
        save_steps=0,
        **more,
    )
    assert main(["export", str(run), "--to", "mlx", "--out", str(tmp_path / "mlx")]) == 0
    said = capsys.readouterr().out
    far, largest = map(float, re.search(r"differ by (\S+) at most, of (\S+),", said).groups())
    assert far <= 1e-5 * max(largest, 1), said
    assert main(["export", str(tmp_path / "mlx"), "--to", "peft", "--out", str(tmp_path / "back")]) == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (run / "adapter" / name).read_bytes()
    ids = torch.arange(5, 35)[None]
    moved = (
        (
            tiny_models.plain(base, adapter=run / "adapter")(input_ids=ids).logits
            - tiny_models.plain(base)(input_ids=ids).logits
        )
        .abs()
        .max()
    )
    assert moved > 0.01, "an adapter that does nothing would pass"


def test_a_rank_for_each_layer(base, tmp_path):
    """PEFT's own adapter with rank and alpha patterns; through plain mlx-lm the same logits, and back the same file."""
    from mlx_lm.utils import load_adapters, load_model

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules=["q_proj", "up_proj"],
            rank_pattern={"layers.1.self_attn.q_proj": 2},
            alpha_pattern={"up_proj": 4},
        ),
    )
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
    model.save_pretrained(tmp_path / "peft")
    for direction, source in (("mlx", "peft"), ("peft", "mlx")):
        assert (
            main(
                [
                    "export",
                    str(tmp_path / source),
                    "--to",
                    direction,
                    "--out",
                    str(tmp_path / (direction if direction == "mlx" else "back")),
                ]
            )
            == 0
        )
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "back"))
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
    ids = np.arange(5, 35)[None]
    plain, _ = load_model(base)
    theirs = np.array(load_adapters(plain, str(tmp_path / "mlx"))(mx.array(ids)))
    ours = model.eval()(input_ids=torch.from_numpy(ids)).logits.detach().numpy()
    assert np.abs(theirs - ours).max() < 1e-5 * np.abs(ours).max()


def test_what_mlx_lm_trained_loads_in_peft(base, tmp_path):
    """An adapter of mlx-lm's own tuner, as it saves it."""
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    model, _ = load_model(base)
    model.freeze()
    parameters = {"rank": 4, "scale": 5.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.down_proj"]}
    linear_to_lora_layers(model, 2, parameters)
    for name, value in tree_flatten(model.trainable_parameters()):
        model.load_weights([(name, mx.random.normal(value.shape) * 0.1)], strict=False)
    (tmp_path / "mlx").mkdir()
    mx.save_safetensors(str(tmp_path / "mlx/adapters.safetensors"), dict(tree_flatten(model.trainable_parameters())))
    (tmp_path / "mlx/adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters, "model": str(base)})
    )
    assert main(["export", str(tmp_path / "mlx"), "--to", "peft", "--out", str(tmp_path / "peft")]) == 0
    ids = np.arange(5, 35)[None]
    theirs = np.array(model(mx.array(ids)))
    ours = tiny_models.plain(base, adapter=tmp_path / "peft")(input_ids=torch.from_numpy(ids)).logits.detach().numpy()
    assert np.abs(theirs - ours).max() < 1e-5 * np.abs(ours).max()


def test_shapes_that_do_not_fit_are_all_named(tmp_path, capsys):
    save_file(
        {
            "model.layers.0.a.lora_a": np.zeros((8, 4), np.float32),
            "model.layers.0.a.lora_b": np.zeros((3, 8), np.float32),
            "model.layers.0.b.lora_a": np.zeros((8, 4), np.float32),
        },
        tmp_path / "adapters.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"num_layers": 1, "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}})
    )
    assert main(["export", str(tmp_path), "--to", "peft", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert (
        "2 layers do not fit" in said
        and "0.a: lora_a [8, 4], lora_b [3, 8]" in said
        and "0.b has only one" in said
        and not (tmp_path / "out").exists()
    )


def test_what_mlx_lm_has_no_place_for_is_refused(base, tmp_path, capsys):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    model.save_pretrained(tmp_path / "peft")
    assert main(["export", str(tmp_path / "peft"), "--to", "mlx", "--out", str(tmp_path / "out")]) == 2
    assert "modules_to_save" in capsys.readouterr().err
    for argv, said in (
        (["--to", "mlx"], "are needed"),
        ([str(base), "--to", "onnx", "--out", "x"], "one of: mlx, peft"),
        ([str(base), "--to", "peft", "--out", str(tmp_path / "y")], "no adapter is read there"),
    ):
        assert main(["export", *argv]) == 2
        assert said in capsys.readouterr().err
