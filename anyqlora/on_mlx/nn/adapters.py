"""What is learned on MLX: LoRA, its variants and full fine-tuning, by PEFT's names and in PEFT's orientation."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from anyqlora.config.schema import TrainConfig
from anyqlora.core.dropout import FIRST, PER_PAIR, SECOND, layer_key, representable, threshold
from anyqlora.models.architectures import shared_input_groups
from anyqlora.models.lora_targets import PREFIX, as_plain_json, as_whole_number, select_targets, shortest
from anyqlora.models.prequantized import loadable
from anyqlora.on_mlx.nn.layers import linears, replace
from anyqlora.on_mlx.nn.quantizers import unpacked_matmul
from anyqlora.training.schedule import uniform_start

ROWS = 1024  # tokens


@mx.custom_function
def low_rank_input(x: mx.array, factor: mx.array) -> mx.array:
    """x F^T in x's dtype of a float32 factor F [out, in], whose gradient is summed in float32: autograd's own is
    rounded to x's dtype.
    """
    return x @ factor.astype(x.dtype).T


@low_rank_input.vjp
def _low_rank_input_grad(primals, cotangent, output):
    return gradients(*primals, cotangent)


@mx.custom_function
def add_low_rank(base: mx.array, x: mx.array, factor: mx.array) -> mx.array:
    """base + x F^T in one product: see `narrow`."""
    return mx.addmm(base, x, factor.astype(x.dtype).T)


@add_low_rank.vjp
def _add_low_rank_grad(primals, cotangent, output):
    return cotangent, *gradients(*primals[1:], cotangent)


def gradients(x: mx.array, factor: mx.array, cotangent: mx.array) -> tuple[mx.array, mx.array]:
    """Of x F^T: those by x, in x's dtype, and by F, in float32."""
    grad_factor = sum_gradients(cotangent, x)
    return mx.depends([cotangent @ factor.astype(x.dtype)], [grad_factor])[0], grad_factor


def sum_gradients(gradient: mx.array, x: mx.array) -> mx.array:
    """gradient^T x [out, in] of [..., out] and [..., in], float32, in parts of ROWS tokens: neither is whole in
    float32.
    """
    total = mx.zeros((gradient.shape[-1], x.shape[-1]))
    gradient, x = gradient.flatten(0, -2), x.flatten(0, -2)
    for start in range(0, len(x), ROWS):
        chunk, others = mx.depends([gradient[start : start + ROWS], x[start : start + ROWS]], [total])
        total = total + chunk.astype(mx.float32).T @ others.astype(mx.float32)
    return total


