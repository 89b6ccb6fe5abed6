"""Where a setting comes from, how it is spelled, and what is refused."""

import inspect
import os
import re
import subprocess
import sys

import pytest
import yaml

from anyqlora.config import other_tools
from anyqlora.config.facets import SECTIONS
from anyqlora.config.resolve import add_flags, canonical_argv, from_environment, print_help, resolve
from anyqlora.config.schema import ALIASES, SETTINGS, SPLIT_ALIASES, TrainConfig, parse_value, settings_with
from anyqlora.core import registry
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.runs.provenance import resolved_yaml
from tests.support.paths import ROOT

FSDP_QLORA = [
    "world_size",
    "train_type",
    "llama_pro_path",
    "batch_size",
    "context_length",
    "gradient_accumulation_steps",
    "num_epochs",
    "dataset",
    "dataset_samples",
    "sharding_strategy",
    "use_gradient_checkpointing",
    "reentrant_checkpointing",
    "use_cpu_offload",
    "use_activation_cpu_offload",
    "low_memory",
    "no_sync",
    "precision",
    "model_name",
    "save_model",
    "output_dir",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "verbose",
    "lr",
    "apply_gradient_clipping",
    "grad_norm",
    "wd",
    "profile_memory",
    "optimizer",
    "lr_scheduler",
    "loading_workers",
    "log_to",
    "master_addr",
    "master_port",
    "seed",
    "project_name",
    "name",
    "group",
    "entity",
    "n_bits",
    "profile",
    "profiling_output",
    "with_stack",
    "with_shapes",
    "export_trace",
    "export_memory_timeline",
    "wait_steps",
    "profiler_warmup_steps",
    "active_steps",
    "repeat",
    "profiling_frequency",
    "max_steps",
    "backend",
    "warmup_steps",
    "warmup_ratio",
    "cosine_min_lr_ratio",
    "log_every_n_steps",
    "hqq_group_size",
    "config",
    "strategy",
    "strategy_config",
    "strategy_opt",
    "quantizer",
    "adapter",
    "mesh",
    "layout",
    "resume",
    "save_steps",
    "keep",
    "eval_steps",
    "eval_fraction",
    "run_name",
    "strict",
    "offline",
    "deterministic",
    "packing",
]


def settings(environ=None, **given):
    return resolve({"model_name": "m", **given}, environ=environ or {})


def test_every_flag_of_the_specification_is_a_setting():
    assert not set(FSDP_QLORA) - {*SETTINGS, *ALIASES, *SPLIT_ALIASES}
    assert all(f.metadata["help"] for f in SETTINGS.values())


def test_aliases_do_not_collide():
    names = [alias for f in SETTINGS.values() for alias in f.metadata["aliases"]] + [*SPLIT_ALIASES]
    names += [*other_tools.NAMES]
    assert len(names) == len(set(names)) and not set(names) & set(SETTINGS)
    for theirs in (
        "learning_rate",
        "per_device_train_batch_size",
        "max_seq_length",
        "report_to",
        "logging_steps",
        "max_grad_norm",
        "weight_decay",
        "num_processes",
        "mixed_precision",
        "fsdp_sharding_strategy",
        "deepspeed_zero_stage",
        "main_process_ip",
        "main_process_port",
        "find_unused_parameters",
        "cpu_ram_efficient_loading",
        "distributed_type",
    ):
        assert theirs in ALIASES or theirs in SETTINGS or theirs in other_tools.NAMES, theirs


