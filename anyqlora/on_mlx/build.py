"""The model that is trained: read lazily, packed layer by layer, with its adapter attached; and the proof that what was
planned is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from anyqlora.config.schema import AUTO, TrainConfig
from anyqlora.core import registry
from anyqlora.core.errors import NotSupported, RunError, UsageError
from anyqlora.models.architectures import read_config
from anyqlora.models.hub import base_directory, check_safetensors
from anyqlora.models.prequantized import quantized_as
from anyqlora.on_mlx.mlx_lm_bridge.load_model import load_model
from anyqlora.on_mlx.nn.layers import linears, recompute, replace
from anyqlora.on_mlx.nn.loss import DocumentMaskCache, FullLogitsLoss, loss_for
from anyqlora.on_mlx.nn.quantizers import UnpackedLinear
from anyqlora.on_mlx.runtime import STORED, Runtime

LEFT_OUT = 1 / 20  # of the blocks' weights that a quantized model may keep as they are
LEAK = 1e-3  # relative difference of a packed document's logits from those of the document alone: far above rounding


@dataclass
class BuiltModel:
    """model: with its adapter. names: {file name: path of the parameter in the model}. adapter, quantizer, loss: see
    their modules. notes: what the plan names and this model cannot take, and why.
    """

    model: nn.Module
    names: dict[str, str]
    adapter: object
    quantizer: object
    loss: FullLogitsLoss
    notes: list[str]

    def trainable(self) -> dict[str, mx.array]:
        """{file name: what is learned}."""
        here = tree_flatten(self.model.trainable_parameters(), destination={})
        return {name: here[path] for name, path in self.names.items()}


def build(config: TrainConfig, runtime: Runtime) -> BuiltModel:
    """Read the base through the quantizer, attach the adapter, set checkpointing, and assert that all of it is in
    effect.
    """
    plan, directory = runtime.plan, base_directory(config)
    model_config = read_config(directory)
    quantizer = registry.quantizer(plan.quantizer).load("mlx")(config, runtime.compute)
    adapter = registry.adapter(plan.adapter).load("mlx")(config, quantizer)
    runtime.memory.start()
    model = load_model(directory, config.context_length, config.trust_remote_code)
    trains_base = registry.adapter(plan.adapter).trains_base
    check_names(model, directory, every=trains_base)
    materialize(
        model,
        quantizer,
        mx.float32 if trains_base else STORED[plan.precision],
        quantized_as(model_config) is not None,
    )
    names = adapter.attach(model, model_config["model_type"])
    loss, why = loss_for(model, config.logits_chunk_tokens)
    built = BuiltModel(
        model, names, adapter, quantizer, loss, [f"logits of all tokens are made for the loss: {why}"] if why else []
    )
    if plan.use_gradient_checkpointing:
        for block in model.layers[: None if config.checkpointed_layers == AUTO else config.checkpointed_layers]:
            recompute(block)
    model.train()
    assert_in_effect(built)
    if plan.packing:
        try_out(model)
    return built


def materialize(model: nn.Module, quantizer, stored: mx.Dtype, already: bool) -> None:
    """Pack each linear layer and give everything else its dtype, one module at a time: the whole model is never in
    memory unpacked.

    Raises UsageError naming every layer that cannot be packed, NotBuilt where much would stay as it is.
    """
    layers = linears(model)
    reasons = {name: quantizer.refusal(inputs) for name, (_, inputs) in layers.items()} if not already else {}
    wrong = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    if wrong:
        raise UsageError(
            f"{len(wrong)} layers cannot be packed:\n  " + "\n  ".join(wrong),
            cure="a smaller --affine_group_size, or --quantizer nf4 or none",
        )
    if quantizer.bits < 16:
        refuse_what_stays(model, layers)
    modules = list(model.named_modules())
    while modules:  # what is packed is let go of before the next one is read
        name, module = modules.pop()
        if name in layers and quantizer.bits < 16 and isinstance(module, nn.Linear) and not already:
            module = quantizer.pack(module)
            replace(model, name, module)
        for key, value in list(module.items()):
            if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating) and not key.startswith("_"):
                module[key] = value.astype(stored)
        if type(module) is nn.QuantizedLinear and mx.default_device() == mx.cpu:
            module.__class__ = UnpackedLinear
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])
    mx.clear_cache()


def refuse_what_stays(model: nn.Module, layers: dict) -> None:
    """Raises NotBuilt when a large part of the blocks would silently stay in 16 bits, naming its largest parameter."""
    packed = sum(outputs * inputs for outputs, inputs in layers.values())
    left = {
        name: value.size
        for name, value in tree_flatten([block.parameters() for block in model.layers])
        if value.ndim > 1
    }
    share = 1 - packed / max(1, packed, sum(left.values()))
    if share > LEFT_OUT:
        name = max(left, key=left.get)
        raise NotSupported(
            f"{share:.0%} of the weights of the model's blocks, layers.{name} perhaps, are in no linear layer and "
            f"would stay unquantized",
            cure="--quantizer none",
        )


def check_names(model: nn.Module, directory: Path, every: bool) -> None:
    """The adapter's file names its layers as the checkpoint does.

    Raises NotBuilt where mlx-lm calls them something else (`every`: where any tensor is called something else or has
    another shape, as all of them are written).
    """
    there = {
        name: about["shape"]
        for path in sorted(directory.glob("model*.safetensors"))
        for name, about in check_safetensors(path).items()
        if name != "__metadata__"
    }
    strange = [name for name in linears(model) if f"{name}.weight" not in there]
    if every:
        strange += [name for name, value in tree_flatten(model.parameters()) if list(value.shape) != there.get(name)]
    if strange:
        raise NotSupported(
            f"{len(strange)} parts of this model have other names or shapes in mlx-lm than in the checkpoint, "
            f"{strange[0]} is the first, so "
            "what is learned could not be loaded elsewhere",
            cure="another --backend, or --lora_target_modules with those that agree",
        )


def assert_in_effect(built: BuiltModel) -> None:
    """Raises RunError when the quantizer or the adapter that the plan names is not really on the model."""
    if not built.names:
        raise RunError("nothing on this model is learned")
    wrong = [name for name, value in built.trainable().items() if value.dtype != mx.float32]
    if wrong:
        raise RunError(f"{len(wrong)} trained tensors are not float32, {wrong[0]} is the first")
    more = set(tree_flatten(built.model.trainable_parameters(), destination={})) - set(built.names.values())
    if more:
        raise RunError(f"{len(more)} tensors are learned that no file names, {min(more)} is the first")
    plain = [
        name
        for name in linears(built.model)
        if not isinstance(dict(built.model.named_modules())[name], built.quantizer.module_type)
    ]
    if plain:
        raise RunError(f"{len(plain)} linear layers are not quantized as planned, {plain[0]} is the first")


def try_out(model: nn.Module) -> None:
    """Two documents in one row, the second compared with itself alone: the same, or packing is not for this
    architecture. Raises RunError.
    """
    ids = mx.arange(3, 15)[None]  # [1, 12]
    training = model.training
    model.eval()
    try:
        alone = model(ids[:, 6:])
        packed = model(ids, cache=[DocumentMaskCache(mx.array([[0] * 6 + [1] * 6]))] * len(model.layers))[:, 6:]
        together = model(ids)[:, 6:]
    except (AttributeError, TypeError, ValueError) as error:
        raise RunError(f"this architecture cannot run packed rows: {error}", cure="--packing false") from error
    finally:
        model.train(training)
    far, seen = (float(mx.linalg.norm((other - alone).astype(mx.float32))) for other in (packed, together))
    if far > max(0.05 * seen, LEAK * float(mx.linalg.norm(alone.astype(mx.float32)))):
        raise RunError(
            "this architecture does not keep packed documents apart, or counts positions through them",
            cure="--packing false",
        )


def check_gradients(gradients: dict[str, mx.array]) -> None:
    """After the first backward: no lora_B's gradient is all zero (lora_A's is then, as B is zero).

    Raises RunError naming the layers.
    """
    dead = [name for name, gradient in gradients.items() if ".lora_B." in name and not bool(mx.any(gradient != 0))]
    if dead:
        layers = sorted({name.partition(".lora_")[0].removeprefix("base_model.model.") for name in dead})
        raise RunError(
            f"{len(dead)} of {len(gradients)} trained tensors got no gradient, of {', '.join(layers[:5])}",
            cure="leave them out by lora_target_modules (a list or a regex) if text does not pass through them",
        )
