"""Bytes of what is there all the time: weights, adapters, gradients, optimizer state."""

from __future__ import annotations

import functools
from collections import Counter

from anyqlora.config.schema import AUTO, TrainConfig
from anyqlora.core import registry
from anyqlora.core.descriptors import ShardFactors
from anyqlora.models.architectures import LinearShape, ModelShape
from anyqlora.models.lora_targets import select_targets
from anyqlora.planning import native_kernels
from anyqlora.planning.memory.widths import FULL, STORED, DtypeSizes, capabilities_of, stored_bytes, traits_of

HEAD_TOKENS = 512  # that share packed weights of the fused head
HEAD_VOCAB_BLOCK, HEAD_VOCAB_PARTS, PANEL_COLUMNS = (
    native_kernels.constants()[name] for name in ("HEAD_VOCAB_BLOCK", "HEAD_VOCAB_PARTS", "PANEL_COLUMNS")
)


def trains_base(config: TrainConfig) -> bool:
    return registry.adapter(config.adapter).trains_base


def shard_factors(config: TrainConfig) -> ShardFactors:
    """Into how many parts the strategy splits what a process would else hold whole."""
    if config.strategy == AUTO:
        return ShardFactors()
    return registry.strategy(config.strategy).shards(config, max(config.world_size, 1))


def together_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """What a sharded model holds whole while it works: two layers, as the next one is fetched meanwhile, and what is in
    no layer.
    """
    whole = weight_bytes(shapes, config)
    outside = shapes.other_parameters * (FULL if trains_base(config) else STORED[config.precision])
    return outside + 2 * max(sum(whole.values()) - outside, 0) // shapes.layers


def weight_bytes(shapes: ModelShape, config: TrainConfig) -> dict[str, int]:
    """What stays: the frozen weights and the adapter, or all weights in float32."""
    if trains_base(config):
        return {"weights": shapes.parameters * FULL}
    linears = shapes.layers * sum(linear.count * quantized_bytes(linear, config) for linear in shapes.linears)
    cache = cache_bytes(shapes, config)
    return {
        "linear weights": linears,
        **({"dequantized weights": cache} if cache else {}),
        "embedding, head, norms": shapes.other_parameters * stored_bytes(config) + rounded_head_bytes(shapes, config),
        "adapter": adapter_parameters(shapes, config) * FULL,
    }


def cache_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """The weights of so many layers as they are multiplied, beside their codes: float8 once for each direction, and
    int8_backward beside the dequantized ones, which without a quantizer are the model's own.
    """
    layers = 0 if config.dequantized_layers == "auto" else min(int(config.dequantized_layers), shapes.layers)
    products, is_quantized = (
        registry.FROZEN_MATMULS[config.frozen_matmul],
        registry.quantizer(config.quantizer).is_quantized,
    )
    keeps_whole = products.keeps_dequantized and (is_quantized or not products.is_rounded)
    width = products.code_bytes + (DtypeSizes.of(config).computed if keeps_whole else 0)
    return sum(linear.parameters for layer in targets(shapes, config)[:layers] for linear in layer) * width


def quantized_bytes(linear: LinearShape, config: TrainConfig) -> int:
    """One linear's weight: codes and scales, or in the precision's own dtype."""
    quantizer = registry.quantizer(config.quantizer)
    if not quantizer.is_quantized:
        return linear.outputs * linear.inputs * stored_bytes(config)
    return quantizer.weight_bytes(linear.outputs, linear.inputs, config, capabilities_of(config).framework)


def largest_tensor(shapes: ModelShape) -> int:
    """Elements of the largest tensor in the files: it is in memory in float32 while it is quantized."""
    return max(shapes.vocab * shapes.hidden, *(linear.outputs * linear.inputs for linear in shapes.linears))


def targets(shapes: ModelShape, config: TrainConfig) -> tuple[tuple[LinearShape, ...], ...]:
    """The linears of each layer that get an adapter, as lora_target_modules says.

    Raises UsageError where that is refused.
    """
    return _targets(shapes, config.lora_target_modules)


@functools.lru_cache(maxsize=32)  # a plan asks hundreds of times
def _targets(shapes: ModelShape, stated: str) -> tuple[tuple[LinearShape, ...], ...]:
    chosen = select_targets(stated, shapes.model_type, shapes.adaptable_names)
    layers = map(shapes.adaptable_linears, range(shapes.layers))
    return tuple(tuple(linear for name, linear in layer.items() if name in chosen) for layer in layers)


def adapter_parameters(shapes: ModelShape, config: TrainConfig) -> int:
    """What the adapter learns on all the linears that get one."""
    parameters = registry.adapter(config.adapter).parameters
    layers = Counter(targets(shapes, config))
    return sum(
        count * parameters(linear.outputs, linear.inputs, config.lora_rank)
        for linears, count in layers.items()
        for linear in linears
    )


def trained_parameters(shapes: ModelShape, config: TrainConfig) -> int:
    return shapes.parameters if trains_base(config) else adapter_parameters(shapes, config)


def update_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """What the update of one tensor needs beside it (AdamW: the denominator); multi-tensor updates on a GPU do all at
    once.
    """
    if not trains_base(config):
        return adapter_parameters(shapes, config) * FULL
    return (shapes.parameters if traits_of(config).updates_together else largest_tensor(shapes)) * FULL


def rounded_head_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """The head's weights as codes, by which its gradient is made (csrc/lm_head.c), in whole blocks."""
    if config.fused_linear_cross_entropy is not True or not registry.FROZEN_MATMULS[config.frozen_matmul].is_rounded:
        return 0
    rows = -(-shapes.vocab // HEAD_VOCAB_BLOCK) * HEAD_VOCAB_BLOCK
    return rows * -(-shapes.hidden // PANEL_COLUMNS) * PANEL_COLUMNS
