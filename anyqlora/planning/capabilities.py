"""What each backend can do: one row of a table each, and what a probe reports of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from anyqlora.core import registry
from anyqlora.core.errors import UsageError
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
        """Bytes of the device with the least, where one that was not measured counts as empty; None where none was measured."""
        if all(device.memory_free is None for device in self.devices):
            return None
        known = [device.memory_total if device.memory_free is None else device.memory_free for device in self.devices]
        return min(
            count for count, device in zip(known, self.devices, strict=True) if count or device.memory_free is not None
        )

    def used(self, processes: int) -> BackendReport:
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
    probe: Callable[[Machine], BackendReport]
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
    (*BNB_4BIT, "int8", "affine4", "none"),
    TORCH_OPTIMIZERS + BNB_OPTIMIZERS,
    strategies=TORCH_STRATEGIES,
    collective="nccl",
    activation_offload=True,
)


CAPABILITIES: dict[str, Capabilities] = {
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


def _called(device: Device) -> str:
    return f"{device.name} ({device.capability})" if device.capability else device.name


def _no_bf16(devices: tuple[Device, ...]) -> dict[str, str]:
    """What these devices lack of it."""
    without = next((device for device in devices if not device.bf16), None)
    return {"bf16": f"{_called(without)} has no bf16 in hardware"} if without else {}
