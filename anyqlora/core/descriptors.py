"""Rows: what is known of a name that a user can ask for, before any framework is imported.

A row says what implements the name (a "module:Object" for each framework that has it), what it goes together with, what
it needs, and what it costs in bytes. The rows of this package stand in registry.py; another package registers its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

FLOAT32 = 4  # bytes


def load(target: str) -> Any:
    """Import `module:Object`."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, kw_only=True)
class Info:
    """What all rows have."""

    name: str = field(kw_only=False)
    torch: str = ""  # "module:Object" of what implements it there; "": it is not there
    mlx: str = ""
    needs: tuple[str, ...] = ()  # what not every machine has: "bitsandbytes", "gpu"
    slow: Mapping[str, str] = field(default_factory=dict, hash=False)  # backend -> why it is slow there
    refused: str = ""  # why this version does not have it; "" where it does

    def target(self, framework: str) -> str:
        """The "module:Object" on `framework`; "" where it is not there."""
        return {"torch": self.torch, "mlx": self.mlx}.get(framework, "")

    def load(self, framework: str = "torch") -> Any:
        """What implements it on `framework`."""
        return load(self.target(framework))


# ---------------------------------------------------------------------------------------------- frozen weights


def no_scales(outputs: int, inputs: int, config: Any, framework: str) -> int:
    return 0


def row_scales(outputs: int, inputs: int, config: Any, framework: str) -> int:
    """A float32 for each row."""
    return FLOAT32 * outputs


