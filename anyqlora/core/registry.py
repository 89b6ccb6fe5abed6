"""Every name a user can ask for, as one row: listing or refusing a name imports no framework.

To add a quantizer, an adapter, a strategy or an optimizer: one file that implements it, and one row here.
descriptors.py says what each field of a row means.

Another package registers the same row as an entry point of the group `anyqlora.quantizers` or `anyqlora.adapters`,
and a strategy's class as one of `anyqlora.strategies`. Without installing it, `--quantizer module:ROW` names it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from anyqlora.core.descriptors import (
    AdapterInfo,
    Info,
    KernelInfo,
    MatmulInfo,
    OptimizerInfo,
    PresetInfo,
    QuantizerInfo,
    StrategyInfo,
    affine_scales,
    always,
    at_stage,
    block_scales,
    byte_scales,
    dora_parameters,
    fsdp_shards,
    load,
    row_scales,
    zero_shards,
)
from anyqlora.core.entry_points import another_packages, entry_point_targets, entry_points_of, imported
from anyqlora.core.errors import NotSupported, UsageError

Row = TypeVar("Row", bound=Info)


def _table(*rows: Row) -> dict[str, Row]:
    return {row.name: row for row in rows}


# fmt: off
# ---------------------------------------------------------------------------------------------- frozen weights

UNQUANTIZED, ALL_WEIGHTS = "none", "full"  # the ends of the two axes
_BNB_4BIT = QuantizerInfo("", bits=4, needs=("bitsandbytes",), scale_bytes=block_scales, block=64, double_quant=True,
                          fusable=True, keeps_dtype=True, shardable=True, tensor_parallel=True, writes_files=True)
_AFFINE = QuantizerInfo("", bits=0, scale_bytes=affine_scales, group="affine_group_size",
                        strategies=("single", "ddp", "mlx"))

QUANTIZERS = _table(
    replace(_BNB_4BIT, name="nf4", checkpoints=("bitsandbytes nf4",),
            torch="anyqlora.on_torch.quantizers.bnb:Nf4", mlx="anyqlora.on_mlx.nn.quantizers:Nf4",
            slow={"mlx": "NF4 weights are dequantized for each product; affine4 is MLX's own form"}),
    replace(_BNB_4BIT, name="fp4", checkpoints=("bitsandbytes fp4", "bitsandbytes 4bit"),
            torch="anyqlora.on_torch.quantizers.bnb:Fp4"),
    QuantizerInfo("int8", bits=8, needs=("bitsandbytes",), scale_bytes=row_scales, checkpoints=("bitsandbytes 8bit",),
            torch="anyqlora.on_torch.quantizers.bnb:Int8",
            slow={"cpu": "int8 products are slow on a CPU"}),
    replace(_AFFINE, name="affine2", bits=2, checkpoints=("mlx affine2",), mlx="anyqlora.on_mlx.nn.quantizers:Affine2"),
    replace(_AFFINE, name="affine3", bits=3, checkpoints=("mlx affine3",), mlx="anyqlora.on_mlx.nn.quantizers:Affine3"),
    replace(_AFFINE, name="affine4", bits=4, checkpoints=("mlx affine4",), mlx="anyqlora.on_mlx.nn.quantizers:Affine4",
            torch="anyqlora.on_torch.quantizers.affine:Affine4", writes_files=True),
    replace(_AFFINE, name="affine5", bits=5, checkpoints=("mlx affine5",), mlx="anyqlora.on_mlx.nn.quantizers:Affine5"),
    replace(_AFFINE, name="affine6", bits=6, checkpoints=("mlx affine6",), mlx="anyqlora.on_mlx.nn.quantizers:Affine6"),
    replace(_AFFINE, name="affine8", bits=8, checkpoints=("mlx affine8",), mlx="anyqlora.on_mlx.nn.quantizers:Affine8"),
    QuantizerInfo("mxfp4", bits=4, group=32, scale_bytes=byte_scales(32), checkpoints=("mlx mxfp4",),
            mlx="anyqlora.on_mlx.nn.quantizers:Mxfp4"),
    QuantizerInfo("nvfp4", bits=4, group=16, scale_bytes=byte_scales(16), checkpoints=("mlx nvfp4",),
            mlx="anyqlora.on_mlx.nn.quantizers:Nvfp4"),
    QuantizerInfo(UNQUANTIZED, bits=16, fusable=True, shardable=True, tensor_parallel=True,
            torch="anyqlora.on_torch.quantizers.none:Unquantized", mlx="anyqlora.on_mlx.nn.quantizers:Unquantized"),
    QuantizerInfo("hqq", bits=4, refused="HQQ quantization is not built yet; use nf4, fp4 or int8"),
    QuantizerInfo("torchao_int4", bits=4, refused="torchao's int4 is not built yet; use nf4, fp4 or int8"),
)

# --------------------------------------------------------------------------------------------- what is learned

ADAPTERS = _table(
    AdapterInfo("lora", fusable=True, tensor_parallel=True,
            torch="anyqlora.on_torch.adapters.lora:Lora", mlx="anyqlora.on_mlx.nn.adapters:Lora"),
    AdapterInfo("rslora", fusable=True, tensor_parallel=True,
            torch="anyqlora.on_torch.adapters.lora:RankStabilisedLora",
            mlx="anyqlora.on_mlx.nn.adapters:RankStabilisedLora"),
    AdapterInfo("dora", parameters=dora_parameters, keeps_outputs=True,
            torch="anyqlora.on_torch.adapters.lora:Dora", mlx="anyqlora.on_mlx.nn.adapters:Dora"),
    AdapterInfo("pissa", fusable=True, needs_full_weights=True, moves_base=True,
            torch="anyqlora.on_torch.adapters.svd_init:Pissa"),
    AdapterInfo("loftq", fusable=True, needs_full_weights=True, needs_quantizer=True,
            torch="anyqlora.on_torch.adapters.svd_init:Loftq"),
    AdapterInfo(ALL_WEIGHTS, trains_base=True, needs_full_weights=True, moves_base=True,
            torch="anyqlora.on_torch.adapters.full:Full", mlx="anyqlora.on_mlx.nn.adapters:Full"),
    AdapterInfo("llama_pro", refused="block expansion (llama_pro) is not built yet; use lora or full"),
)

TRAIN_TYPES = _table(  # fsdp_qlora's names
    PresetInfo("full", quantizer="none", adapter="full"),
    PresetInfo("lora", quantizer="none", adapter="lora"),
    PresetInfo("qlora", quantizer="nf4", adapter="lora"),
    PresetInfo("bnb_dora", quantizer="nf4", adapter="dora"),
    PresetInfo("custom_lora", quantizer="none", adapter="lora", fused=True),
    PresetInfo("custom_qlora", quantizer="nf4", adapter="lora", fused=True),
    PresetInfo("hqq_lora", refused="HQQ quantization is not built yet; use qlora"),
    PresetInfo("hqq_dora", refused="HQQ quantization is not built yet; use bnb_dora"),
    PresetInfo("bnb_llama_pro", refused="block expansion (llama_pro) is not built yet; use qlora"),
    PresetInfo("hqq_llama_pro", refused="block expansion and HQQ are not built yet; use qlora"),
)

_IN_8_BITS = 2 + 2 * 4 / 256  # both moments a byte, and a float32 for each 256 values of each

OPTIMIZERS = _table(
    OptimizerInfo("adamw", torch="torch.optim:AdamW", mlx="anyqlora.on_mlx.optimizers:adamw", is_adam=True),
    OptimizerInfo("fused_adamw", torch="torch.optim:AdamW", is_adam=True, options={"fused": True}),
    OptimizerInfo("adam", torch="torch.optim:Adam", mlx="anyqlora.on_mlx.optimizers:adam", is_adam=True),
    OptimizerInfo("sgd", torch="torch.optim:SGD", mlx="anyqlora.on_mlx.optimizers:sgd", state_bytes=0),
    OptimizerInfo("adadelta", torch="torch.optim:Adadelta", mlx="anyqlora.on_mlx.optimizers:adadelta"),
    OptimizerInfo("adamw_8bit", torch="bitsandbytes.optim:AdamW8bit", is_adam=True,
            needs=("bitsandbytes",), shardable=False, state_bytes=_IN_8_BITS),
    OptimizerInfo("paged_adamw", torch="bitsandbytes.optim:PagedAdamW32bit", is_adam=True,
            needs=("bitsandbytes", "gpu"), shardable=False),
    OptimizerInfo("paged_adamw_8bit", torch="bitsandbytes.optim:PagedAdamW8bit", is_adam=True,
            needs=("bitsandbytes", "gpu"), shardable=False, state_bytes=_IN_8_BITS),
)

# ------------------------------------------------------------------------------------------ how work is shared

STRATEGIES = _table(
    StrategyInfo("single", several=False, fusable=True, quantizes_whole=True,
            torch="anyqlora.on_torch.parallel.base:Strategy"),
    StrategyInfo("ddp", fusable=True, quantizes_whole=True,
            torch="anyqlora.on_torch.parallel.ddp:Ddp", options="anyqlora.config.strategy_options:DdpOptions"),
    StrategyInfo("fsdp", shards=fsdp_shards, splits_weights=always, splits_optimizer=always, quantizes_whole=True,
            offloads=True,
            torch="anyqlora.on_torch.parallel.fsdp:Fsdp", options="anyqlora.config.strategy_options:FsdpOptions"),
    StrategyInfo("deepspeed", shards=zero_shards, splits_weights=at_stage(3), splits_optimizer=at_stage(1),
            quantizes_whole=True, offloads=True,
            torch="anyqlora.on_torch.parallel.deepspeed:DeepSpeed",
            options="anyqlora.config.strategy_options:DeepSpeedOptions"),
    StrategyInfo("tp", tensor_parallel=True, torch="anyqlora.on_torch.parallel.tp:TensorParallel"),
    StrategyInfo("accelerate", fusable=True, quantizes_whole=True,
            torch="anyqlora.on_torch.parallel.accelerate:Accelerate",
            options="anyqlora.config.strategy_options:AccelerateOptions"),
    StrategyInfo("mlx", mlx="anyqlora.on_mlx.process_group:MlxProcessGroup"),
    StrategyInfo("pipeline", refused="pipeline parallelism is not offered"),
    StrategyInfo("megatron", refused="Megatron-LM is not offered; use tp or fsdp"),
    StrategyInfo("tpu", refused="TPUs are not offered"),
)

# ------------------------------------------------------------------------------------------ how it is computed

KERNELS = _table(
    KernelInfo("portable"),  # ops of the framework
    KernelInfo("exact", needs=("triton",)),  # ours where they give the same bits
    KernelInfo("triton", needs=("triton",), redraws_dropout=True),  # all of ours
    KernelInfo("native", precisions=("bf16",), in_c=True),  # C ones for CPUs
)

FROZEN_MATMULS = _table(
    MatmulInfo("full"),
    MatmulInfo("int8_backward", code_bytes=1),
    MatmulInfo("int8", code_bytes=1, keeps_dequantized=False),
    MatmulInfo("fp8", code_bytes=2, keeps_dequantized=False, sum_bytes=0),  # codes of their own for each direction
)

ENGINES = {  # framework -> the engine of the training loop
    "torch": "anyqlora.on_torch.engine:TorchEngine",
    "mlx": "anyqlora.on_mlx.engine:MlxEngine",
}

PROCESS_GROUPS = {  # framework -> how the processes of a run meet and talk
    "torch": "anyqlora.on_torch.parallel.process_group:TorchProcessGroup",
    "mlx": "anyqlora.on_mlx.process_group:MlxProcessGroup",
}

MODEL_OPENERS = {  # framework -> how a finished run is opened: f(run, plan)
    "torch": "anyqlora.on_torch.inference:load_finetuned",
    "mlx": "anyqlora.on_mlx.inference:load_finetuned",
}

# --------------------------------------------------------------------------------------------- all other names

REPORTERS = {  # log_to: what is shown; none of them named is auto
    "auto": "",  # a panel on a terminal, else lines
    "stdout": "anyqlora.reporting.console:ConsoleReporter",
    "tqdm": "anyqlora.reporting.live_panel:ProgressBarReporter",
    "none": "anyqlora.reporting.console:QuietReporter",
}
TRACKERS = {  # log_to: what is told; the name is that of the package
    "wandb": "anyqlora.reporting.trackers:Wandb",
    "tensorboard": "anyqlora.reporting.trackers:Tensorboard",
    "trackio": "anyqlora.reporting.trackers:Trackio",
}

SCHEDULES = ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "exponential")
PRECISIONS = ("fp32", "bf16", "fp16_autocast", "bf16_autocast", "bf16_buffers_autocast")
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # PEFT's names of an adapter's files
CHAT_TEMPLATES = {  # what they need
    "zephyr": (),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
SHARDING_STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_full_shard", "hybrid_shard_grad_op", "ddp")
# fmt: on


# ----------------------------------------------------------------------------------------------------- one row


def quantizer(name: str, where: str = "") -> QuantizerInfo:
    """The row of a quantizer, ours or another package's. Raises UsageError, NotSupported."""
    return _row("quantizer", name, QUANTIZERS, QuantizerInfo, where)


