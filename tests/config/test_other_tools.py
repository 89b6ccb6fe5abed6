"""Other tools' names and files, against those tools' own lists and writers: Accelerate's, torch's, fsdp_qlora's."""

import dataclasses
import re

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.constants import FSDP_SHARDING_STRATEGY
from torch.distributed.fsdp import ShardingStrategy

from anyqlora.config import other_tools
from anyqlora.config.resolve import canonical_argv, from_environment, resolve
from anyqlora.config.schema import ALIASES, SETTINGS, canonical_settings
from anyqlora.config.strategy_options import strategy_options
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.planning.backends import BackendManager
from anyqlora.planning.machine import Machine
from tests.support import documents, runs
from tests.support.paths import MACHINES

DEMO = {"model_name": "demo", "dataset": "dummy"}
A100 = Machine.from_dict(yaml.safe_load((MACHINES / "a100.json").read_text())["machine"])


def settings(environ=None, **given):
    return resolve({**DEMO, **given}, environ=environ or {})


def flags(*words):
    """The settings of a command line, as train.py takes it."""
    pairs = (word.removeprefix("--").partition("=") for word in canonical_argv([*words]))
    return settings(**{name.replace("-", "_"): value for name, _, value in pairs})


def plan(config):
    return BackendManager(machine=A100).plan(config)


def is_known(name):
    return name in SETTINGS or name in ALIASES or name in other_tools.SECTIONS or other_tools.find(name) is not None


# ------------------------------------------------------------------------------------------------------ their own lists


OF_THE_LAUNCHER = {  # how `accelerate launch` starts a script: unknown settings here, and refused as such
    *("help", "quiet", "module", "no_python", "tee", "log_dir", "role", "rdzv_conf", "monitor_interval"),
    *("vm", "env", "aws_access_key_id", "aws_secret_access_key", "training_script"),
    *("training_script_args",),
}


def test_every_key_of_accelerates_file_is_known():
    """Reference: the fields of the class that Accelerate reads it into."""
    assert [f.name for f in dataclasses.fields(ClusterConfig) if not is_known(f.name)] == []


def test_every_flag_of_accelerate_launch_is_known():
    """Reference: its parser."""
    names = {action.dest for action in launch_command_parser()._actions}
    assert len(names) > 90 and {name for name in names if not is_known(name)} == OF_THE_LAUNCHER


@pytest.mark.parametrize("kind", [kind.value for kind in DistributedType])
@pytest.mark.parametrize("spelled", [str, str.lower])
def test_every_distributed_type_is_a_strategy_or_is_refused_by_name(kind, spelled):
    """Reference: Accelerate's enumeration."""
    expected = {"NO": "single", "FSDP": "fsdp", "DEEPSPEED": "deepspeed"} | dict.fromkeys(
        ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU"), "ddp"
    )
    if kind in expected:
        config = settings(distributed_type=spelled(kind))
        assert config.strategy == expected[kind]
        assert config.backend == {"MULTI_CPU": "cpu", "MULTI_XPU": "xpu"}.get(kind, "auto")
    else:
        with pytest.raises(UsageError, match="(?i)megatron|tpu|" + kind) as refused:
            settings(distributed_type=spelled(kind))
        assert refused.value.cure


