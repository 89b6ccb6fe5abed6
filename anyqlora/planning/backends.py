"""Which backends there are, what each can do, what this machine does of it - and the plan of a run from that."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

from anyqlora.config.resolve import TrainConfig, from_environment
from anyqlora.core import registry
from anyqlora.core.errors import NotBuilt, UsageError
from anyqlora.models import architectures
from anyqlora.planning import memory
from anyqlora.planning.fitting import HEADROOM
from anyqlora.planning.machine import Device, Machine, free_memory, host_memory, observe
from anyqlora.planning.planner import PRECISION_OF, Adjustment, RunPlan, plan_run
from anyqlora.processes.environment import device_of, local_rank

__all__ = [
    "CAPABILITIES",
    "Adjustment",
    "Backend",
    "BackendManager",
    "BackendSpec",
    "BackendUnavailable",
    "Capabilities",
    "Found",
    "Machine",
    "RunPlan",
    "detect_backend",
    "get_backend_manager",
    "get_device",
    "observe",
]


class Backend(StrEnum):
    """The built-in backends, in the order in which `auto` tries them."""

    CUDA = "cuda"
    ROCM = "rocm"
    XPU = "xpu"
    MLX = "mlx"
    MPS = "mps"
    CPU = "cpu"


@dataclass(frozen=True)
class Capabilities:
    """What the software can do on one backend; a probe narrows it to what a machine does."""

    framework: str  # which loop runs it: a key of LOOPS
    device: str  # the framework's name of the device type
    dtypes: tuple[str, ...]  # fp32, bf16, fp16: best first
    quantizers: tuple[str, ...]
    optimizers: tuple[str, ...]
    strategies: tuple[str, ...] = ("single",)
    kernels: tuple[str, ...] = ("portable",)  # best first: the first is what `kernels auto` runs
    products: tuple[str, ...] = ("full",)  # of frozen weights
    collective: str | None = None  # torch.distributed's (or mlx's) backend; None: one process only
    activation_offload: bool = False  # whether host memory is another memory
    adapters: tuple[str, ...] = ("lora", "rslora", "dora", "pissa", "loftq", "full")
    autocast: bool = True  # whether weights of one dtype can be computed with in another
    lacks: Mapping[str, str] = field(default_factory=dict)  # settings that have no effect here, and why
    tested: frozenset[str] = frozenset()  # the cells that tests of this repository run on real hardware
    notes: str = ""

    @property
    def bits(self) -> tuple[int, ...]:
        """Bits a frozen weight can be kept in."""
        return tuple(sorted({registry.BITS.get(quantizer, 16) for quantizer in self.quantizers}))


@dataclass(frozen=True)
class Found:
    """What a machine does of a backend's row, and why less."""

    available: bool
    devices: tuple[Device, ...] = ()
    dtypes: tuple[str, ...] = ()  # best first: the first is what `precision auto` computes in
    quantizers: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    collective: str | None = None
    cores: int = 0  # of the processor; 0: not asked
    threads: int = 0  # that the environment states; 0: none
    processes: int = 0  # of a run, that are on this machine; 0: all of them
    automatic: bool = True  # whether `auto` may take it
    device: str = ""  # where it is not the row's: MLX's CPU build has no gpu
    reasons: Mapping[str, str] = field(default_factory=dict)  # cell -> why not; "available" for the whole row
    slow: Mapping[str, str] = field(default_factory=dict)  # cell -> warning; "" for the whole row
    kernels: tuple[str, ...] = ("portable",)
    products: tuple[str, ...] = ("full",)

    @property
    def memory_total(self) -> int:
        """Bytes of the device with the least; 0 where it is unknown."""
        return min((device.memory_total for device in self.devices), default=0)

    @property
    def memory_free(self) -> int | None:
        """Bytes of the device with the least, where one that was not measured counts as empty; None where none was measured."""
        if all(device.memory_free is None for device in self.devices):
            return None
        known = [device.memory_total if device.memory_free is None else device.memory_free for device in self.devices]
        return min(
            count for count, device in zip(known, self.devices, strict=True) if count or device.memory_free is not None
        )

    def used(self, processes: int) -> Found:
        """The same of the devices that so many processes take, one each: what one of them does not do, the run does not."""
        devices = self.devices[:processes]
        lacks = _no_bf16(devices) if devices and devices[0].bf16 else {}
        return replace(
            self,
            devices=devices,
            processes=min(processes, self.processes or processes),
            dtypes=tuple(dtype for dtype in self.dtypes if dtype not in lacks),
            reasons={**self.reasons, **lacks},
        )

    @property
    def sharing(self) -> int:
        """Processes for each device, where there are more of them than devices, as on a processor."""
        return max(1, -(-self.processes // max(1, len(self.devices))))

    def why(self, cell: str) -> str:
        """Why this machine does not do `cell`; "" when it does."""
        return self.reasons.get(cell, "")


@dataclass(frozen=True)
class BackendSpec:
    """One backend: a row, the probe that narrows it, the device string. Third parties give one by entry point, group anyqlora.backends."""

    name: str
    capabilities: Capabilities
    probe: Callable[[Machine], Found]
    device: str


class BackendUnavailable(UsageError, ValueError):
    """The backend that was asked for is unknown, or not on this machine."""


LOOPS = {"torch": "", "mlx": ""}  # framework -> why no loop runs it; "" where one does
BNB_4BIT = ("nf4", "fp4")
TORCH_STRATEGIES = ("single", "ddp", "fsdp", "deepspeed", "tp", "accelerate")
TORCH_OPTIMIZERS = ("adamw", "fused_adamw", "adam", "sgd", "adadelta")
BNB_OPTIMIZERS = ("adamw_8bit", "paged_adamw", "paged_adamw_8bit")
NEEDS_BITSANDBYTES = (*BNB_4BIT, "int8", *BNB_OPTIMIZERS)

FLOAT8_FROM = (8, 9)  # compute capability

_NOT_ON_MLX = {
    "threads": "MLX chooses its own",
    "weight_cache": "each product has packed weights of its own kind",
    "quantized_cache": "it reads what `python -m anyqlora quantize` writes, given as model_name",
    "profile": "it is torch's profiler",
    "profile_memory": "MLX keeps no record of memory by phase; metrics.jsonl has each step's",
    "reentrant_checkpointing": "it is a form of torch's checkpointing",
    "use_activation_cpu_offload": "host and device share one memory",
}

_GPU = Capabilities(
    "torch",
    "cuda",
    ("bf16", "fp16", "fp32"),
    (*BNB_4BIT, "int8", "affine4", "none"),
    TORCH_OPTIMIZERS + BNB_OPTIMIZERS,
    strategies=TORCH_STRATEGIES,
    collective="nccl",
    activation_offload=True,
)
CAPABILITIES: dict[Backend, Capabilities] = {
    Backend.CUDA: replace(_GPU, kernels=("exact", "portable", "triton"), products=("full", "fp8"), notes="NVIDIA GPU"),
    Backend.ROCM: replace(_GPU, notes="AMD GPU; torch built for ROCm calls it cuda"),
    Backend.XPU: replace(_GPU, device="xpu", collective="xccl", notes="Intel GPU"),
    Backend.MLX: Capabilities(
        "mlx",
        "gpu",
        ("bf16", "fp16", "fp32"),
        ("nf4", *registry.AFFINE, "mxfp4", "nvfp4", "none"),
        ("adamw", "adam", "sgd", "adadelta"),
        strategies=("single", "mlx"),
        collective="ring",
        adapters=("lora", "rslora", "dora", "full"),
        autocast=False,
        lacks=_NOT_ON_MLX,
        notes="Apple silicon; what is marked ran on MLX's Linux CPU build",
        tested=frozenset(
            (
                "fp32",
                "bf16",
                "fp16",
                "nf4",
                *registry.AFFINE,
                "mxfp4",
                "nvfp4",
                "none",
                "adamw",
                "adam",
                "sgd",
                "adadelta",
                "single",
                "mlx",
                "lora",
                "rslora",
                "dora",
                "full",
            )
        ),
    ),
    Backend.MPS: Capabilities(
        "torch",
        "mps",
        ("bf16", "fp16", "fp32"),
        (*BNB_4BIT, "int8", "affine4", "none"),
        TORCH_OPTIMIZERS,
        notes="Apple silicon through torch; one process, no collective",
    ),
    Backend.CPU: Capabilities(
        "torch",
        "cpu",
        ("bf16", "fp32", "fp16"),
        (*BNB_4BIT, "int8", "affine4", "none"),
        (*TORCH_OPTIMIZERS, "adamw_8bit"),
        strategies=TORCH_STRATEGIES,
        collective="gloo",
        kernels=("native", "portable"),
        products=("full", "int8_backward", "int8"),
        notes="any CPU; slow",
        tested=frozenset(
            (
                "fp32",
                "bf16",
                "fp16",
                *BNB_4BIT,
                "int8",
                "int8_backward",
                "affine4",
                "none",
                *TORCH_OPTIMIZERS,
                "adamw_8bit",
                *TORCH_STRATEGIES,
                "native",
                "portable",
                "lora",
                "rslora",
                "dora",
                "pissa",
                "loftq",
                "full",
            )
        ),
    ),
}


# ------------------------------------------------------------------------------ probes: (row, machine) -> Found, no side effects


def _absent(why: str) -> Found:
    return Found(available=False, reasons={"available": why})


def _narrowed(
    row: Capabilities, machine: Machine, devices: tuple[Device, ...], lacks: Mapping[str, str], **more
) -> Found:
    """The row without the cells in `lacks` (cell -> why)."""
    lacks = dict(lacks)
    if machine.bitsandbytes.get("error"):
        lacks = {**dict.fromkeys(NEEDS_BITSANDBYTES, machine.bitsandbytes["error"]), **lacks}
    if row.collective and row.collective not in machine.torch.get("collectives", ()):
        lacks["collective"] = f"this torch has no {row.collective}"
    collective = "gloo" if "collective" in lacks and "gloo" in machine.torch.get("collectives", ()) else None
    kept = {
        name: tuple(cell for cell in getattr(row, name) if cell not in lacks)
        for name in ("dtypes", "quantizers", "optimizers", "kernels")
    }
    return Found(
        True,
        devices,
        **{**kept, **more},
        cores=machine.cores,
        threads=machine.threads,
        collective=collective if "collective" in lacks else row.collective,
        reasons=lacks,
    )


def _called(device: Device) -> str:
    return f"{device.name} ({device.capability})" if device.capability else device.name


def _no_bf16(devices: tuple[Device, ...]) -> dict[str, str]:
    """What these devices lack of it."""
    without = next((device for device in devices if not device.bf16), None)
    return {"bf16": f"{_called(without)} has no bf16 in hardware"} if without else {}


def _torch_gpu(
    row: Capabilities, machine: Machine, *, build: str, maker: str, devices: tuple[Device, ...], error: str
) -> Found:
    torch = machine.torch
    if torch.get("error"):
        return _absent(torch["error"])
    if not torch.get(build):
        return _absent(f"torch {torch.get('version')} is not built for {maker} GPUs")
    if not devices:
        return _absent(error or f"torch finds no {maker} GPU")
    first, lacks = devices[0], _no_bf16(devices[:1])
    if "triton" in row.kernels and machine.triton.get("version", "") == "":
        lacks |= dict.fromkeys(("exact", "triton"), machine.triton.get("error", "triton was not looked for"))
    products = row.products
    if "fp8" in products and tuple(map(int, first.capability.split("."))) < FLOAT8_FROM:
        lacks["fp8 products"], products = f"{_called(first)} does not multiply float8", ("full",)
    return _narrowed(row, machine, devices, lacks, products=products)


def _cuda(row, machine):
    return _torch_gpu(
        row, machine, build="cuda", maker="NVIDIA", devices=machine.cuda, error=machine.torch.get("cuda_error", "")
    )


def _rocm(row, machine):
    return _torch_gpu(
        row, machine, build="hip", maker="AMD", devices=machine.cuda, error=machine.torch.get("cuda_error", "")
    )


def _xpu(row, machine):
    return _torch_gpu(
        row, machine, build="xpu", maker="Intel", devices=machine.xpu, error=machine.torch.get("xpu_error", "")
    )


def _mps(row, machine):
    mps = machine.mps
    if machine.torch.get("error"):
        return _absent(machine.torch["error"])
    if not mps.get("built"):
        return _absent(f"torch {machine.torch.get('version')} is not built with MPS")
    if not mps.get("available"):
        return _absent(f"this torch's MPS needs a newer macOS than {machine.os_version}, or there is no Metal device")
    if not mps.get("allocates"):
        return _absent(f"MPS cannot allocate: {mps.get('error', 'no reason given')}")
    lacks = {} if mps.get("bf16") else {"bf16": f"bf16 products fail on MPS here: {mps.get('error') or 'wrong result'}"}
    if not mps.get("quantizes"):
        lacks |= dict.fromkeys(
            NEEDS_BITSANDBYTES, f"4-bit quantization fails on MPS here: {mps.get('error') or 'wrong result'}"
        )
    slow = dict.fromkeys(
        ("nf4", "fp4", "int8"), "quantized weights run on torch fallback kernels, slower than 16-bit weights"
    )
    free = min(mps["memory_free"], machine.memory_available)  # the GPU's memory is the host's
    return _narrowed(row, machine, (Device("Metal", "", mps["memory_total"], free, mps["bf16"]),), lacks, slow=slow)


def _mlx(row, machine):
    if machine.mlx.get("error"):
        return _absent(machine.mlx["error"])
    build = machine.mlx.get("build", "")
    has_metal = machine.system == "Darwin" and build == "mlx-metal"
    lm = machine.mlx.get("lm_version", "")
    if not build or not lm:
        lacking = "mlx-lm" if build else "mlx's device code (mlx-metal, or mlx-cpu on Linux)"
        return _absent(
            f"mlx {machine.mlx.get('version')} is installed without {lacking}: pip install 'mlx[cpu]' mlx-lm (on a Mac: mlx mlx-lm)"
        )
    if has_metal and machine.mps.get("built") and not machine.mps.get("available"):
        return _absent("Metal finds no GPU here, as in a virtual machine or without a screen")
    room = _metal_memory(machine) if has_metal else machine.memory_total
    device = Device(f"mlx {machine.mlx.get('version')} ({build})", "", room, min(room, machine.memory_available), True)
    slow = {"nf4": "NF4 weights are dequantized for each product; affine4 is MLX's own form"}
    dtypes = row.dtypes
    if build == "mlx-cpu":
        slow[""] = "mlx's CPU build is there to try things out, and slow"
        dtypes = ("fp32", "bf16", "fp16")  # 16-bit products are ten times slower there
    return Found(
        True,
        (device,),
        tuple(d for d in dtypes if d in row.dtypes),
        row.quantizers,
        row.optimizers,
        row.collective,
        automatic=has_metal,
        device="cpu" if build == "mlx-cpu" else "",
        slow=slow,
    )


def _metal_memory(machine) -> int:
    """Bytes that stay resident for a Mac's GPU: what Metal recommends, or two thirds of the memory, which is the least that it does."""
    return machine.mps.get("memory_total") or machine.memory_total * 2 // 3


def _cpu(row, machine):
    if machine.torch.get("error"):
        return _absent(machine.torch["error"])
    is_fast = bool({"avx512_bf16", "amx_bf16", "bf16"} & set(machine.cpu_features))
    slow = {"": "training on a CPU is slow", "int8": "int8 products are slow on a CPU"}
    if not is_fast:
        slow["bf16"] = "bf16 is emulated on this CPU, slower than fp32"
    dtypes = ("bf16", "fp32", "fp16") if is_fast else ("fp32", "bf16", "fp16")
    device = Device(
        f"{machine.arch}, {machine.cores} cores", "", machine.memory_total, machine.memory_available, is_fast
    )
    missing = "" if machine.compiler else "no C compiler is here"
    if "avx512_bf16" not in machine.cpu_features:
        missing = "this processor has no AVX512-BF16"
    kernels = ("portable",) if missing else row.kernels
    kernels += ("exact", "triton") if machine.triton.get("interpreted") else ()  # slow: for tests
    lacks = {"native": missing} if missing else {}
    if missing or "avx512_vnni" not in machine.cpu_features:
        lacks["fused head"] = missing or "this processor has no AVX512-VNNI"
    elif "amx_bf16" in machine.cpu_features:
        lacks["fused head"] = "this processor has AMX, by which the framework's products are several times as fast"
    products = row.products
    if not {"avx512_vnni", "amx_int8"} & set(machine.cpu_features):
        lacks |= dict.fromkeys(
            (f"{kind} products" for kind in row.products), "this processor has neither AVX512-VNNI nor AMX"
        )
        products = ("full",)
    return _narrowed(
        row,
        machine,
        (device,),
        lacks,
        dtypes=tuple(d for d in dtypes if d in row.dtypes),
        kernels=kernels,
        slow=slow,
        products=products,
    )


_PROBES = {
    Backend.CUDA: (_cuda, "cuda:0"),
    Backend.ROCM: (_rocm, "cuda:0"),
    Backend.XPU: (_xpu, "xpu:0"),
    Backend.MLX: (_mlx, "gpu"),
    Backend.MPS: (_mps, "mps"),
    Backend.CPU: (_cpu, "cpu"),
}


def built_in(table: Mapping[str, Capabilities] = CAPABILITIES) -> dict[str, BackendSpec]:
    """The table's rows as specs, in the order in which auto tries them."""
    return {
        name: BackendSpec(name, table[name], partial(probe, table[name]), device)
        for name, (probe, device) in _PROBES.items()
        if name in table
    }


def plugin(name: str) -> BackendSpec:
    """The spec of an installed third-party backend. Raises UsageError when its package does not give one."""
    target = registry.plugins("backends")[name]
    try:
        spec = registry.load(target)
    except Exception as error:  # somebody else's code: whatever is wrong with it is the finding
        raise UsageError(f"backend plugin {name!r} cannot be imported: {error}", where=target) from error
    if not isinstance(spec, BackendSpec):
        raise UsageError(f"backend plugin {name!r} is {type(spec).__name__}, not a BackendSpec", where=target)
    return spec


# ---------------------------------------------------------------------------------------------------------------- the manager


class MemoryInfo(dict):
    """{name: bytes}; printed with labels and units."""

    LABELS = {
        "allocated": "Memory allocated",
        "reserved": "Memory reserved",
        "free": "Memory free",
        "rss": "Memory of this process",
        "total": "Total memory",
        "available": "Available memory",
        "active": "MLX memory active",
        "peak": "MLX memory at most",
        "unified": "Unified memory",
    }

    def __str__(self) -> str:
        return "\n".join(f"{self.LABELS[name]}: {memory.shown(count)}" for name, count in self.items())


class BackendManager:
    """One backend of one machine: `backend` names it (auto: the first usable), `machine` and `table` stand for others in tests.

    Raises BackendUnavailable (a ValueError) for a name that is unknown or absent, NotBuilt for one whose loop is not built.
    """

    def __init__(
        self,
        backend: str = "auto",
        verbose: bool = False,
        machine: Machine | None = None,
        table: Mapping[str, Capabilities] | None = None,
    ):
        self.verbose, self._is_live = verbose, machine is None
        self._specs, self._found = built_in(CAPABILITIES if table is None else table), {}
        if backend != "auto":
            self._check_name(str(backend))  # before torch is imported: a typing error is answered at once
        self.machine = machine or observe()
        name = self._detected() if backend == "auto" else self._checked(str(backend))
        self.backend = Backend(name) if name in list(Backend) else name
        self.found, spec = self.probe(name), self.spec(name)
        self.capabilities, self.device = spec.capabilities, self.found.device or spec.device
        if verbose:
            print("\n".join(self.describe()))

    @classmethod
    def from_env(cls, verbose: bool = False) -> BackendManager:
        """The backend that FSDP_BACKEND (or ANYQLORA_BACKEND) names; auto without it."""
        return cls(from_environment(os.environ).get("backend", ("auto", ""))[0], verbose)

    def names(self) -> list[str]:
        """Every backend there is: built in, in the order in which auto tries them, then third parties'."""
        return [str(name) for name in {**self._specs, **registry.plugins("backends")}]

    def probe(self, name: str) -> Found:
        """What this machine does of backend `name`."""
        if name not in self._found:
            try:
                found = self.spec(name).probe(self.machine)
                self._found[name] = replace(found, processes=found.processes or self.machine.processes)
            except UsageError as error:  # a broken plugin is absent; it does not break the other backends
                self._found[name] = _absent(str(error))
        return self._found[name]

    def available(self) -> list[str]:
        """The backends of this machine."""
        return [name for name in self.names() if self.probe(name).available]

    def spec(self, name: str) -> BackendSpec:
        if name not in self._specs:
            self._specs[name] = plugin(name)
        return self._specs[name]

    def _detected(self) -> str:
        for name in list(self._specs):
            if self.probe(name).available and self.probe(name).automatic and not self.no_loop(name):
                return name
        raise BackendUnavailable("no backend is available on this system" + self._reasons())

    def _check_name(self, name: str) -> None:
        names = self.names()
        if name not in names:
            raise BackendUnavailable(
                f"unknown backend {name!r}{registry.nearest(name, names)}", cure="one of: auto, " + ", ".join(names)
            )
        if self.no_loop(name):
            raise NotBuilt(f"backend {name!r}: {self.no_loop(name)}", cure="--backend auto")

    def _checked(self, name: str) -> str:
        if not self.probe(name).available:
            available = ", ".join(self.available()) or "none"
            raise BackendUnavailable(
                f"Backend {name!r} is not available on this system. Available: {available}" + self._reasons()
            )
        return name

    def no_loop(self, name: str) -> str:
        framework = self.spec(name).capabilities.framework
        return LOOPS.get(framework, f"no loop runs framework {framework!r}")

    def _reasons(self) -> str:
        return "".join(
            f"\n  {name}: {self.probe(name).why('available')}"
            for name in self.names()
            if not self.probe(name).available
        )

    def describe(self) -> list[str]:
        """System, backend, capabilities and memory, a line each."""
        found, machine = self.found, self.machine
        torch = machine.torch.get("version")
        lines = [
            f"System: {machine.system} {machine.os_version} {machine.arch}, Python {machine.python}, torch {torch}",
            f"Backend: {self.backend} (device {self.device}); available: {', '.join(self.available())}",
        ]
        lines += [f"Device: {device.name}" for device in found.devices]
        for title, cells in (
            ("Dtypes", found.dtypes),
            ("Quantizers", found.quantizers),
            ("Optimizers", found.optimizers),
            ("Strategies", self.capabilities.strategies),
        ):
            lines.append(f"{title}: {', '.join(cells) or 'none'}")
        lines += [f"Collective: {found.collective or 'none'}", str(self.get_memory_info())]
        return lines + [f"Not here: {cell}: {why}" for cell, why in found.reasons.items()]

    def supports_quantization(self, bits: int) -> bool:
        """Whether frozen weights can be kept in so many bits here."""
        return bits in {registry.BITS.get(quantizer, 16) for quantizer in self.found.quantizers}

    def get_dtype(self, prefer_bfloat16: bool = True):
        """The torch dtype that `precision auto` computes in; with prefer_bfloat16=False the best other one."""
        import torch

        name = next((dtype for dtype in self.found.dtypes if prefer_bfloat16 or dtype != "bf16"), "fp32")
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]

    def get_distributed_backend(self) -> str | None:
        """torch.distributed's backend for this device; None where there is no collective."""
        return self.found.collective

    def get_memory_info(self) -> MemoryInfo:
        """Bytes, now: of the device's allocator where it has one, of host memory else."""
        if not self._is_live:
            return MemoryInfo(total=self.found.memory_total, available=self.found.memory_free)
        if self.capabilities.framework == "torch" and self.capabilities.device in ("cuda", "xpu"):
            import torch

            module, devices = getattr(torch, self.capabilities.device), self.found.devices
            own = device_of(local_rank() or 0, len(devices))
            free = free_memory(module, len(devices))[own]
            info = MemoryInfo(
                allocated=module.memory_allocated(own),
                reserved=module.memory_reserved(own),
                total=devices[own].memory_total,
            )
            return info if free is None else MemoryInfo(info, free=free)  # some drivers do not tell
        if self.capabilities.framework == "mlx":
            import mlx.core as mx

            return MemoryInfo(active=mx.get_active_memory(), peak=mx.get_peak_memory(), unified=self.found.memory_total)
        if self.capabilities.device == "mps":
            import torch

            return MemoryInfo(
                allocated=torch.mps.current_allocated_memory(),
                reserved=torch.mps.driver_allocated_memory(),
                total=torch.mps.recommended_max_memory(),
            )
        import psutil

        total, available = host_memory()
        return MemoryInfo(rss=psutil.Process().memory_info().rss, total=total, available=available)

    def validate_model_size(self, billions: float) -> bool:
        """Whether QLoRA of a model of so many billion parameters is predicted to fit: one row of 2048 tokens, checkpointing."""
        return self._fits(billions, 1, 2048)

    def get_optimal_batch_size(self, model_size_b: float, sequence_length: int = 2048) -> int:
        """The largest power of two of rows that is predicted to fit, at least 1: fewer for larger models and longer rows."""
        rows = 1
        while rows < 1024 and self._fits(model_size_b, 2 * rows, sequence_length):
            rows *= 2
        return rows

    def _fits(self, billions: float, rows: int, length: int) -> bool:
        quantizer = next((q for q in ("nf4", "int8", "none") if q in self.found.quantizers), "none")
        precision = PRECISION_OF[self.found.dtypes[0]]
        config = TrainConfig(
            quantizer=quantizer,
            adapter="lora",
            precision=precision,
            batch_size=rows,
            context_length=length,
            use_gradient_checkpointing=True,
        )
        return memory.estimate(architectures.llama_of(billions), config).total <= HEADROOM * (
            self.found.memory_free or 0
        )

    def plan(self, config: TrainConfig) -> RunPlan:
        """What a run of `config` will do here. Pure: reads nothing but the model's config.json; prints nothing."""
        return plan_run(config, self.backend, self.device, self.capabilities, self.found)


def get_backend_manager(backend: str = "auto", verbose: bool = False) -> BackendManager:
    return BackendManager(backend, verbose)


def detect_backend() -> Backend:
    """The backend that auto takes on this machine."""
    return BackendManager().backend


def get_device(backend: str = "auto") -> str:
    """The device string of a backend: cuda:0, xpu:0, mps, cpu."""
    return BackendManager(backend).device
