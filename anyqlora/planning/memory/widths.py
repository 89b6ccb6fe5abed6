"""Bytes of a number in each of a step's roles, by precision and backend."""

from __future__ import annotations

from dataclasses import dataclass

from anyqlora.config.schema import AUTO, TrainConfig
from anyqlora.core import registry
from anyqlora.core.entry_points import entry_point_targets
from anyqlora.models.architectures import ModelShape
from anyqlora.planning.capabilities import CAPABILITIES, Capabilities, MemoryTraits

FULL = 4  # bytes of float32: adapters, gradients and moments in every precision


STORED = {
    "fp32": 4,
    "bf16": 2,
    "fp16_autocast": 4,
    "bf16_autocast": 4,
    "bf16_buffers_autocast": 2,
}  # of an unquantized frozen weight


UNKNOWN = Capabilities(
    "torch", "cpu", ("fp32",), (registry.UNQUANTIZED,), ("adamw",)
)  # a backend that nobody has chosen yet


def capabilities_of(config: TrainConfig) -> Capabilities:
    """The row of the configuration's backend."""
    if config.backend in CAPABILITIES:
        return CAPABILITIES[config.backend]
    target = entry_point_targets("backends").get(config.backend)
    return registry.load(target).capabilities if target else UNKNOWN


def traits_of(config: TrainConfig) -> MemoryTraits:
    return capabilities_of(config).memory


@dataclass(frozen=True)
class DtypeSizes:
    """Bytes per value, by precision.

    Full fine-tuning keeps float32 weights, and any other precision is autocast then.
    """

    stored: int  # unquantized frozen weights, and the residual stream, which starts as an embedding
    computed: int  # what matrix products and attention see
    inner: int  # between the linears of an MLP: 4-bit linears give back the dtype they were given
    autocast: bool

    @classmethod
    def of(cls, config: TrainConfig) -> DtypeSizes:
        is_full = registry.adapter(config.adapter).trains_base
        stored = FULL if is_full else stored_bytes(config)
        computed = FULL if config.precision == "fp32" else 2
        autocast = config.precision.endswith("autocast") or (is_full and computed == 2)
        inner = stored if registry.quantizer(config.quantizer).keeps_dtype else computed
        return cls(stored, computed, inner, autocast)

    @property
    def copied(self) -> int:
        """What an adapter computes in: float32, unless autocast turns its input into 16 bits."""
        return self.computed if self.autocast else FULL


def stored_bytes(config: TrainConfig) -> int:
    """Of an unquantized frozen weight. A backend without autocast keeps in 16 bits what it computes in 16 bits."""
    is_narrow = config.precision != "fp32" and not capabilities_of(config).autocast
    return 2 if is_narrow else STORED[config.precision]


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
        registry.adapter(config.adapter).fusable
        and registry.quantizer(config.quantizer).fusable
        and (config.strategy == AUTO or registry.strategy(config.strategy).fusable)
    )
    return fits if config.fused_lora == "auto" else config.fused_lora is True


def batch_tokens(config: TrainConfig) -> int:
    """Tokens of a micro-batch, whose rows have been chosen."""
    return int(config.batch_size) * config.context_length
