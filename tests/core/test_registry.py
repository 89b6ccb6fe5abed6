"""Rows: what a name says of itself is what the rest goes by, and another package's row counts as ours do."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from anyqlora.config.resolve import resolve
from anyqlora.config.schema import AUTO, TrainConfig
from anyqlora.core import registry
from anyqlora.core.descriptors import Info
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.models import architectures
from anyqlora.planning import memory
from anyqlora.planning.backends import BackendManager

TABLES = {
    "quantizer": registry.QUANTIZERS,
    "adapter": registry.ADAPTERS,
    "strategy": registry.STRATEGIES,
    "optimizer": registry.OPTIMIZERS,
    "train_type": registry.TRAIN_TYPES,
}
ROWS = """
from anyqlora.extend import AdapterInfo, QuantizerInfo
from anyqlora.core import registry
CLASS = "json:JSONDecoder"
ROW = QuantizerInfo("its_own", bits=5, torch=CLASS, scale_bytes=lambda outputs, inputs, config, framework: outputs)
NEEDY = QuantizerInfo("needy", bits=4, torch="json:JSONDecoder", needs=("bitsandbytes",))
OF_MLX = QuantizerInfo("of_mlx", bits=4, mlx="json:JSONDecoder")
ADAPTER = AdapterInfo("twice", torch=CLASS, parameters=lambda outputs, inputs, rank: 2 * rank * (outputs + inputs))
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """install({group: "name = module:Object"}, package): as pip would leave it. `their_rows` can be imported."""
    (tmp_path / "their_rows.py").write_text(ROWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_rows", raising=False)

    def install(entries: dict[str, str], package: str = "a-package") -> None:
        about = tmp_path / package / f"{package}-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        text = "".join(f"[anyqlora.{group}]\n{entry}\n" for group, entry in entries.items())
        (about / "entry_points.txt").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / package))

    return install


def plan(**settings):
    config = resolve({"model_name": "demo", "dataset": "demo", "backend": "cpu", **settings}, environ={})
    return BackendManager("cpu").plan(config)


@pytest.mark.parametrize("kind", TABLES)
def test_a_row_has_its_name_and_is_refused_or_somewhere(kind):
    for name, row in TABLES[kind].items():
        assert row.name == name and isinstance(row, Info)
        if kind == "train_type":
            assert bool(row.refused) != (row.quantizer in registry.QUANTIZERS and row.adapter in registry.ADAPTERS)
        else:
            assert bool(row.refused) != bool(row.torch or row.mlx)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, table in TABLES.items() for name, row in table.items() if row.refused]
)
def test_what_is_refused_says_why_and_what_there_is(kind, name):
    with pytest.raises(NotSupported) as refused:
        registry.lookup(kind, name, TABLES[kind], "somewhere")
    assert TABLES[kind][name].refused in refused.value.message and refused.value.where == "somewhere"
    assert refused.value.cure.startswith("one of: ") and name not in refused.value.cure.split(": ")[1].split(", ")


@pytest.mark.parametrize("name", ["lora", "rslora", "dora"])
def test_an_adapters_parameters_are_those_of_peft(name):
    import torch
    from peft import LoraConfig, get_peft_model

    flags = {"rslora": {"use_rslora": True}, "dora": {"use_dora": True}}.get(name, {})
    model = torch.nn.Sequential(torch.nn.Linear(24, 40))
    model = get_peft_model(model, LoraConfig(r=3, target_modules=["0"], **flags))
    counted = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert registry.adapter(name).parameters(40, 24, 3) == counted


def test_the_names_that_a_backend_offers_are_those_of_rows():
    for name in BackendManager("cpu").names():
        row = BackendManager("cpu").spec(name).capabilities
        assert {registry.quantizer(q).target(row.framework) != "" for q in row.quantizers} == {True}
        assert {registry.adapter(a).target(row.framework) != "" for a in row.adapters} == {True}


# ---------------------------------------------------------------------------------------------- of another package