def test_command_line_over_environment_over_file_over_default(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model_name: m\nlr: 1e-4\n\nseed: 1\nlora_rank: 4\n")
    environ = {"ANYQLORA_SEED": "2", "ANYQLORA_LORA_RANK": "8"}
    config = resolve({"config": str(file), "lora_rank": "16"}, environ=environ)
    assert (config.lr, config.seed, config.lora_rank, config.weight_decay) == (1e-4, 2, 16, 0.1)
    assert config.sources["lr"] == f"{file}:2" and config.sources["seed"] == "ANYQLORA_SEED"
    assert config.sources["lora_rank"] == "command line: --lora_rank" and config.sources["weight_decay"] == "default"
    assert resolve({"config": str(file), "seed": 3}, environ=environ, origin="code").seed == 3


@pytest.mark.parametrize(
    ("file", "line", "expected"),
    [
        (
            {"train_type": "qlora", "quantizer": "nf4", "adapter": "lora", "bits": 4},
            {"train_type": "full"},
            {"quantizer": "none", "adapter": "full", "bits": 16},
        ),
        ({"quantizer": "nf4", "adapter": "lora"}, {"train_type": "lora"}, {"quantizer": "none", "adapter": "lora"}),
        ({"quantizer": "nf4", "adapter": "lora"}, {"train_type": "bnb_dora"}, {"quantizer": "nf4", "adapter": "dora"}),
        ({"quantizer": "nf4"}, {"bits": 8}, {"quantizer": "int8"}),
        ({"bits": 4}, {"quantizer": "int8"}, {"quantizer": "int8", "bits": 8}),
        ({"warmup_steps": 0}, {"warmup_ratio": 0.5}, {"warmup_steps": -1, "warmup_ratio": 0.5}),
        ({"warmup_ratio": 0.5}, {"warmup_steps": 7}, {"warmup_steps": 7}),
        ({"eval_dataset": "x.jsonl"}, {"eval_fraction": 0.1}, {"eval_dataset": "", "eval_fraction": 0.1}),
        ({"lora_rank": 4}, {"adapter": "full", "quantizer": "none"}, {"adapter": "full", "lora_rank": 16}),
        ({"adapter": "dora"}, {"lr": 1}, {"adapter": "dora", "quantizer": "nf4"}),
    ],
    ids=str,
)
def test_what_a_higher_layer_says_in_other_words_wins_too(file, line, expected, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model_name: m\n" + "".join(f"{name}: {value}\n" for name, value in file.items()))
    for given in (
        {"given": {"config": str(path), **line}, "environ": {}},
        {
            "given": {"config": str(path)},
            "environ": {f"ANYQLORA_{name.upper()}": str(value) for name, value in line.items()},
        },
    ):
        found = resolve(**given)
        assert {name: getattr(found, name) for name in expected} == expected


def test_a_file_may_be_named_by_the_environment(tmp_path):
    (tmp_path / "run.yaml").write_text("model_name: m\nseed: 5\n")
    assert resolve({}, environ={"ANYQLORA_CONFIG": str(tmp_path / "run.yaml")}).seed == 5


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("optim", "adamw_torch", "adamw"),
        ("optim", "paged_adamw_32bit", "paged_adamw"),
        ("lr_scheduler_type", "constant_with_warmup", "constant"),
        ("mixed_precision", "no", "fp32"),
    ],
)
def test_hugging_faces_values_are_understood(name, theirs, ours):
    assert getattr(settings(**{name: theirs}), ALIASES[name]) == ours


def test_a_part_of_an_epoch_is_refused_with_what_ends_within_one():
    with pytest.raises(UsageError, match="num_epochs: '0.5' is not a whole number") as refused:
        settings(num_epochs="0.5")
    assert "--max_steps" in refused.value.cure


def test_help_shows_each_settings_kind_of_value_and_its_other_names(capsys, monkeypatch):
    """The reference are the defaults, and what a setting takes."""
    monkeypatch.setenv("COLUMNS", "1000")
    print_help("train.py")
    shown = {found[1]: found for found in re.finditer(r"^  --(\w+) (\S+)\s+(.+)$", capsys.readouterr().out, re.M)}
    assert [*shown] == [name for section in SECTIONS for name in settings_with("section", section)]
    assert {*shown} == {*SETTINGS} == {*inspect.signature(add_flags(lambda **flags: None)).parameters}
    for name, about in SETTINGS.items():
        kinds = shown[name][2].split("|")
        assert shown[name][3].startswith(about.metadata["help"]), name
        assert all(re.search(rf"also .*\b{other}\b", shown[name][3]) for other in about.metadata["aliases"]), name
        if about.default != "auto":
            assert kinds[0] == {int: "int", float: "float", bool: "true", str: "text"}[type(about.default)], name
        if "auto" in kinds:
            assert parse_value(name, "auto", "test") == "auto"
    kinds = [shown[name][2] for name in ("batch_size", "packing", "model_name")]
    assert kinds == ["int|auto", "true|false|auto", "text"]


def test_fsdp_backend_is_the_backend():
    assert from_environment({"FSDP_BACKEND": "mps"}) == {"backend": ("mps", "FSDP_BACKEND")}
    assert settings(environ={"FSDP_BACKEND": "mps", "ANYQLORA_BACKEND": "cpu"}).backend == "cpu"


