"""Private names of other libraries stand in `_compat.py` files alone, each with the test that says when it can go."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PRODUCT = sorted((ROOT / "anyqlora").rglob("*.py"))
COMPAT = [path for path in PRODUCT if path.name == "_compat.py"]
# Documented in spite of the underscore: Python's own os._exit, and the methods of named tuples.
DOCUMENTED = {"_exit", "_replace", "_asdict", "_fields", "_make"}
# Settings of other libraries, which are documented as module attributes that their users set.
SETTINGS = {
    "torch.backends.cudnn.benchmark",
    "torch.utils.deterministic.fill_uninitialized_memory",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def is_own(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "anyqlora"


def defined_in(tree: ast.AST) -> set[str]:
    """Names that a file gives to functions, classes, and attributes of its own objects."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_instance(node.value):
            names.add(node.attr)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def is_instance(node: ast.expr) -> bool:
    """Whether it is what a method is called on, or super()."""
    return (isinstance(node, ast.Name) and node.id in ("self", "cls")) or (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )


def foreign_names(tree: ast.AST) -> set[str]:
    """Names in a file that stand for another library's module or something in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names if not is_own(alias.name)}
        elif isinstance(node, ast.ImportFrom) and not is_own(node.module):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def private_touches(source: str) -> list[str]:
    """Places where a file names a private part of another library, or sets an attribute of one."""
    tree = ast.parse(source)
    own, foreign, found = defined_in(tree), foreign_names(tree), []
    for node in ast.walk(tree):
        what = ""
        if isinstance(node, ast.Attribute):
            root = ast.unparse(node).split(".")[0]
            if is_private(node.attr) and node.attr not in own | DOCUMENTED and not is_instance(node.value):
                what = ast.unparse(node)
            elif isinstance(node.ctx, ast.Store) and root in foreign and ast.unparse(node) not in SETTINGS:
                what = f"{ast.unparse(node)} = ..."
        elif isinstance(node, ast.ImportFrom) and not is_own(node.module):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            what = f"from {node.module} import ..." if any(map(is_private, parts)) else ""
        elif isinstance(node, ast.Import):
            what = " ".join(
                a.name for a in node.names if any(map(is_private, a.name.split("."))) and not is_own(a.name)
            )
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            owner, name = node.args[0], getattr(node.args[1], "value", "")
            is_ours = name in own | DOCUMENTED or is_instance(owner)
            sets_foreign = ast.unparse(node.func) == "setattr" and ast.unparse(owner).split(".")[0] in foreign
            is_touch = isinstance(name, str) and is_private(name) and not is_ours
            what = ast.unparse(node) if is_touch or sets_foreign else ""
        if what:
            found.append(f"line {node.lineno}: {what}")
    return found


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_of_other_libraries_stand_in_compat_alone(path):
    found = [] if path in COMPAT else private_touches(path.read_text(encoding="utf-8"))
    assert not found, f"{path.relative_to(ROOT)}: a function in the folder's _compat.py for each of {found}"


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch._foreach_mul_([], 2)",
        "def f(model):\n    return model.config._attn_implementation",
        "def f(model):\n    return getattr(model, '_no_split_modules', None)",
        "def f(module):\n    del module._parameters['weight']",
        "from mlx_lm.utils import _get_classes",
        "from torch._dynamo import reset",
        "import torch._dynamo",
        "import torch\ntorch.compile = print",
        "from torch import nn\nsetattr(nn.Linear, 'forward', print)",
    ],
)
def test_each_way_to_touch_one_is_seen(line):
    assert private_touches(line)


@pytest.mark.parametrize(
    "line",
    [
        "class A:\n    def _own(self):\n        return self._other, A()._own",
        "class A:\n    def __init__(self, other):\n        self._mesh = other._mesh",
        "import os\nos._exit(1)",
        "import torch\nprint(torch.__version__)",
        "from anyqlora.planning.probes import _PROBES",
        "def f(row):\n    return row._replace(a=1)",
        "import torch\ntorch.backends.cudnn.benchmark = False",
        "from torch import nn\nmodule = nn.Linear(1, 1)\nmodule.bias = None",
    ],
)
def test_what_is_ours_or_documented_is_not_one(line):
    assert not private_touches(line)


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("path", COMPAT, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_function_says_when_it_can_go(path):
    """By a test that exists, or a version that is supported no longer."""
    for function in functions(path):
        if is_private(function.name):
            continue
        text = " ".join((ast.get_docstring(function) or "").split())
        assert re.search(r"\d", text), f"{function.name}: in which versions was it seen?"
        if re.search(r"Can go when \w+ [\d.]+ is no longer supported\.", text):
            continue
        named = re.search(r"Can go when (tests/[\w/]+\.py)::(test_\w+) fails", text)
        assert named, f"{function.name}: which test says when it can go?"
        file, test = named.groups()
        tests = {node.name for node in functions(ROOT / file)}
        assert test in tests, f"{function.name}: {file} has no {test}"


def test_what_says_when_it_can_go_names_a_test_that_exists():
    """Outside of _compat.py, too: classes that step round something."""
    for path in PRODUCT:
        text = " ".join(path.read_text(encoding="utf-8").split())
        for file, test in re.findall(r"Can go when (tests/[\w/]+\.py)::(\w+)", text):
            assert test in {node.name for node in functions(ROOT / file)}, f"{path}: {file} has no {test}"
        assert not re.search(r"Can go when (?!tests/[\w/]+\.py::|\w+ [\d.]+ is no longer supported)", text), path
