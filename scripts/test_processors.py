#!/usr/bin/env python3
"""The test suite as other processors would see it, one run after the other: what passed, what failed, how long it took.

    python scripts/test_processors.py                     all settings, the default suite each time (most of an hour)
    python scripts/test_processors.py zen3 amx -- -x tests/config
                                                          some settings; what follows `--` goes to pytest

torch and oneDNN take fewer instructions than there are when they are told to (ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA),
and this package chooses as on a smaller processor, or as on one with AMX, where ANYQLORA_CPU_FEATURES says so. Exits
with 1 when a run has failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
SETTINGS = {
    "here": ("this processor", {}),
    "avx2": ("torch and oneDNN as with AVX2", AVX2),
    "default": ("torch without vector instructions", {"ATEN_CPU_CAPABILITY": "default"}),
    "amx": ("choices as with AMX", {"ANYQLORA_CPU_FEATURES": "amx_bf16,amx_int8"}),
    "zen3": ("everything as with AVX2", {**AVX2, "ANYQLORA_CPU_FEATURES": "avx2"}),
    "nocompiler": ("no C compiler", {"CC": ""}),
    "twothreads": ("two threads", {"OMP_NUM_THREADS": "2"}),
}
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "clang++", "c89", "c99", "tcc", "icx", "icc", "nvcc")


def without_compilers(directory: Path) -> str:
    """A PATH on which everything is but compilers: folders of links, in the order of PATH's own."""
    mirrors = []
    for number, folder in enumerate(os.environ["PATH"].split(os.pathsep)):
        mirror = directory / str(number)
        mirror.mkdir()
        mirrors.append(str(mirror))
        for program in Path(folder).iterdir() if os.path.isdir(folder) else ():
            name = program.name.rpartition("-linux-gnu-")[2]  # x86_64-linux-gnu-gcc-12
            if name.partition("-")[0] not in COMPILERS:
                (mirror / program.name).symlink_to(program)
    return os.pathsep.join(mirrors)


def run(name: str, arguments: list[str], directory: Path) -> tuple[dict[str, int], float]:
    """How many tests ended in which way under a setting, and the seconds that they took."""
    environ = {**os.environ, **SETTINGS[name][1]}
    if name == "nocompiler":
        del environ["CC"]
        (directory / name).mkdir()
        environ["PATH"] = without_compilers(directory / name)
        environ["XDG_CACHE_HOME"] = str(directory / "cache")  # where compiled kernels of earlier runs are not
    report, began = directory / f"{name}.xml", time.monotonic()
    subprocess.run([sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments], cwd=ROOT, env=environ)
    seconds = time.monotonic() - began
    if not report.exists():
        return {"errors": 1}, seconds
    counts = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0}
    for suite in ET.parse(report).iter("testsuite"):
        counts["failed"] += int(suite.get("failures"))
        counts["errors"] += int(suite.get("errors"))
        counts["skipped"] += int(suite.get("skipped"))
        counts["passed"] += int(suite.get("tests"))
    counts["passed"] -= counts["failed"] + counts["errors"] + counts["skipped"]
    return counts, seconds


def main(arguments: list[str]) -> int:
    names, rest = arguments, []
    if "--" in arguments:
        names, rest = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    if unknown := set(names) - set(SETTINGS):
        sys.exit(f"no such setting: {', '.join(sorted(unknown))}; there are {', '.join(SETTINGS)}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="processors-") as directory:
        for name in names or SETTINGS:
            print(f"== {name}: {SETTINGS[name][0]}", flush=True)
            rows.append((name, *run(name, rest, Path(directory))))
    print(f"\n{'setting':12}{'passed':>8}{'failed':>8}{'errors':>8}{'skipped':>8}{'seconds':>9}")
    for name, counts, seconds in rows:
        cells = "".join(f"{counts.get(kind, 0):8}" for kind in ("passed", "failed", "errors", "skipped"))
        print(f"{name:12}{cells}{seconds:9.0f}")
    return any(counts.get("failed") or counts.get("errors") or not counts.get("passed") for _, counts, _ in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
