#!/usr/bin/env python3
"""Compile the C kernels for a wheel: an object for each kind of processor, and a manifest by which they are verified.

python scripts/build_kernels.py [--compiler CC] [--out FOLDER]

Needs Python and a C compiler, no package. Without --out they are put where the package looks first and setuptools takes
them into the wheel, anyqlora/on_torch/kernels/cpu/prebuilt, which git ignores. Objects link the C library alone: built
in manylinux_2_28 (glibc 2.28) they run on everything that is newer. Each is compiled for a level of instruction sets
and not for the machine that compiles; at run time the best one is taken that the processor has, after sources, options
and sha256 have been compared (planning/native_kernels.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from anyqlora.planning import native_kernels  # noqa: E402 - found by the path above


def build(compiler: str, folder: Path) -> dict:
    """Compile all levels into `folder`, which has nothing else afterwards. Returns the manifest."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    objects = {}
    for level in native_kernels.LEVELS:
        path = folder / f"kernels-{level.name}.so"
        subprocess.run(native_kernels.command(compiler, level.options, path), check=True)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        objects[level.name] = {"file": path.name, "options": list(level.options), "sha256": digest}
    manifest = {
        "system": [platform.system(), platform.machine()],
        "sources": native_kernels.source_hash(),
        "compiler": version,
        "objects": objects,
    }
    (folder / native_kernels.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default=os.environ.get("CC", "cc"), help="the C compiler: CC, or cc")
    parser.add_argument("--out", type=Path, default=native_kernels.PREBUILT, metavar="FOLDER")
    stated = parser.parse_args()
    if [platform.system(), platform.machine()] != ["Linux", "x86_64"]:
        print(
            "build_kernels.py: compiled kernels are for Linux on x86_64; elsewhere wheels go without", file=sys.stderr
        )
        return 2
    manifest = build(stated.compiler, stated.out)
    for name, entry in manifest["objects"].items():
        size = (stated.out / entry["file"]).stat().st_size
        print(f"{name:12} {entry['file']:24} {size:>8} bytes  {' '.join(entry['options'])}")
    print(f"{stated.out}: {manifest['compiler']}, sources {manifest['sources'][:16]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
