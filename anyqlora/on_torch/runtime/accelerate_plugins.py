"""The objects that Accelerate's Accelerator takes - plugins, handlers, configurations - as settings."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from anyqlora.core.errors import UsageError

CURE = "state it as settings: strategy=, strategy_opt=, precision="
# field -> why any value of it is the same here
OF_FSDP = {
    "backward_prefetch": "FSDP2 fetches the next block before a block's gradients",
    "state_dict_type": "states hold whole tensors",
    "state_dict_config": "states hold whole tensors",
    "optim_state_dict_config": "states hold whole tensors",
    "limit_all_gathers": "FSDP2 has no other way",
    "use_orig_params": "FSDP2 has parameters as they are",
    "sync_module_states": "the first process's weights are everybody's",
    "cpu_ram_efficient_loading": "the model is the loop's own",
    "auto_wrap_policy": "each block of the model is sharded by itself",
    "transformer_cls_names_to_wrap": "each block of the model is sharded by itself",
    "min_num_params": "each block of the model is sharded by itself",
}
OF_DEEPSPEED = {
    "is_train_batch_min": "the loader's batch is the micro-batch",
    "zero3_save_16bit_model": "get_state_dict gives whole tensors",
    "msamp_opt_level": "enable_msamp decides",
}
OF_DEEPSPEEDS_FILE = ("zero_optimization", "gradient_accumulation_steps", "gradient_clipping", "steps_per_print")


def settings_of_objects(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with each of Accelerate's objects among them replaced by what it says, which counts less than what
    is stated beside it. Raises UsageError for what is not offered, naming the class and the field.
    """
    stated, implied = dict(settings), {}
    for name in list(stated):
        value = stated[name]
        objects = value if isinstance(value, (list, tuple)) else [value]
        if not objects or not all(dataclasses.is_dataclass(one) and type(one).__name__ in READ for one in objects):
            continue
        del stated[name]
        for one in objects:
            for setting, meaning in READ[type(one).__name__](one).items():
                options = [implied.get(setting), meaning] if setting == "strategy_opt" else [meaning]
                implied[setting] = ",".join(filter(None, options)) if setting == "strategy_opt" else meaning
    return {**implied, **stated}


def _fsdp(plugin) -> dict[str, Any]:
    sharding = getattr(plugin.sharding_strategy, "name", plugin.sharding_strategy)
    if sharding is None and plugin.reshard_after_forward is not None:
        sharding = "FULL_SHARD" if plugin.reshard_after_forward else "SHARD_GRAD_OP"
    offload = plugin.cpu_offload  # torch's CPUOffload, FSDP2's CPUOffloadPolicy, or whether
    offloads = getattr(offload, "offload_params", type(offload).__name__ == "CPUOffloadPolicy" or offload is True)
    _check(plugin, {"fsdp_version", "sharding_strategy", "reshard_after_forward", "cpu_offload"}, OF_FSDP)
    is_replica = str(sharding).upper() == "NO_SHARD"
    return {
        "strategy": "ddp" if is_replica else "fsdp",
        **({"fsdp_sharding_strategy": sharding} if sharding and not is_replica else {}),
        **({"use_cpu_offload": True} if offloads else {}),
    }


def _deepspeed(plugin) -> dict[str, Any]:
    for device in ("offload_optimizer_device", "offload_param_device"):
        if getattr(plugin, device) not in (None, "none", "cpu"):
            raise UsageError(f"DeepSpeedPlugin: {device} {getattr(plugin, device)}", where="Runtime.of", cure="cpu")
    config = plugin.deepspeed_config
    others = [key for key, value in config.items() if key not in OF_DEEPSPEEDS_FILE and value != "auto"]
    if others:
        raise UsageError(
            f"DeepSpeedPlugin: {', '.join(others)} of its configuration",
            where="Runtime.of",
            cure='strategy_config="FILE", which is read whole',
        )
    # zero3_init_flag follows from the stage, and is about models that are made after it
    named = {"gradient_accumulation_steps", "gradient_clipping", "zero_stage", "hf_ds_config", "zero3_init_flag"}
    devices = {"offload_optimizer_device", "offload_param_device"}
    _check(plugin, named | devices, OF_DEEPSPEED)
    steps, clipping = config.get("gradient_accumulation_steps", "auto"), config.get("gradient_clipping", "auto")
    return {
        "strategy": "deepspeed",
        "deepspeed_zero_stage": plugin.zero_stage,
        **({"gradient_accumulation_steps": steps} if steps not in ("auto", None) else {}),
        **({"max_grad_norm": clipping} if clipping not in ("auto", None) else {}),
        **({"strategy_opt": "deepspeed.offload_optimizer=true"} if plugin.offload_optimizer_device == "cpu" else {}),
        **({"use_cpu_offload": True} if plugin.offload_param_device == "cpu" else {}),
    }