def adapter(name: str, where: str = "") -> AdapterInfo:
    """The row of an adapter, ours or another package's. Raises UsageError, NotSupported."""
    return _row("adapter", name, ADAPTERS, AdapterInfo, where)


def strategy(name: str, where: str = "") -> StrategyInfo:
    """The row of a strategy; that of another package's class promises nothing, and imports nothing.

    Raises UsageError, NotSupported.
    """
    target = another_packages("strategy", name, "strategies", name in STRATEGIES, where)
    return StrategyInfo(name, torch=target) if target else lookup("strategy", name, STRATEGIES, where)


def strategy_class(name: str, where: str = "") -> type:
    """The class of a strategy. Raises UsageError where it cannot be imported, saying why."""
    row = strategy(name, where)
    if name in STRATEGIES:
        return load(row.torch or row.mlx)
    cls = imported("strategy", name, row.torch, where)
    if not isinstance(cls, type) or not all(hasattr(cls, member) for member in ("prepare", "backward", "step")):
        raise UsageError(
            f"strategy {name!r} is no Strategy class",
            where=where or row.torch,
            cure="a subclass of anyqlora.extend.Strategy",
        )
    return cls


def _row(kind: str, name: str, table: Mapping[str, Row], cls: type[Row], where: str) -> Row:
    target = another_packages(kind, name, f"{kind}s", name in table, where)
    if not target:
        return lookup(kind, name, table, where)
    row = imported(kind, name, target, where)
    if isinstance(row, cls) and name in (row.name, target):
        return row
    what = f"the row of {row.name!r}" if isinstance(row, cls) else f"{type(row).__name__}, no {cls.__name__}"
    raise UsageError(
        f"{kind} {name!r}: {target} is {what}", where=where, cure=f"a {cls.__name__} of anyqlora.extend with that name"
    )


