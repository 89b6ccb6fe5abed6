"""The fast paths that a plan names, put onto a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from anyqlora.config.schema import AUTO, TrainConfig
from anyqlora.core import registry
from anyqlora.core.errors import NotSupported, RunError
from anyqlora.data.stream import Batch
from anyqlora.on_torch import unpadded
from anyqlora.on_torch.adapters.fused_layers import are_all_fused, fuse_layers
from anyqlora.on_torch.assembly import int8_calibration
from anyqlora.on_torch.assembly.checks import BuiltModel
from anyqlora.on_torch.generate import evaluating
from anyqlora.on_torch.kernels.cpu import bindings
from anyqlora.on_torch.kernels.cross_entropy import LogitTransform
from anyqlora.on_torch.kernels.frozen_matmul import (
    CpuFullMatmul,
    CpuInt8Matmul,
    Fp8Matmul,
    FullMatmul,
    Int8Matmul,
    SplitMatmul,
)
from anyqlora.on_torch.kernels.self_check import failure
from anyqlora.on_torch.linears import blocks
from anyqlora.on_torch.loss import TrainedTokenLoss, loss_from_model, token_loss
from anyqlora.on_torch.precision import COMPUTE, STORED
from anyqlora.on_torch.quantizers.experts import PackedExperts, expert_parameters
from anyqlora.on_torch.runtime import Runtime
from anyqlora.planning import memory


def checkpoint_layers(model: nn.Module, config: TrainConfig) -> None:
    """Let the first `checkpointed_layers` of the model keep their input only, and be run again in backward: by then the others, which come
    after them, have let go of what they kept."""
    model.gradient_checkpointing_enable({"use_reentrant": config.reentrant_checkpointing})
    if config.checkpointed_layers != AUTO:
        for block in blocks(model)[config.checkpointed_layers :]:
            block.gradient_checkpointing = False
    if config.reentrant_checkpointing:
        model.enable_input_require_grads()  # else nothing that enters a block needs a gradient, and none comes out


def make_loss(model: nn.Module, config: TrainConfig, strategy, kernels: str) -> tuple[Callable, str]:
    """loss_of the process that has read the model, on all. (the loss, why it is not the fast one or "")."""
    if strategy.needs_logits:
        return token_loss, strategy.needs_logits
    loss, why = (
        (None, "") if any(p.is_meta for p in model.parameters()) else loss_from_model(model, config.logits_chunk_tokens)
    )
    said = strategy.broadcast({"why": why, "after": list(loss.after) if isinstance(loss, TrainedTokenLoss) else None})
    if said["after"] is None:
        return token_loss, said["why"]
    in_c, rows = kernels == "native", config.logits_chunk_tokens
    is_fused = in_c and config.fused_linear_cross_entropy is True and bindings.preferred("lm_head_cross_entropy")
    if (
        config.fused_linear_cross_entropy is True and not is_fused and not config.asked("logits_chunk_tokens")
    ):  # the kernels do not run here: there are logits after all
        rows = memory.logits_chunk_tokens(
            None, config.with_(fused_linear_cross_entropy=False, logits_chunk_tokens=AUTO, kernels=kernels)
        )
    return TrainedTokenLoss(model.get_output_embeddings(), LogitTransform(*said["after"]), rows, in_c, is_fused), ""


def remove_padding(built: BuiltModel, runtime: Runtime, kernels: str) -> list[str]:
    """Give the model rows without padding, all documents in one launch of attention where that is among the kernels. Returns why not."""
    in_one = kernels == "triton" and COMPUTE[runtime.plan.precision] != torch.float32
    slow = unpadded.remove_padding_from(built.model, unpadded.VARLEN) if in_one else ""
    why = (
        unpadded.remove_padding_from(built.model, unpadded.NATIVE if kernels == "native" else unpadded.NAME)
        if slow or not in_one
        else ""
    )
    in_c = (
        kernels == "native"
        and bindings.preferred("frozen_matmul")
        and are_all_fused(built.model, built.quantizer.module_type)
        and not is_mixture(built.model)
    )
    runtime.loss.inputs = unpadded.padded if why else unpadded.flat_batch_native if in_c else unpadded.flat_batch
    return [f"attention runs a document at a time: {slow}"] * bool(slow) + [f"rows are padded: {why}"] * bool(why)


def is_mixture(model: nn.Module) -> bool:
    """Whether it has experts, packed or as they are."""
    return any(isinstance(module, PackedExperts) for module in model.modules()) or bool(expert_parameters(model))


def fuse_lora(model: nn.Module, quantizer, config: TrainConfig, kernels: str = "portable") -> list[str]:
    """Fuse the model's LoRA layers, and say what could not be. Raises NotBuilt when it was demanded."""
    cached = config.dequantized_layers if isinstance(config.dequantized_layers, int) else 0
    linears_of = (
        "anyqlora.on_torch.kernels.gpu.dropout_lora:lora_linears"
        if kernels == "triton"
        else "anyqlora.on_torch.kernels.fused_lora:lora_linears"
    )
    left = fuse_layers(
        model, quantizer, cached, registry.load(linears_of), CpuFullMatmul() if kernels == "native" else FullMatmul()
    )
    if left and config.sources.get("fused_lora") not in (None, "default", "plan"):
        raise NotSupported(
            f"fused: {len(left)} LoRA layers of this architecture cannot be, {left[0]} is the first",
            cure="--fused_lora auto",
        )
    return (
        [
            f"{len(left)} LoRA layers are not fused with their weights, {left[0]} is the first: they are no plain linear layers"
        ]
        if left
        else []
    )


