"""LoRA and its variants, as PEFT's modules and in PEFT's file format."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterable, Iterator

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import RunError
from anyqlora.models.architectures import shared_input_groups
from anyqlora.models.lora_targets import PREFIX, as_plain_json, as_whole_number, select_targets, shortest
from anyqlora.models.prequantized import loadable
from anyqlora.on_torch.kernels.dropout import TokenDropout
from anyqlora.on_torch.linears import text_linears
from anyqlora.training.schedule import uniform_start


class Lora:
    """y = W x + (alpha / rank) B A x, with A [rank, in] uniform in +-1/sqrt(in), B [out, rank] zero (Hu et al.
    2021).
    """

    variant: dict = {}
    folder = "adapter"
    observes = False

    def __init__(self, config: TrainConfig, device: torch.device):
        self.config, self.device = config, device
        self.chosen: set[str] = set()

    def select_targets(self, model: nn.Module, held: type = nn.Linear) -> None:
        """Resolve lora_target_modules into names of linear layers (of type `held` where already packed).

        Raises UsageError.
        """
        stated, where = self.config.lora_target_modules, self.config.sources.get("lora_target_modules", "")
        self.chosen = select_targets(stated, model.config.model_type, text_linears(model, held), where)

    def base_weight(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def attach(self, model: nn.Module) -> nn.Module:
        self.peft_config = LoraConfig(
            r=self.config.lora_rank,
            lora_alpha=as_whole_number(self.config.lora_alpha),
            lora_dropout=self.config.lora_dropout,
            target_modules=shortest(self.chosen, (name for name, _ in model.named_modules())),
            bias="none",
            task_type="CAUSAL_LM",
            **self.variant,
        )
        model = get_peft_model(model, self.peft_config, autocast_adapter_dtype=True)
        layers = {
            name.removeprefix(PREFIX): module for name, module in model.named_modules() if isinstance(module, LoraLayer)
        }
        if layers.keys() != self.chosen:
            raise RunError(f"PEFT put adapters elsewhere than planned: {sorted(layers.keys() ^ self.chosen)[:3]}")
        if self.config.lora_dropout and self.config.dropout_masks == "token":
            for names in shared_input_groups(sorted(layers)):
                for name in names:
                    layers[name].lora_dropout["default"] = TokenDropout(self.config.lora_dropout, names[0])
        with torch.no_grad():
            for name, module in layers.items():
                if not module.lora_A["default"].weight.is_meta:  # else it comes from the process that has read the base
                    self.init_weights(PREFIX + name, module)
        return model

    def init_weights(self, name: str, module: LoraLayer) -> None:
        """PEFT's own start, drawn by name, so that it does not depend on the order or the device."""
        a = module.lora_A["default"].weight
        values = uniform_start(name, tuple(a.shape), 1 / math.sqrt(a.shape[1]), self.config.seed)
        a.copy_(torch.from_numpy(values))

    def trainable(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return dict(sorted((peft_name(name), p) for name, p in model.named_parameters() if p.requires_grad))

    def tensors(self, trainable: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return trainable

    def adapter_config(self) -> dict:
        return as_plain_json(
            {**self.peft_config.to_dict(), "inference_mode": True, "base_model_name_or_path": loadable(self.config)}
        )


class RankStabilisedLora(Lora):
    """LoRA scaled by alpha / sqrt(rank) (Kalajdzievski 2023)."""

    variant = {"use_rslora": True}


class Dora(Lora):
    """LoRA on the direction of each weight row, with a learned magnitude (Liu et al. 2024)."""

    variant = {"use_dora": True}

    def attach(self, model: nn.Module) -> nn.Module:
        """PEFT starts magnitudes from the norms of the weights' rows. Those of an outline come, as its weights do, from
        the process that has read the model.
        """
        with without_values(model.get_submodule(name) for name in self.chosen):
            return super().attach(model)


@contextlib.contextmanager
def without_values(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Within, packed layers on the meta device, which have no scales either, give PEFT a weight that is there, too."""
    outlines = [layer for layer in layers if layer.weight.is_meta and hasattr(layer, "W_q")]
    for layer in outlines:
        layer.dequantize = functools.partial(torch.empty, layer.out_features, layer.in_features, device="meta")
    try:
        yield
    finally:
        for layer in outlines:
            del layer.dequantize  # the class has its own


def peft_name(parameter: str) -> str:
    """The name in adapter_model.safetensors of a parameter of a PEFT model."""
    return re.sub(r"\.default(\.weight)?$", r"\1", parameter).replace(
        "lora_magnitude_vector.weight", "lora_magnitude_vector"
    )
