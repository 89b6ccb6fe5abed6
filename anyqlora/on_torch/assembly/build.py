"""The model that is trained: read, quantized, with its adapter attached; and the proof that what was planned is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from anyqlora.config.schema import TrainConfig
from anyqlora.core import registry
from anyqlora.data.stream import Batch
from anyqlora.models.architectures import read_config
from anyqlora.models.hub import base_directory
from anyqlora.models.prequantized import quantized_as
from anyqlora.on_torch import unpadded
from anyqlora.on_torch._compat import quietly
from anyqlora.on_torch.assembly.checks import BuiltModel, assert_in_effect, try_out
from anyqlora.on_torch.assembly.fast_paths import (
    calibrate_int8,
    checkpoint_layers,
    fuse_lora,
    install_kernels,
    make_loss,
    remove_padding,
    usable_kernels,
)
from anyqlora.on_torch.device import room_for
from anyqlora.on_torch.loading import stream
from anyqlora.on_torch.loading.quantized_cache import QuantizedCache
from anyqlora.on_torch.loss import TrainedTokenLoss, last_mlp_chunked
from anyqlora.on_torch.memory.malloc import return_freed_pages
from anyqlora.on_torch.precision import COMPUTE, STORED
from anyqlora.on_torch.runtime import Runtime


@dataclass
class BaseModelLoader:
    """The base model of a run. Called, it reads it; a process that is to receive it from another makes the `outlined` one."""

    directory: str
    quantizer: object
    adapter: object
    dtype: torch.dtype
    device: torch.device
    kind: str  # the quantizer's name
    is_quantized: bool  # so are its files
    trust_remote_code: bool
    cache: QuantizedCache | None = None  # of what the quantizer makes of the files alone

    def __call__(self, quantise, device: torch.device | None = None) -> nn.Module:
        """Each linear weight goes through `quantise(name, module, weight)` and ends on `device`."""
        options = {"dtype": self.dtype, "device": device or self.device, "trust_remote_code": self.trust_remote_code}
        kept = self.cache and self.cache.entry()
        if kept:
            options["made_in"] = stream.exact_dtype(self.directory, self.dtype)  # as without the cache
        if self.is_quantized or kept:
            reading = stream.load_packed if self.kind in registry.AFFINE else stream.load_quantized
            model = reading(str(kept or self.directory), self.quantizer, **options)
            model.name_or_path = self.directory
            self.adapter.select_targets(model, self.quantizer.module_type)
            return model
        return stream.load_streamed(
            self.directory, stream.LoadPolicy(self.quantizer, quantise, self.adapter.select_targets), **options
        )

    def outline(self, model: nn.Module) -> dict:
        return stream.meta_model(model, self.quantizer)

    def outlined(self, about: dict) -> nn.Module:
        return stream.meta_model_with_shapes(
            self.directory,
            self.quantizer,
            self.adapter.select_targets,
            about,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
        )


@quietly()
@room_for("reading the model", "--quantizer nf4, a smaller model, or --strategy fsdp on several GPUs")
def build(config: TrainConfig, runtime: Runtime, sample: Sequence[Batch] = ()) -> BuiltModel:
    """Read the base through the quantizer, attach the adapter, set checkpointing, and assert that all of it is in effect.

    `sample`: rows of the run, on which products in 8 bits prove themselves; without any they are not used.
    """
    plan, directory = runtime.plan, base_directory(config)
    adapter = registry.load(registry.lookup("adapter", plan.adapter, registry.ADAPTERS))(config, runtime.device)
    quantizer = registry.load(registry.lookup("quantizer", plan.quantizer, registry.QUANTIZERS))(
        COMPUTE[plan.precision], config.double_quant
    )
    if plan.quantizer in registry.AFFINE:
        quantizer.group = config.affine_group_size
    kernels, notes = usable_kernels(runtime)
    if hasattr(quantizer, "set_kernels"):
        notes += quantizer.set_kernels(kernels, runtime.device)
    already = quantized_as(read_config(directory))
    stored = torch.float32 if adapter.folder == "model" else STORED[plan.precision]  # what is learned is float32

    def fill(name: str, module: nn.Module, weight: torch.Tensor) -> nn.Parameter:
        held = quantizer.quantize_into(module, adapter.base_weight(name, weight))
        if adapter.observes:
            module.weight = held
            adapter.on_quantized(name, weight, quantizer.dequantize(module))
        return held

    news: list[str] = []
    cache = QuantizedCache(config, directory, runtime.device, news, notes) if config.quantized_cache else None
    base = BaseModelLoader(
        str(directory),
        quantizer,
        adapter,
        stored,
        runtime.device,
        plan.quantizer,
        bool(already),
        config.trust_remote_code,
        cache,
    )
    runtime.memory.start()
    with return_freed_pages():
        model = runtime.strategy.load_model(base, fill)
        model.requires_grad_(False)
        model = runtime.strategy.shard_adapter(adapter.attach(model))
        notes += fuse_lora(model, quantizer, config, kernels) if config.fused_lora else []
        if plan.use_gradient_checkpointing:
            checkpoint_layers(model, config)
        notes += install_kernels(model, kernels, runtime)
        model.train()
        built = BuiltModel(model, adapter.trainable(model), adapter, quantizer, notes, news)
        assert_in_effect(built, whole=not already)
        if not any(p.is_meta for p in model.parameters()):
            with runtime.autocast():
                try_out(model, next(model.parameters()).device, plan.packing)
        if config.logits_chunk_tokens:
            with runtime.autocast():
                runtime.loss, why = make_loss(model, config, runtime.strategy, kernels)
                if plan.strategy in registry.FUSED_STRATEGIES and isinstance(runtime.loss, TrainedTokenLoss):
                    runtime.loss.last_mlp = last_mlp_chunked(model, runtime.loss.head)
            built.notes += [f"logits of all tokens are made for the loss: {why}"] if why else []
        if config.padding_free and isinstance(runtime.loss, TrainedTokenLoss):
            with runtime.autocast():
                built.notes += remove_padding(built, runtime, kernels)
        if config.deterministic and runtime.device.type == "cuda":
            unpadded.make_deterministic(model)
    if config.frozen_matmul != "full" and sample:
        news += calibrate_int8(model, runtime, sample, kernels)
    return built


def optimizer_factory(config: TrainConfig):
    """parameters -> optimizer; the learning rate is set at every step."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kind = registry.load(registry.OPTIMIZERS[config.optimizer])
        options = {"lr": config.lr, "weight_decay": config.weight_decay}
        if "adam" in config.optimizer:
            options |= {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
        if config.optimizer == "fused_adamw":
            options["fused"] = True
        return kind(parameters, **options)

    return make
