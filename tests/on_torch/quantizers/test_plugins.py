"""A quantizer of another package: installed for the test, planned with its bytes, and trained with."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from anyqlora.config.resolve import resolve
from anyqlora.core import registry
from anyqlora.models import architectures
from anyqlora.models.architectures import DEMO_BASE
from anyqlora.planning import memory
from anyqlora.planning.backends import BackendManager
from tests.end_to_end.conftest import OFFLINE, PIP
from tests.support import runs
from tests.support.paths import ROOT
from tests.training import test_parity as parity

PACKAGE = ROOT / "examples" / "quantizer_plugin"
OURS = ("rowwise", "rowwise.quantizer")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The example package, installed by pip where only these tests look, from a copy: a build leaves files beside
    it.
    """
    import shutil

    source, target = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("site")
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [*map(str, (*PIP, "install", *OFFLINE, "--target", target, source))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def on_the_path(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return installed


def six_bits(weight):
    """By hand: each row in steps of a 31st of its largest magnitude."""
    step = weight.abs().amax(1, keepdim=True) / 31
    return (weight / step).round() * step


def test_it_is_planned_with_its_bytes(on_the_path):
    config = resolve({"model_name": "demo", "dataset": "demo", "quantizer": "rowwise6"}, environ={})
    plan = BackendManager("cpu").plan(config)
    shapes = architectures.model_shape(architectures.model_config(config))
    weights = sum(linear.parameters for linear in shapes.linears)
    rows = sum(linear.outputs for linear in shapes.linears)
    assert memory.weight_bytes(shapes, plan.config)["linear weights"] == shapes.layers * (weights * 6 // 8 + 4 * rows)
    assert plan.config.bits == 6 and any("frozen weights rowwise6" in line for line in plan.explain())


@pytest.mark.parametrize(
    "settings",
    [
        {"quantizer": "rowwise6"},
        pytest.param({"quantizer": "rowwise:ROWWISE6", "fused_lora": False}, marks=pytest.mark.slow),
    ],
    ids=["fused, by its name", "not fused, by module and row"],
)
def test_losses_are_those_of_plain_linears_on_the_dequantized_weights(settings, on_the_path, tmp_path):
    """The reference is a hand-written loop over transformers and PEFT, on weights rounded by hand."""
    base = AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
    weights = {
        name: six_bits(module.weight.detach())
        for name, module in base.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    assert all((value - base.get_submodule(name).weight).abs().max() > 0 for name, value in weights.items())
    settings = {**parity.SETTINGS, "batch_size": 2, "gradient_accumulation_steps": 2, **settings}
    directory = runs.run(tmp_path, model_name="demo", **settings)
    expected = parity.reference(DEMO_BASE, settings, packing=False, weights=weights)
    parity.compare(directory, expected, loss=1e-5, norm=1e-4, adapter=1e-3)
    assert runs.result(directory)["quantizer"] == settings["quantizer"]


@pytest.mark.distributed
@pytest.mark.slow
def test_the_contract_holds_for_the_installed_package(installed):
    """Its own test file, run by pytest as its author would."""
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r}); import pytest; "
        f"sys.exit(pytest.main(['-p', 'no:cacheprovider', '-n', '0', {str(PACKAGE / 'test_contract.py')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


def test_a_strategy_that_it_is_not_built_for_is_refused(on_the_path):
    from anyqlora.core.errors import NotSupported

    settings = {"model_name": "demo", "dataset": "demo", "quantizer": "rowwise6", "strategy": "fsdp", "world_size": 2}
    with pytest.raises(NotSupported, match="quantizer rowwise6 with strategy fsdp") as refused:
        BackendManager("cpu").plan(resolve(settings, environ={}))
    assert refused.value.cure == "--quantizer nf4, or --strategy single"


def test_it_is_gone_with_its_package():
    assert "rowwise6" not in registry.installed("quantizer")
