"""Every private part of another library that this folder touches, with its cause and how we know that it can go.

No other file names one: tests/test_private_names.py."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence

import torch
from torch import nn


def keep_weights_as_packed(module: nn.Module) -> nn.Module:
    """Keep a Linear4bit from repacking its weights in evaluation, after which training forwards lose the base layer's
    gradient.

    bitsandbytes 0.49 to 0.50.2 on CPUs with AVX512-BF16 (one UserWarning, up to 99 % gradient error). Can go when
    tests/on_torch/test_compat.py::test_bitsandbytes_still_loses_gradients_after_evaluation fails on such a CPU.
    """
    from bitsandbytes.nn import Linear4bit  # here: unquantized weights need no bitsandbytes

    if isinstance(module, Linear4bit):
        module.support_avx512bf16_for_cpu = False
    return module


def quiet_bitsandbytes() -> None:
    """Keep bitsandbytes from reporting, whenever it is imported, that it found no kernel on the hub, and at every
    product of 8-bit weights that it computes in float16.

    bitsandbytes 0.50: the loggers have names of private modules. Ours never come to the former kernel, see
    `keep_weights_as_packed`, and the latter is int8's design. Can go when
    tests/on_torch/test_compat.py::test_bitsandbytes_still_reports_what_nobody_can_mend fails.
    """
    for name in ("bitsandbytes.backends.cpu.ops", "bitsandbytes.autograd._functions"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def without_compiling():
    """Within, torch.compile gives back what it is given: set while peft, and with it bitsandbytes, is imported.

    bitsandbytes 0.49 to 0.50.2 hands it four functions on being imported, which imports torch's whole compiler (3.5 s
    of CPU time on 2 slow cores); they are for devices without kernels of their own, and none is called in a run of
    ours. The switch is torch's own for its users; it is read at each call, so that what is compiled later is compiled.
    Can go when tests/on_torch/test_compat.py::test_bitsandbytes_still_imports_the_compiler fails.
    """
    switch = "TORCHDYNAMO_DISABLE"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    finally:
        os.environ.pop(switch) if before is None else os.environ.update({switch: before})


@contextlib.contextmanager
def quietly():
    """Without a progress bar where nobody watches, and without deprecations that are not the user's to mend.

    transformers 5.23 calls `gradient_checkpointing_enable` and `is_gradient_checkpointing` deprecated; peft 0.21.2
    reads the latter, and transformers 5.17 has no other name for them. Can go when
    tests/reporting/test_console.py::test_peft_still_reads_what_transformers_deprecates fails.
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
    """Keep DeepSpeed from compiling an operation for CPUs on one machine: it takes a minute, a C++ compiler and ninja,
    and gloo does the same.

    deepspeed 0.19.8 offers no setting (deepspeed/comm/torch.py builds it wherever this table calls it compatible).
    Can go when tests/on_torch/parallel/test_deepspeed.py::test_deepspeed_still_has_no_switch_for_its_operation fails.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def link_moments(zero) -> None:
    """Let a ZeRO-1 or 2 optimizer find each parameter's part of its state as it is now.

    deepspeed 0.19.8 links them once, inside its first step(): what is loaded before that is not found, nor is any state
    when that step changed nothing. Can go when
    tests/on_torch/parallel/test_deepspeed.py::test_deepspeed_still_links_moments_in_its_step_only fails.
    """
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        lazy_init_hp_params_optimizer_state(parameters, flat, zero.optimizer.state)


def gather_where_read(model: nn.Module) -> list:
    """In a forward of `model` itself, too, put together the ZeRO-3 parameters that are read outside of their own layer,
    as DoRA reads the LoRA factors. Returns the handles of the hooks.

    deepspeed 0.19.8 does it in a forward of its engine's module only, around which we have an autocast, and evaluation
    calls the model. Can go when
    tests/on_torch/parallel/test_deepspeed.py::test_deepspeed_still_gathers_what_is_read_in_its_own_forward_only fails.
    """
    from deepspeed.runtime.zero.parameter_offload import ensure_zero_ordered_dict

    def begin(*_) -> None:
        for module in model.modules():
            ensure_zero_ordered_dict(module)
            module._parameters._in_forward = True

    def end(*_) -> None:
        for module in model.modules():
            module._parameters._in_forward = False

    return [model.register_forward_pre_hook(begin), model.register_forward_hook(end, always_call=True)]


def without_buffers() -> dict:
    """How DistributedDataParallel is told not to send buffers at every forward: torch 2.13 has another word for it than
    2.11.

    Can go when torch 2.11 is no longer supported.
    """
    from inspect import signature

    from torch.nn.parallel import DistributedDataParallel

    new = "forward_sync_buffers"
    return {new if new in signature(DistributedDataParallel).parameters else "broadcast_buffers": False}


def attention_implementation(config) -> str:
    """The name, in transformers' table, of the attention that modules with this configuration run.

    transformers 5.17 to 5.23 have a public method that sets it for a model, and nothing public that tells it or sets it
    for one module. Can go when tests/on_torch/test_compat.py::test_transformers_still_hides_which_attention_runs fails.
    """
    return config._attn_implementation


@contextlib.contextmanager
def attention_replaced(config, name: str):
    """Within, modules with this configuration run the attention `name` of transformers' table.

    transformers 5.17 to 5.23: see `attention_implementation`. Can go when
    tests/on_torch/test_compat.py::test_transformers_still_hides_which_attention_runs fails.
    """
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def float32_patterns(model: nn.Module) -> set[str]:
    """Patterns of the names of parameters that the architecture wants in float32, since they lose too much in 16 bits.

    transformers 5.17 to 5.23 have these lists for models' authors alone.
    Can go when tests/on_torch/test_compat.py::test_transformers_still_hides_its_lists_of_modules fails.
    """
    lists = (getattr(model, name, None) for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
    return {pattern for patterns in lists for pattern in patterns or ()}


def block_classes(model: nn.Module) -> set[str] | None:
    """Names of the classes of layers that may not be split over devices; None where the model says nothing of it.

    transformers 5.17 to 5.23 have this list for models' authors alone.
    Can go when tests/on_torch/test_compat.py::test_transformers_still_hides_its_lists_of_modules fails.
    """
    names = getattr(model, "_no_split_modules", None)
    return None if names is None else set(names)


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor's values were changed in place.

    torch 2.11 to 2.13 document it in their notes on autograd and have no public name for it.
    Can go when tests/on_torch/test_compat.py::test_torch_still_has_private_names_only_for_what_we_use fails.
    """
    return tensor._version


