"""What this machine is, as plain data: the one place that asks the hardware and the installed libraries."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from anyqlora.core.errors import UsageError
from anyqlora.core.lazy_imports import uncollected
from anyqlora.planning import native_kernels
from anyqlora.processes.environment import cores_per_process, device_index, local_rank, local_size

MLX_BUILDS = (
    "mlx-metal",
    "mlx-cuda-13",
    "mlx-cuda-12",
    "mlx-cuda",
    "mlx-cpu",
)  # mlx's device code is in packages of its own
# At what others keep busy: the first look after a start finds up to 1.4 cores in use where nothing runs (Linux 6, a
# virtual machine).
LOOKS = 4
FEATURES_VARIABLE = "ANYQLORA_CPU_FEATURES"
# AVX2_VNNI is another instruction set than AVX512-VNNI, which is the one that is asked for here
ONEDNN_WITHOUT_VNNI = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE")
CPU_FEATURES = {  # instruction sets that matter here, by Linux's names, and what a processor with them has as well
    "avx2": (),
    "avx512f": ("avx2",),
    "avx512_bf16": ("avx2", "avx512f"),
    "avx512_vnni": ("avx2", "avx512f"),
    "amx_bf16": ("avx2", "avx512f", "avx512_bf16", "avx512_vnni"),
    "amx_int8": ("avx2", "avx512f", "avx512_bf16", "avx512_vnni"),
    "asimd": (),
    "bf16": ("asimd",),
}
AMX = {"amx_bf16", "amx_int8"}

ASKING = """
import importlib, sys
module = importlib.import_module(sys.argv[1])
for index in range(module.device_count()):
    try:
        print(module.mem_get_info(index)[0])
    except RuntimeError:
        print()
"""


@dataclass(frozen=True)
class Device:
    """One accelerator. Memory in bytes; `memory_free` is None where it was not measured (a device that is not used)."""

    name: str
    capability: str = ""
    memory_total: int = 0
    memory_free: int | None = None
    bf16: bool = False  # in hardware, not by emulation


@dataclass(frozen=True)
class Machine:
    """Plain data that the probes judge: `Machine.from_dict(json)` of a recorded machine stands for the machine itself.

    Memory is in bytes and respects a container's limit. In every mapping, `error` says why the rest is missing.
    """

    system: str
    os_version: str
    arch: str
    python: str
    cores: int  # that this run's processes here may use together
    memory_total: int
    memory_available: int
    cpu_features: tuple[str, ...] = ()  # that may be used
    cpu_limit: str = ""  # what ANYQLORA_CPU_FEATURES allows; "": all
    onednn_limit: str = ""  # VARIABLE=VALUE that takes VNNI from oneDNN, torch's products on a CPU; "": it has it
    threads: int = 0  # that OMP_NUM_THREADS allows; 0: it says nothing
    processes: int = 0  # of this run, that a launcher has started here; 0: it says nothing
    torch: Mapping = field(
        default_factory=dict
    )  # version, cuda, hip, xpu (versions it is built for), collectives, error
    cuda: tuple[Device, ...] = ()  # NVIDIA's or, where torch is built for ROCm, AMD's
    xpu: tuple[Device, ...] = ()
    mps: Mapping = field(
        default_factory=dict
    )  # built, available, allocates, quantizes, bf16, memory_total, memory_free, error
    mlx: Mapping = field(
        default_factory=dict
    )  # version, build (one of MLX_BUILDS; "": none), lm_version (mlx-lm's), error
    bitsandbytes: Mapping = field(default_factory=dict)  # version, library (the native library's file), error
    triton: Mapping = field(default_factory=dict)  # version, interpreted (kernels run in Python, on the CPU), error
    compiler: str = ""  # of C, where the kernels can be compiled by it
    prebuilt: Mapping = field(default_factory=dict)  # C kernels of this installation: level (of native_kernels), error

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping) -> Machine:
        data = dict(data)
        for kind in ("cuda", "xpu"):
            data[kind] = tuple(Device(**device) for device in data.get(kind, ()))
        data["cpu_features"] = tuple(data.get("cpu_features", ()))
        return cls(**data)


def observe() -> Machine:
    """This machine, now. Imports torch if it is installed, and nothing else that is heavy.

    What is missing or broken is an entry of the result. Raises UsageError where ANYQLORA_CPU_FEATURES cannot be read.
    """
    torch = _import_torch()
    memory_total, memory_available = host_memory()
    host = {
        "system": platform.system(),
        "os_version": platform.mac_ver()[0] or platform.release(),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "cores": cores_per_process(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ),
        "memory_total": memory_total,
        "memory_available": memory_available,
        "cpu_features": cpu_features(),
        "cpu_limit": os.environ.get(FEATURES_VARIABLE, ""),
        "onednn_limit": onednn_limit(),
        "threads": _stated_threads(),
        "processes": local_size(),
        "mlx": _mlx(),
        "triton": _triton(),
        "compiler": compiler(),
        "prebuilt": _prebuilt(),
    }
    if isinstance(torch, str):
        return Machine(**host, torch={"error": torch}, bitsandbytes={"error": torch})
    cuda, cuda_error = _accelerators(torch.cuda, _amd_device if torch.version.hip else _nvidia_device)
    xpu, xpu_error = _accelerators(torch.xpu, _xpu_device)
    build = _torch_build(torch) | {"cuda_error": cuda_error, "xpu_error": xpu_error}
    return Machine(**host, torch=build, cuda=cuda, xpu=xpu, mps=_mps(torch), bitsandbytes=_bitsandbytes(torch))


def _stated_threads() -> int:
    """What OMP_NUM_THREADS says of the outermost level; 0 where it says nothing that can be read."""
    stated = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(stated) if stated.isdigit() else 0


def host_memory() -> tuple[int, int]:
    """(total, available) bytes of host memory, within the container's limit if there is one."""
    import psutil

    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = int(Path("/sys/fs/cgroup", limit).read_text())
            used = int(Path("/sys/fs/cgroup", used).read_text())
        except (OSError, ValueError):  # no such cgroup version, or "max"
            continue
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return total, available


