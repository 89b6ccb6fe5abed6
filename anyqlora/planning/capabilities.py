"""What each backend can do: one row of a table each, and what a probe reports of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from anyqlora.core import registry
from anyqlora.core.errors import UsageError
from anyqlora.core.registry import ADAPTERS, OPTIMIZERS, QUANTIZERS, STRATEGIES, offered
from anyqlora.planning.machine import Device, Machine


class Backend(StrEnum):
    """The built-in backends, in the order in which `auto` tries them."""

    CUDA = "cuda"
    ROCM = "rocm"
    XPU = "xpu"
    MLX = "mlx"
    MPS = "mps"
    CPU = "cpu"


@dataclass(frozen=True)
class MemoryTraits:
    """How a backend's way of computing shows in the bytes of a step, beside precision and kernels."""

    logits_chunk: int = (
        64 << 20
    )  # bytes of the logits that are made at a time: near a processor's caches, or enough for a GPU
    dropout_mask: int = 4  # bytes that dropout keeps of a value
    is_host_heap: bool = False  # tensors lie in the process's own heap, beside what oneDNN compiles
    blocked_attention: bool = False  # without padding, attention in 16 bits keeps no output of its own
    updates_together: bool = False  # the update of all tensors is one operation
    composed_activation: bool = False  # an MLP's activation is several operations, each of which keeps its input
    keeps_norm_inputs: bool = False  # as they are, and not in float32
    narrow_adapters: bool = False  # what is W x + scale B A x is computed in x's dtype
    overlaps: bool = False  # up to ten operations are under way at a time


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
    adapters: tuple[str, ...] = offered(ADAPTERS, "torch")
    autocast: bool = True  # whether weights of one dtype can be computed with in another
    lacks: Mapping[str, str] = field(default_factory=dict)  # settings that have no effect here, and why
    tested: frozenset[str] = frozenset()  # the cells that tests of this repository run on real hardware
    notes: str = ""
    memory: MemoryTraits = MemoryTraits()

    @property
    def bits(self) -> tuple[int, ...]:
        """Bits a frozen weight can be kept in."""
        return bits_of(self.quantizers)


@dataclass(frozen=True)
class BackendReport:
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
    slow: Mapping[str, str] = field(
        default_factory=dict
    )  # cell -> warning; "": the whole row, "kernels": of better ones
    kernels: tuple[str, ...] = ("portable",)
    products: tuple[str, ...] = ("full",)

    @property
    def memory_total(self) -> int:
        """Bytes of the device with the least; 0 where it is unknown."""
        return min((device.memory_total for device in self.devices), default=0)

    @property
    def memory_free(self) -> int | None:
        """Bytes of the device with the least, where one that was not measured counts as empty; None where none was
        measured.
        """
        if all(device.memory_free is None for device in self.devices):
            return None
        known = [device.memory_total if device.memory_free is None else device.memory_free for device in self.devices]
        return min(
            count for count, device in zip(known, self.devices, strict=True) if count or device.memory_free is not None
        )

    def used(self, processes: int) -> BackendReport:
        """The same of the devices that so many processes take, one each: what one of them does not do, the run does
        not.
        """
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

    def wider(self, quantizer: str) -> str:
        """The quantizer that takes the place of one that is not here: that with the fewest bits more."""
        known = [QUANTIZERS[name] for name in self.quantizers if name in QUANTIZERS]
        rows = [row for row in known if row.bits > registry.quantizer(quantizer).bits]
        return min(rows, key=lambda row: row.bits).name if rows else ""


@dataclass(frozen=True)
class BackendSpec:
    """One backend: a row, the probe that narrows it, the device string.

    Third parties give one by entry point, group anyqlora.backends.
    """

    name: str
    capabilities: Capabilities
    probe: Callable[[Machine], BackendReport]
    device: str


class BackendUnavailable(UsageError, ValueError):
    """The backend that was asked for is unknown, or not on this machine."""


LOOPS = {"torch": "", "mlx": ""}  # framework -> why no loop runs it; "" where one does


NEEDS_BITSANDBYTES = registry.needing("bitsandbytes", QUANTIZERS, OPTIMIZERS)


