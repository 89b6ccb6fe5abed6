"""The library of csrc/: an object that the wheel carries, else compiled by the machine's own compiler when first
needed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from anyqlora.core.hashing import cache_directory
from anyqlora.on_torch.kernels.cpu import header
from anyqlora.planning import native_kernels
from anyqlora.planning.machine import AMX, compiler, cpu_features, cpu_flags

MATMUL = {  # that the framework has, too
    "frozen_matmul",
    "lm_head_cross_entropy",
    "lm_head_workspace",
    "lora_linears",
    "lora_linears_backward",
    "lora_matmul",
    "lora_weight_grad",
}


@functools.cache
def library() -> ctypes.CDLL:
    """Its functions, without those for which the processor has no instructions. Raises OSError or
    subprocess.SubprocessError where none can be had.
    """
    loaded = ctypes.CDLL(str(library_file()), mode=os.RTLD_NOW)  # later, a name that is missing would end the process
    for name, function in header.functions(native_kernels.HEADER.read_text(encoding="utf-8")).items():
        if hasattr(loaded, name):
            entry = getattr(loaded, name)
            entry.argtypes = [parameter.ctype for parameter in function.parameters]
            entry.restype = None if function.returns == "void" else header.SCALARS[function.returns]
    return loaded


@functools.cache
def available(name: str) -> bool:
    """Whether a function can be had here: there is an object or a compiler, and the processor has the instructions."""
    try:
        return hasattr(library(), name)
    except (OSError, subprocess.SubprocessError):
        return False


@functools.cache
def preferred(name: str) -> bool:
    """Whether a function is available and to be taken: by AMX the framework's own products are
    several times as fast.
    """
    return available(name) and not (name in MATMUL and AMX & set(cpu_features()))


def call(name: str, *arguments):
    """Call a function of kernels.h, with tensors for its pointers: contiguous ones, of the type that it declares."""
    entry = getattr(library(), name, None)
    if entry is None:
        raise RuntimeError(f"{name}: this processor has no instructions for it, or may not use them")
    return entry(*(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments))


def library_file() -> Path:
    """The wheel's own object for this processor, else one that is compiled here."""
    try:
        prebuilt = native_kernels.prebuilt(cpu_flags(), cpu_features())
    except native_kernels.UnusableObject:  # the plan says why
        prebuilt = None
    return prebuilt[1] if prebuilt else build_library()


def build_library() -> Path:
    """The library's file in the user's cache, made unless it is there. Its name tells source, compiler, options and
    processor apart.
    """
    cc, target = compiler(), native_kernels.native_target(cpu_flags(), cpu_features())
    if not cc:
        raise FileNotFoundError("no C compiler is here")
    how = {"capture_output": True, "check": True, "text": True}
    # What the compiler says of itself and, for -march=native, of the processor.
    compiler_options = subprocess.run([cc, "-march=native", "-E", "-v", "-x", "c", os.devnull], **how).stderr
    parts = [native_kernels.source_hash(), cc, *native_kernels.options(target), compiler_options]
    path = cache_directory() / f"native-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Two processes may be at it: the last one's stands, whole.
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            staged = Path(directory) / path.name
            subprocess.run(native_kernels.command(cc, target, staged), **how)
            staged.chmod(0o700)
            os.replace(staged, path)
    status = path.stat()
    if status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022:
        raise PermissionError(f"{path} may be written by somebody else, and would be run")
    return path