def _import_torch():
    """The torch module, or the reason why there is none."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if "torch" not in sys.modules:
        os.environ.update(_waiting(os.environ))
    try:
        with uncollected("torch"):
            import torch
    except Exception as error:  # a broken installation is a finding, not a crash
        return f"torch cannot be imported: {_first_line(error)}"
    return torch


def _waiting(environ: Mapping[str, str]) -> dict[str, str]:
    """How torch's threads shall wait for each other, as OpenMP reads it when torch is imported; nothing where somebody
    has said.

    Asleep, and where nothing else wants the processor, by one of LOOKS looks at it, only after trying 5,000 times (0.1
    ms). A thread that sleeps wakes in 0.07 ms, of which a step has thousands; one that stays awake takes the core that
    another process needs, and that process delays the next wait. docs/performance.md has what either costs.
    """
    if "OMP_WAIT_POLICY" in environ or "GOMP_SPINCOUNT" in environ:
        return {}
    return {"OMP_WAIT_POLICY": "PASSIVE"} | (
        {"GOMP_SPINCOUNT": "5000"} if any(_cores_in_use() < 0.5 for _ in range(LOOKS)) else {}
    )


def _cores_in_use(seconds: float = 0.05) -> float:
    """Of the processor's cores that this process may use, how many others keep busy just now."""
    import psutil

    def idle() -> float:
        times = psutil.cpu_times(percpu=True)
        return sum(times[core].idle + getattr(times[core], "iowait", 0) for core in cores if core < len(times))

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    before, began = idle(), time.perf_counter()
    time.sleep(seconds)
    return len(cores) - (idle() - before) / (time.perf_counter() - began)


def _torch_build(torch) -> dict:
    distributed = torch.distributed
    collectives = [
        name
        for name in ("nccl", "xccl", "gloo")
        if distributed.is_available() and distributed.is_backend_available(name)
    ]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "xpu": torch.version.xpu,
        "collectives": collectives,
    }


def _accelerators(module, read) -> tuple[tuple[Device, ...], str]:
    """The devices of torch.cuda or torch.xpu, and why there are fewer than the driver has."""
    try:
        accelerators = (
            [read(module.get_device_properties(index)) for index in range(module.device_count())]
            if module.is_available()
            else []
        )
        return tuple(
            replace(device, memory_free=free)
            for device, free in zip(accelerators, free_memory(module, len(accelerators)), strict=True)
        ), ""
    except Exception as error:  # a driver that is too old or a device that is lost
        return (), _first_line(error)


def _nvidia_device(properties) -> Device:
    return Device(
        properties.name, f"{properties.major}.{properties.minor}", properties.total_memory, bf16=properties.major >= 8
    )


