"""The public names: `import anyqlora` is quick and imports no framework; plan, train and load_finetuned do the embedded
job for real.
"""

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import anyqlora
from anyqlora import BackendManager, TrainConfig, UsageError, extend, testing
from tests.support.paths import ROOT

JOB = {"backend": "cpu", "max_steps": 2, "num_samples": 0, "log_to": "none", "run_name": "run"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("public")
    return anyqlora.train(**JOB, output_dir=str(place)), place


def fresh(code: str) -> str:
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return out.stdout.strip()


def test_importing_it_takes_milliseconds_and_no_framework():
    code = (
        "import sys, time; began = time.process_time(); before = set(sys.modules); import anyqlora; "
        "seconds = time.process_time() - began; print(seconds, *sorted(set(sys.modules) - before))"
    )
    seconds, names = [], set()
    for _ in range(3):
        first, *names = fresh(code).split()
        seconds.append(float(first))
    assert {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names} == {"anyqlora"}
    assert min(seconds) < 0.05, seconds  # of a processor: other tests run beside this one


@pytest.mark.parametrize("module", [anyqlora, extend, testing], ids=lambda module: module.__name__)
def test_every_public_name_is_there_and_seen_by_type_checkers(module):
    tree = ast.parse(Path(module.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in [*guarded.body, *tree.body] if isinstance(node, ast.ImportFrom)]
    seen = {alias.name for node in imports for alias in node.names}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} | {"__version__"}
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in seen | defined, f"a type checker does not see {name}"
    assert set(module.__all__) <= set(dir(module)) and module.__all__ == sorted(module.__all__, key=sort_key)
    with pytest.raises(AttributeError, match="trian"):
        module.trian  # noqa: B018


def sort_key(name: str) -> tuple:
    """Constants, classes, the rest: ruff's order."""
    return (not name.isupper(), name[0].islower() or name[0] == "_", name)


def test_what_plugins_import_needs_no_framework():
    code = (
        "import sys; from anyqlora.extend import BackendSpec, Capabilities, Machine, StrategyOptions, StepResult, "
        "option; "
        "import anyqlora.testing; print(sorted({'torch', 'transformers', 'mlx', 'peft', 'pytest'} & set(sys.modules)))"
    )
    assert fresh(code) == "[]"


PUBLIC = [ROOT / "anyqlora" / "__init__.py", ROOT / "anyqlora" / "extend.py"] + [
    path for folder in ("testing", "distribution") for path in sorted((ROOT / "anyqlora" / folder).glob("*.py"))
]


def unannotated(tree: ast.AST):
    """(line, function, parameters) of what says no type; self and cls need none, and __init__ returns nothing."""
    for owner in ast.walk(tree):
        for node in ast.iter_child_nodes(owner):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            given = node.args
            named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
            is_static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
            own = named[1:] if isinstance(owner, ast.ClassDef) and not is_static else named
            missing = [argument.arg for argument in own if argument.annotation is None]
            if node.returns is None and node.name != "__init__":
                missing.append("return")
            if missing:
                yield node.lineno, node.name, missing


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_function_of_public_modules_says_its_types(path):
    assert list(unannotated(ast.parse(path.read_text()))) == []


def test_what_says_no_type_is_seen():
    code = "class A:\n    def f(self, x, *, y: int): ...\n    def g(self) -> None: ...\n\ndef h(*z) -> int: ...\n"
    assert list(unannotated(ast.parse(code))) == [(5, "h", ["z"]), (2, "f", ["x", "return"])]


def test_a_name_is_what_its_module_has():
    from anyqlora.on_torch.runtime import Runtime
    from anyqlora.planning import backends

    assert anyqlora.Runtime is Runtime and BackendManager is backends.BackendManager
    assert anyqlora.Backend("cpu") == "cpu"


def test_a_plan_is_the_managers():
    config = anyqlora.resolve({"backend": "cpu", "precision": "bf16"}, environ={})
    plan = anyqlora.plan(config)
    theirs = BackendManager("cpu").plan(config)
    assert replace(plan, memory_free=0) == replace(theirs, memory_free=0) and plan.precision == "bf16"
    assert isinstance(plan, anyqlora.RunPlan) and plan.memory.total > 0
    assert anyqlora.plan(backend="cpu", lora_r=4).config.lora_rank == 4  # an alias
    with pytest.raises(UsageError, match="lora_rnak"):
        anyqlora.plan(lora_rnak=4)
    with pytest.raises(TypeError, match="give one"):
        anyqlora.plan(config, lora_rank=4)


def test_train_returns_the_result_and_where_it_is(trained):
    result, place = trained
    written = json.loads((place / "run" / "result.json").read_text())
    assert result == {**written, "directory": str(place / "run")}
    assert result["steps"] == 2 and (place / "run" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_train_in_two_processes_returns_the_same(trained, tmp_path):
    result, _ = trained
    config = anyqlora.resolve(
        {**JOB, "strategy": "ddp", "world_size": 2, "batch_size": 8, "output_dir": str(tmp_path)}, environ={}
    )
    assert isinstance(config, TrainConfig)
    two = anyqlora.train(config)
    assert two["world_size"] == 2 and two["directory"] == str(tmp_path / "run")
    assert two["tokens_trained"] == result["tokens_trained"]


def test_a_finished_run_answers_and_evaluates(trained):
    result, _ = trained
    model = anyqlora.load_finetuned(result["directory"], num_samples=1)
    assert model.plan.config.num_samples == 1
    assert isinstance(model, anyqlora.FineTunedModel) and str(model.run.directory) == result["directory"]
    prompts = ["Name three colours.", "Rosa sold two apples."]
    one, several = model.generate(prompts[0]), model.generate(prompts)
    assert isinstance(one, str) and several[0] == one and len(several) == 2
    drawn = (
        model.generate(prompts[0], temperature=5.0, max_new_tokens=8),
        model.generate(prompts[0], temperature=5.0, max_new_tokens=40),
    )
    assert 0 < len(drawn[0]) < len(drawn[1]) and drawn[1].startswith(drawn[0].rstrip("\ufffd")), "of the same seed"
    assert model.generate(prompts, temperature=5.0) == model.generate(prompts, temperature=5.0) != several
    numbers = {name: value for name, value in model.evaluate().items() if name != "samples"}
    assert {"step": 2, **numbers} == result["eval"]["after"]
    with pytest.raises(UsageError, match="neither 0"):
        model.generate(prompts, temperature=1e-9)
    with pytest.raises(UsageError, match="max_new_tokens"):
        model.generate(prompts, max_new_tokens=0)
    with pytest.raises(UsageError, match="chat template"):
        model.generate([{"role": "user", "content": "the embedded base has none"}])
    with pytest.raises(UsageError, match="no run 'nowhere'"):
        anyqlora.load_finetuned("nowhere")
