"""The house: a file imports from lower floors or its own, and floors 0-2 leave the frameworks alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FLOORS = {
    0: [
        "anyqlora/__init__.py",
        "anyqlora/core/errors.py",
        "anyqlora/core/terminal.py",
        "anyqlora/core/redaction.py",
        "anyqlora/core/lazy_imports.py",
        "anyqlora/core/registry.py",
        "anyqlora/config/strategy_options.py",
        "anyqlora/config/schema.py",
        "anyqlora/config/validate.py",
        "anyqlora/config/init_adapter.py",
        "anyqlora/config/resolve.py",
        "anyqlora/models/architectures.py",
        "anyqlora/models/prequantized.py",
    ],
    1: [
        "anyqlora/planning/memory/estimate.py",
        "anyqlora/planning/machine.py",
        "anyqlora/planning/mesh.py",
        "anyqlora/planning/planner.py",
        "anyqlora/planning/fitting.py",
        "anyqlora/models/lora_targets.py",
        "anyqlora/processes/environment.py",
        "backend_manager.py",
    ],
    4: ["train.py", "anyqlora/__main__.py", "anyqlora/commands", "anyqlora/recipes/worker.py"],
    3: [
        "anyqlora/on_torch",
        "anyqlora/on_mlx",
        "anyqlora/distribution",
        "anyqlora/export",
        "anyqlora/report",
        "anyqlora/testing.py",
    ],
    2: ["anyqlora"],  # whatever else stands there
}


def floor_of(path: str) -> int:
    for floor in (0, 1, 4, 3, 2):
        if any(path == room or path.startswith(room + "/") for room in FLOORS[floor]):
            return floor
    raise AssertionError(f"{path} has no floor")


def product() -> list[Path]:
    return [ROOT / "train.py", ROOT / "backend_manager.py", *sorted((ROOT / "anyqlora").rglob("*.py"))]


def module_path(name: str) -> str | None:
    for candidate in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"):
        if (ROOT / candidate).exists():
            return candidate
    return None


def imports(path: Path) -> set[str]:
    """Project files that `path` imports, wherever in the file it does so."""
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [stem, *(f"{stem}.{alias.name}" for alias in node.names)]
        found |= {p for p in map(module_path, names) if p}
    return found


@pytest.mark.parametrize("path", product(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_come_from_lower_floors(path):
    own = floor_of(str(path.relative_to(ROOT)))
    higher = {name for name in imports(path) if floor_of(name) > own}
    assert not higher, f"floor {own} imports {higher}"


def test_torch_and_mlx_never_import_each_other():
    for path in product():
        room = str(path.relative_to(ROOT))
        if room.startswith("anyqlora/on_torch/"):
            assert not any(name.startswith("anyqlora/on_mlx/") for name in imports(path))
        if room.startswith("anyqlora/on_mlx/"):
            assert not any(name.startswith("anyqlora/on_torch/") for name in imports(path))


def test_no_cycles_on_one_floor():
    graph = {str(p.relative_to(ROOT)): imports(p) for p in product()}
    done = set()

    def visit(name, trail):
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in graph[name]:
                if other in graph and other != name and not other.endswith("__init__.py"):
                    visit(other, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_floors_0_to_2_import_no_framework():
    modules = [
        str(p.relative_to(ROOT).with_suffix("")).replace("/", ".")
        for p in product()
        if floor_of(str(p.relative_to(ROOT))) <= 2 and p.name != "__init__.py"
    ]
    code = f"import sys\nfor m in {modules!r}: __import__(m)\nprint(sorted({{'torch', 'transformers', 'mlx', 'peft'}} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
