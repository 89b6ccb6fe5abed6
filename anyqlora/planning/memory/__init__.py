"""The memory that a run takes, predicted part by part from the shapes of its model."""

from anyqlora.planning.memory.activations import SCORES_ON_MLX, activation_bytes, head_room, logits_chunk_tokens
from anyqlora.planning.memory.estimate import COMPILED, HOLES, LIBRARIES, OF_PRODUCT, MemoryEstimate, estimate, products
from anyqlora.planning.memory.weights import (
    adapter_parameters,
    cache_bytes,
    quantized_bytes,
    targets,
    weight_bytes,
)
from anyqlora.planning.memory.widths import is_fused

__all__ = [
    "COMPILED",
    "MemoryEstimate",
    "HOLES",
    "LIBRARIES",
    "OF_PRODUCT",
    "SCORES_ON_MLX",
    "activation_bytes",
    "adapter_parameters",
    "cache_bytes",
    "estimate",
    "head_room",
    "is_fused",
    "logits_chunk_tokens",
    "products",
    "quantized_bytes",
    "targets",
    "weight_bytes",
]
