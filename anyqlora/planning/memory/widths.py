"""Bytes of a number in each of a step's roles, by precision and backend."""

from __future__ import annotations

from dataclasses import dataclass

from anyqlora.config.schema import TrainConfig
from anyqlora.core.registry import FUSED_ADAPTERS, FUSED_QUANTIZERS, FUSED_STRATEGIES
from anyqlora.models.architectures import ModelShape

FULL = 4  # bytes of float32: adapters, gradients and moments in every precision


STORED = {
    "fp32": 4,
    "bf16": 2,
    "fp16_autocast": 4,
    "bf16_autocast": 4,
    "bf16_buffers_autocast": 2,
}  # of an unquantized frozen weight


FUSED_DROPOUT = ("cuda", "rocm", "xpu")  # there dropout keeps a byte per value, elsewhere a float32


@dataclass(frozen=True)
class DtypeSizes:
    """Bytes per value, by precision. Full fine-tuning keeps float32 weights, and any other precision is autocast then."""

    stored: int  # unquantized frozen weights, and the residual stream, which starts as an embedding
    computed: int  # what matrix products and attention see
    inner: int  # between the linears of an MLP: 4-bit linears give back the dtype they were given
    autocast: bool

    @classmethod
    def of(cls, config: TrainConfig) -> DtypeSizes:
        is_full = config.adapter == "full"
        stored = FULL if is_full else stored_bytes(config)
        computed = FULL if config.precision == "fp32" else 2
        autocast = config.precision.endswith("autocast") or (is_full and computed == 2)
        return cls(stored, computed, stored if config.quantizer in ("nf4", "fp4") else computed, autocast)

    @property
    def copied(self) -> int:
        """What an adapter computes in: float32, unless autocast turns its input into 16 bits."""
        return self.computed if self.autocast else FULL


def stored_bytes(config: TrainConfig) -> int:
    """Of an unquantized frozen weight. MLX has no autocast: it keeps in 16 bits what it computes in 16 bits."""
    return 2 if config.backend == "mlx" and config.precision != "fp32" else STORED[config.precision]


def recomputed(shapes: ModelShape, config: TrainConfig) -> int:
    """The first layers, which keep their input only: as many as are stated, else with checkpointing all of them."""
    if not config.use_gradient_checkpointing:
        return 0
    return (
        shapes.layers if config.checkpointed_layers == "auto" else min(int(config.checkpointed_layers), shapes.layers)
    )


def is_fused(config: TrainConfig) -> bool:
    """Whether LoRA runs in one function with its frozen weight: as stated, else wherever it can."""
    fits = (
        config.adapter in FUSED_ADAPTERS
        and config.quantizer in FUSED_QUANTIZERS
        and config.strategy in ("auto", *FUSED_STRATEGIES)
    )
    return fits if config.fused_lora == "auto" else config.fused_lora is True


def batch_tokens(config: TrainConfig) -> int:
    """Tokens of a micro-batch, whose rows have been chosen."""
    return int(config.batch_size) * config.context_length