FLOAT8_FROM = (8, 9)  # compute capability


_NOT_ON_MLX = {
    "cpu_threads": "MLX chooses its own",
    "dequantized_layers": "each product has packed weights of its own kind",
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
    offered(QUANTIZERS, "torch"),
    offered(OPTIMIZERS, "torch"),
    strategies=offered(STRATEGIES, "torch"),
    collective="nccl",
    activation_offload=True,
    memory=MemoryTraits(logits_chunk=512 << 20, dropout_mask=1, updates_together=True),
)
_MLX = Capabilities(
    "mlx",
    "gpu",
    ("bf16", "fp16", "fp32"),
    offered(QUANTIZERS, "mlx"),
    offered(OPTIMIZERS, "mlx"),
    strategies=("single", *offered(STRATEGIES, "mlx")),
    collective="ring",
    adapters=offered(ADAPTERS, "mlx"),
    autocast=False,
    lacks=_NOT_ON_MLX,
    notes="Apple silicon; what is marked ran on MLX's Linux CPU build",
    memory=MemoryTraits(
        logits_chunk=256 << 20,
        composed_activation=True,
        keeps_norm_inputs=True,
        narrow_adapters=True,
        overlaps=True,
    ),
)
_CPU = Capabilities(
    "torch",
    "cpu",
    ("bf16", "fp32", "fp16"),
    offered(QUANTIZERS, "torch"),
    offered(OPTIMIZERS, "torch", without=("gpu",)),
    strategies=offered(STRATEGIES, "torch"),
    collective="gloo",
    kernels=("native", "portable"),
    products=("full", "int8_backward", "int8"),
    notes="any CPU; slow",
    memory=MemoryTraits(is_host_heap=True, blocked_attention=True),
)


def _all_tested(capabilities: Capabilities, *but: str) -> Capabilities:
    """A row of which every cell is run by tests on real hardware, `but` some."""
    cells = (
        *capabilities.dtypes,
        *capabilities.quantizers,
        *capabilities.optimizers,
        *capabilities.strategies,
        *capabilities.kernels,
        *capabilities.products,
        *capabilities.adapters,
    )
    return replace(capabilities, tested=frozenset(cells) - set(but))


CAPABILITIES: dict[str, Capabilities] = {
    Backend.CUDA: replace(
        _GPU,
        kernels=("exact", "portable", "triton"),
        products=("full", "fp8"),
        notes="NVIDIA GPU",
        # By tests/on_torch/test_gpu.py on an H200.
        tested=frozenset(
            {
                *(
                    "fp32",
                    "bf16",
                    "fp16",
                    "nf4",
                    "fp4",
                    "int8",
                    "none",
                    "lora",
                    "single",
                    "exact",
                    "portable",
                    "triton",
                ),
                *("full", "fp8", "adamw", "fused_adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"),
            }
        ),
    ),
    Backend.ROCM: replace(_GPU, notes="AMD GPU; torch built for ROCm calls it cuda"),
    Backend.XPU: replace(_GPU, device="xpu", collective="xccl", notes="Intel GPU"),
    Backend.MLX: _all_tested(_MLX, "portable"),
    Backend.MPS: Capabilities(
        "torch",
        "mps",
        ("bf16", "fp16", "fp32"),
        offered(QUANTIZERS, "torch"),
        offered(OPTIMIZERS, "torch", without=("bitsandbytes",)),
        notes="Apple silicon through torch; one process, no collective",
    ),
    Backend.CPU: _all_tested(_CPU),
}


def bits_of(quantizers: Iterable[str]) -> tuple[int, ...]:
    """The bits of these quantizers, sorted; those of a third party's own count as none."""
    return tuple(sorted({QUANTIZERS[name].bits if name in QUANTIZERS else 16 for name in quantizers}))


def _called(device: Device) -> str:
    return f"{device.name} ({device.capability})" if device.capability else device.name


def _no_bf16(devices: tuple[Device, ...]) -> dict[str, str]:
    """What these devices lack of it."""
    without = next((device for device in devices if not device.bf16), None)
    return {"bf16": f"{_called(without)} has no bf16 in hardware"} if without else {}
