"""The fast paths that a plan names, put onto a model. Each is a pass of `build`: it returns a note for what is planned
and not had here."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from anyqlora.config.schema import AUTO
from anyqlora.core import registry
from anyqlora.core.errors import NotSupported, RunError
from anyqlora.on_torch import unpadded
from anyqlora.on_torch.adapters.fused_layers import are_all_fused, fuse_layers
from anyqlora.on_torch.assembly import int8_calibration
from anyqlora.on_torch.assembly.context import BuildContext
from anyqlora.on_torch.generate import evaluating
from anyqlora.on_torch.kernels.cpu import bindings
from anyqlora.on_torch.kernels.cross_entropy import LogitTransform
from anyqlora.on_torch.kernels.dropout import recomputing_contexts, token_dropouts
from anyqlora.on_torch.kernels.frozen_matmul import (
    CpuFullMatmul,
    CpuInt8Matmul,
    Fp8Matmul,
    FullMatmul,
    Int8Matmul,
    SplitMatmul,
)
from anyqlora.on_torch.kernels.self_check import failure, failure_of_masks
from anyqlora.on_torch.linears import blocks
from anyqlora.on_torch.loss import can_narrow_last_mlp, logit_transform
from anyqlora.on_torch.precision import COMPUTE, STORED
from anyqlora.on_torch.quantizers.experts import PackedExperts, expert_parameters
from anyqlora.planning import memory


def choose_kernels(context: BuildContext) -> list[str]:
    """The planned kernels, or portable ones where they do not run here. Raises RunError when it was they that were
    asked for."""
    plan, device = context.runtime.plan, context.device
    why = "" if plan.kernels == "portable" else failure(plan.kernels, device, STORED[plan.precision])
    if why and plan.config.asked("kernels"):
        raise RunError(f"kernels {plan.kernels} cannot be used on {device}: {why}", cure="--kernels portable")
    context.kernels = "portable" if why else plan.kernels
    return [f"portable kernels instead of {plan.kernels} ones: {why}"] if why else []


def fuse_lora_layers(context: BuildContext) -> list[str]:
    """LoRA layers whose forward and backward are one function with the frozen weight. Raises NotSupported when that was
    demanded of layers that do more."""
    config, is_native = context.config, context.kernels == "native"
    if not config.fused_lora:
        return []
    cached = config.dequantized_layers if isinstance(config.dequantized_layers, int) else 0
    product = registry.load(
        "anyqlora.on_torch.kernels.gpu.dropout_lora:lora_linears"
        if context.kernels == "triton"
        else "anyqlora.on_torch.kernels.fused_lora:lora_linears"
    )
    full = CpuFullMatmul() if is_native else FullMatmul()
    unfused = fuse_layers(context.model, context.quantizer, cached, product, full)
    if not unfused:
        return []
    if config.sources.get("fused_lora") not in (None, "default", "plan"):
        raise NotSupported(
            f"fused: {len(unfused)} LoRA layers of this architecture cannot be, {unfused[0]} is the first",
            cure="--fused_lora auto",
        )
    layers = f"{len(unfused)} LoRA layers are not fused with their weights, {unfused[0]} is the first"
    return [f"{layers}: they are no plain linear layers"]


def choose_mask_kernels(context: BuildContext) -> list[str]:
    """Dropout's masks by the fastest of the kernels that run here: all draw the same. Returns why a GPU draws them by
    torch's operations, which take a tenth of a step."""
    dropouts, kernels, why = token_dropouts(context.model), "portable", ""
    if dropouts and context.device.type == "cpu" and context.kernels == "native":
        kernels = "native"
    elif dropouts and context.device.type in ("cuda", "xpu"):
        why = failure_of_masks(context.device)
        kernels = "portable" if why else "triton"
    for dropout in dropouts:
        dropout.kernels = kernels
    return [f"dropout's masks are drawn by torch's own operations: {why}"] if why else []


def checkpoint_layers(context: BuildContext) -> list[str]:
    """Let the first `checkpointed_layers` of the model keep their input only, and be run again in backward: by then the
    others, which come after them, have let go of what they kept."""
    model, config = context.model, context.config
    if not context.runtime.plan.use_gradient_checkpointing:
        return []
    options = {} if config.reentrant_checkpointing else {"context_fn": recomputing_contexts}
    model.gradient_checkpointing_enable({"use_reentrant": config.reentrant_checkpointing, **options})
    if config.checkpointed_layers != AUTO:
        for block in blocks(model)[config.checkpointed_layers :]:
            block.gradient_checkpointing = False
    if config.reentrant_checkpointing:
        model.enable_input_require_grads()  # else nothing that enters a block needs a gradient, and none comes out
    return []


def install_kernels(context: BuildContext) -> list[str]:
    """Modules that run on our kernels, in the place of the model's that compute the same. Returns what stays as it is,
    and why."""
    notes = []
    if context.kernels != "portable":
        from anyqlora.on_torch.kernels.swap_modules import install

        with context.runtime.autocast(), evaluating(context.model):
            notes = install(context.model, context.kernels)
    context.model.train()  # new modules, too: they were made while it was evaluating
    return notes