def token_mask(keys: mx.array, width: int, rate: float) -> mx.array:
    """What stays of tokens with these keys, uint32 [..., 2]: bool [..., width], as core/dropout.py defines it."""
    pairs, (low, high) = mx.arange(-(-width // 2)).astype(mx.uint32), (keys[..., :1], keys[..., 1:])
    h = pairs * mx.array(PER_PAIR, mx.uint32) + low
    h = ((h ^ (h >> 16)) * mx.array(FIRST, mx.uint32)) ^ high
    h = (h ^ (h >> 15)) * mx.array(SECOND, mx.uint32)
    h = h ^ (h >> 15)
    halves = mx.stack([h & 0xFFFF, h >> 16], axis=-1).reshape(*keys.shape[:-1], -1)
    return halves[..., :width] >= threshold(rate)


class LoraLinear(nn.Module):
    """base(x) + scale dropout(x) A^T B^T in x's dtype; A [rank, in] and B [out, rank], both learned in float32.

    What is dropped follows from tokens' keys where they are known, which a router's choice of tokens hides.
    """

    def __init__(self, base: nn.Module, a: mx.array, b: mx.array, scale: float, dropout: float):
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = base, a, b
        self.scale, self.dropout = scale, dropout
        self._key, self._tokens, self._own = None, None, None

    def name_dropout(self, name: str) -> None:
        """Layers of one name drop the same of a token."""
        whole = layer_key(name) % (1 << 64)
        self._own = mx.array([whole % (1 << 32), whole >> 32], mx.uint32)

    def draw_from(self, key: mx.array, tokens: mx.array | None = None) -> None:
        """What the dropout of the forward passes from here on draws from: a recomputed one has to draw the same.
        `tokens`: their keys, uint32 [B, T, 2].
        """
        self._key, self._tokens = key, None if tokens is None or self._own is None else tokens ^ self._own

    def dropped(self, x: mx.array) -> mx.array:
        """`x`, in training with a part of it zeroed.

        By how much the rest grows is left to the narrow product: see `keep_probability`.
        """
        if self.keep_probability == 1:
            return x
        if self._tokens is not None and self._tokens.shape[:-1] == x.shape[:-1]:
            stays = token_mask(self._tokens, x.shape[-1], self.dropout)
        else:
            stays = mx.random.bernoulli(self.keep_probability, x.shape, key=self._key)
        return mx.where(stays, x, 0)

    @property
    def keep_probability(self) -> float:
        """The part of x that dropout leaves."""
        if not self.training:
            return 1.0
        return 1 - (self.dropout if self._own is None else representable(self.dropout))

    def __call__(self, x: mx.array) -> mx.array:
        lora_hidden = low_rank_input(self.dropped(x), self.lora_A) * (self.scale / self.keep_probability)
        return add_low_rank(self.base_layer(x), lora_hidden, self.lora_B)


class DoraLinear(LoraLinear):
    """m V x / |V| with V = W + scale B A, its row norms taken as constants of the gradient (Liu et al. 2024, section
    4.3), as PEFT has it.
    """

    def __init__(self, base, a, b, scale, dropout, dequantize):
        super().__init__(base, a, b, scale, dropout)
        self.dequantize = dequantize
        self.lora_magnitude_vector = mx.linalg.norm(self._weight(), axis=1)
        mx.eval(self.lora_magnitude_vector)  # or all layers' weights would be unpacked together

    def _weight(self, after: mx.array | None = None) -> mx.array:
        return self.dequantize(self.base_layer, after).astype(mx.float32)

    def __call__(self, x: mx.array) -> mx.array:
        out, dropped = self.base_layer(x), self.dropped(x.astype(mx.float32)) / self.keep_probability
        bias = self.base_layer.get("bias", 0)
        # Under dropout the frozen part of the difference sees the same dropped input as the adapter.
        frozen = unpacked_matmul(dropped, self._weight) if self.training and self.dropout else out - bias
        norm = mx.stop_gradient(mx.linalg.norm(self._weight(x) + self.scale * (self.lora_B @ self.lora_A), axis=1))
        share = self.lora_magnitude_vector / norm
        delta = (dropped @ self.lora_A.T) @ self.lora_B.T
        return (out + (share - 1) * frozen + share * self.scale * delta).astype(out.dtype)


class Lora:
    """y = W x + (alpha / rank) B A x, with A uniform in +-1/sqrt(in), B zero (Hu et al. 2021)."""

    variant: dict = {}
    folder = "adapter"

    def __init__(self, config: TrainConfig, quantizer):
        self.config, self.quantizer = config, quantizer

    @property
    def scale(self) -> float:
        return self.config.lora_alpha / self.config.lora_rank

    def wrap(self, base: nn.Module, a: mx.array, b: mx.array) -> LoraLinear:
        return LoraLinear(base, a, b, self.scale, self.config.lora_dropout)

    def attach(self, model: nn.Module, model_type: str) -> dict[str, str]:
        """Put adapters on the chosen layers. Returns {file name: path of the parameter}, sorted. Raises UsageError."""
        config, layers = self.config, linears(model)
        where = config.sources.get("lora_target_modules", "")
        self.chosen = select_targets(config.lora_target_modules, model_type, layers, where)
        self.modules = [name for name, _ in model.named_modules() if name]
        model.freeze()
        names = {}
        first = {name: group[0] for group in shared_input_groups(sorted(self.chosen)) for name in group}
        for name in sorted(self.chosen):
            outputs, inputs = layers[name]
            a = uniform_start(PREFIX + name, (config.lora_rank, inputs), 1 / math.sqrt(inputs), config.seed)
            layer = self.wrap(model_at(model, name), mx.array(a), mx.zeros((outputs, config.lora_rank)))
            layer.base_layer.freeze()
            if config.dropout_masks == "token":
                layer.name_dropout(first[name])
            replace(model, name, layer)
            for kind, _ in tree_flatten(layer.trainable_parameters()):
                names[f"{PREFIX}{name}.{kind}" + ("" if kind == "lora_magnitude_vector" else ".weight")] = (
                    f"{name}.{kind}"
                )
        return dict(sorted(names.items()))

    def adapter_config(self) -> dict:
        """adapter_config.json, as PEFT itself writes it."""
        from peft import LoraConfig

        peft_config = LoraConfig(
            r=self.config.lora_rank,
            lora_alpha=as_whole_number(self.config.lora_alpha),
            lora_dropout=self.config.lora_dropout,
            target_modules=shortest(self.chosen, self.modules),
            bias="none",
            task_type="CAUSAL_LM",
            **self.variant,
        )
        return as_plain_json(
            {**peft_config.to_dict(), "inference_mode": True, "base_model_name_or_path": loadable(self.config)}
        )


class RankStabilisedLora(Lora):
    """LoRA scaled by alpha / sqrt(rank) (Kalajdzievski 2023)."""

    variant = {"use_rslora": True}

    @property
    def scale(self) -> float:
        return self.config.lora_alpha / math.sqrt(self.config.lora_rank)


class Dora(Lora):
    """LoRA on the direction of each weight row, with a learned magnitude."""

    variant = {"use_dora": True}

    def wrap(self, base, a, b):
        return DoraLinear(base, a, b, self.scale, self.config.lora_dropout, self.quantizer.dequantize)


class Full:
    """Every weight is learned, in float32."""

    folder = "model"

    def __init__(self, config: TrainConfig, quantizer):
        self.config = config

    def attach(self, model: nn.Module, model_type: str) -> dict[str, str]:
        model.unfreeze()
        return {name: name for name in sorted(name for name, _ in tree_flatten(model.trainable_parameters()))}

    def adapter_config(self) -> dict:
        return {}


def model_at(model: nn.Module, name: str) -> nn.Module:
    return dict(model.named_modules())[name]