def test_every_sharding_strategy_has_its_name_and_its_number():
    """References: Accelerate's list, and torch's enumeration of what they mean."""
    ours = {
        ShardingStrategy.FULL_SHARD: ("fsdp", "full_shard"),
        ShardingStrategy.SHARD_GRAD_OP: ("fsdp", "shard_grad_op"),
        ShardingStrategy.NO_SHARD: ("ddp", "ddp"),
        ShardingStrategy.HYBRID_SHARD: ("fsdp", "hybrid_full_shard"),
        ShardingStrategy._HYBRID_SHARD_ZERO2: ("fsdp", "hybrid_shard_grad_op"),
    }
    for number, (theirs, expected) in enumerate(ours.items(), 1):
        assert FSDP_SHARDING_STRATEGY[number - 1] == theirs.name.removeprefix("_")
        for spelled in (theirs.name, theirs.name.lower(), FSDP_SHARDING_STRATEGY[number - 1], str(number), number):
            config = settings(distributed_type="FSDP", fsdp_sharding_strategy=spelled)
            assert (config.strategy, config.sharding_strategy) == expected
        assert plan(settings(sharding_strategy=str(number))).strategy == expected[0]  # which says the strategy, too
    option = strategy_options(settings(strategy="FSDP", strategy_opt="sharding_strategy=HYBRID_SHARD"))
    assert option.sharding_strategy == "hybrid_full_shard"


# ------------------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"reshard_after_forward": "true"}, {"sharding_strategy": "full_shard"}),
        ({"fsdp_reshard_after_forward": "False"}, {"sharding_strategy": "shard_grad_op"}),
        ({"fsdp_offload_params": "true"}, {"use_cpu_offload": True}),
        ({"cpu_offload": True}, {"use_cpu_offload": True}),
        ({"fsdp_activation_checkpointing": "true"}, {"use_gradient_checkpointing": True}),
        ({"use_cpu": "true"}, {"backend": "cpu"}),
        ({"tp_degree": 2}, {"mesh": "model=2"}),
        ({"tp_degree": 1}, {"mesh": ""}),
        ({"num_micro_batches": 3}, {"gradient_accumulation_steps": 3}),
        ({"num_machines": 1, "machine_rank": 0}, {}),
        ({"main_process_ip": "node1", "num_processes": 2}, {"master_addr": "node1", "world_size": 2}),
        ({"main_process_port": 29501, "num_processes": 2}, {"master_port": "29501"}),
        ({"mixed_precision": "BF16"}, {"precision": "bf16"}),
        ({"mixed_precision": "no"}, {"precision": "fp32"}),
        ({"use_deepspeed": "true", "zero_stage": 3, "offload_param_device": "CPU"}, {"use_cpu_offload": True}),
        ({"optim": "ADAMW_TORCH"}, {"optimizer": "adamw"}),
        ({"precision": "AUTO", "batch_size": "Auto"}, {"precision": "auto", "batch_size": "auto"}),
        ({"precision": "mp_bf16_autocast"}, {"precision": "bf16_autocast"}),
        ({"precision": "mp_bf16_buffers_autocast"}, {"precision": "bf16_buffers_autocast"}),
        ({"train_type": "hf_qlora"}, {"train_type": "qlora", "quantizer": "nf4"}),
        ({"lora_target_modules": "none"}, {"lora_target_modules": "default"}),
        ({"wrapping_policy": "llamarecipes"}, {}),
        ({"backend": "CPU"}, {"backend": "cpu"}),
    ],
    ids=str,
)
def test_theirs_is_ours_in_code_and_in_the_environment(theirs, ours):
    environ = {f"ANYQLORA_{name.upper()}": str(value) for name, value in theirs.items()}
    for config in (settings(**theirs), settings(environ)):
        assert {name: getattr(config, name) for name in ours} == ours


