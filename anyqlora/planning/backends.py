"""Which backends there are, what each can do, what this machine does of it - and the plan of a run from that."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from anyqlora.config.resolve import from_environment
from anyqlora.config.schema import AUTO, TrainConfig
from anyqlora.core import registry
from anyqlora.core.entry_points import entry_point_targets
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.core.plugin_errors import described, place, reason
from anyqlora.core.terminal import format_bytes
from anyqlora.models import architectures
from anyqlora.planning import memory
from anyqlora.planning.capabilities import (
    CAPABILITIES,
    LOOPS,
    Backend,
    BackendReport,
    BackendSpec,
    BackendUnavailable,
    Capabilities,
    bits_of,
)
from anyqlora.planning.fitting import HEADROOM
from anyqlora.planning.machine import Machine, free_memory, host_memory, observe
from anyqlora.planning.planner import PRECISION_OF, Adjustment, RunPlan, plan_run
from anyqlora.planning.probes import _PROBES, _absent
from anyqlora.processes.environment import device_index, local_rank

__all__ = [
    "CAPABILITIES",
    "Adjustment",
    "Backend",
    "BackendManager",
    "BackendSpec",
    "BackendUnavailable",
    "Capabilities",
    "BackendReport",
    "Machine",
    "RunPlan",
    "detect_backend",
    "get_backend_manager",
    "get_device",
    "observe",
]


MOST_ROWS = 1 << 20  # of a micro-batch that anybody asks about


# --------------------------------------------------------------------- probes: (row, machine) -> Found, no side effects


def built_in(table: Mapping[str, Capabilities] = CAPABILITIES) -> dict[str, BackendSpec]:
    """The table's rows as specs, in the order in which auto tries them."""
    return {
        name: BackendSpec(name, table[name], partial(probe, table[name]), device)
        for name, (probe, device) in _PROBES.items()
        if name in table
    }


def plugin(name: str) -> BackendSpec:
    """The spec of an installed third-party backend. Raises UsageError when its package does not give one."""
    target = entry_point_targets("backends")[name]
    try:
        spec = registry.load(target)
    except (Exception, SystemExit) as error:  # somebody else's code: whatever is wrong with it is the finding
        why = described(error, target)
        raise UsageError(f"backend plugin {name!r} cannot be imported: {why}", where=target) from error
    if not isinstance(spec, BackendSpec):
        raise UsageError(f"backend plugin {name!r} is {type(spec).__name__}, not a BackendSpec", where=target)
    if not isinstance(spec.capabilities, Capabilities):
        kind = type(spec.capabilities).__name__
        raise UsageError(f"backend plugin {name!r}: its capabilities are {kind}, not Capabilities", where=target)
    return replace(spec, probe=partial(_checked_report, name, target, spec.probe))


def _checked_report(
    name: str, target: str, probe: Callable[[Machine], BackendReport], machine: Machine
) -> BackendReport:
    """What another package's probe reports. Raises UsageError with its line where it raises, or reports nothing that
    can be planned by.
    """
    try:
        report = probe(machine)
    except (Exception, SystemExit) as error:  # somebody else's code: whatever is wrong with it is the finding
        raise UsageError(
            f"the probe of backend plugin {name!r} raises {reason(error, target)}", where=place(error, target) or target
        ) from error
    if not isinstance(report, BackendReport):
        kind = type(report).__name__
        raise UsageError(f"the probe of backend plugin {name!r} gives {kind}, not a BackendReport", where=target)
    empty = [cells for cells in ("dtypes", "quantizers", "optimizers") if not getattr(report, cells)]
    if report.available and empty:
        raise UsageError(f"the probe of backend plugin {name!r} reports no {' and no '.join(empty)}", where=target)
    return report


# ---------------------------------------------------------------------------------------------------------- the manager


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
        return "\n".join(f"{self.LABELS[name]}: {format_bytes(count)}" for name, count in self.items())


