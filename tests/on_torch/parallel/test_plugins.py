"""Strategies of third parties: a real package that is installed for the test, options from four layers, and what can be
wrong with them.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from anyqlora.cli import strategies
from anyqlora.config import strategy_options
from anyqlora.config.options_class import options_from_dict, options_to_dict
from anyqlora.config.resolve import resolve
from anyqlora.core import registry
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.processes.environment import OF_TORCHRUN
from tests.support import documents, runs
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


# --------------------------------------------------------------------------------------- a plain dataclass as options

GUIDES = documents.read(ROOT / "tests" / "support" / "guides" / "custom_backend_guide.md")
PLAIN = """
import json
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, Optional, Union

from anyqlora.extend import MultiProcessStrategy, StrategyOptions, option

{guide}

class Guide(MultiProcessStrategy):
    plugin_cls = MyBackendPlugin


class Colour(Enum):
    RED = "red"
    BLUE = "blue"

@dataclass(frozen=True)
class Kinds:
    number: int = 3
    share: float = 0.5
    name: str = "x"
    maybe: Optional[int] = None
    either: Union[int, str] = "auto"
    level: Annotated[Literal[1, 2, "all"], "how much"] = 1
    colour: Colour = Colour.RED
    where: Path = Path("here")
    items: list[int] = field(default_factory=list)
    both: Literal["a", "b"] | None = None
    mixedCase: bool = False
    made: int = field(default=0, init=False)

class OfKinds(MultiProcessStrategy):
    plugin_cls = Kinds


@dataclass(frozen=True)
class Forgetful(StrategyOptions):
    every: int = option(4, "steps", low=1)
    mode: Literal["fast", "slow"] = "fast"

    def __post_init__(self):
        pass  # without super().__post_init__()

class OfForgetful(MultiProcessStrategy):
    plugin_cls = Forgetful


class Plain:
    every = 4

class OfPlain(MultiProcessStrategy):
    plugin_cls = Plain

class OfObject(MultiProcessStrategy):
    plugin_cls = Kinds()

@dataclass
class Required:
    every: int

class OfRequired(MultiProcessStrategy):
    plugin_cls = Required

@dataclass
class Checked:
    stage: int = 1
    offload: bool = False
    config_file: Optional[str] = None

    def __post_init__(self):
        if self.config_file:
            for name, value in json.loads(Path(self.config_file).read_text()).items():
                setattr(self, name, value)
        if self.stage not in (1, 2, 3):
            raise ValueError(f"stage {self.stage} is not known")
        if self.offload and self.stage != 3:
            raise ValueError(f"offload at stage {self.stage}")

class OfChecked(MultiProcessStrategy):
    plugin_cls = Checked
"""


@pytest.fixture
def plain(tmp_path, monkeypatch):
    """A module of options classes, the first of which is that of Accelerate's guide as it stands."""
    guide = "\n".join(GUIDES.blocks()[0][1])
    assert guide.startswith("@dataclass\nclass MyBackendPlugin:")
    (tmp_path / "plain_options.py").write_text(PLAIN.replace("{guide}", guide))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plain_options", raising=False)
    yield tmp_path
    sys.modules.pop("plain_options", None)


def of(name, environ=None, **given):
    return options(environ, strategy=f"plain_options:{name}", **given)


def test_the_guides_class_is_the_options(plain):
    assert of("Guide").to_dict() == {"config_file": None, "sharding_strategy": "full", "offload_to_cpu": False}
    found = of("Guide", strategy_opt="sharding_strategy=partial,offload_to_cpu=yes")
    assert type(found).__name__ == "MyBackendPlugin"
    assert (found.sharding_strategy, found.offload_to_cpu) == ("partial", True)
    assert of("Guide", strategy_opt=found) == found, "an object of the class states the same options"
    assert of("Guide", strategy_opt={"offload_to_cpu": True}).offload_to_cpu is True


VARIABLE = "ANYQLORA_STRATEGY_OPT_"


