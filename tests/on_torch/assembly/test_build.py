"""What building a model gives: one loss, of which the description says all."""

import dataclasses

import pytest
import torch

from anyqlora.on_torch.assembly.build import build
from anyqlora.on_torch.kernels.cpu import bindings
from anyqlora.on_torch.loss import LossSpec, TrainedTokenLoss, make_loss, token_loss
from anyqlora.on_torch.runtime import Runtime
from anyqlora.planning.backends import BackendManager
from tests.support import tiny_models

CPU = torch.device("cpu")
KINDS = {
    "logits of all tokens": {"precision": "fp32", "logits_chunk_tokens": 0},
    "portable": {"precision": "fp32", "kernels": "portable"},
    "padded": {"precision": "fp32", "kernels": "portable", "padding_free": False},
    "capped logits": {"precision": "fp32", "kernels": "portable", "architecture": "gemma2"},
    "native": {"precision": "bf16", "kernels": "native"},
    "8 bits": {"precision": "bf16", "kernels": "native", "frozen_matmul": "int8_backward"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_what_its_description_says(kind, tmp_path):
    """Made again from the description alone, it has the same value and the same gradients, bit for bit; and the plain
    loss's value nearly.
    """
    settings = {**KINDS[kind]}
    architecture = settings.pop("architecture", "llama")
    if settings.get("kernels") == "native" and not bindings.preferred("lm_head_cross_entropy"):
        pytest.skip("the fused head is not taken on this processor")
    if settings.get("frozen_matmul", "full") not in BackendManager("cpu").report.products:
        pytest.skip("this processor's int8 products may saturate")
    base = tiny_models.make(tmp_path / "base", architecture)
    started = tiny_models.Started(tmp_path, base, batch_size=2, lora_dropout=0.0, **settings)
    runtime = Runtime(started.plan)
    built = build(started.plan.config, runtime, started.run.data.sample(2))
    if kind == "logits of all tokens":
        assert built.loss is token_loss and make_loss(LossSpec(), built.model) is token_loss
        return
    assert isinstance(built.loss, TrainedTokenLoss)
    spec = built.loss.spec
    assert spec.chunk_tokens == started.plan.config.logits_chunk_tokens and spec.is_unpadded == (
        kind not in ("padded", "capped logits")
    )
    assert (spec.is_native, spec.is_fused, spec.int8_gradient) == {
        "native": (True, True, False),
        "8 bits": (True, True, True),
    }.get(kind, (False, False, False))
    assert (spec.transform.cap is None) == (kind != "capped logits") and spec.narrows_last_mlp
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.loss.spec.is_native = True
    (batch,) = started.run.stream[0]
    for parameter in (p for name, p in built.trainable.items() if "lora_B" in name):
        torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(parameter.numel()))
    found = []
    for loss in (built.loss, make_loss(spec, built.model)):
        with runtime.autocast():
            value = loss(built.model, batch, CPU)
        found.append((value.detach(), torch.autograd.grad(value, list(built.trainable.values()))))
    (value, gradients), (again, gradients_again) = found
    assert torch.equal(value, again) and all(map(torch.equal, gradients, gradients_again))
    with runtime.autocast(), torch.no_grad():
        assert value.item() == pytest.approx(token_loss(built.model, batch, CPU).item(), rel=0.02)


def test_a_loop_of_ones_own_has_no_loss_of_ours():
    """A Runtime is devices, precision and strategy; the loss is a part of the model that is built."""
    assert not hasattr(Runtime.of(backend="cpu", precision="fp32"), "loss")
