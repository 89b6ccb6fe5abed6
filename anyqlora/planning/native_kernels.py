"""Where the C kernels (kernels native) come from: objects that a wheel carries, or sources for the
machine's compiler.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "on_torch" / "kernels" / "cpu"
SOURCES = [
    FOLDER / "csrc" / name
    for name in ("elementwise.c", "attention.c", "matmul.c", "lm_head.c", "kernels.h", "panels.h", "bf16.h")
]
HEADER = FOLDER / "csrc" / "kernels.h"
PREBUILT = FOLDER / "prebuilt"  # of a wheel: written by scripts/build_kernels.py
MANIFEST = "manifest.json"
FLAGS_VARIABLE = "ANYQLORA_KERNEL_CFLAGS"  # options more for the compiler; whoever states some gets no compiled objects
# Numbers that are not finite keep their meaning, so no -ffast-math. OpenMP's functions are those of the library that
# torch has loaded: a second one would have threads of its own.
OPTIONS = ("-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-nostdlib")
WIDE = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
WITHOUT = {  # what the compiler leaves out where the processor has it and ANYQLORA_CPU_FEATURES does not name it
    "avx2": "-mno-avx2",
    "avx512f": "-mno-avx512f",
    "avx512_bf16": "-mno-avx512bf16",
    "avx512_vnni": "-mno-avx512vnni",
}


@dataclass(frozen=True)
class Level:
    """A kind of processor that objects are compiled for. `flags` are all that it must have, by Linux's names;
    `features` those of them that ANYQLORA_CPU_FEATURES can take away.
    """

    name: str
    features: tuple[str, ...]
    flags: frozenset[str]
    options: tuple[str, ...]


_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"))  # x86-64-v3
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS = (  # best first
    Level(
        "avx512_bf16",
        ("avx512_bf16", "avx512_vnni"),
        _V4 | {"avx512_bf16", "avx512_vnni"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
    ),
    Level("avx2", ("avx2",), _V3, ("-march=x86-64-v3",)),  # 4-bit quantization alone
)


def options(target: Iterable[str]) -> list[str]:
    """The compiler's options for a `target`: what stands for -march and -m."""
    return [*OPTIONS, *target, *WIDE]


def command(compiler: str, target: Iterable[str], output: Path) -> list[str]:
    """How the library is compiled."""
    sources = (str(source) for source in SOURCES if source.suffix == ".c")
    return [compiler, *options(target), "-o", str(output), *sources, "-lm"]


def native_target(
    flags: Collection[str], features: Collection[str], environ: Mapping[str, str] = os.environ
) -> list[str]:
    """The options for this processor: all that it has (`flags`) but what may not be used, which is
    not in `features`.
    """
    without = [option for name, option in WITHOUT.items() if name in flags and name not in features]
    return ["-march=native", *without, *environ.get(FLAGS_VARIABLE, "").split()]


def source_hash() -> str:
    """sha256 of all sources, by which compiled objects are known to be theirs."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def constants() -> dict[str, int]:
    """The tile sizes that kernels.h defines: {name: number}."""
    text = HEADER.read_text(encoding="utf-8")
    return {name: int(number) for name, number in re.findall(r"^#define (\w+) (\d+)", text, re.MULTILINE)}


class UnusableObject(ValueError):
    """Compiled objects are there, and are not to be loaded; the message says why."""


def prebuilt(
    flags: Collection[str],
    features: Collection[str],
    folder: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Level, Path] | None:
    """The object in `folder` (the package's own unless given) for this processor, of `flags` and allowed `features`.

    None where there are no objects, where none has all that it could have on this processor, and where the environment
    states options of its own. Raises UnusableObject for objects of other sources, options or bytes than the manifest
    has to say.
    """
    folder = folder or PREBUILT
    if environ.get(FLAGS_VARIABLE) or not (folder / MANIFEST).exists():
        return None
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        system, sources, objects = manifest["system"], manifest["sources"], dict(manifest["objects"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnusableObject(f"{folder / MANIFEST} cannot be read: {error!r}") from None
    here = [platform.system(), platform.machine()]
    if system != here:
        raise UnusableObject(f"{folder / MANIFEST} is for {system}, and this is {here}")
    if sources != source_hash():
        raise UnusableObject(f"{folder / MANIFEST} is of other sources than those in {HEADER.parent}")
    for level in LEVELS:
        is_whole = "avx512_bf16" in level.features or "avx512_bf16" not in features
        if level.name in objects and is_whole and level.flags <= set(flags) and set(level.features) <= set(features):
            return level, _checked(folder, level, objects[level.name])
    return None


def _checked(folder: Path, level: Level, entry: Mapping) -> Path:
    try:
        path, options, digest = folder / Path(entry["file"]).name, entry["options"], entry["sha256"]
        actual = hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, KeyError, TypeError) as error:
        raise UnusableObject(f"{folder / MANIFEST}: the object for {level.name} cannot be read: {error!r}") from None
    if options != list(level.options):
        raise UnusableObject(
            f"{path} was compiled with {' '.join(map(str, options))}, not with {' '.join(level.options)}"
        )
    if digest != actual:
        raise UnusableObject(f"{path} is damaged: its sha256 is not the manifest's")
    return path
