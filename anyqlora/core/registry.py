"""Every name a user can ask for, as strings: listing or refusing a name imports no framework.

A value `module:Object` is resolved by `load` when it is used. A value that starts with `!` is a known name that this
version refuses; the rest of the string is the reason.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from anyqlora.core.errors import NotSupported, UsageError

QUANTIZERS = {
    "none": "anyqlora.on_torch.quantizers.none:Unquantized",
    "nf4": "anyqlora.on_torch.quantizers.bnb:Nf4",
    "fp4": "anyqlora.on_torch.quantizers.bnb:Fp4",
    "int8": "anyqlora.on_torch.quantizers.bnb:Int8",
    "hqq": "!HQQ quantization is not built yet; use nf4, fp4 or int8",
    "torchao_int4": "!torchao's int4 is not built yet; use nf4, fp4 or int8",
    "affine4": "anyqlora.on_torch.quantizers.affine:Affine4",
    "affine2": "anyqlora.on_mlx.nn.quantizers:Affine2",  # from here on: MLX's own, which no torch backend has in its row
    "affine3": "anyqlora.on_mlx.nn.quantizers:Affine3",
    "affine5": "anyqlora.on_mlx.nn.quantizers:Affine5",
    "affine6": "anyqlora.on_mlx.nn.quantizers:Affine6",
    "affine8": "anyqlora.on_mlx.nn.quantizers:Affine8",
    "mxfp4": "anyqlora.on_mlx.nn.quantizers:Mxfp4",
    "nvfp4": "anyqlora.on_mlx.nn.quantizers:Nvfp4",
}
PACKED = ("nf4", "fp4", "affine4")  # quantizers that write files
WHOLE_STRATEGIES = (
    "single",
    "ddp",
    "fsdp",
    "deepspeed",
    "accelerate",
)  # one process quantizes whole weights, nobody slices of them
AFFINE_STRATEGIES = ("single", "ddp", "mlx")  # the others split weights, and a scale belongs to codes on one process
AFFINE = ("affine2", "affine3", "affine4", "affine5", "affine6", "affine8")
BITS = {
    "none": 16,
    "nf4": 4,
    "fp4": 4,
    "int8": 8,
    "hqq": 4,
    "torchao_int4": 4,
    **{name: int(name[-1]) for name in AFFINE},
    "mxfp4": 4,
    "nvfp4": 4,
}

ADAPTERS = {
    "lora": "anyqlora.on_torch.adapters.lora:Lora",
    "rslora": "anyqlora.on_torch.adapters.lora:RankStabilisedLora",
    "dora": "anyqlora.on_torch.adapters.lora:Dora",
    "pissa": "anyqlora.on_torch.adapters.svd_init:Pissa",
    "loftq": "anyqlora.on_torch.adapters.svd_init:Loftq",
    "full": "anyqlora.on_torch.adapters.full:Full",
    "llama_pro": "!block expansion (llama_pro) is not built yet; use lora or full",
}

STRATEGIES = {
    "single": "anyqlora.on_torch.parallel.base:Strategy",
    "ddp": "anyqlora.on_torch.parallel.ddp:Ddp",
    "fsdp": "anyqlora.on_torch.parallel.fsdp:Fsdp",
    "deepspeed": "anyqlora.on_torch.parallel.deepspeed:DeepSpeed",
    "tp": "anyqlora.on_torch.parallel.tp:TensorParallel",
    "accelerate": "anyqlora.on_torch.parallel.accelerate:Accelerate",
    "mlx": "anyqlora.on_mlx.process_group:MlxProcessGroup",
    "pipeline": "!pipeline parallelism is not offered",
    "megatron": "!Megatron-LM is not offered; use tp or fsdp",
    "tpu": "!TPUs are not offered",
}

ON_MLX = {  # what the MLX loop takes for names that torch has too
    "none": "anyqlora.on_mlx.nn.quantizers:Unquantized",
    "nf4": "anyqlora.on_mlx.nn.quantizers:Nf4",
    "affine4": "anyqlora.on_mlx.nn.quantizers:Affine4",
    "lora": "anyqlora.on_mlx.nn.adapters:Lora",
    "rslora": "anyqlora.on_mlx.nn.adapters:RankStabilisedLora",
    "dora": "anyqlora.on_mlx.nn.adapters:Dora",
    "full": "anyqlora.on_mlx.nn.adapters:Full",
    "adamw": "anyqlora.on_mlx.optimizers:adamw",
    "adam": "anyqlora.on_mlx.optimizers:adam",
    "sgd": "anyqlora.on_mlx.optimizers:sgd",
    "adadelta": "anyqlora.on_mlx.optimizers:adadelta",
}

TRAIN_TYPES = {  # fsdp_qlora's names -> (quantizer, adapter); a string is a refusal
    "full": ("none", "full"),
    "lora": ("none", "lora"),
    "qlora": ("nf4", "lora"),
    "bnb_dora": ("nf4", "dora"),
    "custom_lora": ("none", "lora"),
    "custom_qlora": ("nf4", "lora"),
    "hqq_lora": "!HQQ quantization is not built yet; use qlora",
    "hqq_dora": "!HQQ quantization is not built yet; use bnb_dora",
    "bnb_llama_pro": "!block expansion (llama_pro) is not built yet; use qlora",
    "hqq_llama_pro": "!block expansion and HQQ are not built yet; use qlora",
}

FUSED_TYPES = ("custom_lora", "custom_qlora")  # those that demand LoRA in one function with its frozen weight
FUSED_ADAPTERS = ("lora", "rslora", "pissa", "loftq")  # what is W x + scale B A x
FUSED_QUANTIZERS = ("none", "nf4", "fp4")  # what is a product with the dequantized weight
FUSED_STRATEGIES = (
    "single",
    "ddp",
    "accelerate",
)  # under others a process has a part or an outline of the model only, when it would be fused

OPTIMIZERS = {
    "adamw": "torch.optim:AdamW",
    "fused_adamw": "torch.optim:AdamW",
    "adam": "torch.optim:Adam",
    "sgd": "torch.optim:SGD",
    "adadelta": "torch.optim:Adadelta",
    "adamw_8bit": "bitsandbytes.optim:AdamW8bit",
    "paged_adamw": "bitsandbytes.optim:PagedAdamW32bit",
    "paged_adamw_8bit": "bitsandbytes.optim:PagedAdamW8bit",
}

ENGINES = {  # framework -> the engine of the training loop
    "torch": "anyqlora.on_torch.engine:TorchEngine",
    "mlx": "anyqlora.on_mlx.engine:MlxEngine",
}

RANKS = {  # framework -> how the processes of a run meet and talk
    "torch": "anyqlora.on_torch.parallel.process_group:TorchProcessGroup",
    "mlx": "anyqlora.on_mlx.process_group:MlxProcessGroup",
}

OPENED = {  # framework -> how a finished run is opened: f(run, plan)
    "torch": "anyqlora.on_torch.inference:load_finetuned",
    "mlx": "anyqlora.on_mlx.inference:load_finetuned",
}

VIEWS = {  # log_to: what is shown; none of them named is auto
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

KERNELS = (
    "portable",
    "exact",
    "triton",
    "native",
)  # ops of the framework; ours where they give the same bits; all of ours; C ones for CPUs
FROZEN_PRODUCTS = ("full", "int8_backward", "int8", "fp8")
SCHEDULES = ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "exponential")
PRECISIONS = ("fp32", "bf16", "fp16_autocast", "bf16_autocast", "bf16_buffers_autocast")
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # PEFT's names of an adapter's files
CHAT_TEMPLATES = {
    "zephyr": (),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}  # what they need
SHARDING_STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_full_shard", "hybrid_shard_grad_op", "ddp")


def nearest(name: str, known) -> str:
    """`; did you mean 'x'?`, or nothing when no known name is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def entry_point_targets(group: str) -> dict[str, str]:
    """{name: "module:Object"} of the installed entry points of `anyqlora.<group>`; nothing is imported."""
    return {name: target for name, target, _ in entry_points_of(group)}