@pytest.mark.parametrize("by_class", [True, False], ids=["config_file", "strategy_config"])
def test_flags_come_before_variables_before_the_file_of_a_plain_class(by_class, plain):
    """Each option by itself: the guide's own __post_init__ puts the file's values above what it was given."""
    file = plain / "mine.json"
    file.write_text(json.dumps({"sharding_strategy": "partial", "offload_to_cpu": True}))
    file = {"strategy_opt": f"config_file={file}"} if by_class else {"strategy_config": str(file)}

    def two(environ, flags=""):
        given = {**file, "strategy_opt": ",".join(filter(None, [file.get("strategy_opt", ""), flags]))}
        found = of("Guide", environ, **given)
        return found.sharding_strategy, found.offload_to_cpu

    assert two({}) == ("partial", True)
    assert two({f"{VARIABLE}OFFLOAD_TO_CPU": "false"}) == ("partial", False)
    assert two({f"{VARIABLE}OFFLOAD_TO_CPU": "false"}, "sharding_strategy=full") == ("full", False)
    both = {f"{VARIABLE}OFFLOAD_TO_CPU": "false", f"{VARIABLE}SHARDING_STRATEGY": "partial"}
    assert two(both, "offload_to_cpu=true,sharding_strategy=full") == ("full", True)


def test_a_settings_file_states_less_than_a_variable_and_more_than_nothing(plain):
    """strategy_opt in a --config file, a variable and a flag, of three options: none takes the others away."""
    config = plain / "run.yaml"
    config.write_text("strategy_opt: number=1,share=0.1,name=file\n")
    environ = {f"{VARIABLE}SHARE": "0.2", f"{VARIABLE}NAME": "variable"}
    found = of("OfKinds", environ, config=str(config), strategy_opt="name=flag")
    assert (found.number, found.share, found.name) == (1, 0.2, "flag")
    config.write_text("strategy_opt: bucket_cap_mb=1,overlap=true\n")
    environ = {"ANYQLORA_DDP_BUCKET_CAP_MB": "2", f"{VARIABLE}BUCKET_CAP_MB": "3"}
    found = options(environ, strategy="ddp", config=str(config))
    assert (found.bucket_cap_mb, found.overlap) == (2, "true"), "the strategy's own variable is the nearer one"
    assert options({f"{VARIABLE}BUCKET_CAP_MB": "3"}, strategy="ddp", config=str(config)).bucket_cap_mb == 3


def test_every_kind_of_field_is_read(plain):
    import plain_options

    stated = "number=4,share=2,name=true,maybe=5,either=7,level=all,colour=blue,where=a/b,both=b"
    found = of("OfKinds", {f"{VARIABLE}MIXEDCASE": "on"}, strategy_opt=stated)
    expected = plain_options.Kinds(
        4, 2.0, "true", 5, 7, "all", plain_options.Colour.BLUE, Path("a/b"), [], "b", mixedCase=True
    )
    assert found == expected and type(found.share) is float
    assert of("OfKinds", strategy_opt="maybe=none,either=some,level=2,both=null,colour=RED").level == 2
    file = plain / "kinds.yaml"
    file.write_text("items: [1, 2]\nlevel: 2\nmaybe: null\n")
    assert of("OfKinds", strategy_config=str(file)).items == [1, 2]


@pytest.mark.parametrize(
    ("name", "stated", "why"),
    [
        ("Guide", "sharding_strategy=bogus", "sharding_strategy: 'bogus' is not one of full, partial"),
        ("Guide", "sharding_strategy=ful", "did you mean 'full'"),
        ("Guide", "offload_to_cpu=maybe", "offload_to_cpu: 'maybe' is not true or false"),
        ("Guide", "sharding=full", "unknown option 'sharding' of MyBackendPlugin"),
        ("OfKinds", "level=3", "level: '3' is not one of 1, 2, all"),
        ("OfKinds", "number=3.5", "number: '3.5' is not a whole number"),
        ("OfKinds", "colour=green", "colour: 'green' is not one of RED, BLUE"),
        ("OfKinds", "items=3", "items: '3' is not a list, which only a file can state"),
        ("OfKinds", "made=3", "unknown option 'made' of Kinds"),
        ("OfForgetful", "every=0", "every: '0' is not at least 1"),
        ("OfForgetful", "mode=faster", "mode: 'faster' is not one of fast, slow"),
        ("OfChecked", "stage=4", r"Checked\(stage=4\): ValueError: stage 4 is not known"),
        ("OfChecked", "offload=true", "ValueError: offload at stage 1"),
    ],
)
@pytest.mark.parametrize("source", ["flag", "variable", "file"])
def test_a_bad_value_names_its_field_and_where_it_is_stated(name, stated, why, source, plain):
    option, value = stated.split("=")
    file = plain / "bad.yaml"
    file.write_text(f"{option}: '{value}'\n")
    given, where = {
        "flag": ({"strategy_opt": stated}, "command line: --strategy_opt"),
        "variable": ({"environ": {f"{VARIABLE}{option.upper()}": value}}, f"{VARIABLE}{option.upper()}"),
        "file": ({"strategy_config": str(file)}, f"{file}:1"),
    }[source]
    if source == "file" and option == "items":
        why = "items: '3' is not a list"
    with pytest.raises(UsageError, match=why) as refused:
        of(name, **given)
    assert refused.value.where == where and refused.value.cure


