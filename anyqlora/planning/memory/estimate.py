"""The bytes a run needs, part by part, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anyqlora.config.schema import TrainConfig
from anyqlora.core import registry
from anyqlora.models.architectures import ModelShape
from anyqlora.planning.memory.activations import (
    activation_bytes,
    evaluation_bytes,
    layer_bytes,
    logit_bytes,
    recomputing_bytes,
    work_bytes,
)
from anyqlora.planning.memory.weights import (
    largest_tensor,
    shard_factors,
    targets,
    together_bytes,
    trained_parameters,
    update_bytes,
    weight_bytes,
)
from anyqlora.planning.memory.widths import FULL, recomputed, traits_of

LIBRARIES, HOLES = (
    24 << 20,
    0.10,
)  # in host memory: what oneDNN and MKL keep for themselves, and holes that heap.py lets be
COMPILED, OF_PRODUCT = (
    128,
    600 << 10,
)  # products in 16 bits that oneDNN may keep (heap.py), two or three lengths with 40 or 50 shapes each; bytes


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted bytes at each moment of a run when memory may peak: {moment: {part: bytes}}."""

    moments: Mapping[str, Mapping[str, int]]
    products: int = COMPILED  # that oneDNN may keep

    @property
    def peak(self) -> str:
        """The moment that needs most."""
        return max(self.moments, key=self.needed)

    @property
    def parts(self) -> Mapping[str, int]:
        return self.moments[self.peak]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def needed(self, moment: str) -> int:
        """Bytes at one moment; 0 when the run does not come to it."""
        return sum(self.moments.get(moment, {}).values())

    def to_dict(self) -> dict:
        return {
            "total": self.total,
            "peak": self.peak,
            "moments": {moment: dict(parts) for moment, parts in self.moments.items()},
        }


def estimate(shapes: ModelShape, config: TrainConfig) -> MemoryEstimate:
    """Predicted bytes on the device for a config whose every auto is resolved.

    Rows are taken to be context_length long.

    Gradients are made in backward and cleared after the update, so they are there during the loss only when
    accumulating.
    """
    shards = shard_factors(config)
    weights = {part: -(-count // shards.weights) for part, count in weight_bytes(shapes, config).items()}
    trained = trained_parameters(shapes, config)
    state = registry.OPTIMIZERS[config.optimizer].state_bytes
    optimizer = {"optimizer": round(trained * state / shards.optimizer)}
    gradients = {"gradients": trained * FULL // shards.gradients}
    if shards.weights > 1:
        weights["layers put together"] = together_bytes(shapes, config)
    saved_for_backward = {"activations": activation_bytes(shapes, config)}
    moments = {
        "loading": weights | {"tensor being read": largest_tensor(shapes) * FULL},
        "loss": weights
        | optimizer
        | (gradients if config.gradient_accumulation_steps > 1 else {})
        | saved_for_backward
        | {"logits and loss": logit_bytes(shapes, config)},
        "backward": weights
        | optimizer
        | gradients
        | saved_for_backward
        | {"layer at work": work_bytes(shapes, config)},
        **(
            {
                "recomputation": weights
                | optimizer
                | gradients
                | {
                    "activations": recomputing_bytes(shapes, config),
                    "layer at work": work_bytes(shapes, config) + layer_bytes(shapes, config),
                }
            }
            if recomputed(shapes, config)
            else {}
        ),
        "update": weights | optimizer | gradients | {"update": update_bytes(shapes, config)},
    }
    if config.eval_dataset or config.eval_fraction:
        moments["evaluation"] = weights | optimizer | {"logits and loss": evaluation_bytes(shapes, config)}
    if traits_of(config).is_host_heap:
        is_in_c = (
            config.fused_linear_cross_entropy is True
            and config.fused_lora
            and not shapes.experts  # then oneDNN has nothing to compile
            and all(len(layer) == len(shapes.linears) for layer in targets(shapes, config))
            and config.lora_rank % 2 == 0
        )
        libraries = LIBRARIES if config.precision == "fp32" or is_in_c else products(shapes) * OF_PRODUCT
        for parts in moments.values():
            parts["heap and libraries"] = libraries + round(HOLES * sum(parts.values()))
    return MemoryEstimate(moments, products(shapes))


def products(shapes: ModelShape) -> int:
    """How many compiled products oneDNN may keep: more for a mixture, since each expert has tokens of its own
    number.
    """
    return COMPILED * (4 if shapes.experts else 1)
