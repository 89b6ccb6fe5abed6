"""Objects that Accelerate's Accelerator takes, made by its own classes, say the same to Runtime.of."""

import datetime

import pytest
from accelerate import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)

from anyqlora.core.errors import UsageError
from anyqlora.on_torch.runtime import Runtime
from anyqlora.on_torch.runtime.accelerate_plugins import settings_of_objects
from anyqlora.testing import world


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (
            {"fsdp_plugin": FullyShardedDataParallelPlugin()},
            {"strategy": "fsdp", "fsdp_sharding_strategy": "FULL_SHARD"},
        ),
        (
            {"fsdp_plugin": FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP", cpu_offload=True)},
            {"strategy": "fsdp", "fsdp_sharding_strategy": "SHARD_GRAD_OP", "use_cpu_offload": True},
        ),
        (
            {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False)},
            {"strategy": "fsdp", "fsdp_sharding_strategy": "SHARD_GRAD_OP"},
        ),
        (
            {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)},
            {"strategy": "fsdp", "fsdp_sharding_strategy": "FULL_SHARD", "use_cpu_offload": True},
        ),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD")}, {"strategy": "ddp"}),
        (
            {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3, gradient_clipping=0.5, offload_param_device="cpu")},
            {
                "strategy": "deepspeed",
                "deepspeed_zero_stage": 3,
                "max_grad_norm": 0.5,
                "use_cpu_offload": True,
            },
        ),
        (
            {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True), GradScalerKwargs()]},
            {"strategy_opt": "ddp.find_unused_parameters=true,ddp.bucket_cap_mb=25"},
        ),
        (
            {"kwargs_handlers": [InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=90))]},
            {"dist_timeout": 90.0},
        ),
        (
            {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=4)},
            {"gradient_accumulation_steps": 4},
        ),
        ({"project_config": ProjectConfiguration(project_dir="here")}, {"project_dir": "here"}),
        (
            {"dataloader_config": DataLoaderConfiguration(), "mixed_precision": "bf16"},
            {"split_batches": False, "dispatch_batches": None, "even_batches": True, "mixed_precision": "bf16"},
        ),
        (
            {"fsdp_plugin": FullyShardedDataParallelPlugin(), "strategy": "ddp"},
            {"strategy": "ddp", "fsdp_sharding_strategy": "FULL_SHARD"},
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_an_object_is_what_it_says(given, settings):
    assert settings_of_objects(given) == settings


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"fsdp_plugin": FullyShardedDataParallelPlugin(activation_checkpointing=True)},
            "activation_checkpointing=True",
        ),
        ({"deepspeed_plugin": DeepSpeedPlugin(offload_param_device="nvme")}, "offload_param_device nvme"),
        (
            {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config={"fp16": {"enabled": True}, "zero_optimization": {}})},
            "fp16 of its configuration",
        ),
        ({"kwargs_handlers": [DistributedDataParallelKwargs(static_graph=True)]}, "static_graph=True is not offered"),
        ({"kwargs_handlers": [GradScalerKwargs(init_scale=2.0)]}, "init_scale=2.0 is not offered"),
        ({"kwargs_handlers": [ProfileKwargs()]}, "ProfileKwargs of Accelerate's is not offered"),
        ({"dataloader_config": DataLoaderConfiguration(split_batches=True)}, "split_batches"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_offered_is_named(given, sentence):
    with pytest.raises(UsageError, match=sentence) as refused:
        Runtime.of(backend="cpu", precision="fp32", strategy="single", **given)
    assert refused.value.cure or "split_batches" in sentence


def test_what_changes_nothing_is_said():
    with pytest.warns(
        UserWarning, match="FullyShardedDataParallelPlugin: min_num_params changes nothing here: each block"
    ):
        settings_of_objects({"fsdp_plugin": FullyShardedDataParallelPlugin(min_num_params=5)})
    with pytest.warns(UserWarning, match="data_seed changes nothing here: the loader's own sampler"):
        settings_of_objects({"dataloader_config": DataLoaderConfiguration(data_seed=3)})


def planned(settings, option):
    """What is in effect on two processes."""
    runtime = Runtime.of(cpu=True, mixed_precision="no", **settings)
    return runtime.distributed_type, getattr(runtime.strategy.options, option)


def test_they_are_in_effect():
    plugin, handler = FullyShardedDataParallelPlugin(), DistributedDataParallelKwargs(bucket_cap_mb=7)
    assert world(2, planned, {"fsdp_plugin": plugin}, "sharding_strategy") == [("FSDP", "full_shard")] * 2
    settings = {"strategy": "ddp", "kwargs_handlers": [handler]}
    assert world(2, planned, settings, "bucket_cap_mb") == [("MULTI_CPU", 7)] * 2
