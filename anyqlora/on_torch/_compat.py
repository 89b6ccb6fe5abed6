"""Every private part of another library that we touch, with its cause and how we know that it can go."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings

import torch
from torch import nn


def keep_weights_as_packed(module: nn.Module) -> nn.Module:
    """Keep a Linear4bit from repacking its weights in evaluation, after which training forwards lose the base layer's gradient.

    bitsandbytes 0.49 to 0.50.2 on CPUs with AVX512-BF16 (one UserWarning, up to 99 % gradient error).
    Can go when tests/test_compat.py::test_bitsandbytes_still_loses_gradients_after_evaluation fails on such a CPU.
    """
    from bitsandbytes.nn import Linear4bit  # here: unquantized weights need no bitsandbytes

    if isinstance(module, Linear4bit):
        module.support_avx512bf16_for_cpu = False
    return module


@contextlib.contextmanager
def compiled_when_called():
    """Within, torch.compile prepares nothing: what it is given is compiled when it is first called.

    bitsandbytes 0.49 to 0.50.2 hands it four functions on being imported, which imports torch's whole compiler (0.8-1.0 s); they are for
    devices without kernels of their own, and none is called in a run of ours.
    Can go when tests/test_compat.py::test_bitsandbytes_still_imports_the_compiler_and_ours_does_not fails.
    """
    now = torch.compile

    def later(function=None, **options):
        if function is None:
            return functools.partial(later, **options)
        compiled = functools.cache(lambda: now(function, **options))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    torch.compile = later
    try:
        yield
    finally:
        torch.compile = now


@contextlib.contextmanager
def quietly():
    """Without a progress bar where nobody watches, and without deprecations that are not the user's to mend.

    transformers 5.23 calls `gradient_checkpointing_enable` and `is_gradient_checkpointing` deprecated; peft 0.21.2 reads the
    latter, and transformers 5.17 has no other name for them.
    Can go when tests/test_log.py::test_peft_still_reads_what_transformers_deprecates fails.
    """
    from transformers.utils import logging

    shows = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if shows:
        logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore",
                message="`(is_gradient_checkpointing|gradient_checkpointing_enable)` is deprecated",
                category=FutureWarning,
            )
            yield
    finally:
        if shows:
            logging.enable_progress_bar()


def without_shared_memory_operation() -> None:
    """Keep DeepSpeed from compiling an operation for CPUs on one machine: it takes a minute, a C++ compiler and ninja, and gloo does the same.

    deepspeed 0.19.8 offers no setting (deepspeed/comm/torch.py builds it wherever this table calls it compatible).
    Can go when tests/distributed/test_deepspeed.py::test_deepspeed_still_has_no_switch_for_its_operation fails.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def link_moments(zero) -> None:
    """Let a ZeRO-1 or 2 optimizer find each parameter's part of its state as it is now.

    deepspeed 0.19.8 links them once, inside its first step(): what is loaded before that is not found, nor is any state when that
    step changed nothing. Can go when tests/distributed/test_deepspeed.py::test_deepspeed_still_links_moments_in_its_step_only fails.
    """
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        lazy_init_hp_params_optimizer_state(parameters, flat, zero.optimizer.state)


def without_buffers() -> dict:
    """How DistributedDataParallel is told not to send buffers at every forward: torch 2.13 has another word for it than 2.11.

    Can go when torch 2.11 is no longer supported.
    """
    from inspect import signature

    from torch.nn.parallel import DistributedDataParallel

    new = "forward_sync_buffers"
    return {new if new in signature(DistributedDataParallel).parameters else "broadcast_buffers": False}


def softmax_backward(of_probabilities: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """The gradient of softmax's input over the last dimension: p (dp - sum(p dp)), in one pass.

    torch has it as a private operator only; by its public ones it takes three passes over memory.
    Can go when tests/test_compat.py::test_torch_still_keeps_softmax_backward_private fails.
    """
    return torch.ops.aten._softmax_backward_data(of_probabilities, probabilities, -1, probabilities.dtype)
