"""What MLX holds at most, by its allocator's own count: while a model is packed, in a step that is compiled or not, in an answer."""

import gc

import pytest

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'mlx[cpu]' mlx-lm")

import tiny_models
import torch

from anyqlora.config import resolve
from anyqlora.on_mlx import zoo
from anyqlora.on_mlx.build import hold, on_mlx

LAYER = 4 * 256 * 1024  # bytes in float32 of the wide model's largest weight


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A bf16 base whose blocks have 10 million weights."""
    return tiny_models.make(tmp_path_factory.mktemp("wide"), "llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=10, dtype=torch.bfloat16)


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
    kind = on_mlx(quantizer)(resolve({"model_name": str(wide), "dataset": "demo", "quantizer": quantizer}, environ={}), mx.bfloat16)
    model = zoo.read(wide, longest=64)
    _, held, most = taken(lambda: hold(model, kind, mx.bfloat16, already=False))
    assert most < held + 4 * LAYER