def _amd_device(properties) -> Device:
    return Device(properties.name, properties.gcnArchName.partition(":")[0], properties.total_memory, bf16=True)


def _xpu_device(properties) -> Device:
    return Device(
        properties.name, "", properties.total_memory, bf16=getattr(properties, "has_bfloat16_conversions", True)
    )


def free_memory(module, count: int, environ: Mapping[str, str] = os.environ) -> list[int | None]:
    """Bytes free on each of the `count` devices of torch.cuda or torch.xpu; None where it is not known.

    Asking starts a context, which takes half a gigabyte and may keep others off. So a process asks for the device that
    it will use. One that may only start others, and the first of several, whose plan is that of all, have a short-lived
    process ask for all.
    """
    rank = local_rank(environ)
    if not rank and count > 1:
        free = asked_elsewhere(module.__name__, count)
    else:
        own = device_index(rank or 0, count)
        free = [_free(module, index) if index == own else None for index in range(count)]
    # What this process has kept of an earlier run counts as used, and is to be had.
    return [
        None if bytes_ is None else bytes_ + module.memory_reserved(index) - module.memory_allocated(index)
        for index, bytes_ in enumerate(free)
    ]


def asked_elsewhere(module: str, count: int) -> list[int | None]:
    """Bytes free on each device of `module`, as a process finds them that ends at once."""
    try:
        lines = subprocess.run(
            [sys.executable, "-c", ASKING, module], capture_output=True, text=True, check=True, timeout=60
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return [None] * count
    return [int(line) if line.isdigit() else None for line in lines[:count]] + [None] * (count - len(lines))


def _free(module, index: int) -> int | None:
    """Bytes free on a device; None where its driver does not tell (some Intel GPUs)."""
    try:
        return module.mem_get_info(index)[0]
    except RuntimeError:
        return None


def _mps(torch) -> dict:
    """Metal by doing: allocate, quantize, multiply in bf16."""
    mps = torch.backends.mps
    if not mps.is_built():
        return {"built": False, "available": False}
    state = {"built": True, "available": mps.is_available(), "allocates": False, "quantizes": False, "bf16": False}
    if not state["available"]:
        return state
    try:
        torch.ones(2, device="mps").sum().item()
        total = torch.mps.recommended_max_memory()
        state |= {
            "allocates": True,
            "memory_total": total,
            "memory_free": max(total - torch.mps.driver_allocated_memory(), 0),
        }
        state["quantizes"] = quantizes(torch, "mps")
        x = torch.ones(2, 2, device="mps", dtype=torch.bfloat16)
        state["bf16"] = (x @ x).sum().item() == 8
    except Exception as error:
        state["error"] = _first_line(error)
    return state


def quantizes(torch, device: str) -> bool:
    """Whether block-wise 4-bit quantization in plain torch ops gives on `device` what it gives on the CPU.

    bitsandbytes' MPS backend falls back to these ops (absmax, bucketize, packing of two codes in a byte), so this
    finds out what it needs without importing it.
    """

    def packed(device):
        x = torch.linspace(-3, 3, 128, device=device).view(2, 64)  # [blocks, block]
        levels = torch.linspace(-1, 1, 16, device=device)
        codes = torch.bucketize((x / x.abs().amax(1, keepdim=True)).flatten(), (levels[1:] + levels[:-1]) / 2).to(
            torch.uint8
        )
        return (codes[::2] << 4 | codes[1::2]).cpu()

    return torch.equal(packed(device), packed("cpu"))


def _mlx() -> dict:
    """Read from the installed packages: importing mlx starts Metal."""
    if importlib.util.find_spec("mlx") is None:
        return {"error": "mlx is not installed"}
    build = next((name for name in MLX_BUILDS if _version(name)), "")
    return {"version": _version("mlx"), "build": build, "lm_version": _version("mlx-lm")}


def compiler() -> str:
    """The C compiler's path; "" where there is none, and elsewhere than on Linux, where torch's threads are not GNU
    OpenMP's.
    """
    return shutil.which(os.environ.get("CC", "cc")) or "" if platform.system() == "Linux" else ""


def _prebuilt() -> dict:
    """The object of this installation that fits the processor; nothing where it has none, as in a checkout."""
    try:
        prebuilt = native_kernels.prebuilt(cpu_flags(), cpu_features())
    except native_kernels.UnusableObject as error:
        return {"error": str(error)}
    return {"level": prebuilt[0].name} if prebuilt else {}


def _triton() -> dict:
    """Read from the installed package: importing it takes half a second."""
    if importlib.util.find_spec("triton") is None:
        return {"error": "triton is not installed"}
    return {"version": _version("triton"), "interpreted": os.environ.get("TRITON_INTERPRET") == "1"}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _bitsandbytes(torch) -> dict:
    """Load the native library that bitsandbytes would choose, without importing bitsandbytes (1-2 s)."""
    spec = importlib.util.find_spec("bitsandbytes")
    if spec is None or not spec.submodule_search_locations:
        return {"error": "bitsandbytes is not installed"}
    state = {"version": _version("bitsandbytes")}
    directory = Path(spec.submodule_search_locations[0])
    library = native_library(
        sorted(path.name for path in directory.glob("libbitsandbytes_*")), torch.version, torch.cuda.is_available()
    )
    if not library:
        return state | {"error": f"bitsandbytes {state['version']} has no native library for torch {torch.__version__}"}
    try:
        ctypes.CDLL(str(directory / library))
    except OSError as error:
        return state | {"library": library, "error": f"bitsandbytes' {library} cannot be loaded: {_first_line(error)}"}
    return state | {"library": library}


def native_library(files: list[str], build, has_cuda: bool) -> str:
    """The file of `files` that bitsandbytes 0.50 loads for a torch `build` (torch.version), or "".

    Its rule (bitsandbytes/cextension.py): the build's own version, else the newest older one of the same major version,
    else the oldest newer one.
    """
    builds = (("rocm", build.hip), ("cuda", build.cuda if has_cuda else None), ("xpu", build.xpu), ("cpu", "any"))
    kind, version = next((kind, version) for kind, version in builds if version)
    if kind in ("cpu", "xpu"):
        names = [f"libbitsandbytes_{kind}{version[:4]}.", f"libbitsandbytes_{kind}."]
        return next((file for name in names for file in files if file.startswith(name)), "")
    wanted = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    major_digits = 1 if kind == "rocm" else 2
    offered = {}
    for file in files:
        if match := re.match(rf"libbitsandbytes_{kind}(\d+)\.", file):
            digits = match[1]
            offered[int(digits[:major_digits]), int(digits[major_digits:] or 0)] = file
    same_major = [v for v in offered if v[0] == wanted[0]]
    older, newer = [v for v in same_major if v <= wanted], [v for v in same_major if v > wanted]
    return offered[max(older)] if older else offered[min(newer)] if newer else ""


def cpu_flags() -> frozenset[str]:
    """Every instruction set that the system names, from /proc/cpuinfo (Linux); none elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def cpu_features(flags: Iterable[str] | None = None, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """What this processor has of CPU_FEATURES and ANYQLORA_CPU_FEATURES allows, sorted: the one place that decides it.

    `flags` are the processor's, `cpu_flags()` unless given. The variable names instruction sets, with commas or spaces
    between them, each with those below it; `none` allows none. It takes away and never adds, with one exception: AMX
    may be named on a processor that has AVX512-BF16 and AVX512-VNNI but not AMX. Nothing here uses its instructions:
    AMX only takes our own products and the fused head away, since the framework's are faster by it. Raises UsageError
    for other names.
    """
    features = CPU_FEATURES.keys() & (cpu_flags() if flags is None else set(flags))
    stated = environ.get(FEATURES_VARIABLE, "").replace(",", " ").split()
    if unknown := [name for name in stated if name not in CPU_FEATURES and stated != ["none"]]:
        raise UsageError(
            f"no such instruction set: {', '.join(unknown)}",
            where=FEATURES_VARIABLE,
            cure=f"one or more of {', '.join(CPU_FEATURES)}; or none",
        )
    if not stated:
        return tuple(sorted(features))
    allowed = {name for one in stated if one != "none" for name in (one, *CPU_FEATURES[one])}
    as_amx = AMX & allowed if {*CPU_FEATURES["amx_bf16"]} <= features else set()
    return tuple(sorted(features & allowed | as_amx))


def onednn_limit(environ: Mapping[str, str] = os.environ) -> str:
    """VARIABLE=VALUE of the environment that keeps oneDNN from VNNI, without which its sums of int8 products overflow.

    oneDNN reads the first that is not empty, in any case of letters, and takes a value that it does not know for none
    (its developer guide, "CPU Dispatcher Control").
    """
    for variable in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        if value := environ.get(variable, ""):
            return f"{variable}={value}" if value.upper() in ONEDNN_WITHOUT_VNNI else ""
    return ""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
