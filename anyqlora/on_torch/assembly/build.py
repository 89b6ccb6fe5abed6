"""The model that is trained: read, quantized, with its adapter attached; and the proof that what was planned is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from anyqlora.config.resolve import AUTO, TrainConfig
from anyqlora.core import registry
from anyqlora.core.errors import NotBuilt, RunError
from anyqlora.data.dataset import Batch
from anyqlora.models.architectures import read_config
from anyqlora.models.hub import base_directory
from anyqlora.models.prequantized import quantized_as
from anyqlora.on_torch import unpadded
from anyqlora.on_torch._compat import quietly
from anyqlora.on_torch.adapters.fused_layers import all_fused, fuse
from anyqlora.on_torch.assembly import int8_calibration
from anyqlora.on_torch.device import room_for
from anyqlora.on_torch.generate import evaluating
from anyqlora.on_torch.kernels.cpu import bindings
from anyqlora.on_torch.kernels.cross_entropy import After
from anyqlora.on_torch.kernels.frozen_matmul import EachWay, Float8, Int8, NativeInt8, NativeWhole, Whole
from anyqlora.on_torch.kernels.self_check import broken
from anyqlora.on_torch.linears import blocks, linears
from anyqlora.on_torch.loading import stream
from anyqlora.on_torch.loading.quantized_cache import QuantizedCache
from anyqlora.on_torch.loss import TrainedTokenLoss, last_mlp, loss_of, token_loss
from anyqlora.on_torch.memory.malloc import unmapping
from anyqlora.on_torch.precision import COMPUTE, STORED
from anyqlora.on_torch.quantizers.experts import PackedExperts, expert_parameters
from anyqlora.on_torch.runtime import Runtime
from anyqlora.planning import memory

LEAK = 0.05  # of a document's influence on the next: far above 16-bit rounding, far below one layer that does not keep them apart


@dataclass
class Built:
    """model: with its adapter. trainable: {file name: Parameter}. adapter, quantizer: see their packages. notes: fast paths that the
    plan names and this model cannot take, and why. news: what else is worth a line."""

    model: nn.Module
    trainable: dict[str, nn.Parameter]
    adapter: object
    quantizer: object
    notes: list[str] = field(default_factory=list)
    news: list[str] = field(default_factory=list)


@dataclass
class Base:
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
            reading = stream.read_packed if self.kind in registry.AFFINE else stream.read_quantized
            model = reading(str(kept or self.directory), self.quantizer, **options)
            model.name_or_path = self.directory
            self.adapter.choose(model, self.quantizer.module_type)
            return model
        return stream.read(self.directory, stream.Placing(self.quantizer, quantise, self.adapter.choose), **options)

    def outline(self, model: nn.Module) -> dict:
        return stream.outline(model, self.quantizer)

    def outlined(self, about: dict) -> nn.Module:
        return stream.outlined(
            self.directory,
            self.quantizer,
            self.adapter.choose,
            about,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
        )


@quietly()
@room_for("reading the model", "--quantizer nf4, a smaller model, or --strategy fsdp on several GPUs")
def build(config: TrainConfig, runtime: Runtime, sample: Sequence[Batch] = ()) -> Built:
    """Read the base through the quantizer, attach the adapter, set checkpointing, and assert that all of it is in effect.

    `sample`: rows of the run, on which products in 8 bits prove themselves; without any they are not used.
    """
    plan, directory = runtime.plan, base_directory(config)
    adapter = registry.load(registry.choose("adapter", plan.adapter, registry.ADAPTERS))(config, runtime.device)
    quantizer = registry.load(registry.choose("quantizer", plan.quantizer, registry.QUANTIZERS))(
        COMPUTE[plan.precision], config.double_quant
    )
    if plan.quantizer in registry.AFFINE:
        quantizer.group = config.affine_group_size
    kernels, notes = usable_kernels(runtime)
    if hasattr(quantizer, "use"):
        notes += quantizer.use(kernels, runtime.device)
    already = quantized_as(read_config(directory))
    stored = torch.float32 if adapter.folder == "model" else STORED[plan.precision]  # what is learned is float32

    def fill(name: str, module: nn.Module, weight: torch.Tensor) -> nn.Parameter:
        held = quantizer.fill(module, adapter.residual(name, weight))
        if adapter.observes:
            module.weight = held
            adapter.observe(name, weight, quantizer.dequantize(module))
        return held

    news: list[str] = []
    cache = QuantizedCache(config, directory, runtime.device, news, notes) if config.quantized_cache else None
    base = Base(
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
    with unmapping():
        model = runtime.strategy.materialise(base, fill)
        model.requires_grad_(False)
        model = runtime.strategy.adapt(adapter.attach(model))
        notes += fused(model, quantizer, config, kernels) if config.fused else []
        if plan.use_gradient_checkpointing:
            recompute(model, config)
        notes += with_kernels(model, kernels, runtime)
        model.train()
        built = Built(model, adapter.trainable(model), adapter, quantizer, notes, news)
        assert_in_effect(built, whole=not already)
        if not any(p.is_meta for p in model.parameters()):
            with runtime.autocast():
                try_out(model, next(model.parameters()).device, plan.packing)
        if config.loss_rows:
            with runtime.autocast():
                runtime.loss, why = loss_for(model, config, runtime.strategy, kernels)
                if plan.strategy in registry.FUSED_STRATEGIES and isinstance(runtime.loss, TrainedTokenLoss):
                    runtime.loss.last_mlp = last_mlp(model, runtime.loss.head)
            built.notes += [f"logits of all tokens are made for the loss: {why}"] if why else []
        if config.flat and isinstance(runtime.loss, TrainedTokenLoss):
            with runtime.autocast():
                built.notes += remove_padding(built, runtime, kernels)
        if config.deterministic and runtime.device.type == "cuda":
            unpadded.make_deterministic(model)
    if config.frozen_products != "full" and sample:
        news += round_products(model, runtime, sample, kernels)
    return built


def recompute(model: nn.Module, config: TrainConfig) -> None:
    """Let the first `recomputed_layers` of the model keep their input only, and be run again in backward: by then the others, which come
    after them, have let go of what they kept."""
    model.gradient_checkpointing_enable({"use_reentrant": config.reentrant_checkpointing})
    if config.recomputed_layers != AUTO:
        for block in blocks(model)[config.recomputed_layers :]:
            block.gradient_checkpointing = False
    if config.reentrant_checkpointing:
        model.enable_input_require_grads()  # else nothing that enters a block needs a gradient, and none comes out


def loss_for(model: nn.Module, config: TrainConfig, strategy, kernels: str) -> tuple[Callable, str]:
    """loss_of the process that has read the model, on all. (the loss, why it is not the fast one or "")."""
    if strategy.needs_logits:
        return token_loss, strategy.needs_logits
    loss, why = (None, "") if any(p.is_meta for p in model.parameters()) else loss_of(model, config.loss_rows)
    said = strategy.told({"why": why, "after": list(loss.after) if isinstance(loss, TrainedTokenLoss) else None})
    if said["after"] is None:
        return token_loss, said["why"]
    in_c, rows = kernels == "native", config.loss_rows
    is_fused = in_c and config.fused_head is True and bindings.has("head")
    if (
        config.fused_head is True and not is_fused and not config.asked("loss_rows")
    ):  # the kernels do not run here: there are logits after all
        rows = memory.loss_rows(None, config.with_(fused_head=False, loss_rows=AUTO, kernels=kernels))
    return TrainedTokenLoss(model.get_output_embeddings(), After(*said["after"]), rows, in_c, is_fused), ""


def remove_padding(built: Built, runtime: Runtime, kernels: str) -> list[str]:
    """Give the model rows without padding, all documents in one launch of attention where that is among the kernels. Returns why not."""
    in_one = kernels == "triton" and COMPUTE[runtime.plan.precision] != torch.float32
    slow = unpadded.use(built.model, unpadded.VARLEN) if in_one else ""
    why = (
        unpadded.use(built.model, unpadded.NATIVE if kernels == "native" else unpadded.NAME)
        if slow or not in_one
        else ""
    )
    in_c = (
        kernels == "native"
        and bindings.has("product")
        and all_fused(built.model, built.quantizer.module_type)
        and not is_mixture(built.model)
    )
    runtime.loss.inputs = unpadded.padded if why else unpadded.flat_in_c if in_c else unpadded.flat
    return [f"attention runs a document at a time: {slow}"] * bool(slow) + [f"rows are padded: {why}"] * bool(why)


def is_mixture(model: nn.Module) -> bool:
    """Whether it has experts, packed or as they are."""
    return any(isinstance(module, PackedExperts) for module in model.modules()) or bool(expert_parameters(model))


def fused(model: nn.Module, quantizer, config: TrainConfig, kernels: str = "portable") -> list[str]:
    """Fuse the model's LoRA layers, and say what could not be. Raises NotBuilt when it was demanded."""
    cached = config.weight_cache if isinstance(config.weight_cache, int) else 0
    linears_of = (
        "anyqlora.on_torch.kernels.gpu.dropout_lora:linears"
        if kernels == "triton"
        else "anyqlora.on_torch.kernels.fused_lora:linears"
    )
    left = fuse(model, quantizer, cached, registry.load(linears_of), NativeWhole() if kernels == "native" else Whole())
    if left and config.sources.get("fused") not in (None, "default", "plan"):
        raise NotBuilt(
            f"fused: {len(left)} LoRA layers of this architecture cannot be, {left[0]} is the first",
            cure="--fused auto",
        )
    return (
        [
            f"{len(left)} LoRA layers are not fused with their weights, {left[0]} is the first: they are no plain linear layers"
        ]
        if left
        else []
    )


