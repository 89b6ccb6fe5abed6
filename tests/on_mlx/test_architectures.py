"""Architectures on MLX: mlx-lm's model computes what transformers' does, learns, and its adapter loads in plain PEFT -
or it is refused by name.
"""

import json

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'mlx[cpu]' mlx-lm")

import torch

from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.on_mlx import _compat
from anyqlora.on_mlx.mlx_lm_bridge import load_model
from tests.support import runs, tiny_models

IDS = torch.arange(5, 35).reshape(2, 15) * 7 % 500
WINDOWED = ("mistral", "qwen2", "gemma2", "phi3")  # mlx-lm's models of these see past their window
REFUSED = {
    **dict.fromkeys(WINDOWED, "sliding_window"),
    **dict.fromkeys(tiny_models.MIXTURES, "mixture-of-experts"),
    "starcoder2": "hidden_act = gelu_pytorch_tanh",  # it computes the exact one
    "gpt2": "n_ctx",  # transformers no longer writes it, and calls the weights otherwise
    "gpt_neox": "mlp.dense_h_to_4h.weight",
}  # four times as wide as the model, and nothing else


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_mlx_lms_model_is_transformers_or_refused(architecture, tmp_path):
    directory = tiny_models.make(tmp_path, architecture)
    try:
        model = load_model.load_model(directory, longest=64)
    except (NotSupported, UsageError) as refused:
        assert REFUSED[architecture] in str(refused)
        return
    assert architecture not in REFUSED
    agree(model, directory)


@pytest.mark.parametrize("architecture", WINDOWED)
def test_a_window_longer_than_every_row_changes_nothing(architecture, tmp_path):
    directory = tiny_models.make(tmp_path, architecture, sliding_window=64)
    agree(load_model.load_model(directory, longest=64), directory)


def agree(model, directory):
    theirs = tiny_models.plain(directory)(input_ids=IDS).logits.detach().numpy()
    ours = np.array(model(mx.array(IDS.numpy())).astype(mx.float32))
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


def test_code_of_a_model_is_not_run_unasked(tmp_path):
    base = tiny_models.make(tmp_path, "llama")
    described = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**described, "model_file": "mine.py"}))
    (base / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    with pytest.raises(UsageError, match="--trust_remote_code true"):
        load_model.load_model(base, longest=64)
    assert not (tmp_path / "ran").exists()


def test_an_unknown_type_and_foreign_weights_are_refused(tmp_path):
    base = tiny_models.make(tmp_path, "llama")
    described = json.loads((base / "config.json").read_text())
    for changes, kind, said in (
        ({"model_type": "mammut"}, NotSupported, "mlx-lm has no model of type 'mammut'"),
        ({"num_hidden_layers": 3}, UsageError, "Missing \\d+ parameters"),
        ({"hidden_act": "gelu"}, NotSupported, "hidden_act = gelu"),
    ):
        (base / "config.json").write_text(json.dumps({**described, **changes}))
        with pytest.raises(kind, match=said):
            load_model.load_model(base, longest=64)


def test_mlx_lm_still_hides_its_classes():
    """While mlx-lm has no public way to ask for a model's classes, on_mlx._compat is needed."""
    from mlx_lm import utils

    assert not hasattr(utils, "get_classes") and utils._get_classes({"model_type": "llama"}) == _compat.model_classes(
        {"model_type": "llama"}
    )


TRAINED = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "gemma2": {"sliding_window": 512},
    "gemma3_text": {},
    "phi3": {"sliding_window": None},
    "olmo2": {},
    "granite": {},
    "smollm3": {},
}


@pytest.mark.parametrize("architecture", TRAINED)
def test_each_architecture_learns_as_on_torch_and_loads_in_peft(architecture, tmp_path):
    base = tiny_models.make(tmp_path / "base", architecture, **TRAINED[architecture])
    settings = {
        "model_name": str(base),
        "dataset": "demo",
        "train_type": "lora",
        "lora_dropout": 0,
        "max_steps": 3,
        "precision": "fp32",
        "lora_rank": 4,
        "context_length": 128,
        "batch_size": 4,
        "lr": 1e-2,
        "warmup_steps": 0,
        "save_steps": 0,
    }
    ours, theirs = runs.run(tmp_path, "mlx", backend="mlx", **settings), runs.run(tmp_path, "torch", **settings)
    np.testing.assert_allclose(
        [m["loss"] for m in runs.metrics(ours)], [m["loss"] for m in runs.metrics(theirs)], rtol=2e-5
    )
    assert (ours / "adapter/adapter_config.json").read_bytes() == (theirs / "adapter/adapter_config.json").read_bytes()
    one, other = (tiny_models.plain(base, adapter=run / "adapter")(input_ids=IDS).logits for run in (ours, theirs))
    start = tiny_models.plain(base)(input_ids=IDS).logits
    assert (one - other).abs().max() < 1e-3 * (one - start).abs().max()
