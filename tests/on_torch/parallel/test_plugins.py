"""Strategies of third parties: a real package that is installed for the test, options from four layers, and what can be
wrong with them.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from anyqlora.cli import strategies
from anyqlora.config import strategy_options
from anyqlora.config.resolve import resolve
from anyqlora.core import registry
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.processes.environment import OF_TORCHRUN
from tests.support import runs
from tests.support.paths import ROOT

PACKAGE = ROOT / "examples" / "strategy_plugin"
BASE = {"model_name": "demo", "dataset": "demo"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The example package, installed by pip where only this test looks."""
    target = tmp_path_factory.mktemp("site")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            str(target),
            str(PACKAGE),
        ],
        check=True,
        capture_output=True,
    )
    return target


@pytest.fixture
def on_the_path(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    return installed


@pytest.mark.slow
def test_the_contract_holds_for_the_installed_package(installed):
    """Its own test file, run by pytest as its author would."""
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r}); import pytest; sys.exit(pytest.main(['-p', "
        f"'no:cacheprovider', {str(PACKAGE / 'test_contract.py')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parents[1])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "10 passed" in done.stdout


def test_it_is_listed_shown_and_planned(on_the_path, capsys):
    strategies.main(["list"])
    assert "anyqlora-local-sgd: local_sgd:LocalSgd" in capsys.readouterr().out
    strategies.main(["show", "local-sgd"])
    assert "every (int, 4): steps between two averages" in capsys.readouterr().out
    config = resolve({**BASE, "strategy": "local-sgd", "strategy_opt": "every=7"}, environ={})
    assert strategy_options.strategy_options(config).every == 7


@pytest.mark.slow
def test_train_takes_it_by_module_and_class(on_the_path, tmp_path):
    flags = {
        "strategy": "local_sgd:LocalSgd",
        "strategy_opt": "every=2",
        "world_size": 2,
        "max_steps": 4,
        "batch_size": 4,
        "output_dir": tmp_path,
        "run_name": "run",
        "backend": "cpu",
        "log_to": "none",
        "eval_batch_size": 64,
        "exact_match": "false",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    import os

    environ = {**os.environ, "PYTHONPATH": str(on_the_path)}
    done = subprocess.run(
        [sys.executable, str(PACKAGE.parents[1] / "train.py"), *words], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()


TORN_DOWN = """
from pathlib import Path
from anyqlora.on_torch.parallel.base import Strategy

class TornDown(Strategy):
    def teardown(self):
        Path(__file__).with_suffix(".txt").write_text("let go")
"""


@pytest.mark.parametrize("is_member", [False, True])
def test_a_run_lets_go_of_all_it_took(is_member, tmp_path, monkeypatch):
    """Its strategy, its group unless the caller had formed it, and the environment: the next run in this process may be
    of another size.
    """
    (tmp_path / "torn_down.py").write_text(TORN_DOWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torn_down", raising=False)
    if is_member:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    before = {name: os.environ.get(name) for name in OF_TORCHRUN}
    try:
        runs.run(
            tmp_path,
            strategy="torn_down:TornDown",
            model_name="demo",
            dataset="demo",
            eval_dataset="",
            max_steps=1,
            batch_size=1,
            log_to="none",
        )
        assert dist.is_initialized() == is_member
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert {name: os.environ.get(name) for name in OF_TORCHRUN} == before
    assert (tmp_path / "torn_down.txt").read_text() == "let go"


# ------------------------------------------------------------------------------------------------------- precedence


def options(environ=None, **given):
    return strategy_options.strategy_options(resolve({**BASE, **given}, environ=environ or {}))


def test_code_comes_before_environment_before_file_before_default(tmp_path):
    file = tmp_path / "ddp.yaml"
    file.write_text("bucket_cap_mb: 3\noverlap: true\n")
    environ = {"ANYQLORA_DDP_BUCKET_CAP_MB": "4"}
    common = {"strategy": "ddp"}
    assert options(**common).bucket_cap_mb == 25
    assert options(**common, strategy_config=str(file)).bucket_cap_mb == 3
    assert options(environ, **common, strategy_config=str(file)).bucket_cap_mb == 4
    found = options(environ, **common, strategy_config=str(file), strategy_opt="bucket_cap_mb=5")
    assert (found.bucket_cap_mb, found.overlap) == (5, "true")
    assert type(found).from_dict(found.to_dict()) == found


def test_a_variable_of_another_strategy_says_nothing_here():
    assert options({"ANYQLORA_FSDP_HYBRID_SHARD_SIZE": "8"}, strategy="ddp").bucket_cap_mb == 25


def test_settings_and_options_say_the_same():
    assert options(strategy="fsdp", sharding_strategy="shard_grad_op").sharding_strategy == "shard_grad_op"
    assert options(strategy="deepspeed", deepspeed_zero_stage=3, use_cpu_offload=True).offload_param
    with pytest.raises(UsageError, match="contradicts deepspeed_zero_stage 1"):
        options(strategy="deepspeed", deepspeed_zero_stage=1, strategy_opt="zero_stage=2")


@pytest.mark.parametrize(
    "given, why",
    [
        ({"strategy": "dpp"}, "did you mean 'ddp'"),
        ({"strategy": "megatron"}, "Megatron-LM is not offered"),
        ({"strategy": "pipeline"}, "not offered"),
        ({"strategy": "tpu"}, "not offered"),
        ({"strategy": "ddp", "strategy_opt": "buckets=3"}, "unknown option 'buckets' of DdpOptions"),
        ({"strategy": "ddp", "strategy_opt": "bucket_cap_mb=many"}, "bucket_cap_mb: 'many' is not a whole number"),
        ({"strategy": "ddp", "strategy_opt": "bucket_cap_mb=0"}, "at least 1"),
        ({"strategy": "ddp", "strategy_opt": "bucket_cap_mb"}, "is not name=value"),
        ({"strategy": "ddp", "strategy_opt": "overlap=true,overlap=false"}, "given twice"),
        ({"strategy": "single", "strategy_opt": "overlap=true"}, "has no options"),
        ({"strategy": "deepspeed", "strategy_opt": "zero_stage=4"}, "one of 0, 1, 2, 3"),
        ({"strategy": "deepspeed", "deepspeed_zero_stage": 2, "use_cpu_offload": True}, "only stage 3 shards weights"),
        ({"strategy": "nowhere.to:Be"}, "cannot be imported"),
        ({"strategy": "json:dumps"}, "is no Strategy class"),
        ({"strategy": "ddp", "sharding_strategy": "shard_grad_op"}, "only fsdp shards"),
        ({"strategy": "fsdp", "deepspeed_zero_stage": 2}, "only deepspeed has stages"),
    ],
)
def test_bad_input_is_named(given, why):
    with pytest.raises(UsageError, match=why):
        options(**given)


@pytest.mark.parametrize(
    "text, place, why",
    [
        ("bucket_cap_mb: [", ":1:17", "not YAML"),
        ('{"bucket_cap_mb": 3,}', "1:21", "not JSON"),
        ("- 3\n", ":1", "not a map"),
        ("overlap: true\nbuckets: 3\n", ":2", "unknown option 'buckets'"),
        ("overlap: true\noverlap: false\n", ":2", "stated twice"),
    ],
)
def test_a_malformed_file_is_named_to_the_line(text, place, why, tmp_path):
    file = tmp_path / "options"
    file.write_text(text)
    with pytest.raises(UsageError, match=why) as error:
        options(strategy="ddp", strategy_config=str(file))
    assert place in error.value.where and str(file) in error.value.where


DEEPSPEED_FILE = """{
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": %s,
  "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu"},
                        "overlap_comm": true}%s
}"""


def test_a_deepspeed_file_is_taken_as_it_is(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(DEEPSPEED_FILE % ('"auto"', ""))
    found = options(strategy="deepspeed", deepspeed=str(file))
    assert (found.zero_stage, found.offload_optimizer, found.offload_param) == (3, True, False)
    assert found.zero_options == {"reduce_bucket_size": 5e8, "overlap_comm": True}
    assert type(found).from_dict(found.to_dict()) == found


@pytest.mark.parametrize(
    "steps, rest, why, line",
    [
        ("7", "", "gradient_accumulation_steps 7 contradicts gradient_accumulation_steps 1", 3),
        ("1", ',\n  "optimizer": {"type": "Lamb"}', "optimizer Lamb is not taken from this file", 7),
        ("1", ',\n  "fp16": {"enabled": true}', "precision fp16_autocast contradicts precision fp32", 7),
        ("1", ',\n  "pipeline": {"stages": 2}', "pipeline of a DeepSpeed configuration is not built", 7),
    ],
)
def test_a_deepspeed_file_that_contradicts_us_is_named(steps, rest, why, line, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(DEEPSPEED_FILE % (steps, rest))
    with pytest.raises(UsageError, match=why) as error:
        options(strategy="deepspeed", strategy_config=str(file), gradient_accumulation_steps=1, precision="fp32")
    assert error.value.where.endswith(f":{line}")


# ----------------------------------------------------------------------------------------------------- what is broken


def package(directory: Path, name: str, entry: str) -> None:
    """The metadata of an installed package with one entry point."""
    about = directory / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[anyqlora.strategies]\n{entry}\n")


def test_a_package_that_does_not_import_is_listed_as_unusable(tmp_path, monkeypatch):
    package(tmp_path, "broken", "broken = broken_strategy:It")
    (tmp_path / "broken_strategy.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    line = next(line for line in strategies.listed() if line.startswith("broken"))
    assert (
        "broken: no: strategy 'broken' cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"
        in line
    )
    with pytest.raises(UsageError, match="no_such_library"):
        options(strategy="broken")


def test_an_unknown_strategy_is_told_what_there_is_and_whose(tmp_path, monkeypatch):
    package(tmp_path, "a-package", "its_own = json:JSONDecoder")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        UsageError,
        match=r"unknown strategy 'its_one'; did you mean 'its_own'\?(.|\n)*one of: single, ddp, .*its_own \(of "
        r"a-package\)",
    ):
        options(strategy="its_one")


@pytest.mark.parametrize("name", ["twice", "ddp"])
def test_two_packages_with_one_name(name, tmp_path, monkeypatch):
    package(tmp_path, "one", f"{name} = json:JSONDecoder")
    package(tmp_path, "two", f"{name} = json:JSONEncoder")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="is registered by .*one and by two"):
        options(strategy=name)
    assert any("registers the same name" in line for line in strategies.listed())


def test_every_strategy_of_the_table_is_refused_or_there():
    for name, row in registry.STRATEGIES.items():
        if row.refused:
            with pytest.raises(NotSupported):
                registry.strategy(name)
        elif importlib.util.find_spec("mlx") or row.torch:
            assert registry.strategy_class(name).name == name
