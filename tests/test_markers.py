"""Markers say what a test needs: a file that imports what several processes or mlx are used by is marked as a whole."""

import ast

import pytest

from tests.conftest import NEEDS, TESTS

IMPORTS = {
    "distributed": {
        "anyqlora.testing.StrategyContract",
        "anyqlora.testing.world",
        "tests.support.launched",
        "tests.support.trials",
    },
    "mlx": {"mlx", "mlx_lm", "anyqlora.on_mlx"},
}
FILES = sorted(TESTS.rglob("test_*.py"))


def imported(path) -> set[str]:
    """What a file imports at its top, and what it would skip itself without."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        value = getattr(node, "value", None)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(value, ast.Call) and ast.unparse(value.func) == "pytest.importorskip":
            names.add(ast.literal_eval(value.args[0]))
    return names


def needs(path) -> set[str]:
    place = path.relative_to(TESTS)
    return {marker for marker, places in NEEDS.items() if any(place.is_relative_to(other) for other in places)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_a_file_has_the_markers_of_what_it_imports(path):
    for marker, modules in IMPORTS.items():
        used = {name for name in imported(path) if any(f"{name}.".startswith(f"{module}.") for module in modules)}
        assert not used or marker in needs(path), f"it imports {used}: NEEDS of tests/conftest.py has {marker} for it"


def test_every_place_is_there():
    assert [place for places in NEEDS.values() for place in places if not (TESTS / place).exists()] == []


def test_what_no_expression_names_is_not_slow(pytestconfig):
    assert "slow" in pytestconfig.option.markexpr