def round_products(model: nn.Module, runtime: Runtime, sample: Sequence[Batch], kernels: str) -> list[str]:
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

    whole, int8 = (NativeWhole(), NativeInt8()) if kernels == "native" else (Whole(), Int8())
    rounded = {"int8": int8, "int8_backward": EachWay(whole, int8), "fp8": Float8(kernels in ("exact", "triton"))}[
        runtime.plan.config.frozen_products
    ]
    said = int8_calibration.use(model, rounded, losses, runtime.strategy.told)
    return said + (
        int8_calibration.use_head(runtime.loss, seen, runtime.strategy.told)
        if isinstance(runtime.loss, TrainedTokenLoss)
        else []
    )


def usable_kernels(runtime: Runtime) -> tuple[str, list[str]]:
    """(the kernels to run on, why they are not the planned ones). Raises RunError when those were asked for and do not run here."""
    plan = runtime.plan
    why = "" if plan.kernels == "portable" else broken(plan.kernels, runtime.device, STORED[plan.precision])
    if why and plan.config.asked("kernels"):
        raise RunError(f"kernels {plan.kernels} cannot be used on {runtime.device}: {why}", cure="--kernels portable")
    return ("portable", [f"portable kernels instead of {plan.kernels} ones: {why}"]) if why else (plan.kernels, [])