def lookup(kind: str, name: str, table: Mapping[str, Any], where: str = "") -> Any:
    """The table's row for `name`.

    Raises UsageError for an unknown name, with the known ones and other packages', and NotSupported for a refused one.
    """
    packages = entry_points_of(_GROUPS[kind]) if kind in _GROUPS else ()
    others = {other: f"{other} (of {package})" for other, _, package in packages}
    refused = {known: row.refused for known, row in table.items() if isinstance(row, Info) and row.refused}
    cure = "one of: " + ", ".join([*(known for known in table if known not in refused), *others.values()])
    cure += "; or module:Object of your own" * (kind in _GROUPS)
    if name not in table:
        raise UsageError(f"unknown {kind} {name!r}{nearest(name, [*table, *others])}", where=where, cure=cure)
    if name in refused:
        raise NotSupported(f"{kind} {name!r}: {refused[name]}", where=where, cure=cure)
    return table[name]


# ------------------------------------------------------------------------------------------------ several rows

_GROUPS = {"quantizer": "quantizers", "adapter": "adapters", "strategy": "strategies"}  # of entry points


def installed(setting: str) -> tuple[str, ...]:
    """The names that other packages register as values of a setting."""
    return tuple(entry_point_targets(_GROUPS[setting])) if setting in _GROUPS else ()