def entry_points_of(group: str) -> tuple[tuple[str, str, str], ...]:
    """(name, "module:Object", package) of every installed entry point of `anyqlora.<group>`, in the order of names."""
    return _points(f"anyqlora.{group}", tuple(sys.path))


@functools.cache
def _points(group: str, _path: tuple[str, ...]) -> tuple[tuple[str, str, str], ...]:
    """A look reads the metadata of all packages there are, which takes 10 ms."""
    return tuple(
        sorted((point.name, point.value, point.dist.name if point.dist else "?") for point in entry_points(group=group))
    )


def is_third_party(strategy: str) -> bool:
    """Whether a strategy is given as module:Class or registered by an installed package."""
    return ":" in strategy or strategy in entry_point_targets("strategies")


def strategy_target(name: str, where: str = "") -> str:
    """The "module:Class" of a strategy: built in, of an installed package, or given as such. Raises UsageError, NotBuilt."""
    if ":" in name:
        return name
    packages = [(target, package) for found, target, package in entry_points_of("strategies") if found == name]
    if name in STRATEGIES:
        packages.insert(0, (STRATEGIES[name], "anyqlora"))
    if len(packages) > 1:
        raise UsageError(
            f"strategy {name!r} is registered by {' and by '.join(package for _, package in packages)}",
            where=where,
            cure="uninstall one of them, or give it as --strategy module:Class",
        )
    others = {found: f"{found} (of {package})" for found, _, package in entry_points_of("strategies")}
    return lookup("strategy", name, {**STRATEGIES, **entry_point_targets("strategies")}, where, others)


def strategy(name: str, where: str = "") -> type:
    """The class of a strategy. Raises UsageError where it cannot be imported, saying why."""
    target = strategy_target(name, where)
    if name in STRATEGIES:
        return load(target)
    try:
        found = load(target)
    except Exception as error:  # somebody else's code: whatever is wrong with it is the finding
        raise UsageError(
            f"strategy {name!r} cannot be imported: {type(error).__name__}: {error}",
            where=where or target,
            cure="--strategy module:Class, importable from here",
        ) from error
    if not isinstance(found, type) or not all(hasattr(found, part) for part in ("prepare", "backward", "step")):
        raise UsageError(
            f"strategy {name!r} is no Strategy class",
            where=where or target,
            cure="a subclass of anyqlora.on_torch.parallel.base:Strategy",
        )
    return found


def lookup(kind: str, name: str, table: dict, where: str = "", shown: Mapping[str, str] = MappingProxyType({})) -> Any:
    """The table's row for `name`. `shown`: how a name is listed, where it is more than the name.

    Raises UsageError for an unknown name (with the known ones) and NotBuilt for a known one that is refused.
    """
    built = ", ".join(shown.get(n, n) for n, row in table.items() if not str(row).startswith("!"))
    if name not in table:
        raise UsageError(f"unknown {kind} {name!r}{nearest(name, table)}", where=where, cure=f"one of: {built}")
    row = table[name]
    if isinstance(row, str) and row.startswith("!"):
        raise NotSupported(f"{kind} {name!r}: {row[1:]}", where=where, cure=f"one of: {built}")
    return row


def load(target: str) -> Any:
    """Import `module:Object`."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
