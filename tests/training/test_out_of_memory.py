"""Memory that runs out: in a micro-batch of any size, in an evaluation, in the optimizer's step.

Errors are those of torch's allocators.
"""

import contextlib
import weakref

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from anyqlora.core.errors import RunError
from anyqlora.on_torch.adapters.fused_layers import fused_layers
from anyqlora.on_torch.device import is_out_of_memory, room_for
from anyqlora.planning import fitting
from tests.support import runs, tiny_models

SMALL = {
    "model_name": "demo",
    "dataset": "demo",
    "context_length": 128,
    "gradient_accumulation_steps": 1,
    "precision": "fp32",
    "max_steps": 2,
    "lr": 2e-3,
    "lora_rank": 4,
    "save_steps": 0,
    "log_to": "none",
}
HELD_OUT = {
    **SMALL,
    "batch_size": 4,
    "eval_dataset": "demo",
    "eval_steps": 1,
    "eval_batch_size": 32,
    "exact_match": False,
}
WORDS = [
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "Triton Error [CUDA]: out of memory",
    "MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 1.10 GB, max allowed: 18.13 GB).",
]


@contextlib.contextmanager
def at_most(tokens: int, training: bool):
    """No embedding looks up more tokens at once, in training or else in evaluation."""

    def check(module, inputs):
        if (
            isinstance(module, torch.nn.Embedding)
            and torch.is_grad_enabled() == training
            and inputs[0].numel() > tokens
        ):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    hook = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def test_what_says_that_memory_ran_out():
    with pytest.raises(RuntimeError) as huge:
        torch.empty(1 << 59)
    assert is_out_of_memory(huge.value) and all(is_out_of_memory(RuntimeError(words)) for words in WORDS)
    with pytest.raises(RuntimeError) as other:
        torch.ones(2) @ torch.ones(3)
    assert not is_out_of_memory(other.value) and not is_out_of_memory(ValueError(WORDS[0]))
    with (
        pytest.raises(RunError, match="out of memory in reading(.|\n)*cure: less of it"),
        room_for("reading", "less of it"),
    ):
        torch.empty(1 << 59)


@pytest.mark.parametrize(
    ("batch", "steps", "halved"),
    [(8, 1, (4, 2)), (9, 1, (3, 3)), (5, 1, (1, 5)), (10, 1, (5, 2)), (5, 2, (2, 5)), (6, 3, (3, 6))],
)
def test_any_micro_batch_is_halved_to_whole_ones(batch, steps, halved):
    assert fitting.halve(batch, steps) == halved


def test_a_micro_batch_of_five_rows_is_done_one_by_one(tmp_path, capfd):
    """Five rows are no whole number of pairs."""
    reference = runs.run(tmp_path, "one", **{**SMALL, "batch_size": 1, "gradient_accumulation_steps": 5})
    with at_most(80, training=True):
        found = runs.run(tmp_path, "five", **SMALL, batch_size=5)
    assert "micro-batches of 1 rows instead of 5" in capfd.readouterr().err
    assert (found / "adapter/adapter_model.safetensors").read_bytes() == (
        reference / "adapter/adapter_model.safetensors"
    ).read_bytes()


def test_an_evaluation_is_done_again_with_fewer_rows(tmp_path, capfd):
    whole = runs.run(tmp_path, "whole", **HELD_OUT)
    with at_most(600, training=False):
        found = runs.run(tmp_path, "halved", **HELD_OUT)
    assert "in an evaluation: 8 rows at a time from here on" in capfd.readouterr().err
    assert [e["loss"] for e in runs.evaluations(found)] == pytest.approx(
        [e["loss"] for e in runs.evaluations(whole)], rel=1e-6
    )
    assert (found / "adapter/adapter_model.safetensors").read_bytes() == (
        whole / "adapter/adapter_model.safetensors"
    ).read_bytes()


def test_a_single_row_that_cannot_be_evaluated_is_told(tmp_path):
    with (
        at_most(20, training=False),
        pytest.raises(RunError, match="in an evaluation of 1 rows at a time(.|\n)*--eval_batch_size"),
    ):
        runs.run(tmp_path, **HELD_OUT)


def test_moments_that_do_not_fit_are_told(tmp_path):
    def check(optimizer, arguments, options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    hook = register_optimizer_step_pre_hook(check)
    try:
        with pytest.raises(RunError, match="out of memory in the optimizer's step(.|\n)*--optimizer"):
            runs.run(tmp_path, **SMALL, batch_size=2)
    finally:
        hook.remove()


def test_nothing_of_a_forward_that_broke_off_stays(tmp_path):
    """It broke off between gate and up, which are computed together: up's output had nobody to come for it."""
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", "llama"), train_type="lora")
    seen, (batch,) = [], started.run.stream[0]

    def broken(module, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    for layer in fused_layers(started.model):
        layer.register_forward_hook(lambda module, inputs, out: seen.append(weakref.ref(out)))
    started.model.get_submodule("base_model.model.model.layers.1.mlp.act_fn").register_forward_pre_hook(broken)
    with contextlib.suppress(torch.OutOfMemoryError):
        started.loss(batch)
    assert any(ref() is not None for ref in seen)  # or nothing would be shown
    started.runtime.discard_step()
    assert len(seen) == 12 and not any(ref() is not None for ref in seen)