def block_scales(outputs: int, inputs: int, config: Any, framework: str) -> int:
    """bitsandbytes': a float32 for each 64 weights; by double quantization a byte, and a float32 for each 256 of them.

    MLX unpacks those when they are read.
    """
    scales = -(-outputs * inputs // 64)
    is_nested = config.double_quant and framework != "mlx"
    return scales + FLOAT32 * -(-scales // 256) if is_nested else FLOAT32 * scales


def byte_scales(group: int) -> Callable[[int, int, Any, str], int]:
    """A byte for each `group` weights of a row."""
    return lambda outputs, inputs, config, framework: outputs * inputs // group


def affine_scales(outputs: int, inputs: int, config: Any, framework: str) -> int:
    """A scale and a bias for each group of a row, in 16 bits; on MLX as wide as what is computed."""
    width = FLOAT32 if framework == "mlx" and config.precision == "fp32" else 2
    return 2 * width * outputs * inputs // config.affine_group_size


@dataclass(frozen=True, kw_only=True)
class QuantizerInfo(Info):
    """How frozen weights are kept. The object is a class that fulfils `anyqlora.extend.Quantizer`."""

    bits: int  # of a weight, without scales; 16: weights stay as they are, in plain linear layers
    scale_bytes: Callable[[int, int, Any, str], int] = no_scales  # of a layer: (outputs, inputs, config, framework)
    group: int | str = 0  # weights of a row that share a scale, or the setting that says it; 0: scales know no rows
    block: int = 0  # weights that share a scale, whatever row they are in; 0: none do
    double_quant: bool = False  # its scales can be quantized, too
    fusable: bool = False  # its layers only multiply by the dequantized weight, so that LoRA can be fused with them
    keeps_dtype: bool = False  # its layers give back the dtype they were given, not the one they compute in
    strategies: tuple[str, ...] = ()  # the only ones that it is built for; (): all, as a BroadcastQuantizer can be
    shardable: bool = False  # a process can hold a part of a packed weight
    tensor_parallel: bool = False  # each process can pack a slice of a weight
    checkpoints: tuple[str, ...] = ()  # what files call weights packed so, "library kind": see models/prequantized.py
    writes_files: bool = False  # it is a FileQuantizer

    @property
    def is_quantized(self) -> bool:
        return self.bits < 16

    @property
    def is_mlx_packed(self) -> bool:
        """Whether files hold its weights in MLX's packing, which transformers does not read by itself."""
        return any(kind.startswith("mlx ") for kind in self.checkpoints)

    def group_size(self, config: Any) -> int:
        """Weights of a row that share a scale; 0 where scales know no rows."""
        return getattr(config, self.group) if isinstance(self.group, str) else self.group

    def weight_bytes(self, outputs: int, inputs: int, config: Any, framework: str) -> int:
        """Codes and scales of a packed weight [outputs, inputs]."""
        return -(-outputs * inputs * self.bits // 8) + self.scale_bytes(outputs, inputs, config, framework)


# --------------------------------------------------------------------------------------------- what is learned


def lora_parameters(outputs: int, inputs: int, rank: int) -> int:
    """A [rank, inputs] and B [outputs, rank]."""
    return rank * (inputs + outputs)


def dora_parameters(outputs: int, inputs: int, rank: int) -> int:
    """LoRA's, and a magnitude for each output."""
    return lora_parameters(outputs, inputs, rank) + outputs


@dataclass(frozen=True, kw_only=True)
class AdapterInfo(Info):
    """What is learned. The object is a class that fulfils `anyqlora.extend.Adapter`."""

    parameters: Callable[[int, int, int], int] = lora_parameters  # learned on a layer: (outputs, inputs, rank)
    trains_base: bool = False  # the model's own weights learn, and there is no adapter
    fusable: bool = False  # a layer's output is W x + scale B A x, and nothing more
    keeps_outputs: bool = False  # what learns scales the outputs of W and of B A, which are kept for backward
    needs_full_weights: bool = False  # it starts from the weights before they are quantized
    needs_quantizer: bool = False  # it starts from what quantization lost
    moves_base: bool = False  # what it learns goes with another base than the files hold
    tensor_parallel: bool = False  # it starts without whole weights


# ------------------------------------------------------------------------------------------ how work is shared


@dataclass(frozen=True)
class ShardFactors:
    """Into how many parts a strategy splits what a process would else hold whole."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1


def unsharded(config: Any, processes: int) -> ShardFactors:
    return ShardFactors()


def fsdp_shards(config: Any, processes: int) -> ShardFactors:
    keeps_weights = config.sharding_strategy.endswith("shard_grad_op")
    return ShardFactors(1 if keeps_weights else processes, processes, processes)


def zero_shards(config: Any, processes: int) -> ShardFactors:
    """Stage 1: optimizer state; 2, which is the default: gradients, too; 3: weights, too."""
    stage = config.deepspeed_zero_stage if config.deepspeed_zero_stage >= 0 else 2
    return ShardFactors(*(processes if stage >= least else 1 for least in (3, 2, 1)))


def never(options: Any) -> bool:
    return False


def always(options: Any) -> bool:
    return True


def at_stage(least: int) -> Callable[[Any], bool]:
    """Of DeepSpeed's options, whether the ZeRO stage is at least this."""
    return lambda options: options.zero_stage >= least


@dataclass(frozen=True, kw_only=True)
class StrategyInfo(Info):
    """How processes share the work. The object is a subclass of `anyqlora.extend.Strategy`."""

    options: str = ""  # "module:Class" of its options; "": it has none
    several: bool = True  # it is for more than one process
    shards: Callable[[Any, int], ShardFactors] = unsharded  # (config, processes)
    splits_weights: Callable[[Any], bool] = never  # (its options): a process keeps a part of each frozen weight
    splits_optimizer: Callable[[Any], bool] = never  # (its options): and of what is learned, or its optimizer's state
    fusable: bool = False  # a process has the whole model when layers are fused: others have a part or an outline
    quantizes_whole: bool = False  # one process quantizes whole weights, and nobody slices of them
    tensor_parallel: bool = False  # each process multiplies by slices of weights
    offloads: bool = False  # weights can wait in host memory


# ------------------------------------------------------------------------------------------ how it is computed


@dataclass(frozen=True, kw_only=True)
class OptimizerInfo(Info):
    """An update rule. torch: a class; mlx: a function of on_mlx/optimizers.py."""

    state_bytes: float = 2 * FLOAT32  # for each trained parameter
    is_adam: bool = False  # it has Adam's decays and epsilon
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # more that torch's class is given
    shardable: bool = True  # it updates parameters of which processes hold parts


@dataclass(frozen=True, kw_only=True)
class KernelInfo(Info):
    """A set of kernels. `torch` stays empty: kernels take the place of parts of a model, not of one object."""

    precisions: tuple[str, ...] = ()  # the only ones that they are for; (): all
    in_c: bool = False  # norms, gated MLPs, attention and the loss keep and need what the C kernels do
    redraws_dropout: bool = False  # fused LoRA keeps a seed in place of a mask


@dataclass(frozen=True, kw_only=True)
class MatmulInfo(Info):
    """How frozen weights are multiplied."""

    code_bytes: int = 0  # for each weight, where the weights of a layer are kept for the next product
    keeps_dequantized: bool = True  # beside the codes, as a direction multiplies by it
    sum_bytes: int = FLOAT32  # of each sum of codes that waits to be scaled

    @property
    def is_rounded(self) -> bool:
        """Whether weights are rounded for the product."""
        return self.code_bytes > 0


@dataclass(frozen=True, kw_only=True)
class PresetInfo(Info):
    """A train_type: a quantizer and an adapter under one name."""

    quantizer: str = ""
    adapter: str = ""
    fused: bool = False  # it demands LoRA in one function with its frozen weight