def calibrate_int8(model: nn.Module, runtime: Runtime, sample: Sequence[Batch], kernels: str) -> list[str]:
    """Products of frozen weights in 8 bits, where they are near. Returns what there is to say of it."""

    def losses() -> Iterator[torch.Tensor]:
        for batch in sample:
            with runtime.forward():
                loss = runtime.loss(model, batch, runtime.device)
            yield loss

    def seen() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in sample:
            with runtime.forward():
                yield runtime.loss.seen(model, batch, runtime.device)

    full, int8 = (CpuFullMatmul(), CpuInt8Matmul()) if kernels == "native" else (FullMatmul(), Int8Matmul())
    rounded = {
        "int8": int8,
        "int8_backward": SplitMatmul(full, int8),
        "fp8": Fp8Matmul(kernels in ("exact", "triton")),
    }[runtime.plan.config.frozen_matmul]
    said = int8_calibration.calibrate(model, rounded, losses, runtime.strategy.broadcast)
    return said + (
        int8_calibration.calibrate_head(runtime.loss, seen, runtime.strategy.broadcast)
        if isinstance(runtime.loss, TrainedTokenLoss)
        else []
    )


def usable_kernels(runtime: Runtime) -> tuple[str, list[str]]:
    """(the kernels to run on, why they are not the planned ones). Raises RunError when those were asked for and do not run here."""
    plan = runtime.plan
    why = "" if plan.kernels == "portable" else failure(plan.kernels, runtime.device, STORED[plan.precision])
    if why and plan.config.asked("kernels"):
        raise RunError(f"kernels {plan.kernels} cannot be used on {runtime.device}: {why}", cure="--kernels portable")
    return ("portable", [f"portable kernels instead of {plan.kernels} ones: {why}"]) if why else (plan.kernels, [])


def install_kernels(model: nn.Module, kernels: str, runtime: Runtime) -> list[str]:
    """Put modules that run on our kernels in the place of the model's. Returns what stays as it is, and why."""
    if kernels == "portable":
        return []
    from anyqlora.on_torch.kernels.swap_modules import install

    with runtime.autocast(), evaluating(model):
        return install(model, kernels)