class BackendManager:
    """One backend of one machine: `backend` names it in any case (auto: the first usable), `machine` and `table` stand
    for others in tests; `where` is what stated the name: a flag, a variable, a line of a file.

    Raises BackendUnavailable (a ValueError) for a name that is unknown or absent, NotBuilt for one whose loop is not
    built.
    """

    def __init__(
        self,
        backend: str = "auto",
        verbose: bool = False,
        machine: Machine | None = None,
        table: Mapping[str, Capabilities] | None = None,
        where: str = "",
    ):
        self.verbose, self._is_live, self._where = verbose, machine is None, where
        self._specs, self._found = built_in(CAPABILITIES if table is None else table), {}
        asked = self._known_name(str(backend))  # before torch is imported: a typing error is answered at once
        self.machine = machine or observe()
        name = self._detected() if asked == AUTO else self._checked(asked)
        self.backend = Backend(name) if name in list(Backend) else name
        self.report, spec = self.probe(name), self.spec(name)
        self.capabilities, self.device = spec.capabilities, self.report.device or spec.device
        if verbose:
            print("\n".join(self.describe()))

    @classmethod
    def from_env(cls, verbose: bool = False) -> BackendManager:
        """The backend that FSDP_BACKEND (or ANYQLORA_BACKEND) names; auto without it."""
        backend, where = from_environment(os.environ).get("backend", (AUTO, ""))
        return cls(str(backend), verbose, where=where)

    def names(self) -> list[str]:
        """Every backend there is: built in, in the order in which auto tries them, then third parties'."""
        return [str(name) for name in {**self._specs, **entry_point_targets("backends")}]

    def probe(self, name: str) -> BackendReport:
        """What this machine does of backend `name`."""
        if name not in self._found:
            try:
                report = self.spec(name).probe(self.machine)
                self._found[name] = replace(report, processes=report.processes or self.machine.processes)
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

    def _known_name(self, asked: str) -> str:
        """The name as it is spelled here, which may be asked for in any case."""
        names = [AUTO, *self.names()]
        name = next((known for known in names if known.lower() == asked.lower()), asked.lower())
        if name not in names:
            raise BackendUnavailable(
                f"unknown backend {asked!r}{registry.nearest(name, names)}",
                where=self._where,
                cure="one of: " + ", ".join(names) + self._unset(),
            )
        if name != AUTO and self.no_loop(name):
            raise NotSupported(
                f"backend {name!r}: {self.no_loop(name)}", where=self._where, cure="--backend auto" + self._unset()
            )
        return name

    def _unset(self) -> str:
        """How a name that a variable states is taken back; "" where none does."""
        return f"; or unset {self._where}, which names it" if self._where.isupper() else ""

    def _checked(self, name: str) -> str:
        if not self.probe(name).available:
            available = ", ".join(self.available()) or "none"
            raise BackendUnavailable(
                f"Backend {name!r} is not available on this system. Available: {available}" + self._reasons(),
                where=self._where,
                cure=f"--backend auto, or one of: {available}" + self._unset(),
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
        reports, machine = self.report, self.machine
        torch = machine.torch.get("version")
        lines = [
            f"System: {machine.system} {machine.os_version} {machine.arch}, Python {machine.python}, torch {torch}",
            f"Backend: {self.backend} (device {self.device}); available: {', '.join(self.available())}",
        ]
        lines += [f"Device: {device.name}" for device in reports.devices]
        for title, cells in (
            ("Dtypes", reports.dtypes),
            ("Quantizers", reports.quantizers),
            ("Optimizers", reports.optimizers),
            ("Strategies", self.capabilities.strategies),
        ):
            lines.append(f"{title}: {', '.join(cells) or 'none'}")
        lines += [f"Collective: {reports.collective or 'none'}", str(self.get_memory_info())]
        return lines + [f"Not here: {cell}: {why}" for cell, why in reports.reasons.items()]

    def supports_quantization(self, bits: int) -> bool:
        """Whether frozen weights can be kept in so many bits here."""
        return bits in bits_of(self.report.quantizers)

    def get_dtype(self, prefer_bfloat16: bool = True):
        """The torch dtype that `precision auto` computes in; with prefer_bfloat16=False the best other one."""
        import torch

        name = next((dtype for dtype in self.report.dtypes if prefer_bfloat16 or dtype != "bf16"), "fp32")
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]

    def get_distributed_backend(self) -> str | None:
        """torch.distributed's backend for this device; None where there is no collective."""
        return self.report.collective

    def get_memory_info(self) -> MemoryInfo:
        """Bytes, now: of the device's allocator where it has one, of host memory else."""
        if not self._is_live:
            return MemoryInfo(total=self.report.memory_total, available=self.report.memory_free)
        if self.capabilities.framework == "torch" and self.capabilities.device in ("cuda", "xpu"):
            import torch

            module, devices = getattr(torch, self.capabilities.device), self.report.devices
            own = device_index(local_rank() or 0, len(devices))
            free = free_memory(module, len(devices))[own]
            info = MemoryInfo(
                allocated=module.memory_allocated(own),
                reserved=module.memory_reserved(own),
                total=devices[own].memory_total,
            )
            return info if free is None else MemoryInfo(info, free=free)  # some drivers do not tell
        if self.capabilities.framework == "mlx":
            import mlx.core as mx

            return MemoryInfo(
                active=mx.get_active_memory(), peak=mx.get_peak_memory(), unified=self.report.memory_total
            )
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

    def validate_model_size(self, billions: float, sequence_length: int = 2048) -> bool:
        """Whether QLoRA of a model of so many billion parameters is predicted to fit: one row, checkpointing."""
        return self._fits(billions, 1, sequence_length)

    def get_optimal_batch_size(self, model_size_b: float, sequence_length: int = 2048) -> int:
        """The most rows that are predicted to fit, as `validate_model_size` predicts it of one.

        1, with a warning that says so, where not even one is.
        """
        if not self.validate_model_size(model_size_b, sequence_length):
            free = self.report.memory_free
            needed = format_bytes(self._needed(model_size_b, 1, sequence_length))
            warnings.warn(
                f"QLoRA of a model of {model_size_b:g} billion parameters is not predicted to fit on {self.backend}: "
                f"one row of {sequence_length} tokens needs {needed}, and "
                f"{'the free memory is not known' if free is None else f'{format_bytes(free)} are free'}; "
                "a smaller model, shorter rows, or several devices with --strategy fsdp",
                stacklevel=2,
            )
            return 1
        few, many = 1, 2
        while many <= MOST_ROWS and self._fits(model_size_b, many, sequence_length):
            few, many = many, 2 * many
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (middle, many) if self._fits(model_size_b, middle, sequence_length) else (few, middle)
        return few

    def _fits(self, billions: float, rows: int, length: int) -> bool:
        return self._needed(billions, rows, length) <= HEADROOM * (self.report.memory_free or 0)

    def _needed(self, billions: float, rows: int, length: int) -> int:
        """Predicted bytes of QLoRA with checkpointing, in the form that this machine has."""
        preset = registry.TRAIN_TYPES["qlora"]
        has_it = preset.quantizer in self.report.quantizers
        quantizer = preset.quantizer if has_it else self.report.wider(preset.quantizer) or registry.UNQUANTIZED
        precision = PRECISION_OF[self.report.dtypes[0]]
        config = TrainConfig(
            quantizer=quantizer,
            adapter=preset.adapter,
            precision=precision,
            batch_size=rows,
            context_length=length,
            use_gradient_checkpointing=True,
        )
        return memory.estimate(architectures.llama_of(billions), config).total

    def plan(self, config: TrainConfig) -> RunPlan:
        """What a run of `config` will do here. Pure: reads nothing but the model's config.json; prints nothing."""
        return plan_run(config, self.backend, self.device, self.capabilities, self.report)


def get_backend_manager(backend: str = "auto", verbose: bool = False) -> BackendManager:
    return BackendManager(backend, verbose)


def detect_backend() -> Backend:
    """The backend that auto takes on this machine."""
    return Backend(BackendManager().backend)


def get_device(backend: str = "auto") -> str:
    """The device string of a backend: cuda:0, xpu:0, mps, cpu."""
    return BackendManager(backend).device
