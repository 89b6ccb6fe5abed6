"""DeepSpeed configurations as settings: against DeepSpeed's own reading of the same file, and by hand."""

import json
import re

import pytest

from anyqlora.config import deepspeed_file
from anyqlora.config.resolve import resolve
from anyqlora.config.strategy_options import strategy_options
from anyqlora.core.errors import UsageError

DEMO = {"model_name": "demo", "dataset": "dummy"}
AUTO = {  # as transformers' manual has it
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "sub_group_size": 1e9,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def file(tmp_path, name="ds.json", **keys):
    """A file with each key on a line of its own."""
    path = tmp_path / name
    path.write_text(
        "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in keys.items()) + "\n}"
    )
    return str(path)


def settings(environ=None, **given):
    return resolve({**DEMO, **given}, environ=environ or {})


@pytest.mark.parametrize("as_", ["config", "strategy_config", "deepspeed", "deepspeed_config_file"])
def test_transformers_own_example_is_read_under_every_name(as_, tmp_path):
    """Reference: the example of transformers' manual, whose every auto is a setting of ours."""
    config = settings(**{as_: file(tmp_path, **AUTO)}, gradient_accumulation_steps=2, batch_size=2)
    options = strategy_options(config)
    assert (config.strategy, config.deepspeed_zero_stage, config.lr_scheduler) == ("deepspeed", 3, "constant")
    assert (config.gradient_accumulation_steps, config.batch_size, config.precision) == (2, 2, "auto")
    assert (options.zero_stage, options.offload_optimizer, options.offload_param) == (3, True, True)
    assert options.zero_options == {"overlap_comm": True, "sub_group_size": 1e9}
    assert [note.split(": ", 1)[1] for note in config.notes] == [f"scheduler WarmupLR: {deepspeed_file.LINEAR}"]


def test_numbers_mean_what_deepspeed_reads_in_them(tmp_path):
    """Reference: DeepSpeed's own configuration object of the same file."""
    from deepspeed.runtime.config import DeepSpeedConfig

    stated = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.2}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_type": "linear", "warmup_num_steps": 5}},
        "zero_optimization": {"stage": 2},
    }
    config, theirs = settings(config=file(tmp_path, **stated)), DeepSpeedConfig(stated)
    assert config.batch_size == theirs.train_micro_batch_size_per_gpu == 3
    assert config.gradient_accumulation_steps == theirs.gradient_accumulation_steps == 4
    assert config.max_grad_norm == theirs.gradient_clipping == 0.5
    assert config.deepspeed_zero_stage == theirs.zero_optimization_stage == 2
    assert config.initial_loss_scale == 2**theirs.float16_config.initial_scale_power == 4096
    assert config.loss_scale_growth_interval == theirs.float16_config.loss_scale_window == 500
    assert (config.precision, config.optimizer, config.lr_scheduler) == ("fp16_autocast", "adamw", "cosine")
    params = theirs.optimizer_params
    assert [config.lr, config.adam_eps, config.weight_decay] == [params["lr"], params["eps"], params["weight_decay"]]
    assert [config.adam_beta1, config.adam_beta2] == params["betas"] and config.warmup_steps == 5
    assert config.notes == ()


def test_the_file_ranks_below_the_layer_that_names_it(tmp_path):
    """What others state must agree, but for what refines the strategy; what nobody states is the file's."""
    ds = file(tmp_path, zero_optimization={"stage": 2}, gradient_accumulation_steps=4)
    (tmp_path / "run.yaml").write_text("strategy: fsdp\nlr: 1e-3\n")
    config = settings(config=str(tmp_path / "run.yaml"), deepspeed=ds)
    assert (config.strategy, config.gradient_accumulation_steps, config.lr) == ("deepspeed", 4, 1e-3)
    assert config.sources["gradient_accumulation_steps"] == f"{ds}:3"
    assert settings(deepspeed=ds, deepspeed_zero_stage=3).deepspeed_zero_stage == 3
    assert strategy_options(settings(deepspeed=ds, deepspeed_zero_stage=3)).zero_stage == 3
    assert settings({"ANYQLORA_DEEPSPEED": ds}).strategy == "deepspeed"
    with pytest.raises(UsageError, match="gradient_accumulation_steps 4 contradicts gradient_accumulation_steps 2"):
        settings(deepspeed=ds, gradient_accumulation_steps=2)
    with pytest.raises(UsageError, match="for strategy deepspeed, and strategy is fsdp"):
        settings(deepspeed=ds, strategy="fsdp")


def test_what_a_plan_changed_later_contradicts_nothing(tmp_path):
    """A micro-batch that was halved because memory ran out is still that of the file."""
    ds = file(tmp_path, zero_optimization={"stage": 2}, train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=1)
    halved = settings(deepspeed=ds).with_(batch_size=4, gradient_accumulation_steps=2)
    assert strategy_options(halved).zero_stage == 2


@pytest.mark.parametrize(
    ("stated", "why", "cure"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer OneBitAdam is not taken", "--optimizer adamw"),
        ({"optimizer": {"type": "Adam", "params": {"momentum": 1}}}, "optimizer: momentum", "take it out"),
        ({"optimizer": {"type": "Adam", "params": {"betas": 1}}}, "optimizer is not as DeepSpeed has it", "auto"),
        ({"optimizer": "Adam"}, "optimizer is not a map", "take it out"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler OneCycle is not taken", "--lr_scheduler"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}}, "warm-up is linear", "linear"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear", "total_num_steps": 9}}},
            "total_num_steps 9",
            "--max_steps 9",
        ),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "found while training", '"loss_scale": 0'),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "contradicts fp16_autocast", "take one of them out"),
        ({"fp16": {"enabled": True, "initial_scale_power": "many"}}, "not as DeepSpeed has it", "mend it"),
        ({"train_batch_size": 32}, "how many rows are in memory at a time", "train_micro_batch_size_per_gpu"),
        ({"pipeline": {"stages": 2}}, "pipeline of a DeepSpeed configuration", "take it out"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param to 'nvme'", "cpu"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio 0.5", "1"),
        ({"zero_optimization": 3}, "zero_optimization is not a map", "take it out"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("as_", ["config", "strategy_config"])
def test_what_cannot_be_done_is_refused_at_its_line(as_, stated, why, cure, tmp_path):
    keys = {"zero_optimization": {"stage": 2}, **stated}
    ds = file(tmp_path, **keys)
    with pytest.raises(UsageError, match=re.escape(why)) as refused:
        settings(**{as_: ds})
    lines = [f"{ds}:{number}" for number, key in enumerate(keys, 2) if key in stated]
    assert refused.value.where in lines and cure in refused.value.cure


def test_rows_of_a_step_are_checked_once_the_processes_are_known(tmp_path):
    keys = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    ds = file(tmp_path, **keys, train_batch_size=12)
    assert settings(deepspeed=ds, world_size=2).strategy == "deepspeed"
    with pytest.raises(UsageError, match="train_batch_size 12 is not .*: 18 on 3") as refused:
        settings(deepspeed=ds, world_size=3)
    assert refused.value.where == f"{ds}:5"