@pytest.mark.parametrize(
    ("text", "place", "why"),
    [
        ('{\n "sharding_strategy": "bogus"\n}', ":2", "Invalid sharding_strategy: bogus"),
        ('{\n "offload_to_cpu": "maybe"\n}', ":2", "offload_to_cpu: 'maybe' is not true or false"),
        ('{\n "sharding_strategy": ,\n}', ":2:23", "config_file: not JSON: Expecting value"),
        ("[1]", "", "AttributeError: 'list' object has no attribute 'get'"),
        (None, "", "config_file: cannot be read: No such file or directory"),
    ],
)
def test_a_bad_config_file_is_named(text, place, why, plain):
    file = plain / "mine.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=why) as refused:
        of("Guide", strategy_opt=f"config_file={file}")
    assert refused.value.where == f"{file}{place}"


def test_what_a_flag_makes_of_a_file_is_checked_by_the_class(plain):
    """The file goes with itself, and so does the flag; the two do not go together."""
    file = plain / "checked.json"
    file.write_text('{"stage": 3, "offload": true}')
    assert of("OfChecked", strategy_opt=f"config_file={file}").offload is True
    with pytest.raises(UsageError, match="offload at stage 2") as refused:
        of("OfChecked", strategy_opt=f"config_file={file},stage=2")
    assert str(file) in refused.value.where and "--strategy_opt" in refused.value.where
    file.write_text('{"stage": 2}')
    with pytest.raises(UsageError, match="stage 4 is not known") as refused:
        of("OfChecked", strategy_opt=f"config_file={file},stage=4")
    assert "--strategy_opt" in refused.value.where


@pytest.mark.parametrize(
    ("name", "why", "cure"),
    [
        ("OfPlain", "plugin_cls is Plain, no dataclass", "write @dataclass above it"),
        ("OfObject", "plugin_cls is an object, Kinds", "plugin_cls = Kinds, the class itself"),
        ("OfRequired", "Required: every has no default and is not stated", "--strategy_opt every=VALUE"),
    ],
)
def test_a_class_that_holds_no_options_is_named_with_its_line_and_the_cure(name, why, cure, plain):
    with pytest.raises(UsageError, match=why) as refused:
        of(name)
    assert cure in refused.value.cure
    file, _, line = refused.value.where.rpartition(":")
    found = (plain / "plain_options.py").read_text().splitlines()[int(line) - 1]
    assert file == str(plain / "plain_options.py") and found.startswith(("class ", "@dataclass"))


@pytest.mark.parametrize("name", ["Guide", "OfKinds", "OfForgetful", "OfChecked"])
def test_options_of_any_class_go_to_a_dictionary_and_back(name, plain):
    found = of(name)
    assert options_from_dict(type(found), options_to_dict(found)) == found
    shown = "\n".join(strategies.shown(f"plain_options:{name}"))
    assert all(f"  {option} (" in shown for option in options_to_dict(found)) and f"{VARIABLE}NAME" in shown


def test_a_registered_name_that_no_variable_can_hold_has_one(tmp_path, monkeypatch, plain):
    package(tmp_path, "dotted", "my.own-one = plain_options:OfKinds")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert options({"ANYQLORA_MY_OWN_ONE_NUMBER": "9"}, strategy="my.own-one").number == 9
    assert "ANYQLORA_MY_OWN_ONE_NAME in" in "\n".join(strategies.shown("my.own-one"))
