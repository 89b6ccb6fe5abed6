"""The C library: what kernels.h says of it, where it comes from, and what is said where there is none."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anyqlora.core.errors import RunError
from anyqlora.on_torch.kernels.cpu import bindings, header, library
from anyqlora.planning import machine, native_kernels
from anyqlora.planning.machine import FEATURES_VARIABLE, compiler, cpu_features, cpu_flags
from anyqlora.planning.memory import weights
from tests.support.paths import ROOT

TEXT = native_kernels.HEADER.read_text(encoding="utf-8")
needs_compiler = pytest.mark.skipif(not compiler(), reason="no C compiler is here")
needs_native = pytest.mark.skipif(
    not bindings.available("attention"), reason="no C compiler, or no AVX512-BF16, is here"
)


# ------------------------------------------------------------------------------------------------------------ kernels.h


def described(parameter) -> tuple:
    """A parameter or member as pycparser has it, in our words: (name, type, whether it is a pointer)."""
    from pycparser import c_ast

    is_pointer = isinstance(parameter.type, c_ast.PtrDecl)
    (name,) = (parameter.type.type if is_pointer else parameter.type).type.names
    return parameter.name, name, is_pointer


def test_a_c_parser_reads_the_header_as_the_binding_does():
    c_parser = pytest.importorskip("pycparser.c_parser")
    from pycparser import c_ast

    known = "typedef int int8_t, int32_t, int64_t, uint8_t, uint16_t;\n"
    plain = re.sub(r"^#.*$", "", re.sub(r"/\*.*?\*/", "", TEXT, flags=re.DOTALL), flags=re.MULTILINE)
    functions, structs = {}, {}
    for node in c_parser.CParser().parse(known + plain).ext:
        if isinstance(node, c_ast.Typedef) and isinstance(node.type.type, c_ast.Struct):
            structs[node.name] = [described(member) for member in node.type.type.decls]
        elif isinstance(node, c_ast.Decl):
            (returns,) = node.type.type.type.names
            functions[node.name] = returns, [described(parameter) for parameter in node.type.args.params]
    ours = header.functions(TEXT)
    assert functions == {name: (each.returns, list(map(tuple, each.parameters))) for name, each in ours.items()}
    assert list(structs) == ["LoraLinear"]
    assert structs["LoraLinear"] == list(map(tuple, header.members(TEXT, "LoraLinear")))


def test_the_header_is_read_whole():
    """Independently of both parsers: each opening bracket of a prototype is a function, each semicolon in the struct a
    member.
    """
    code = re.sub(r"/\*.*?\*/", "", TEXT, flags=re.DOTALL)
    assert len(header.functions(TEXT)) == code.count("(")
    assert len(header.members(TEXT, "LoraLinear")) == re.search(r"\{(.*?)\}", code, re.DOTALL)[1].count(";")


@pytest.mark.parametrize(
    "text", ["void f(long a[3]);", "void f(unsigned long a);", "int *f(long a);", "void f(const bf16 **x);", "long x;"]
)
def test_what_the_binding_could_not_call_is_no_prototype(text):
    with pytest.raises(ValueError):
        header.functions(text)


@needs_compiler
def test_the_library_exports_what_the_header_declares(tmp_path):
    """And a definition that differs from its prototype, or has none, does not compile."""
    target = native_kernels.native_target(cpu_flags(), cpu_features())
    command = native_kernels.command(compiler(), target, tmp_path / "library.so")
    wrong = ["-Werror=missing-prototypes", "-Werror=unknown-pragmas"]
    subprocess.run([*command, "-fsyntax-only", "-Wall", *wrong], check=True)
    file = library.build_library()
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", str(file)], capture_output=True, text=True, check=True
    ).stdout.split()[2::3]
    declared = set(header.functions(TEXT))
    assert set(symbols) <= declared
    if {"avx512_bf16", "avx512_vnni"} <= set(cpu_features()):
        assert set(symbols) == declared
    else:
        assert "quantize_4bit" in symbols


@needs_compiler
def test_the_struct_lies_in_memory_as_the_binding_packs_it(tmp_path):
    """Asked of the compiler: the offset of each member, and the size of all."""
    members = header.members(TEXT, "LoraLinear")
    printed = "".join(f'printf("%zu ", offsetof(LoraLinear, {member.name}));' for member in members)
    source = f'#include <stdio.h>\n#include <stddef.h>\n#include "{native_kernels.HEADER}"\n'
    (tmp_path / "a.c").write_text(source + f'int main(void) {{ {printed} printf("%zu", sizeof(LoraLinear)); }}')
    subprocess.run([compiler(), "-o", str(tmp_path / "a"), str(tmp_path / "a.c")], check=True)
    offsets = list(map(int, subprocess.run([str(tmp_path / "a")], capture_output=True, text=True).stdout.split()))
    assert offsets == [
        header.layout(members[:count]).size - size_of(members[count - 1]) for count in range(1, len(members) + 1)
    ] + [header.layout(members).size]


def size_of(member) -> int:
    return header.layout((member,)).size


def test_layers_are_packed_by_the_names_of_the_struct():
    """The order in which bindings.LoraLinear.packed puts them."""
    assert [member.name for member in header.members(TEXT, "LoraLinear")] == [
        "weight", "column_scales", "bias", "a", "b", "y", "grad_b", "scale", "columns", "rank", "first",
    ]  # fmt: skip
    tensors = [torch.empty(2, 3) for _ in range(6)]
    weight, scales, bias, a, y, grad_b = tensors
    b = torch.empty(5, 2)
    layer = bindings.LoraLinear((weight, scales), bias, a, b, 0.5, 7)
    pointers = [x.data_ptr() for x in (weight, scales, bias, a, b, y, grad_b)]
    assert list(bindings.LAYOUT.unpack(layer.packed(y, grad_b))) == [*pointers, 0.5, 5, 2, 7]


def test_the_plan_counts_with_the_librarys_tiles():
    """Asked of the preprocessor's own line, not of the parser."""
    for name in ("HEAD_VOCAB_BLOCK", "HEAD_VOCAB_PARTS", "PANEL_COLUMNS"):
        (line,) = [line for line in TEXT.splitlines() if line.startswith(f"#define {name} ")]
        assert getattr(weights, name) == int(line.split()[2])
    assert set(native_kernels.constants()) == {"HEAD_VOCAB_BLOCK", "HEAD_VOCAB_PARTS", "PANEL_COLUMNS"}


