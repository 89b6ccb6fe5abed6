"""The model that is trained, built pass by pass: read, quantized, its adapter attached, fast paths installed, and what
was planned proven there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from anyqlora.config.schema import TrainConfig
from anyqlora.core import registry
from anyqlora.data.stream import Batch
from anyqlora.models.architectures import read_config
from anyqlora.models.hub import base_directory
from anyqlora.models.prequantized import quantized_as
from anyqlora.on_torch._compat import quietly
from anyqlora.on_torch.assembly.checks import try_out, verify
from anyqlora.on_torch.assembly.context import BuildContext, BuiltModel
from anyqlora.on_torch.assembly.fast_paths import (
    calibrate_head_gradient,
    calibrate_products,
    checkpoint_layers,
    choose_kernels,
    choose_mask_kernels,
    fuse_lora_layers,
    install_kernels,
    make_attention_deterministic,
    narrow_last_mlp,
    remove_padding,
    specify_loss,
)
from anyqlora.on_torch.device import room_for
from anyqlora.on_torch.loading.base_model import BaseModelLoader, WeightPacker
from anyqlora.on_torch.loading.quantized_cache import QuantizedCache
from anyqlora.on_torch.memory.malloc import return_freed_pages
from anyqlora.on_torch.precision import COMPUTE, STORED
from anyqlora.on_torch.quantizers.base import KernelQuantizer
from anyqlora.on_torch.runtime import Runtime


def choose_parts(context: BuildContext) -> list[str]:
    """The adapter and the quantizer that the plan names. Returns what of the kernels the quantizer cannot use."""
    plan, config = context.runtime.plan, context.config
    context.adapter = registry.adapter(plan.adapter).load()(config, context.device)
    context.quantizer = registry.quantizer(plan.quantizer).load()(config, COMPUTE[plan.precision])
    if isinstance(context.quantizer, KernelQuantizer):
        return context.quantizer.set_kernels(context.kernels, context.device)
    return []


def load_base(context: BuildContext) -> list[str]:
    """The frozen model: each linear weight packed as it is read, or taken from a file of codes. Under several processes
    one reads, and the strategy gives the others what they are to hold. Returns what is wrong with the cache of packed
    weights."""
    plan, config, directory = context.runtime.plan, context.config, base_directory(context.config)
    notes: list[str] = []
    context.is_prequantized = bool(quantized_as(read_config(directory)))
    cache = QuantizedCache(config, directory, context.device, context.news, notes) if config.quantized_cache else None
    loader = BaseModelLoader(
        str(directory),
        context.quantizer,
        context.adapter,
        torch.float32 if context.adapter.folder == "model" else STORED[plan.precision],  # what is learned is float32
        context.device,
        plan.quantizer,
        context.is_prequantized,
        config.trust_remote_code,
        cache,
    )
    packer = WeightPacker(context.quantizer, context.adapter)
    context.model = context.runtime.strategy.load_model(loader, packer.pack)
    context.model.requires_grad_(False)
    return notes


def attach_adapter(context: BuildContext) -> list[str]:
    """What is learned, on the frozen model, and split as that is."""
    model = context.adapter.attach(context.model)
    context.model = context.runtime.strategy.shard_adapter(model)
    return []


# In this order, which says what each may rely on. A pass returns a note for each thing that the plan names and this
# model or machine does not have; what cannot be done without is an error.
CHOICES = (choose_kernels, choose_parts)  # before the model's memory is counted: they import, compile and try
PASSES = (
    load_base,
    attach_adapter,
    fuse_lora_layers,  # replaces PEFT's layers, so after them
    choose_mask_kernels,
    checkpoint_layers,
    install_kernels,  # compares modules with the model's own, so before anything changes what those compute
    verify,
    try_out,
    specify_loss,  # asks the model's own forward what it does around its head
    narrow_last_mlp,
    remove_padding,  # changes the model's attention
    make_attention_deterministic,  # of whatever attention is there by now
)
# Forward and backward on rows of the run, as a step does them: with the heap as a step has it, on the loss that is
# specified by now.
CALIBRATIONS = (calibrate_products, calibrate_head_gradient)


@quietly()
@room_for("reading the model", "--quantizer nf4, a smaller model, or --strategy fsdp on several GPUs")
def build(config: TrainConfig, runtime: Runtime, sample: Sequence[Batch] = ()) -> BuiltModel:
    """The model of `config` on this process, in training mode, with the loss that is to be trained on.

    `sample`: rows of the run, on which products in 8 bits prove themselves; without any they are not used.
    """
    context = BuildContext(config, runtime, sample)
    notes = _run(CHOICES, context)
    runtime.memory.start()
    with return_freed_pages():
        notes += _run(PASSES, context)
    notes += _run(CALIBRATIONS, context)
    return BuiltModel(
        context.model,
        context.trainable,
        context.adapter,
        context.quantizer,
        context.loss(),
        notes,
        context.news,
    )


def _run(passes: Iterable[Callable[[BuildContext], list[str]]], context: BuildContext) -> list[str]:
    return [note for run_pass in passes for note in run_pass(context)]


def optimizer_factory(config: TrainConfig):
    """parameters -> optimizer; the learning rate is set at every step."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        row = registry.OPTIMIZERS[config.optimizer]
        options = {"lr": config.lr, "weight_decay": config.weight_decay, **row.options}
        if row.is_adam:
            options |= {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
        return row.load()(parameters, **options)

    return make