def test_nothing_given_is_the_embedded_job():
    config = resolve({}, environ={})
    assert config.is_demo and config.dataset == "demo" and config.sources["lr"].endswith("first.yaml:12")
    assert resolve({"lr": "1"}, environ={}).is_demo
    assert settings().dataset == "alpaca_sample"
    with pytest.raises(UsageError, match="model_name is missing"):
        resolve({"dataset": "x.jsonl"}, environ={})


@pytest.mark.parametrize(
    "argv, out",
    [
        (["--train_type", "lora"], ["--train-type=lora"]),
        (["--train-type=lora"], ["--train-type=lora"]),
        (["--learning_rate", "1e-3"], ["--lr=1e-3"]),
        (["--verbose"], ["--verbose=true"]),
        (["--verbose", "--lr", "1"], ["--verbose=true", "--lr=1"]),
        (["--max_steps", "-1"], ["--max-steps=-1"]),
    ],
)
def test_both_spellings_and_aliases(argv, out):
    assert canonical_argv(argv) == out


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--data", "x"], "unknown setting 'data'"),
        (["--lora-rnk", "4"], "did you mean 'lora_rank'"),
        (["--lr"], "needs a value"),
        (["--lr", "1", "--learning_rate", "2"], "lr is stated twice; first at command line: --lr"),
        (["lr=3"], "unexpected argument"),
    ],
)
def test_flags_that_are_refused(argv, message):
    with pytest.raises(UsageError, match=message):
        canonical_argv(argv)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"lr": "fast"}, "lr: 'fast' is not a number"),
        ({"lora_rank": "4.5"}, "whole number"),
        ({"lora_rank": "0"}, "at least 1"),
        ({"batch_size": "many"}, "whole number or auto"),
        ({"verbose": "maybe"}, "true or false"),
        ({"lr": "nan"}, "not a number"),
        ({"precision": "fp8"}, "fp8 arithmetic is not offered"),
        ({"optimizer": "adammw"}, "did you mean 'adamw'"),
        ({"max_steps": "0"}, "neither -1 nor"),
        ({"save_total_limit": 1}, "at least 2"),
        ({"run_name": "../x"}, "not a plain name"),
        ({"run_name": "a/b"}, "not a plain name"),
        ({"profiling_output": "..", "profile": "true"}, "not a plain name"),
        ({"train_type": "qlora", "quantizer": "none"}, "contradicts"),
        ({"train_type": "lora", "quantizer": "nf4"}, "contradicts"),
        ({"bits": "8", "quantizer": "nf4"}, "contradicts"),
        ({"train_type": "full", "lora_rank": "4"}, "contradicts"),
        ({"adapter": "full", "train_type": "full", "quantizer": "nf4"}, "contradicts"),
        ({"warmup_steps": "1", "warmup_ratio": "0.1", "dataset": "d"}, "both state the warm-up"),
        ({"eval_steps": "5"}, "needs evaluation rows"),
        ({"eval_fraction": "0.1", "eval_dataset": "x"}, "both say what is held out"),
        ({"early_stopping_patience": "2", "eval_fraction": "0.1"}, "needs eval_steps"),
        ({"use_gradient_checkpointing": "false", "reentrant_checkpointing": "true"}, "nothing to recompute"),
        ({"use_gradient_checkpointing": "false", "checkpointed_layers": "2"}, "the other that nothing is"),
        ({"use_gradient_checkpointing": "true", "checkpointed_layers": "0"}, "the other that nothing is"),
        ({"load_best_model_at_end": True}, "needs evaluations"),
        ({"profile": "true", "profile_active": "20"}, "longer than profiling_frequency"),
        ({"seed": "99999999999999999999"}, "seed: '99999999999999999999' is not between 0 and 9223372036854775807"),
        ({"seed": "9223372036854775808"}, "between 0 and"),
        ({"lora_alpha": "0"}, "lora_alpha: '0' is not greater than 0"),
        ({"lora_alpha": "-1"}, "greater than 0"),
        ({"lora_dropout": "1"}, "between 0 and 0.999"),
    ],
)
def test_values_that_are_refused(given, message):
    with pytest.raises(UsageError, match=message):
        settings(**given)


@pytest.mark.parametrize(
    "text, value",
    [("9223372036854775807", 2**63 - 1), ("9007199254740993", 2**53 + 1), ("1e3", 1000), ("4.0", 4), ("1_000", 1000)],
)
def test_whole_numbers_keep_every_digit(text, value):
    assert settings(seed=text).seed == value