def specify_loss(context: BuildContext) -> list[str]:
    """The output head on some trained tokens at a time, by the kernels that run here. What the process that has read
    the model finds on it holds on all. Returns why the logits of all tokens are made after all."""
    config, strategy = context.config, context.runtime.strategy
    if not config.logits_chunk_tokens:
        return []
    if strategy.needs_logits:
        transform, why = None, strategy.needs_logits
    else:
        with context.runtime.autocast():
            transform, why = (None, "") if context.is_outline else logit_transform(context.model)
        transform, why = strategy.broadcast([transform, why])
    if transform is None:
        return [f"logits of all tokens are made for the loss: {why}"]
    is_native, chunk = context.kernels == "native", config.logits_chunk_tokens
    is_fused = is_native and config.fused_linear_cross_entropy is True and bindings.preferred("lm_head_cross_entropy")
    if config.fused_linear_cross_entropy is True and not is_fused and not config.asked("logits_chunk_tokens"):
        # The kernels do not run here: there are logits after all, and so a smaller number of them.
        chunk = memory.logits_chunk_tokens(
            None, config.with_(fused_linear_cross_entropy=False, logits_chunk_tokens=AUTO, kernels=context.kernels)
        )
    context.specify(chunk_tokens=chunk, transform=LogitTransform(*transform), is_native=is_native, is_fused=is_fused)
    return []


def narrow_last_mlp(context: BuildContext) -> list[str]:
    """The last block's MLP on trained tokens only, where every process has the whole model and it reaches no other
    token."""
    if context.loss_spec.chunk_tokens and registry.strategy(context.runtime.plan.strategy).fusable:
        with context.runtime.autocast():
            context.specify(narrows_last_mlp=can_narrow_last_mlp(context.model))
    return []


def remove_padding(context: BuildContext) -> list[str]:
    """Rows without padding, all documents in one launch of attention where that is among the kernels. Returns why
    not."""
    model, kernels = context.model, context.kernels
    if not (context.config.padding_free and context.loss_spec.chunk_tokens):
        return []
    in_one = kernels == "triton" and COMPUTE[context.runtime.plan.precision] != torch.float32
    with context.runtime.autocast():
        slow = unpadded.remove_padding_from(model, unpadded.VARLEN) if in_one else ""
        name = unpadded.NATIVE if kernels == "native" else unpadded.NAME
        why = unpadded.remove_padding_from(model, name) if slow or not in_one else ""
    no_products_of_onednn = (
        kernels == "native"
        and bindings.preferred("frozen_matmul")
        and are_all_fused(model, context.quantizer.module_type)
        and not is_mixture(model)
    )
    context.specify(is_unpadded=not why, few_lengths=not no_products_of_onednn)
    return [f"attention runs a document at a time: {slow}"] * bool(slow) + [f"rows are padded: {why}"] * bool(why)


def is_mixture(model: nn.Module) -> bool:
    """Whether it has experts, packed or as they are."""
    return any(isinstance(module, PackedExperts) for module in model.modules()) or bool(expert_parameters(model))


def make_attention_deterministic(context: BuildContext) -> list[str]:
    """Attention on a GPU whose backward adds gradients in one order, where determinism is asked for."""
    if context.config.deterministic and context.device.type == "cuda":
        unpadded.make_deterministic(context.model)
    return []


def calibrate_products(context: BuildContext) -> list[str]:
    """Products with frozen weights in 8 bits, where they are near whole ones on the sample. What there is to say of it
    is news."""
    if context.config.frozen_matmul == "full" or not context.sample:
        return []
    full, int8 = (CpuFullMatmul(), CpuInt8Matmul()) if context.kernels == "native" else (FullMatmul(), Int8Matmul())
    rounded = {
        "int8": int8,
        "int8_backward": SplitMatmul(full, int8),
        "fp8": Fp8Matmul(context.kernels in ("exact", "triton")),
    }[context.config.frozen_matmul]
    loss, runtime = context.loss(), context.runtime

    def losses() -> Iterator[torch.Tensor]:
        for batch in context.sample:
            with runtime.forward():
                value = loss(context.model, batch, context.device)
            yield value

    context.news += int8_calibration.calibrate(context.model, rounded, losses, runtime.strategy.broadcast)
    return []


def calibrate_head_gradient(context: BuildContext) -> list[str]:
    """With products in 8 bits, the gradient of the head's input from weights in 8 bits, too, where that is near. News,
    as above."""
    if context.config.frozen_matmul == "full" or not context.sample or not context.loss_spec.chunk_tokens:
        return []
    loss, runtime = context.loss(), context.runtime

    def hidden() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in context.sample:
            with runtime.forward():  # what is computed of them is of the same precision
                yield loss.hidden(context.model, batch, context.device)

    context.quantized_head, news = int8_calibration.calibrate_head(loss, hidden, runtime.strategy.broadcast)
    context.specify(int8_gradient=context.quantized_head is not None)
    context.news += news
    return []
