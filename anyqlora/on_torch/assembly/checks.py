"""What was planned is on the model, rows do not see each other, and every trained tensor gets a gradient."""

from __future__ import annotations

import torch
from torch import nn

from anyqlora.core.errors import NotSupported, RunError
from anyqlora.on_torch.assembly.context import BuildContext
from anyqlora.on_torch.generate import evaluating
from anyqlora.on_torch.linears import linears
from anyqlora.on_torch.quantizers.experts import PackedExperts, expert_parameters

# The part of a document's influence on the next that may leak: far above 16-bit rounding, far below one layer that does
# not keep them apart
LEAK = 0.05


def verify(context: BuildContext) -> list[str]:
    """What is planned is on the model. Raises RunError."""
    assert_in_effect(context.model, context.trainable, context.quantizer, whole=not context.is_prequantized)
    return []


def assert_in_effect(model: nn.Module, trainable: dict[str, nn.Parameter], quantizer, whole: bool = True) -> None:
    """Raises RunError when the quantizer or the adapter that the plan names is not really on the model: on all linear
    layers, or on some of them where not `whole` (whoever quantized the checkpoint may have left layers out)."""
    kind = quantizer.module_type
    if not trainable:
        raise RunError("nothing on this model is learned")
    wrong_dtype = [name for name, p in trainable.items() if p.dtype != torch.float32]
    if wrong_dtype:
        raise RunError(f"{len(wrong_dtype)} trained tensors are not float32, {wrong_dtype[0]} is the first")
    layers = {name: module for name, module in linears(model, kind).items() if "lora_" not in name}
    plain = [name for name, module in layers.items() if not isinstance(module, kind)]
    if plain and (whole or len(plain) == len(layers)):
        first = type(model.get_submodule(plain[0])).__name__
        raise RunError(f"{len(plain)} linear layers are not quantized as planned, {plain[0]} is the first: {first}")
    experts = [] if quantizer.bits == 16 else expert_parameters(model)
    if experts and whole:
        raise RunError(f"{len(experts)} experts' weights are not quantized as planned, {experts[0]} is the first")


def try_out(context: BuildContext) -> list[str]:
    """Run a dozen tokens where this version or the architecture may fall short: quantized experts, and packed
    documents.

    Raises NotSupported or RunError. A process that has an outline only takes the other's word.
    """
    if not context.is_outline:
        with context.runtime.autocast():
            run_a_dozen_tokens(context.model, next(context.model.parameters()).device, context.runtime.plan.packing)
    return []


def run_a_dozen_tokens(model: nn.Module, device: torch.device, packing: bool) -> None:
    """`try_out` of a model on its device.

    Two sequences differ in their first document only. What that changes in the second one's logits is compared with
    what it changes when nothing keeps the documents apart.
    """
    mixture = any(isinstance(module, PackedExperts) for module in model.modules())
    if not (packing or mixture):
        return
    ids = torch.arange(3, 15, device=device).repeat(2, 1)  # [2, 12]
    ids[1, :6] = ids[0, :6].flip(0)
    apart = torch.arange(6, device=device).repeat(2, 2)
    together = torch.arange(12, device=device).repeat(2, 1)
    with evaluating(model):
        try:
            seen, leaked = (
                (logits[0, 6:] - logits[1, 6:]).float().norm().item()
                for logits in (
                    model(input_ids=ids, position_ids=positions, use_cache=False).logits
                    for positions in (together, apart)
                )
            )
        except (AttributeError, TypeError, RuntimeError) as error:
            if mixture:
                raise NotSupported(
                    f"this architecture cannot run with quantized experts: {error}", cure="--quantizer none"
                ) from error
            raise RunError(f"this architecture cannot run packed rows: {error}", cure="--packing false") from error
    if packing and leaked > LEAK * seen:
        raise RunError(
            f"this architecture does not keep packed documents apart: {leaked / seen:.0%} of what a document would "
            f"change in the "
            "next one, were they one text, comes through",
            cure="--packing false",
        )


def check_gradients(strategy) -> None:
    """After the first backward: every tensor got a gradient, and no lora_B's is all zero (lora_A's is then, as B is
    zero).

    Experts that are linear layers of their own are let off: the first step's tokens may have passed one by. Raises
    RunError naming those that a frozen, detached or unused path has cut off.
    """
    dead = [
        name
        for name, is_zero in strategy.missing_gradients().items()
        if ".experts." not in name and (not is_zero or ".lora_B." in name)
    ]
    if dead:
        layers = sorted({name.partition(".lora_")[0].removeprefix("base_model.model.") for name in dead})
        raise RunError(
            f"{len(dead)} of {len(strategy.trainable)} trained tensors got no gradient, of {', '.join(layers[:5])}",
            cure="leave them out by lora_target_modules (a list or a regex) if text does not pass through them; "
            "use_gradient_checkpointing false or reentrant_checkpointing false, if either is on",
        )
