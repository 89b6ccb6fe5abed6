"""The house: folders are floors.

A file imports from folders above its own in this list, or from its own folder without a circle.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FLOORS = [  # folders on one line do not import each other
    ["core"],
    ["config"],
    ["models", "processes"],
    ["data", "reporting"],
    ["planning"],
    ["runs"],
    ["training", "export"],
    ["on_torch", "on_mlx"],
    ["recipes", "serving"],
    ["cli"],
]
PUBLIC = [
    "__init__",
    "__main__",
    "extend",
    "testing",
    "distribution",
    "demo",
]  # faces: they may import from every floor
FRAMEWORK_FREE = [folder for floor in FLOORS[:7] for folder in floor]
FLOOR = {folder: number for number, floor in enumerate(FLOORS, 1) for folder in floor}
PRODUCT = sorted((ROOT / "anyqlora").rglob("*.py"))


def folder_of(path: Path) -> str:
    """The folder of anyqlora that a file of the package stands in, or its own name at the top."""
    parts = path.relative_to(ROOT / "anyqlora").with_suffix("").parts
    return parts[0]


def module_path(name: str) -> Path | None:
    for candidate in (ROOT / f"{name.replace('.', '/')}.py", ROOT / name.replace(".", "/") / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


def imported_names(path: Path) -> set[str]:
    """Every dotted name that a file imports, wherever in the file it does so."""
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names |= {stem, *(f"{stem}.{alias.name}" for alias in node.names)}
    return names


def imports(path: Path) -> set[Path]:
    """The files of the package that a file imports."""
    found = {module_path(name) for name in imported_names(path) if name.split(".")[0] == "anyqlora"}
    return {other for other in found if other and other != path}


@pytest.mark.parametrize("path", PRODUCT, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_come_from_lower_floors(path):
    folder = folder_of(path)
    if folder in PUBLIC:
        return
    for other in imports(path):
        their = folder_of(other)
        if their in (folder, "__init__"):
            continue
        if their in PUBLIC:
            assert their == "demo" or FLOOR[folder] >= FLOOR["recipes"], (
                f"{other} is a face: it imports from everywhere"
            )
        else:
            assert FLOOR[their] < FLOOR[folder], (
                f"{folder} (floor {FLOOR[folder]}) imports {their} (floor {FLOOR[their]})"
            )


def test_every_folder_has_a_floor():
    assert {folder_of(path) for path in PRODUCT} <= {*FLOOR, *PUBLIC}


def test_no_circles():
    graph = {path: {other for other in imports(path) if other.name != "__init__.py"} for path in PRODUCT}
    done = set()

    def visit(path, trail):
        assert path not in trail, " -> ".join(str(p.relative_to(ROOT)) for p in [*trail[trail.index(path) :], path])
        if path not in done:
            for other in graph[path]:
                visit(other, [*trail, path])
            done.add(path)

    for path in graph:
        visit(path, [])


def test_the_package_imports_no_module_that_a_users_directory_could_hold():
    """train.py, data.py and utils.py are in everybody's directory; the package has its own modules below its own name
    only.
    """
    for path in PRODUCT:
        own = {name.split(".")[0] for name in imported_names(path)} & {p.stem for p in ROOT.glob("*.py")}
        assert not own, f"{path} imports {own}"


def test_folders_1_to_7_import_no_framework():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in PRODUCT
        if folder_of(path) in FRAMEWORK_FREE and path.name != "__init__.py"
    ]
    code = (
        f"import sys\nfor m in {modules!r}: __import__(m)\n"
        "print(sorted({'torch', 'transformers', 'mlx', 'peft'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