def with_kernels(model: nn.Module, kernels: str, runtime: Runtime) -> list[str]:
    """Put modules that run on our kernels in the place of the model's. Returns what stays as it is, and why."""
    if kernels == "portable":
        return []
    from anyqlora.on_torch.kernels.swap_modules import install

    with runtime.autocast(), evaluating(model):
        return install(model, kernels)


def assert_in_effect(built: Built, whole: bool = True) -> None:
    """Raises RunError when the quantizer or the adapter that the plan names is not really on the model: on all linear layers, or on
    some of them where not `whole` (whoever quantized the checkpoint may have left layers out)."""
    model, kind = built.model, built.quantizer.module_type
    if not built.trainable:
        raise RunError("nothing on this model is learned")
    wrong_dtype = [name for name, p in built.trainable.items() if p.dtype != torch.float32]
    if wrong_dtype:
        raise RunError(f"{len(wrong_dtype)} trained tensors are not float32, {wrong_dtype[0]} is the first")
    layers = {name: module for name, module in linears(model, kind).items() if "lora_" not in name}
    plain = [name for name, module in layers.items() if not isinstance(module, kind)]
    if plain and (whole or len(plain) == len(layers)):
        raise RunError(
            f"{len(plain)} linear layers are not quantized as planned, {plain[0]} is the first: {type(model.get_submodule(plain[0])).__name__}"
        )
    experts = [] if built.quantizer.bits == 16 else expert_parameters(model)
    if experts and whole:
        raise RunError(f"{len(experts)} experts' weights are not quantized as planned, {experts[0]} is the first")


def try_out(model: nn.Module, device: torch.device, packing: bool) -> None:
    """Run a dozen tokens where this version or the architecture may fall short: quantized experts, and packed documents.

    Two sequences differ in their first document only. What that changes in the second one's logits is compared with what it
    changes when nothing keeps the documents apart. Raises NotBuilt or RunError.
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
                raise NotBuilt(
                    f"this architecture cannot run with quantized experts: {error}", cure="--quantizer none"
                ) from error
            raise RunError(f"this architecture cannot run packed rows: {error}", cure="--packing false") from error
    if packing and leaked > LEAK * seen:
        raise RunError(
            f"this architecture does not keep packed documents apart: {leaked / seen:.0%} of what a document would change in the "
            "next one, were they one text, comes through",
            cure="--packing false",
        )


def check_gradients(strategy) -> None:
    """After the first backward: every tensor got a gradient, and no lora_B's is all zero (lora_A's is then, as B is zero).

    Experts that are linear layers of their own are let off: the first step's tokens may have passed one by. Raises RunError naming
    those that a frozen, detached or unused path has cut off.
    """
    dead = [
        name
        for name, is_zero in strategy.without_gradient().items()
        if ".experts." not in name and (not is_zero or ".lora_B." in name)
    ]
    if dead:
        layers = sorted({name.partition(".lora_")[0].removeprefix("base_model.model.") for name in dead})
        raise RunError(
            f"{len(dead)} of {len(strategy.trainable)} trained tensors got no gradient, of {', '.join(layers[:5])}",
            cure="leave them out by lora_target_modules (a list or a regex) if text does not pass through them; "
            "use_gradient_checkpointing false or reentrant_checkpointing false, if either is on",
        )


def optimizer_factory(config: TrainConfig):
    """parameters -> optimizer; the learning rate is set at every step."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kind = registry.load(registry.OPTIMIZERS[config.optimizer])
        options = {"lr": config.lr, "weight_decay": config.wd}
        if "adam" in config.optimizer:
            options |= {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}
        if config.optimizer == "fused_adamw":
            options["fused"] = True
        return kind(parameters, **options)

    return make