# ------------------------------------------------------------------------------------------------ compiled at first use


FEW = {"elementwise.c", "kernels.h", "bf16.h"}


@needs_compiler
def test_the_library_is_made_once_and_by_whoever_needs_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Nothing is run of it here: a few kernels are enough, hardly optimised.
    monkeypatch.setattr(native_kernels, "SOURCES", [s for s in native_kernels.SOURCES if s.name in FEW])
    monkeypatch.setenv(native_kernels.FLAGS_VARIABLE, "-O1")
    first = library.build_library()
    written = first.stat().st_mtime_ns
    assert library.build_library() == first and first.stat().st_mtime_ns == written
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    monkeypatch.setenv(native_kernels.FLAGS_VARIABLE, "-O1 -DOTHER")
    other = library.build_library()
    assert other != first
    with monkeypatch.context() as lowered:
        lowered.setenv(FEATURES_VARIABLE, "none")
        assert library.build_library() not in (first, other) or not cpu_features(environ={})
    other.chmod(0o666)  # nothing is run that somebody else may have written
    with pytest.raises(PermissionError, match="may be written by somebody else"):
        library.build_library()


@pytest.mark.skipif(
    not compiler() or "avx512_bf16" not in cpu_features(environ={}), reason="no C compiler, or no AVX512-BF16, is here"
)
@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        pytest.param("none", {"quantize_4bit"}, marks=pytest.mark.slow),
        pytest.param("avx2", {"quantize_4bit"}, marks=pytest.mark.slow),
        pytest.param("avx512_bf16", {"quantize_4bit", "attention"}, marks=pytest.mark.slow),
        pytest.param(
            "avx512_bf16,avx512_vnni", {"quantize_4bit", "attention", "frozen_matmul"}, marks=pytest.mark.slow
        ),
        ("amx_bf16,amx_int8", {"quantize_4bit", "attention", "frozen_matmul"}),
    ],
)
@pytest.mark.distributed
def test_what_the_library_has_follows_from_what_may_be_used(stated, expected):
    """In a process of its own, since a library is loaded once. By AMX the framework's products are preferred, and the
    head's.
    """
    code = """
from anyqlora.on_torch.kernels.cpu.library import available, preferred
for function in (available, preferred):
    print(*(name for name in ("quantize_4bit", "attention", "frozen_matmul") if function(name)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, FEATURES_VARIABLE: stated},
        capture_output=True,
        text=True,
        check=True,
    )
    available, preferred = (set(line.split()) for line in done.stdout.splitlines())
    assert available == expected
    assert preferred == expected - ({"frozen_matmul"} if "amx" in stated else set())


@needs_native
def test_a_function_that_is_not_in_the_library_is_named():
    with pytest.raises(RuntimeError, match="no_such_kernel: this processor has no instructions for it"):
        library.call("no_such_kernel")


def run_with(compiler: Path | str, tmp_path, *flags) -> subprocess.CompletedProcess:
    """One step of the embedded job with another C compiler and an empty cache."""
    command = [
        sys.executable,
        "train.py",
        f"--output_dir={tmp_path}",
        "--run_name=run",
        "--backend=cpu",
        "--precision=bf16",
        "--max_steps=1",
        "--eval_dataset=",
        "--num_samples=0",
        *flags,
    ]
    env = {**os.environ, "CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)


@needs_native
@pytest.mark.slow
def test_a_compiler_that_does_not_work_is_said(tmp_path):
    """`auto` trains on without them and says why; who asked for them is told."""
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho this one is out of order >&2\nexit 1\n")
    broken.chmod(0o755)
    done = run_with(broken, tmp_path)
    assert (
        done.returncode == 0
        and "portable kernels instead of native ones: the C compiler refuses them: this one is out of order"
        in done.stdout + done.stderr
    )
    asked = run_with(broken, tmp_path / "asked", "--kernels=native")
    assert (
        asked.returncode == RunError.exit_code
        and "kernels native cannot be used on cpu" in asked.stderr
        and "--kernels portable" in asked.stderr
    )


# --------------------------------------------------------------------------------------------------- objects of a wheel

V3 = set(native_kernels.LEVELS[1].flags)
ZEN_4 = set(native_kernels.LEVELS[0].flags)


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """What the release builds, by a Python without packages."""
    if not compiler() or [platform.system(), platform.machine()] != ["Linux", "x86_64"]:
        pytest.skip("no C compiler for them is here")
    folder = tmp_path_factory.mktemp("objects") / "prebuilt"
    command = [sys.executable, "-I", "-S", str(ROOT / "scripts" / "build_kernels.py"), f"--compiler={compiler()}"]
    subprocess.run([*command, f"--out={folder}"], check=True, capture_output=True, timeout=600)
    return folder


@pytest.fixture
def copied(objects, tmp_path):
    """A copy that may be damaged."""
    return Path(shutil.copytree(objects, tmp_path / "prebuilt"))


@pytest.mark.parametrize(
    ("flags", "features", "level"),
    [
        (ZEN_4, ("avx2", "avx512f", "avx512_bf16", "avx512_vnni"), "avx512_bf16"),
        ({*ZEN_4, "amx_bf16"}, ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16"), "avx512_bf16"),
        (ZEN_4, ("avx2", "avx512f"), "avx2"),
        (ZEN_4, ("avx2", "avx512f", "avx512_bf16"), None),  # what has all but VNNI's is compiled here
        (ZEN_4, (), None),
        (ZEN_4 - {"avx512vl"}, ("avx2", "avx512f", "avx512_bf16", "avx512_vnni"), None),
        (V3, ("avx2",), "avx2"),
        (V3 - {"fma"}, ("avx2",), None),
        ({"asimd", "bf16"}, ("asimd", "bf16"), None),
    ],
    ids=lambda value: " ".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_the_object_is_the_best_one_that_the_processor_has_all_instructions_for(objects, flags, features, level):
    found = native_kernels.prebuilt(flags, features, objects, {})
    assert (found and found[0].name) == level
    assert level is None or found[1] == objects / f"kernels-{level}.so"


def test_where_options_are_stated_or_no_objects_are_there_they_are_compiled(objects, tmp_path):
    features = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni")
    assert native_kernels.prebuilt(ZEN_4, features, objects, {native_kernels.FLAGS_VARIABLE: "-O1"}) is None
    assert native_kernels.prebuilt(ZEN_4, features, tmp_path, {}) is None


def damage_object(folder, manifest):
    with open(folder / "kernels-avx512_bf16.so", "r+b") as file:
        file.seek(5000)
        file.write(b"\0\1\2\3")


REFUSED = {
    "a damaged object": (damage_object, "is damaged: its sha256 is not the manifest's"),
    "an object less": (lambda folder, _: (folder / "kernels-avx512_bf16.so").unlink(), "cannot be read"),
    "other sources": (lambda _, manifest: manifest.update(sources="0" * 64), "is of other sources than those in"),
    "another system": (lambda _, manifest: manifest.update(system=["Linux", "aarch64"]), "aarch64.*, and this is"),
    "other options": (
        lambda _, manifest: manifest["objects"]["avx512_bf16"].update(options=["-march=native"]),
        "was compiled with -march=native, not with -march=x86-64-v4",
    ),
    "no sha256": (lambda _, manifest: manifest["objects"]["avx512_bf16"].pop("sha256"), "cannot be read"),
    "no objects": (lambda _, manifest: manifest.pop("objects"), "cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_objects_that_are_not_what_the_manifest_says_are_refused_in_a_sentence(case, copied, monkeypatch):
    """The plan says it; a compiler makes its own, and without one there are none."""
    change, why = REFUSED[case]
    manifest = json.loads((copied / "manifest.json").read_text())
    change(copied, manifest)
    (copied / "manifest.json").write_text(json.dumps(manifest))
    features = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni")
    with pytest.raises(native_kernels.UnusableObject, match=why):
        native_kernels.prebuilt(ZEN_4, features, copied, {})
    if set(features) <= set(cpu_features()):
        monkeypatch.setattr(native_kernels, "PREBUILT", copied)
        monkeypatch.delenv(native_kernels.FLAGS_VARIABLE, raising=False)
        assert why.split(",")[0].split("*")[-1] in machine.observe().prebuilt["error"]
        assert library.library_file() == library.build_library()
        monkeypatch.setenv("CC", "/absent")
        with pytest.raises(FileNotFoundError, match="no C compiler is here"):
            library.library_file()


def test_a_manifest_that_is_no_json_is_refused(copied):
    (copied / "manifest.json").write_text("{")
    with pytest.raises(native_kernels.UnusableObject, match="manifest.json cannot be read"):
        native_kernels.prebuilt(ZEN_4, ("avx2",), copied, {})


INSTALLED = """
import sys
import torch
from anyqlora.config.resolve import resolve
from anyqlora.on_torch.kernels import attention, reference
from anyqlora.on_torch.kernels.cpu import bindings, library
from anyqlora.planning.backends import BackendManager

