"""Bytes of what is there all the time: weights, adapters, gradients, optimizer state."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from anyqlora.config.schema import TrainConfig
from anyqlora.core.registry import AFFINE, BITS
from anyqlora.models.architectures import LinearShape, ModelShape
from anyqlora.models.lora_targets import select_targets
from anyqlora.planning import native_kernels
from anyqlora.planning.memory.widths import FULL, FUSED_DROPOUT, STORED, DtypeSizes, stored_bytes

MOMENTS = {
    "adamw": 8,
    "fused_adamw": 8,
    "adam": 8,
    "paged_adamw": 8,
    "adadelta": 8,
    "sgd": 0,  # bytes per trained parameter
    "adamw_8bit": 2 + 2 * 4 / 256,
    "paged_adamw_8bit": 2 + 2 * 4 / 256,
}  # 8-bit: one float32 scale per 256 values


GROUPS = {"mxfp4": 32, "nvfp4": 16}  # weights per scale, where it is not for choice


BLOCK, SCALES_BLOCK = 64, 256  # weights per 4-bit scale; scales per scale of double quantization


HEAD_TOKENS = 512  # that share packed weights of the fused head
HEAD_VOCAB_BLOCK, HEAD_VOCAB_PARTS, PANEL_COLUMNS = (
    native_kernels.constants()[name] for name in ("HEAD_VOCAB_BLOCK", "HEAD_VOCAB_PARTS", "PANEL_COLUMNS")
)


def group_size(config: TrainConfig) -> int:
    """Weights of a row that share a scale; 0 where scales know no rows."""
    return config.affine_group_size if config.quantizer in AFFINE else GROUPS.get(config.quantizer, 0)


@dataclass(frozen=True)
class ShardFactors:
    """Into how many parts a strategy splits what a process would else hold whole."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1

    @classmethod
    def of(cls, config: TrainConfig) -> ShardFactors:
        n = max(config.world_size, 1)
        if config.strategy == "fsdp":
            return cls(1 if config.sharding_strategy.endswith("shard_grad_op") else n, n, n)
        if config.strategy == "deepspeed":
            stage = config.deepspeed_zero_stage if config.deepspeed_zero_stage >= 0 else 2
            return cls(n if stage == 3 else 1, n if stage >= 2 else 1, n if stage >= 1 else 1)
        return cls()


def together_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """What a sharded model holds whole while it works: two layers, as the next one is fetched meanwhile, and what is in no layer."""
    whole = weight_bytes(shapes, config)
    outside = shapes.other_parameters * (FULL if config.adapter == "full" else STORED[config.precision])
    return outside + 2 * max(sum(whole.values()) - outside, 0) // shapes.layers


def weight_bytes(shapes: ModelShape, config: TrainConfig) -> dict[str, int]:
    """What stays: the frozen weights and the adapter, or all weights in float32."""
    if config.adapter == "full":
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
    """The weights of so many layers as they are multiplied, beside their codes: float8 once for each direction, and int8_backward beside the
    dequantized ones, which without a quantizer are the model's own."""
    layers = 0 if config.dequantized_layers == "auto" else min(int(config.dequantized_layers), shapes.layers)
    whole = DtypeSizes.of(config).computed
    width = {"int8": 1, "int8_backward": 1 + (0 if config.quantizer == "none" else whole), "fp8": 2}.get(
        config.frozen_matmul, whole
    )
    return sum(linear.parameters for layer in targets(shapes, config)[:layers] for linear in layer) * width


def quantized_bytes(linear: LinearShape, config: TrainConfig) -> int:
    """One linear: nf4 and fp4 half a byte per weight and a scale per 64 (float32; with double quantization one byte, and float32
    per 256 scales); int8 one byte per weight and a float32 scale per output; affine a scale and a bias per group of a row; none the
    precision's own dtype."""
    n = linear.outputs * linear.inputs
    if config.quantizer == "none":
        return n * stored_bytes(config)
    if group := group_size(config):
        scale = (
            1
            if config.quantizer in GROUPS
            else 2 * (FULL if config.backend == "mlx" and config.precision == "fp32" else 2)
        )
        return n * BITS[config.quantizer] // 8 + scale * n // group
    if config.quantizer == "int8":
        return n + FULL * linear.outputs
    scales = -(-n // BLOCK)
    nested = config.double_quant and config.backend != "mlx"  # there the scales are unpacked when they are read
    scale_bytes = scales + FULL * -(-scales // SCALES_BLOCK) if nested else FULL * scales
    return -(-n // 2) + scale_bytes


def largest_tensor(shapes: ModelShape) -> int:
    """Elements of the largest tensor in the files: it is in memory in float32 while it is quantized."""
    return max(shapes.vocab * shapes.hidden, *(linear.outputs * linear.inputs for linear in shapes.linears))


def targets(shapes: ModelShape, config: TrainConfig) -> tuple[tuple[LinearShape, ...], ...]:
    """The linears of each layer that get an adapter, as lora_target_modules says. Raises UsageError where that is refused."""
    return _targets(shapes, config.lora_target_modules)


@functools.lru_cache(maxsize=32)  # a plan asks hundreds of times
def _targets(shapes: ModelShape, stated: str) -> tuple[tuple[LinearShape, ...], ...]:
    chosen = select_targets(stated, shapes.model_type, shapes.adaptable_names)
    layers = map(shapes.adaptable_linears, range(shapes.layers))
    return tuple(tuple(linear for name, linear in layer.items() if name in chosen) for layer in layers)


def adapter_parameters(shapes: ModelShape, config: TrainConfig) -> int:
    """Rank x (inputs + outputs) per linear; DoRA adds one magnitude per output."""
    magnitude = 1 if config.adapter == "dora" else 0
    return sum(
        config.lora_rank * (linear.inputs + linear.outputs) + magnitude * linear.outputs
        for layer in targets(shapes, config)
        for linear in layer
    )


def trained_parameters(shapes: ModelShape, config: TrainConfig) -> int:
    return shapes.parameters if config.adapter == "full" else adapter_parameters(shapes, config)


def update_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """What the update of one tensor needs beside it (AdamW: the denominator); multi-tensor updates on a GPU do all at once."""
    if config.adapter != "full":
        return adapter_parameters(shapes, config) * FULL
    return (shapes.parameters if config.backend in FUSED_DROPOUT else largest_tensor(shapes)) * FULL


def rounded_head_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """The head's weights as codes, by which its gradient is made (csrc/lm_head.c), in whole blocks."""
    if config.fused_linear_cross_entropy is not True or config.frozen_matmul == "full":
        return 0
    rows = -(-shapes.vocab // HEAD_VOCAB_BLOCK) * HEAD_VOCAB_BLOCK
    return rows * -(-shapes.hidden // PANEL_COLUMNS) * PANEL_COLUMNS