@pytest.mark.parametrize(
    ("words", "why", "cure"),
    [
        (["--distributed_type", "MEGATRON_LM"], "Megatron-LM is not offered", "fsdp"),
        (["--num_machines", "2"], "num_machines 2", "torchrun --nnodes"),
        (["--machine_rank", "1"], "machine_rank 1", "torchrun --nnodes"),
        (["--mixed_precision", "fp8"], "fp8 arithmetic is not offered", "--frozen_matmul fp8"),
        (["--fp8_backend", "TE"], "fp8 arithmetic is not offered", "--frozen_matmul fp8"),
        (["--offload_param_device", "nvme"], "only host memory", "cpu or none"),
        (["--offload_optimizer_device", "nvme"], "only host memory", "cpu or none"),
        (["--pp_degree", "2"], "pipeline parallelism", "tp or fsdp"),
        (["--gpu_ids", "0,1"], "gpu_ids 0,1", "CUDA_VISIBLE_DEVICES=0,1"),
        (["--dynamo_backend", "INDUCTOR"], "torch.compile", "NO"),
        (["--dynamo_use_fullgraph"], "torch.compile", "leave out"),
        (["--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"], "each block", "TRANSFORMER_BASED_WRAP"),
        (["--wrapping_policy", "size"], "each block", "llamarecipes"),
        (["--fsdp_use_orig_params", "false"], "FSDP2 has parameters as they are", "leave out"),
        (["--compute_environment", "AMAZON_SAGEMAKER"], "compute_environment AMAZON_SAGEMAKER", "LOCAL_MACHINE"),
        (["--megatron_lm_recompute_method", "block"], "Megatron-LM is not offered", "fsdp"),
        (["--tpu_use_cluster", "true"], "TPUs are not offered", "leave out"),
        (["--cpu_ram_efficient_loading", "false"], "weights are always streamed", "leave out"),
        (["--reshard_after_forward", "4"], "reshard_after_forward 4", "true, false"),
        (["--use_fsdp", "perhaps"], "use_fsdp perhaps", "leave out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_refused_by_its_name_with_a_cure(words, why, cure):
    with pytest.raises(NotSupported, match=re.escape(why)) as refused:
        flags(*words)
    assert cure in refused.value.cure and refused.value.where.startswith("command line: --")


def test_what_one_strategy_alone_can_do_asks_for_it():
    for stated, strategy in (
        ({"use_cpu_offload": "true"}, "fsdp"),
        ({"strategy_opt": "hybrid_shard_size=1"}, "fsdp"),
        ({"offload_optimizer_device": "cpu"}, "deepspeed"),
        ({"offload_param_device": "cpu", "zero_stage": 3}, "deepspeed"),
        ({"strategy_opt": "bucket_cap_mb=3"}, "ddp"),
        ({"offload_optimizer_device": "none"}, "single"),
    ):
        assert plan(settings(**stated)).strategy == strategy, stated
    with pytest.raises(UsageError, match="unknown option 'offload_optimizer' of FsdpOptions"):
        settings(offload_optimizer_device="cpu", strategy="fsdp")


def test_two_names_may_say_the_same_and_no_more():
    words = ["--use_fsdp", "--distributed_type", "FSDP", "--strategy", "fsdp"]
    assert flags(*words, "--reshard_after_forward", "true", "--fsdp_sharding_strategy", "FULL_SHARD").strategy == "fsdp"
    with pytest.raises(UsageError, match="strategy is stated twice; first at command line: --use_fsdp"):
        canonical_argv(["--use_fsdp", "--use_deepspeed"])
    with pytest.raises(UsageError, match="sharding_strategy is stated twice"):
        settings(fsdp_sharding_strategy="FULL_SHARD", reshard_after_forward="false")
    with pytest.raises(UsageError, match="--num_machines needs a value"):
        canonical_argv(["--num_machines"])


def test_options_of_all_layers_are_merged(tmp_path):
    """By hand: an option holds as the highest layer has it, with or without its strategy's name."""
    file = tmp_path / "run.yaml"
    file.write_text("offload_optimizer_device: cpu\nzero_stage: 2\nstrategy: deepspeed\n")
    assert strategy_options(settings(config=str(file))).offload_optimizer
    assert not strategy_options(settings(config=str(file), offload_optimizer_device="none")).offload_optimizer
    file.write_text("strategy: ddp\nstrategy_opt: overlap=true,bucket_cap_mb=3\n")
    found = strategy_options(
        settings({"ANYQLORA_DDP_BUCKET_CAP_MB": "4"}, config=str(file), strategy_opt="find_unused_parameters=true")
    )
    assert (found.overlap, found.bucket_cap_mb, found.find_unused_parameters) == ("true", 4, True)


# ------------------------------------------------------------------------------------------------------------ files


OF_FSDP = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": True,
    "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_transformer_layer_cls_to_wrap": None,
    "fsdp_use_orig_params": False,
}
OF_DEEPSPEED = {
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "offload_optimizer_device": "cpu",
    "offload_param_device": "none",
    "zero3_init_flag": False,
    "zero_stage": 2,
}


def written(path, **fields):
    """Accelerate's file, by Accelerate's own writer."""
    config = ClusterConfig(
        **{
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "MULTI_GPU",
            "mixed_precision": "bf16",
            "use_cpu": False,
            "debug": False,
            "num_processes": 2,
            "gpu_ids": "all",
            **fields,
        }
    )
    config.to_yaml_file(path)
    return str(path)


@pytest.mark.parametrize("as_", ["config", "config_file", "strategy_config", "fsdp_config"])
def test_accelerates_file_is_read_as_it_is(as_, tmp_path):
    file = written(tmp_path / "fsdp.yaml", distributed_type="FSDP", fsdp_config=OF_FSDP)
    config = settings(**{as_: file})
    assert (config.strategy, config.sharding_strategy, config.use_cpu_offload) == ("fsdp", "shard_grad_op", True)
    assert (config.world_size, config.precision, config.strategy_config) == (2, "bf16", "")
    line = 1 + (tmp_path / "fsdp.yaml").read_text().split("num_processes")[0].count("\n")
    assert config.sources["world_size"] == f"{file}:{line}"
    assert [note.split(": ")[1].split()[0] for note in config.notes] == ["fsdp_state_dict_type", "fsdp_use_orig_params"]
    assert all(note in plan(config).warnings for note in config.notes)
    assert settings(**{as_: file, "num_processes": 3, "cpu_offload": False}).world_size == 3
    own = tmp_path / "run.yaml"
    own.write_text("precision: fp32\nlora_rank: 4\n")
    if as_ in ("strategy_config", "fsdp_config"):  # below what names it, above the file that does not
        both = settings(config=str(own), **{as_: file})
        assert (both.precision, both.lora_rank) == ("bf16", 4)
        own.write_text(f"precision: fp32\n{as_}: {file}\n")
        assert settings(config=str(own)).precision == "fp32"


def test_accelerates_deepspeed_section_is_ours(tmp_path):
    file = written(tmp_path / "ds.yaml", distributed_type="DEEPSPEED", deepspeed_config=OF_DEEPSPEED)
    config = settings(config=file)
    assert (config.strategy, config.deepspeed_zero_stage, config.max_grad_norm) == ("deepspeed", 2, 0.5)
    assert (config.gradient_accumulation_steps, config.use_cpu_offload) == (4, False)
    options = strategy_options(config)
    assert (options.zero_stage, options.offload_optimizer, options.offload_param) == (2, True, False)


def test_accelerates_file_may_name_deepspeeds(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 3}')
    section = {"deepspeed_config_file": str(tmp_path / "ds.json"), "zero3_init_flag": True}
    config = settings(config=written(tmp_path / "a.yaml", distributed_type="DEEPSPEED", deepspeed_config=section))
    assert (config.strategy, config.deepspeed_zero_stage, config.batch_size) == ("deepspeed", 3, 3)
    assert config.sources["batch_size"] == f"{tmp_path / 'ds.json'}:1"


@pytest.mark.parametrize(
    ("fields", "why", "key"),
    [
        ({"num_machines": 2}, "num_machines 2", "num_machines"),
        ({"mixed_precision": "fp8", "fp8_config": {"backend": "TE"}}, "fp8 arithmetic", "  backend"),
        ({"mixed_precision": "fp8"}, "fp8 arithmetic", "mixed_precision"),
        ({"distributed_type": "MEGATRON_LM"}, "Megatron-LM", "distributed_type"),
        ({"megatron_lm_config": {"megatron_lm_pp_degree": 2}}, "pipeline", "  megatron_lm_pp_degree"),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "torch.compile", "  dynamo_backend"),
        ({"parallelism_config": {"parallelism_config_cp_size": 2}}, "sequences", "  parallelism_config_cp_size"),
        ({"fsdp_config": {"fsdp_new_thing": 2}}, "unknown setting 'fsdp_new_thing'", "  fsdp_new_thing"),
        ({"deepspeed_config": {"offload_param_device": "nvme"}}, "only host memory", "  offload_param_device"),
        ({"mpirun_config": {"mpirun_hostfile": "hosts"}}, "mpirun is not offered", "  mpirun_hostfile"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_a_file_asks_for_in_vain_is_refused_at_its_line(fields, why, key, tmp_path):
    file = written(tmp_path / "a.yaml", **fields)
    lines = (tmp_path / "a.yaml").read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(lines) if text.startswith(f"{key}:"))
    with pytest.raises(UsageError, match=re.escape(why)) as refused:
        settings(config=file)
    assert refused.value.where == f"{file}:{line}" and refused.value.cure


def test_a_file_of_ones_own_may_use_their_sections(tmp_path):
    """And is read as strictly as ever: a name of ours without a value is an error."""
    file = tmp_path / "run.yaml"
    file.write_text("model_name: demo\nfsdp_config:\n  sharding_strategy: SHARD_GRAD_OP\n")
    assert resolve({"config": str(file)}, environ={}).sharding_strategy == "shard_grad_op"
    file.write_text("model_name: demo\nfsdp_config:\n  cpu_offload: true\nlr:\n")
    with pytest.raises(UsageError, match=r"run.yaml:4: lr: None is not a value"):
        resolve({"config": str(file)}, environ={})


@pytest.mark.distributed
def test_accelerates_file_runs_as_one_process_does(tmp_path):
    """Reference: one process without the file."""
    file = written(tmp_path / "fsdp.yaml", distributed_type="FSDP", fsdp_config=OF_FSDP, mixed_precision="no")
    tiny = {**DEMO, "context_length": 64, "max_steps": 2, "lora_dropout": 0, "save_steps": 0}
    alone = runs.run(tmp_path, "alone", **tiny, precision="fp32", batch_size=8)
    two = runs.run(tmp_path, "two", **tiny, config=file, batch_size=4)
    said = yaml.safe_load((two / "plan.json").read_text())
    assert (said["strategy"], said["world_size"], said["config"]["use_cpu_offload"]) == ("fsdp", 2, True)
    assert any("fsdp_state_dict_type" in warning for warning in said["warnings"])
    for one, other in zip(runs.metrics(alone), runs.metrics(two), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)


# -------------------------------------------------------------------------------------------------------- fsdp_qlora


DEFAULTS = {  # of its `main` (commit 05ed9f2), but for its model and its data set
    "world_size": -1,
    "train_type": "qlora",
    "batch_size": 1,
    "context_length": 512,
    "gradient_accumulation_steps": 1,
    "num_epochs": 1,
    "dataset_samples": 512,
    "sharding_strategy": "full_shard",
    "use_gradient_checkpointing": True,
    "reentrant_checkpointing": False,
    "use_cpu_offload": True,
    "use_activation_cpu_offload": False,
    "low_memory": True,
    "no_sync": False,
    "precision": "bf16",
    "save_model": False,
    "output_dir": "output",
    "lora_rank": 64,
    "lora_alpha": 16,
    "lora_dropout": 0.1,
    "lora_target_modules": "all",
    "verbose": False,
    "lr": 1e-5,
    "apply_gradient_clipping": False,
    "wd": 0.1,
    "profile_memory": False,
    "optimizer": "adamw",
    "lr_scheduler": "constant",
    "loading_workers": -1,
    "log_to": "tqdm",
    "master_addr": "localhost",
    "master_port": "12355",
    "seed": 42,
    "project_name": "fsdp_qlora",
    "n_bits": 4,
    "profile": False,
    "profiling_output": "profiles",
    "with_stack": False,
    "with_shapes": False,
    "export_trace": True,
    "export_memory_timeline": False,
    "wait_steps": 0,
    "warmup_steps": 1,
    "active_steps": 2,
    "repeat": 0,
    "profiling_frequency": 10,
    "max_steps": -1,
}


def test_all_of_fsdp_qloras_defaults_can_be_stated_at_once():
    words = [word for name, value in DEFAULTS.items() for word in (f"--{name}", str(value))]
    planned = plan(flags(*words, "--wrapping_policy", "llamarecipes"))
    assert (planned.strategy, planned.quantizer, planned.config.use_cpu_offload) == ("fsdp", "nf4", True)


@pytest.mark.parametrize("name", DEFAULTS)
def test_each_of_fsdp_qloras_defaults_can_be_stated_alone(name):
    assert plan(flags(f"--{name}", str(DEFAULTS[name]))).batch_size >= 1


@pytest.mark.parametrize(
    ("words", "why", "cure"),
    [
        ("--grad_norm 0.3 --apply_gradient_clipping false", "nothing is clipped", "leave out max_grad_norm"),
        ("--n_bits 4 --train_type lora", "contradicts train_type = lora", "--train_type qlora --bits 4"),
        ("--dataset_samples 64", "only alpaca_sample and dummy are cut", "dataset"),
        ("--loading_workers 4", "one tensor at a time", "leave out loading_workers"),
    ],
)
def test_what_of_fsdp_qlora_does_nothing_here_is_answered(words, why, cure):
    other = {"model_name": "demo", "dataset": "demo"}
    stated = dict(word.removeprefix("--").replace("-", "_").split("=", 1) for word in canonical_argv(words.split()))
    with pytest.raises(UsageError, match=why) as refused:
        resolve({**other, **stated}, environ={})
    assert cure in refused.value.cure


def test_the_default_set_is_cut_to_its_samples():
    """Nobody names a data set: fsdp_qlora's own is taken, and --dataset_samples is its."""
    assert resolve({"model_name": "demo", "dataset_samples": "64"}, environ={}).dataset == "alpaca_sample"


# --------------------------------------------------------------------------------------------------------- the manual


PAGE = documents.page("coming-from.md").text
OWN_TABLE = PAGE[PAGE.index("## Accelerate") : PAGE.index("## DeepSpeed")]
TABLE = re.findall(r"^\| `(\w+: [\w-]+)` \| (?:`(--[^`]+)`)? *\|", OWN_TABLE, re.MULTILINE)


@pytest.mark.parametrize("theirs, ours", TABLE, ids=[theirs for theirs, _ in TABLE])
def test_the_tables_of_the_manual_are_the_rows(theirs, ours):
    """What stands there for a name and its value is what it means; nothing stands for what is so anyway."""
    assert len(TABLE) > 15
    name, _, value = theirs.partition(": ")
    found = {key: str(stated).lower() for key, stated in canonical_settings(name, value, "", []).items()}
    setting, _, wanted = ours.removeprefix("--").partition(" ")
    assert (found.get(setting, "") == wanted) if ours else found == {}


def test_the_manual_has_what_files_may_say_in_vain():
    noted = [name for name, row in other_tools.NAMES.items() if row.note]
    assert len(noted) > 5 and [name for name in noted if f"`{name}`" not in OWN_TABLE] == []


def test_variables_of_their_names_are_not_taken_for_options_of_a_strategy():
    found = from_environment({"ANYQLORA_FSDP_OFFLOAD_PARAMS": "true", "ANYQLORA_DEEPSPEED_CONFIG_FILE": "ds.json"})
    assert {name: value for name, (value, _) in found.items()} == {
        "use_cpu_offload": "true",
        "strategy_config": "ds.json",
    }
