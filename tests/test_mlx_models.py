"""Architectures on MLX: mlx-lm's model computes what transformers' does, learns, and its adapter loads in plain PEFT - or it is refused by name."""

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'mlx[cpu]' mlx-lm")

import runs
import tiny_models
import torch

from anyqlora.errors import NotBuilt, UsageError
from anyqlora.layouts import read_config
from anyqlora.on_mlx import _compat, zoo

IDS = torch.arange(5, 35).reshape(2, 15) * 7 % 500
WINDOWED = ("mistral", "qwen2", "gemma2", "phi3", "starcoder2")  # mlx-lm's models of these see past their window
REFUSED = {**dict.fromkeys(WINDOWED, "sliding_window"), **dict.fromkeys(tiny_models.MIXTURES, "mixture-of-experts"),
           "gpt_neox": "mlp.dense_h_to_4h.weight"}  # four times as wide as the model, and nothing else


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_mlx_lms_model_is_transformers_or_refused(architecture, tmp_path):
    directory = tiny_models.make(tmp_path, architecture)
    try:
        model = zoo.read(directory, longest=64)
    except (NotBuilt, UsageError) as refused:
        assert REFUSED[architecture] in str(refused)
        return
    assert architecture not in REFUSED
    agree(model, directory)


@pytest.mark.parametrize("architecture", WINDOWED)
def test_a_window_longer_than_every_row_changes_nothing(architecture, tmp_path):
    directory = tiny_models.make(tmp_path, architecture, sliding_window=64)
    agree(zoo.read(directory, longest=64), directory)


def agree(model, directory):
    theirs = tiny_models.plain(directory)(input_ids=IDS).logits.detach().numpy()
    ours = np.array(model(mx.array(IDS.numpy())).astype(mx.float32))
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()