plan = BackendManager("cpu").plan(resolve({"backend": "cpu", "precision": "bf16"}, environ={}))
print(plan.kernels, not [warning for warning in plan.warnings if "kernels" in warning])
print(library.library_file(), repr(bindings.self_check()), bindings.available("lm_head_cross_entropy"))
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(2, heads, 70, 32, generator=generator).bfloat16() for heads in (4, 2, 2))
ours = attention.attention(q, k, v, scale=0.2, is_native=True).double()
exact = attention.reference(*(x.double() for x in (q, k, v)), scale=0.2)
x, w = torch.randn(37, 64, generator=generator).bfloat16(), torch.randn(50, 64, generator=generator).bfloat16()
out = torch.empty(37, 50).bfloat16()
bindings.frozen_matmul(x, w, out)
product = x.double() @ w.double().T
print(float((ours - exact).norm() / exact.norm()) < 0.004, float((out - product).norm() / product.norm()) < 2**-8)
"""


@pytest.fixture
def installed(objects, tmp_path):
    """The package as a wheel with objects installs it."""
    shutil.copytree(ROOT / "anyqlora", tmp_path / "anyqlora", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", tmp_path / "anyqlora" / "configs")
    shutil.rmtree(tmp_path / "anyqlora/on_torch/kernels/cpu/prebuilt", ignore_errors=True)
    shutil.copytree(objects, tmp_path / "anyqlora/on_torch/kernels/cpu/prebuilt")
    return tmp_path


def bare(folder: Path) -> dict[str, str]:
    """An environment with no compiler on PATH, an empty cache, and the package of `folder`."""
    env = {name: value for name, value in os.environ.items() if name != native_kernels.FLAGS_VARIABLE}
    (folder / "bin").mkdir(exist_ok=True)
    return env | {"PATH": str(folder / "bin"), "PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.mark.distributed
@needs_native
@pytest.mark.skipif("avx512_vnni" not in cpu_features(), reason="no AVX512-VNNI is here")
def test_an_installation_with_objects_needs_no_compiler(installed):
    """The fast path is planned and taken, its numbers are the references', and nothing is compiled."""
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED], cwd=installed, env=bare(installed), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    path = installed / "anyqlora/on_torch/kernels/cpu/prebuilt/kernels-avx512_bf16.so"
    assert done.stdout.splitlines() == ["native True", f"{path} '' True", "True True"]
    assert not list((installed / "cache").rglob("*.so"))


