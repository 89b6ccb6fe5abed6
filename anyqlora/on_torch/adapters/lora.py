"""LoRA and its variants, as PEFT's modules and in PEFT's file format."""

from __future__ import annotations

import math
import re

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS
from torch import nn

from ...config import TrainConfig
from ...errors import NotBuilt, RunError, UsageError
from ...layouts import DEMO_BASE
from ...memory import BLOCK
from ...schedule import uniform_start
from .._compat import refused_targets, rerouted_targets
from ..linears import inputs, text_linears

PREFIX = "base_model.model."  # what PEFT puts before every name
ALL = ("all", "all-linear")


class Lora:
    """y = W x + (alpha / rank) B A x, with A [rank, in] uniform in +-1/sqrt(in), B [out, rank] zero (Hu et al. 2021)."""

    variant: dict = {}
    folder = "adapter"
    observes = False

    def __init__(self, config: TrainConfig, device: torch.device):
        self.config, self.device = config, device
        self.chosen: set[str] = set()

    def choose(self, model: nn.Module, held: type = nn.Linear) -> None:
        """Resolve lora_target_modules into names of linear layers (of type `held` where already packed). Raises UsageError."""
        stated, where = self.config.lora_target_modules, self.config.sources.get("lora_target_modules", "")
        layers = text_linears(model, held)
        lasts = {_last(name) for name in layers}
        barred = rerouted_targets(model) | refused_targets(model, lasts)
        self.chosen = targets(stated, model.config.model_type, layers)
        wrong = {name for name in self.chosen if _last(name) in barred}
        if stated in ALL:
            self.chosen -= wrong
        elif wrong:
            raise UsageError(f"lora_target_modules: PEFT cannot load an adapter on {min(wrong)} of a {model.config.model_type} model: it takes the name "
                             "for one of the experts, or its kernel passes the module by", where=where, cure=f"among: {', '.join(sorted(lasts - barred))}")
        if not self.chosen:
            raise UsageError(f"lora_target_modules: {stated!r} matches no linear layer of this {model.config.model_type} model",
                             where=where, cure=f"all, or some of: {', '.join(sorted(lasts - barred))}")

    def residual(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def attach(self, model: nn.Module) -> nn.Module:
        self.peft_config = LoraConfig(
            r=self.config.lora_rank, lora_alpha=_whole(self.config.lora_alpha), lora_dropout=self.config.lora_dropout,
            target_modules=shortest(self.chosen, model), bias="none", task_type="CAUSAL_LM", **self.variant)
        model = get_peft_model(model, self.peft_config, autocast_adapter_dtype=True)
        layers = {name.removeprefix(PREFIX): module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        if layers.keys() != self.chosen:
            raise RunError(f"PEFT put adapters elsewhere than planned: {sorted(layers.keys() ^ self.chosen)[:3]}")
        with torch.no_grad():
            for name, module in layers.items():
                if not module.lora_A["default"].weight.is_meta:  # else it comes from the process that has read the base
                    self.start(PREFIX + name, module)
        return model

    def start(self, name: str, module: LoraLayer) -> None:
        """PEFT's own start, drawn by name, so that it does not depend on the order or the device."""
        a = module.lora_A["default"].weight
        values = uniform_start(name, tuple(a.shape), 1 / math.sqrt(a.shape[1]), self.config.seed)
        a.copy_(torch.from_numpy(values))

    def trainable(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return dict(sorted((peft_name(name), p) for name, p in model.named_parameters() if p.requires_grad))

    def tensors(self, trainable: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return trainable

    def describe(self) -> dict:
        base = str(DEMO_BASE) if self.config.is_demo else self.config.model_name  # what PEFT itself can load
        return plain({**self.peft_config.to_dict(), "inference_mode": True, "base_model_name_or_path": base})


class RankStabilisedLora(Lora):
    """LoRA scaled by alpha / sqrt(rank) (Kalajdzievski 2023)."""

    variant = {"use_rslora": True}


class Dora(Lora):
    """LoRA on the direction of each weight row, with a learned magnitude (Liu et al. 2024)."""

    variant = {"use_dora": True}

    def choose(self, model: nn.Module, held: type = nn.Linear) -> None:
        super().choose(model, held)
        # PEFT takes a row's norm from bitsandbytes' own dequantization, which is wrong there (see quantizers/bnb.py).
        across = sorted(name for name in self.chosen if inputs(model.get_submodule(name)) % BLOCK)
        if across and self.config.quantizer in ("nf4", "fp4") and self.device.type == "cpu":
            raise NotBuilt(f"DoRA on {self.config.quantizer} weights of {across[0]}, whose inputs are no multiple of {BLOCK}, on a CPU",
                           cure="--adapter lora, or --quantizer none")


def targets(stated: str, model_type: str, layers: dict[str, nn.Module]) -> set[str]:
    """The names among `layers` that `lora_target_modules` states: all of them, PEFT's choice for the architecture, a
    comma-separated list of last parts of names, or a regex of whole names."""
    if stated in ALL:
        return set(layers)
    if stated == "default":
        names = [name for name in DEFAULTS.get(model_type, ()) if any(_last(layer) == name for layer in layers)]
        if not names:
            raise UsageError(f"lora_target_modules: PEFT has no default for {model_type} models", cure="--lora_target_modules all")
        stated = ",".join(names)
    if re.search(r"[\\^$*+?(){}\[\]|]", stated):
        try:
            return {name for name in layers if re.fullmatch(stated, name)}
        except re.error as error:
            raise UsageError(f"lora_target_modules: {stated!r} is not a regex: {error}") from None
    wanted = [name.strip() for name in stated.split(",") if name.strip()]
    found = {w: {name for name in layers if name == w or name.endswith(f".{w}")} for w in wanted}
    unknown = [w for w, names in found.items() if not names]
    if unknown:
        raise UsageError(f"lora_target_modules: no linear layer is called {', '.join(unknown)}",
                         cure="names among: " + ", ".join(sorted({_last(name) for name in layers})))
    return set().union(*found.values())


def shortest(chosen: set[str], model: nn.Module) -> list[str]:
    """What to tell PEFT, and every other reader of adapter_config.json: last parts of names where they say it, else whole names."""
    others = {_last(name) for name, _ in model.named_modules() if name not in chosen}
    return sorted({name if _last(name) in others else _last(name) for name in chosen})


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _whole(number: float) -> float | int:
    """32 for 32.0: readers of adapter_config.json expect a whole alpha."""
    return int(number) if number == int(number) else number


def peft_name(parameter: str) -> str:
    """The name in adapter_model.safetensors of a parameter of a PEFT model."""
    return re.sub(r"\.default(\.weight)?$", r"\1", parameter).replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def plain(value):
    """`value` as JSON with sets sorted, so that PYTHONHASHSEED does not show."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(v) for v in value)
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(getattr(value, "value", value))