def plugins(plan: Any) -> dict[tuple[str, str], str]:
    """{(kind, name): "module:Object"} of what other packages bring to a planned run."""
    targets = {}
    if plan.strategy not in STRATEGIES:
        targets["strategy", plan.strategy] = strategy(plan.strategy).torch
    for kind, name, table, find in (
        ("quantizer", plan.quantizer, QUANTIZERS, quantizer),
        ("adapter", plan.adapter, ADAPTERS, adapter),
    ):
        if name not in table:
            targets[kind, name] = find(name).target(plan.framework)
    if target := entry_point_targets("backends").get(str(plan.backend)):
        targets["backend", str(plan.backend)] = target
    return targets


def is_module_object(setting: str, value: object) -> bool:
    """Whether `value` is meant as the module:Object of another package."""
    return setting in _GROUPS and ":" in str(value)


def offered(table: Mapping[str, Info], framework: str, without: Iterable[str] = ()) -> tuple[str, ...]:
    """The names in a table that `framework` has, but for those that need something of `without`."""
    return tuple(name for name, row in table.items() if row.target(framework) and not set(row.needs) & set(without))


def needing(need: str, *tables: Mapping[str, Info]) -> tuple[str, ...]:
    """The names in the tables of what needs this."""
    return tuple(name for table in tables for name, row in table.items() if need in row.needs)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no known name is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