KERNEL_TESTS = [
    f"tests/on_torch/kernels/test_{name}.py" for name in ("cpu", "dropout", "frozen_matmul", "lm_head_int8")
]


@needs_native
@pytest.mark.slow
@pytest.mark.skipif("avx512_vnni" not in cpu_features(), reason="no AVX512-VNNI is here")
def test_the_kernels_of_a_wheel_pass_their_tests(installed):
    """All of them, by the objects and without a compiler: explicit options may make other code than
    -march=native does.
    """
    shutil.copytree(ROOT / "tests", installed / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "configs", "train.py", "backend_manager.py"):
        source = ROOT / name
        shutil.copytree(source, installed / name) if source.is_dir() else shutil.copy(source, installed / name)
    command = [sys.executable, "-m", "pytest", *KERNEL_TESTS, "-p", "no:cacheprovider"]  # pyproject.toml has -q
    done = subprocess.run(command, cwd=installed, env=bare(installed), capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-3000:]
    assert not list((installed / "cache").rglob("*.so"))


# ----------------------------------------------------------------------------------------------------------- sanitizers

SANITIZED = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"


def sanitized() -> dict[str, str]:
    """The environment in which kernels are compiled with both sanitizers and Python runs with their libraries."""
    runtime = [
        subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(map(os.path.isabs, runtime)):
        pytest.skip("this compiler has no sanitizers")
    # Python and torch keep what they never free, so leaks are not looked for.
    return {"LD_PRELOAD": ":".join(runtime), "ASAN_OPTIONS": "detect_leaks=0", native_kernels.FLAGS_VARIABLE: SANITIZED}


@needs_native
@pytest.mark.slow
def test_the_kernels_read_and_write_what_is_theirs_and_compute_nothing_undefined():
    """The tests of all kernels, instrumented: gcc's address and undefined-behaviour sanitizers end the process at the
    first finding.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        *KERNEL_TESTS,
        "-s",
        "-p",
        "no:cacheprovider",
    ]  # -s: findings are shown
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **sanitized()}, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "finding"),
    [("(64, 256)", "heap-buffer-overflow"), ("(16, 64)", None)],
    ids=["too few rows", "as many as stated"],
)
def test_the_sanitizers_see_a_read_beyond_the_end(shape, finding):
    """Else the test above would pass with anything."""
    code = f"""
import ctypes
import torch
from anyqlora.on_torch.kernels.cpu import library
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
x = libc.malloc(16 * 64 * 2)  # torch's own memory has room around it
ctypes.memset(x, 0, 16 * 64 * 2)
rows, width = {shape}
weight, y, rstd = torch.ones(width).bfloat16(), torch.empty(rows, width).bfloat16(), torch.empty(rows)
library.call("rms_norm", x, weight, y, rstd, rows, width, 1e-5, 0.0, 0)
print("done")
"""
    env = {**os.environ, **sanitized()}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode == 0 and "done" in done.stdout) if finding is None else finding in done.stderr, done.stderr