@pytest.mark.parametrize(
    "given, name",
    [({"train_type": t}, t) for t, row in registry.TRAIN_TYPES.items() if row.refused]
    + [
        ({"quantizer": "hqq"}, "hqq"),
        ({"adapter": "llama_pro"}, "llama_pro"),
        ({"strategy": "megatron"}, "megatron"),
        ({"low_memory": "false"}, "low_memory"),
        ({"bits": "3"}, "bits"),
        ({"loading_workers": "4"}, "loading_workers"),
        ({"hqq_group_size": "32"}, "hqq_group_size"),
        ({"llama_pro_path": "p"}, "llama_pro_path"),
        ({"strategy": "pipeline"}, "pipeline"),
    ],
)
def test_what_is_not_built_is_refused_by_name(given, name):
    with pytest.raises(NotSupported, match=name) as refused:
        settings(**given)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "train_type, bits, expected",
    [
        ("qlora", "auto", ("nf4", "lora", 4)),
        ("qlora", "8", ("int8", "lora", 8)),
        ("lora", "auto", ("none", "lora", 16)),
        ("full", "auto", ("none", "full", 16)),
        ("bnb_dora", "auto", ("nf4", "dora", 4)),
    ],
)
def test_presets(train_type, bits, expected):
    config = settings(train_type=train_type, bits=bits)
    assert (config.quantizer, config.adapter, config.bits) == expected
    assert settings(quantizer="fp4", adapter="rslora").adapter == "rslora"


@pytest.mark.parametrize(
    "text, message",
    [
        ("lr: 1\nlearning_rat: 2\n", r"run.yaml:2: unknown setting 'learning_rat'; did you mean 'learning_rate'"),
        ("lr: 1\nlr: 2\n", r"run.yaml:2: lr is stated twice"),
        ("lr: [1\n", r"run.yaml:2:1: not YAML"),
        ("- lr\n", "not a map"),
        ("lr:\n  a: 1\n", "not a map"),
        ("lr: fast\n", r"run.yaml:1: lr: 'fast' is not a number"),
        ("lr:\n", "None is not a value"),
        ("trust_remote_code: true\n", "only be given on the command line"),
        ("seed: !!python/object/apply:os.system ['true']\n", "plain values only"),
    ],
)
def test_files_that_are_refused(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        settings(config=str(file))


def test_trust_remote_code_is_not_read_from_the_environment():
    with pytest.raises(UsageError, match="only be given on the command line"):
        settings(environ={"ANYQLORA_TRUST_REMOTE_CODE": "true"})
    with pytest.raises(UsageError, match="ANYQLORA_LRR: unknown setting"):
        settings(environ={"ANYQLORA_LRR": "1"})


def test_the_resolved_file_gives_the_same_configuration(tmp_path):
    config = settings(lr="3e-5", lora_target_modules="q_proj,v_proj", packing="true", tracker_name="a: b # c")
    file = tmp_path / "config.resolved.yaml"
    file.write_text(resolved_yaml(config))
    assert yaml.safe_load(file.read_text())["lr"] == 3e-5
    again = resolve({"config": str(file)}, environ={})
    assert again.with_(config="") == config and again.sources["lr"].startswith(str(file))


def test_exit_codes_and_messages_of_the_script():
    def script(*arguments):
        return subprocess.run(
            [sys.executable, "train.py", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": ""},
        )

    wrong = script("--lrr", "1")
    assert wrong.returncode == 2 and "did you mean 'lr'" in wrong.stderr and "Traceback" not in wrong.stderr
    right = script("--help")
    assert (
        right.returncode == 0
        and right.stdout.startswith("usage: train.py")
        and all(f"--{n} " in right.stdout for n in SETTINGS)
    )


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        settings().lr = 1
    assert isinstance(settings(), TrainConfig)


@pytest.mark.parametrize(
    ("stated", "train_type"),
    [
        ({"quantizer": "none"}, "lora"),
        ({"adapter": "full", "quantizer": "none"}, "full"),
        ({"quantizer": "fp4", "adapter": "dora"}, "qlora"),
    ],
    ids=str,
)
def test_a_preset_that_was_overridden_is_not_kept(stated, train_type, tmp_path):
    """A run's directory states everything in one file, in which an overridden preset would be a contradiction."""
    config = resolve(stated, environ={})
    assert config.train_type == train_type
    (tmp_path / "all.yaml").write_bytes(resolved_yaml(config).encode())
    again = resolve({"config": str(tmp_path / "all.yaml")}, environ={})
    assert again.settings() == {**config.settings(), "config": str(tmp_path / "all.yaml")}