def _ddp(handler) -> dict[str, Any]:
    same = {"gradient_as_bucket_view": "buckets are an option of torch's that saves memory, no other numbers"}
    _check(handler, {"find_unused_parameters", "bucket_cap_mb"}, same)
    options = [f"ddp.find_unused_parameters={str(handler.find_unused_parameters).lower()}"]
    return {"strategy_opt": ",".join([*options, f"ddp.bucket_cap_mb={handler.bucket_cap_mb}"])}


def _process_group(handler) -> dict[str, Any]:
    _check(handler, {"timeout"}, {"backend": "the device decides: NCCL on GPUs, gloo on CPUs"})
    return {"dist_timeout": handler.timeout.total_seconds()} if handler.timeout is not None else {}


def _accumulation(plugin) -> dict[str, Any]:
    _check(plugin, {"num_steps"})
    return {} if plugin.num_steps is None else {"gradient_accumulation_steps": plugin.num_steps}


def _loaders(configuration) -> dict[str, Any]:
    names = ("split_batches", "dispatch_batches", "even_batches")  # which Runtime.of answers
    sampler = "the loader's own sampler and generator are kept"
    same = {
        "use_seedable_sampler": sampler,
        "data_seed": sampler,
        "non_blocking": "it saves time and no other numbers",
        "use_stateful_dataloader": "save_state keeps the place of a prepared loader",
    }
    _check(configuration, {*names}, same)
    return {name: getattr(configuration, name) for name in names}


def _project(configuration) -> dict[str, Any]:
    same = {"logging_dir": "trackers write below project_dir", "save_on_each_node": "the first process writes"}
    is_own = configuration.logging_dir == configuration.project_dir  # as the class itself states it
    _check(configuration, {"project_dir", "logging_dir"} if is_own else {"project_dir"}, same)
    return {} if configuration.project_dir is None else {"project_dir": configuration.project_dir}


def _nothing(one) -> dict[str, Any]:
    _check(one, set())
    return {}


def _check(one, honoured: set[str], same: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raises UsageError where a field that is not honoured has another value than one that was left out; one in `same`
    changes nothing here, {field: why}, which is said.
    """
    version = {"fsdp_version": one.fsdp_version} if hasattr(one, "fsdp_version") else {}  # which decides on defaults
    plain = type(one)(**version)
    for each in dataclasses.fields(one):
        value = getattr(one, each.name)
        if each.name in honoured or value in (None, getattr(plain, each.name)):
            continue
        if each.name not in same:
            raise UsageError(
                f"{type(one).__name__}: {each.name}={value!r} is not offered", where="Runtime.of", cure=CURE
            )
        warnings.warn(f"{type(one).__name__}: {each.name} changes nothing here: {same[each.name]}", stacklevel=2)


READ: dict[str, Callable[[Any], dict[str, Any]]] = {  # class of Accelerate's -> its settings
    "FullyShardedDataParallelPlugin": _fsdp,
    "DeepSpeedPlugin": _deepspeed,
    "DistributedDataParallelKwargs": _ddp,
    "InitProcessGroupKwargs": _process_group,
    "GradientAccumulationPlugin": _accumulation,
    "DataLoaderConfiguration": _loaders,
    "ProjectConfiguration": _project,
    "GradScalerKwargs": _nothing,
    "AutocastKwargs": _nothing,
    "TorchDynamoPlugin": _nothing,
}
