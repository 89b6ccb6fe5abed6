"""The pages that add a strategy and a backend, followed step by step; and Accelerate's guide to a custom backend, of
which every block of code either runs, adapted in what it imports, or ends in a sentence that says what to write.
"""

import dataclasses
import enum
import json
import os
import re
import subprocess
import sys
import textwrap
import typing

import pytest
import torch

from anyqlora import Runtime, extend
from anyqlora.config import strategy_options
from anyqlora.config.resolve import resolve
from anyqlora.core.errors import UsageError
from anyqlora.testing import StrategyContract, world
from anyqlora.testing.strategies import alone
from tests.support import documents
from tests.support.paths import ROOT

BASE = {"model_name": "demo", "dataset": "demo"}
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", "-c", os.devnull]


def run(words, place, **environ):
    """A command given in `place`, with this checkout as the installed package."""
    path = os.pathsep.join([str(ROOT), *filter(None, [environ.pop("PYTHONPATH", "")])])
    own = {name: value for name, value in os.environ.items() if not name.startswith("ANYQLORA_")}
    environ = {**own, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run([sys.executable, *words], cwd=place, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def commands(name):
    """The commands of a page, in the order in which they stand."""
    return [line for language, lines in documents.page(name).blocks() if language == "bash" for line in lines]


# ------------------------------------------------------------------------------------------------ writing a strategy


@pytest.fixture(scope="module")
def strategy_place(tmp_path_factory):
    """A directory with the files of the page."""
    place = tmp_path_factory.mktemp("strategy")
    files = documents.files_of("writing-a-strategy.md")
    assert set(files) == {"my_backend.py", "own_loop.py", "test_my_backend.py"}
    for name, text in files.items():
        (place / name).write_text(text, encoding="utf-8")
    return place


def test_the_commands_of_writing_a_strategy_are_those_that_are_given_below():
    show, train, own_loop, contract = commands("writing-a-strategy.md")
    assert show == "python -m anyqlora strategies show my_backend:MyBackend"
    assert train.startswith("python -m anyqlora train --strategy my_backend:MyBackend ")
    assert own_loop == "torchrun --nproc_per_node 2 own_loop.py" and contract == "python -m pytest test_my_backend.py"


@pytest.mark.distributed
def test_the_strategy_of_the_page_is_shown_and_trained(strategy_place):
    """In another directory than the checkout, by two processes; the options are those of the flags."""
    show, train, *_ = (command.split()[1:] for command in commands("writing-a-strategy.md"))
    shown = run(show, strategy_place)
    assert "sharding_strategy (str, full) [full|partial]" in shown and "config_file (str|none, none)" in shown
    assert "ANYQLORA_STRATEGY_OPT_NAME in the environment" in shown
    small = "--max_steps 2 --output_dir out --run_name run --backend cpu --log_to none --eval_dataset= --num_samples 0"
    train = [word for word in train if word not in ("--max_steps", "4")]
    run([*train, *small.split(), "--batch_size=2", "--context_length=128"], strategy_place)
    result = json.loads((strategy_place / "out" / "run" / "result.json").read_text())
    assert result["steps"] == 2 and (strategy_place / "out/run/adapter/adapter_model.safetensors").exists()


@pytest.mark.distributed
def test_the_loop_of_the_page_runs_on_two_processes(strategy_place):
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "own_loop.py"]
    said = run(words, strategy_place)
    assert re.findall(r"^norm \d+\.\d+ on 2 processes$", said, re.MULTILINE), said
    assert (strategy_place / "state" / "learned.safetensors").exists()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("choice", ["sgd or dictionary", "Test"], ids=["quick", "whole"])
def test_the_contract_of_the_page_holds(choice, strategy_place):
    said = run([*PYTEST, "test_my_backend.py", "--rootdir", ".", "-k", choice], strategy_place)
    assert re.search(r"\b([2-9]|10) passed", said) and "failed" not in said, said


def test_every_step_of_accelerates_guide_has_a_row_on_the_page():
    rows = documents.page("writing-a-strategy.md").rows(below="## Coming from Accelerate's guide")
    assert [int(row[0].split(".")[0]) for row in rows] == [*range(1, 10)] and all(row[1] for row in rows)


# ------------------------------------------------------------------------------------------------- writing a backend


@pytest.fixture(scope="module")
def backend_place(tmp_path_factory):
    """A directory with the files of the page, installed by the page's command where only these tests look."""
    place = tmp_path_factory.mktemp("backend")
    files = documents.files_of("writing-a-backend.md")
    assert set(files) == {"my_npu.py", "pyproject.toml", "test_my_npu.py"}
    for name, text in files.items():
        (place / name).write_text(text, encoding="utf-8")
    install = commands("writing-a-backend.md")[0].split()
    assert install == ["pip", "install", "--no-deps", "."]
    run(["-m", *install, "-q", "--no-build-isolation", "--target", str(place / "site")], place)
    return place


@pytest.mark.distributed
def test_the_backend_of_the_page_is_listed_planned_and_trained(backend_place):
    show, plan, train = (command.split()[1:] for command in commands("writing-a-backend.md")[1:4])
    path = {"PYTHONPATH": str(backend_place / "site")}
    assert "mynpu yes: My NPU" in run(show, backend_place, **path)
    assert "mynpu" in run(plan, backend_place, **path)
    small = "--output_dir out --run_name run --log_to none --eval_dataset= --num_samples 0 --batch_size 2"
    run([*train, *small.split()], backend_place, **path)
    assert json.loads((backend_place / "out" / "run" / "result.json").read_text())["backend"] == "mynpu"


@pytest.mark.slow
def test_the_contract_of_the_backends_page_holds(backend_place):
    words = commands("writing-a-backend.md")[4].split()
    assert words[1:3] == ["-m", "pytest"]
    said = run([*PYTEST, words[3], "--rootdir", "."], backend_place, PYTHONPATH=str(backend_place / "site"))
    assert "7 passed" in said, said


# ------------------------------------------------------------------------------ Accelerate's guide, block by block

GUIDE = documents.read(ROOT / "tests" / "support" / "guides" / "custom_backend_guide.md")
STEPS = {
    match[1] or "Complete": documents.Document(GUIDE.path, section).blocks()
    for section in re.split(r"^## ", GUIDE.text, flags=re.MULTILINE)
    if (match := re.match(r"(?:Step (\d)|Complete Example):", section))
}
PATCHED = {  # step -> the class of Accelerate's sources that its block is to be typed into, by the step's location
    "2": "DistributedType",
    "3": "AcceleratorState",
    "5": "Accelerator",
    "6": "Accelerator",
    "7": "Accelerator",
    "8": "ClusterConfig",
    "9": "Accelerator",
    "Complete": "Accelerator",
}


def block(step):
    ((language, lines),) = STEPS[step]
    assert language == "python"
    return "\n".join(lines)


PLUGIN = f"""import json
from dataclasses import dataclass
from typing import Literal

import torch

from anyqlora.extend import MultiProcessStrategy, Prepared, Strategy

{block("1")}

{block("4")}

class MyBackend(MultiProcessStrategy):
    name = "my-backend"
    plugin_cls = MyBackendPlugin

    def prepare(self, model, trainable, optimizer_factory):
        owners = self.owners(trainable, model)
        self.share(model)
        self.refresh(trainable, owners)
        Strategy.prepare(self, model, trainable, optimizer_factory)
        self.stepper = MyBackendOptimizerWrapper(self.optimizer, model)
        return Prepared(MyBackendModelWrapper(model, self.options), self.optimizer)

    def sum_gradients(self):
        self.sum_flat(self.trainable.values())

    def update(self):
        self.stepper.step()
"""
LIBRARY = '''"""The library that the guide's wrappers call."""
CALLS = []

def distributed_model(model, sharding_strategy, offload_to_cpu):
    CALLS.append((sharding_strategy, offload_to_cpu))
    return model

def distributed_optimizer(optimizer, model):
    return optimizer
'''


@pytest.fixture(scope="module")
def guide_place(tmp_path_factory):
    place = tmp_path_factory.mktemp("guide")
    (place / "guide_plugin.py").write_text(PLUGIN, encoding="utf-8")
    (place / "mybackend.py").write_text(LIBRARY, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        yield place
    for name in ("guide_plugin", "mybackend"):
        sys.modules.pop(name, None)


def test_all_blocks_of_the_guide_are_here():
    assert list(STEPS) == [*map(str, range(1, 10)), "Complete"] and {*STEPS} - {*PATCHED} == {"1", "4"}
    assert len([one for one in GUIDE.blocks() if one[0] == "python"]) == len(STEPS) == 10


def test_step_1_is_the_class_of_a_strategys_options(guide_place):
    config = resolve({**BASE, "strategy": "guide_plugin:MyBackend", "strategy_opt": "sharding_strategy=partial"}, {})
    options = strategy_options.strategy_options(config)
    assert dataclasses.asdict(options) == options.to_dict()
    assert options.to_dict() == {"config_file": None, "sharding_strategy": "partial", "offload_to_cpu": False}


@pytest.mark.distributed
def test_step_4s_wrappers_are_run_by_a_strategy(guide_place):
    """As they stand, on two processes; the reference is one process without any."""

    class Guide(StrategyContract):
        strategy, options = "guide_plugin:MyBackend", {"sharding_strategy": "partial"}

    Guide().agrees(Guide().run(2), alone(), adapter=1e-4)


def _guides_test(place):
    """Step 9's first test with Runtime for Accelerator, and its second, which prepares a model that it never makes."""
    import guide_plugin
    import mybackend

    plugin = guide_plugin.MyBackendPlugin(sharding_strategy="full")
    runtime = Runtime.of(strategy="guide_plugin:MyBackend", strategy_opt=plugin, backend="cpu", precision="fp32")
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = runtime.prepare(model, optimizer)
    before = model.model.weight.detach().clone()
    x = torch.randn(4, 10, device=runtime.device)
    runtime.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
    after = model.model.weight.detach().clone()
    runtime.save_state(f"{place}/checkpoint")
    runtime.load_state(f"{place}/checkpoint")
    kept = torch.equal(model.model.weight, after)
    return type(model).__name__, mybackend.CALLS, bool((before != after).any()), kept


@pytest.mark.distributed
def test_step_9_on_two_processes(guide_place, tmp_path):
    expected = ("MyBackendModelWrapper", [("full", False)], True, True)
    assert world(2, _guides_test, str(tmp_path)) == [expected, expected]


@pytest.mark.parametrize("step", PATCHED)
def test_a_block_that_edits_accelerate_ends_in_what_to_write_instead(step):
    """Typed in with what it edits imported from ours: the sentence, which names what there is and the page."""
    name, names = PATCHED[step], {}
    location = re.search(rf"## (?:Step )?{step}\b.*?\n```", GUIDE.text, re.DOTALL)[0] + block(step)
    assert re.search(name, location, re.IGNORECASE), "the step is about another class"
    source = f"from anyqlora.extend import {name}\n{textwrap.dedent(block(step))}"
    with pytest.raises(ImportError) as refused:
        exec(compile(source, "guide", "exec"), names)
    sentence = str(refused.value)
    assert name in sentence and "docs/writing-a-strategy.md" in sentence
    assert any(
        way in sentence for way in ("--strategy module:Class", "Runtime.of(strategy=", "entry point", "--strategy_opt")
    )


def test_step_2_alone_makes_no_strategy():
    """The enum runs, since it is Python; what it would have registered is asked for, and answered."""
    names = {"enum": enum}
    exec(compile(block("2"), "guide", "exec"), names)
    with pytest.raises(UsageError, match="unknown strategy 'MYBACKEND'(.|\n)*module:Object of your own"):
        resolve({**BASE, "strategy": names["DistributedType"].MYBACKEND.value}, {})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mybackend_plugin": "x"}, "strategy_opt=plugin"),
        ({"minimal_backend_plugin": "x"}, "strategy_opt=plugin"),
        ({"use_mybackend": "true"}, "--strategy module:Class"),
        ({"mybackend_config_file": "x.json"}, "--strategy_opt config_file=FILE"),
    ],
)
def test_the_settings_that_the_guide_adds_are_answered(given, sentence):
    """Steps 8 and 9: Accelerator's argument and the fields of ClusterConfig."""
    with pytest.raises(UsageError, match="unknown setting") as refused:
        resolve({**BASE, **given}, {})
    assert sentence in refused.value.cure


def test_names_that_the_guide_edits_are_no_public_names():
    assert not {*PATCHED.values()} & {*extend.__all__} and typing.get_type_hints(extend.__getattr__)
