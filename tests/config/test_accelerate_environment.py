"""The variables that `accelerate launch` gives to the processes that it starts, made by itself, are settings."""

import json
import subprocess
import sys

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import launch

from anyqlora.cli import doctor
from anyqlora.config.resolve import resolve
from anyqlora.core.errors import NotSupported
from tests.support.paths import ROOT

BASE = {"model_name": "demo", "dataset": "demo"}


def variables(*words):
    """Those that Accelerate's launcher sets for `words`; what else the environment has is left out."""
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args([*words, "train.py"]))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""
        environ = launch.prepare_deepspeed_cmd_env(arguments)[1]
    elif arguments.multi_gpu or arguments.use_fsdp or arguments.use_megatron_lm:
        environ = launch.prepare_multi_gpu_env(arguments)
    else:
        environ = launch.prepare_simple_launcher_cmd_env(arguments)[1]
    return {name: value for name, value in environ.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def changed(environ, **given):
    """{setting: value} of what the variables change, and what the plan says of the others."""
    config, plain = resolve({**BASE, **given}, environ=environ), resolve({**BASE, **given}, environ={})
    names = [name for name in vars(plain) if name not in ("sources", "notes")]
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(plain, name)}, [
        note.partition(" changes")[0] for note in config.notes
    ]


ON_TWO = ("--multi_gpu", "--num_processes", "2")
MEANINGS = [
    (("--num_processes", "1"), {}, []),
    (("--cpu", "--num_processes", "1"), {"backend": "cpu"}, []),
    (("--num_processes", "1", "--mixed_precision", "bf16"), {"precision": "bf16"}, []),
    ((*ON_TWO, "--mixed_precision", "fp16"), {"precision": "fp16_autocast"}, []),
    (
        ("--use_fsdp", "--num_processes", "2", "--fsdp_sharding_strategy", "SHARD_GRAD_OP"),
        {"strategy": "fsdp", "sharding_strategy": "shard_grad_op"},
        [],
    ),
    (
        ("--use_fsdp", "--num_processes", "2", "--fsdp_offload_params", "true", "--fsdp_use_orig_params", "false"),
        {"strategy": "fsdp", "use_cpu_offload": True},
        ["FSDP_USE_ORIG_PARAMS: fsdp_use_orig_params false"],
    ),
    (
        ("--use_fsdp", "--num_processes", "2", "--fsdp_version", "2", "--fsdp_reshard_after_forward", "false"),
        {"strategy": "fsdp", "sharding_strategy": "shard_grad_op"},
        [],
    ),
    (
        ("--use_deepspeed", "--num_processes", "2", "--zero_stage", "3", "--offload_param_device", "cpu"),
        {"strategy": "deepspeed", "deepspeed_zero_stage": 3, "use_cpu_offload": True},
        [],
    ),
    (
        ("--use_deepspeed", "--num_processes", "2", "--gradient_accumulation_steps", "4", "--gradient_clipping", "0.5"),
        {"strategy": "deepspeed", "gradient_accumulation_steps": 4, "max_grad_norm": 0.5},
        [],
    ),
]


@pytest.mark.parametrize(("words", "settings", "notes"), MEANINGS, ids=lambda value: str(value)[:60])
def test_what_its_launcher_states_is_a_setting_or_said(words, settings, notes):
    seen, said = changed(variables(*words))
    always_so = {"FSDP_STATE_DICT_TYPE: fsdp_state_dict_type SHARDED_STATE_DICT", "FSDP_SYNC_MODULE_STATES"}
    assert seen == settings and [note for note in said if note not in always_so] == notes


def test_every_variable_of_the_launchers_is_known():
    """None of them is answered by "it is no setting"."""
    words = [
        (*ON_TWO, "--dynamo_backend", "no"),
        ("--use_fsdp", "--num_processes", "2"),
        ("--use_deepspeed", "--num_processes", "2"),
    ]
    for each in words:
        assert not [note for note in resolve(BASE, environ=variables(*each)).notes if "it is no setting" in note]


def test_flags_and_our_own_variables_count_more():
    environ = {**variables(*ON_TWO, "--mixed_precision", "bf16"), "ANYQLORA_PRECISION": "fp32"}
    assert resolve(BASE, environ=environ).precision == "fp32"
    assert resolve({**BASE, "precision": "bf16"}, environ=environ).precision == "bf16"


def test_a_file_counts_less(tmp_path):
    (tmp_path / "run.yaml").write_text("precision: fp32\nlr: 0.5\n")
    config = resolve({**BASE, "config": str(tmp_path / "run.yaml")}, environ={"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert (config.precision, config.lr) == ("bf16", 0.5)


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "fp8 arithmetic is not offered"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "torch.compile is not offered"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM is not offered"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, "each block of the model"),
    ],
)
def test_what_is_not_offered_is_refused_with_the_variable(environ, sentence):
    with pytest.raises(NotSupported, match=sentence) as refused:
        resolve(BASE, environ=environ)
    assert refused.value.where in environ


def test_variables_of_fsdp_count_where_accelerate_asks_for_it():
    """FSDP_* without ACCELERATE_USE_FSDP is of another program, and FSDP_BACKEND ours."""
    assert changed({"FSDP_OFFLOAD_PARAMS": "true", "FSDP_BACKEND": "cpu"}) == ({"backend": "cpu"}, [])
    assert changed({"ACCELERATE_NO_SUCH_THING": "1"}) == ({}, ["ACCELERATE_NO_SUCH_THING 1"])


def test_doctor_says_what_they_state():
    found = list(doctor.environment({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_NO_SUCH_THING": "1"}))
    assert [(one.mark, one.what.partition(" for")[0]) for one in found] == [
        ("note", "ACCELERATE_MIXED_PRECISION states precision bf16"),
        ("note", "ACCELERATE_NO_SUCH_THING 1 changes nothing here: it is no setting"),
    ]


@pytest.mark.distributed
def test_train_py_under_accelerate_launch(tmp_path):
    words = ["--cpu", "--num_processes", "1", "--mixed_precision", "bf16"]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *words, str(ROOT / "train.py"), "--max_steps", "1"]
        + ["--output_dir", str(tmp_path), "--run_name", "one", "--eval_dataset", "", "--num_samples", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    plan = json.loads((tmp_path / "one" / "plan.json").read_text())
    assert plan["config"]["precision"] == "bf16" and plan["config"]["backend"] == "cpu"