def test_another_packages_quantizer_is_planned_with_its_bytes(installed):
    installed({"quantizers": "its_own = their_rows:ROW"})
    found = plan(quantizer="its_own")
    assert (found.quantizer, found.config.bits) == ("its_own", 5)
    shapes = architectures.model_shape(architectures.model_config(found.config))
    expected = shapes.layers * sum(-(-x.outputs * x.inputs * 5 // 8) + x.outputs for x in shapes.linears)
    assert memory.weight_bytes(shapes, found.config)["linear weights"] == expected
    assert plan(quantizer="their_rows:ROW").memory.total == plan(quantizer="its_own").memory.total


def test_another_packages_adapter_is_planned_with_its_bytes(installed):
    installed({"adapters": "twice = their_rows:ADAPTER"})
    found, lora = plan(adapter="twice"), plan(adapter="lora")
    assert found.adapter == "twice"
    shapes = architectures.model_shape(architectures.model_config(found.config))
    assert memory.adapter_parameters(shapes, found.config) == 2 * memory.adapter_parameters(shapes, lora.config)


def test_a_quantizer_that_is_unknown_is_told_what_there_is_and_whose(installed):
    installed({"quantizers": "its_own = their_rows:ROW"})
    with pytest.raises(UsageError, match=r"'its_one'; did you mean 'its_own'") as refused:
        plan(quantizer="its_one")
    assert "its_own" in refused.value.cure and "nf4" in refused.value.cure


@pytest.mark.parametrize("name", ["its_own", "nf4"])
def test_two_packages_with_one_name(name, installed):
    installed({"quantizers": f"{name} = their_rows:ROW"}, "one")
    installed({"quantizers": f"{name} = their_rows:ROW"}, "two")
    with pytest.raises(UsageError, match="is registered by .*one and by two"):
        plan(quantizer=name)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("their_rows:nothing", "cannot be imported: AttributeError"),
        ("no_such_module:ROW", "cannot be imported: ModuleNotFoundError"),
        ("json:JSONDecoder", "json:JSONDecoder is type, no QuantizerInfo"),
        ("their_rows:ADAPTER", "their_rows:ADAPTER is AdapterInfo, no QuantizerInfo"),
        ("their_rows:OF_MLX", "backend cpu has no their_rows:OF_MLX"),
    ],
)
def test_what_is_no_quantizer_here(target, message, installed):
    with pytest.raises(UsageError, match=message) as refused:
        plan(quantizer=target)
    assert refused.value.where == "command line: --quantizer"


def test_a_row_under_another_name_than_its_own(installed):
    installed({"quantizers": "something = their_rows:ROW"})
    with pytest.raises(UsageError, match="is the row of 'its_own'"):
        plan(quantizer="something")


def test_what_another_packages_row_needs_has_to_be_here(installed):
    manager = BackendManager("cpu")
    config = resolve({"model_name": "demo", "dataset": "demo", "quantizer": "their_rows:NEEDY"}, environ={})
    assert manager.plan(config).quantizer == "their_rows:NEEDY"
    without = replace(manager.machine, bitsandbytes={"error": "bitsandbytes is not installed"})
    with pytest.raises(UsageError, match="bitsandbytes is not installed"):
        BackendManager("cpu", machine=without).plan(config)


def test_a_plan_with_another_packages_row_imports_no_framework(installed, tmp_path):
    import subprocess

    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(Path(registry.__file__).parents[2])!r}]\n"
        "from anyqlora.core import registry\n"
        "registry.quantizer('their_rows:ROW').weight_bytes(8, 8, None, 'torch')\n"
        "print(sorted({'torch', 'transformers', 'peft', 'mlx', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_a_name_of_the_table_is_found_whatever_is_installed():
    assert registry.quantizer(TrainConfig().with_(quantizer="nf4").quantizer).bits == 4
    with pytest.raises(UsageError, match=f"unknown quantizer {AUTO!r}"):
        registry.quantizer(AUTO)