def multiply_each_(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Each tensor times the factor, in place, in one launch.

    torch 2.11 to 2.13 document it under this private name; the public way is a launch for each tensor.
    Can go when tests/on_torch/test_compat.py::test_torch_still_has_private_names_only_for_what_we_use fails.
    """
    torch._foreach_mul_(tensors, factor)


def int8_matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """a @ b of int8 [N, K] and [K, M], put into `out`, int32 [N, M].

    torch 2.11 to 2.13 refuse the public product of int8 on CUDA, and on a CPU let its sums overflow in int8.
    Can go when tests/on_torch/test_compat.py::test_torch_still_has_private_names_only_for_what_we_use fails.
    """
    return torch._int_mm(a, b, out=out)


def scaled_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **options
) -> torch.Tensor:
    """a @ b of float8 [N, K] and [K, M] with scales [N, 1] and [1, M]; see torch._scaled_mm.

    torch 2.13's public torch.nn.functional.scaled_mm takes no `out`.
    Can go when tests/on_torch/test_compat.py::test_torch_still_has_private_names_only_for_what_we_use fails.
    """
    return torch._scaled_mm(a, b, scale_a, scale_b, **options)


def softmax_backward(grad_probabilities: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """The gradient of softmax's input over the last dimension: p (dp - sum(p dp)), in one pass.

    torch 2.11 to 2.13 have it as a private operator only; by public ones it takes three passes over memory.
    Can go when tests/on_torch/test_compat.py::test_torch_still_keeps_softmax_backward_private fails.
    """
    return torch.ops.aten._softmax_backward_data(grad_probabilities, probabilities, -1, probabilities.dtype)
