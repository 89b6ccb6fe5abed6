"""What a run will do, decided once: every auto resolved, every change of what was asked written down with its
reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from anyqlora.config import strategy_options
from anyqlora.config.schema import AUTO, TrainConfig
from anyqlora.config.validate import validate
from anyqlora.core import registry
from anyqlora.core.descriptors import Info
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.core.terminal import format_bytes
from anyqlora.models import architectures, lora_targets, prequantized
from anyqlora.planning import fitting, memory, mesh
from anyqlora.planning.capabilities import bits_of

NARROW = 1 << 18  # weights of an MLP's matrix: narrower ones are multiplied before a second thread has begun
KEPT_FROM = 10**8  # linear weights whose quantization is kept for the next start: fewer take less than a second
GPUS = ("cuda", "rocm", "xpu")  # of which each process takes one
LAUNCHERS = ("the launcher", "srun")  # where a world_size comes from that counts several machines
PRECISION_OF = {
    "bf16": "bf16",
    "fp16": "fp16_autocast",
    "fp32": "fp32",
}  # dtype -> the precision that auto chooses for it
DTYPE_OF = {
    "fp32": "fp32",
    "bf16": "bf16",
    "bf16_autocast": "bf16",
    "bf16_buffers_autocast": "bf16",
    "fp16_autocast": "fp16",
}


@dataclass(frozen=True)
class Adjustment:
    """One thing that was asked for and is not what will happen."""

    field: str
    asked: object
    got: object
    why: str

    def __str__(self) -> str:
        return f"{self.field}: asked {_format_value(self.asked)}, got {_format_value(self.got)}: {self.why}"


def _config_property(name: str) -> property:
    """What the plan says of a setting is what its config says."""
    return property(lambda plan: getattr(plan.config, name))


@dataclass(frozen=True)
class RunPlan:
    """What will happen. `config` has no auto that is the plan's to choose; planning it again changes nothing."""

    config: TrainConfig
    backend: str
    framework: str
    device: str
    memory: memory.MemoryEstimate | None  # None: unknown, for the reason in memory_unknown
    memory_free: (
        int | None
    )  # bytes on the device when the plan was made, for each process that shares it; None: not measured
    adjustments: tuple[Adjustment, ...] = ()
    warnings: tuple[str, ...] = ()  # these change nothing
    memory_unknown: str = ""
    sharing: int = 1  # processes that share a device's memory

    precision, quantizer, adapter = (
        _config_property("precision"),
        _config_property("quantizer"),
        _config_property("adapter"),
    )
    strategy, world_size = _config_property("strategy"), _config_property("world_size")
    batch_size, gradient_accumulation_steps = (
        _config_property("batch_size"),
        _config_property("gradient_accumulation_steps"),
    )
    use_gradient_checkpointing, use_activation_cpu_offload = (
        _config_property("use_gradient_checkpointing"),
        _config_property("use_activation_cpu_offload"),
    )
    packing, kernels = _config_property("packing"), _config_property("kernels")

    @property
    def data_processes(self) -> int:
        """Processes that read rows of their own: all but those along the model axis of a mesh."""
        return mesh.data_processes(self.config)

    @property
    def global_batch(self) -> int:
        """Rows per optimizer step, over all micro-batches and processes."""
        return self.batch_size * self.gradient_accumulation_steps * self.data_processes

    def explain(self) -> list[str]:
        """The plan in words, a line each."""
        c = self.config
        trained = (
            "all weights"
            if registry.adapter(self.adapter).trains_base
            else f"{self.adapter} rank {c.lora_rank} on {c.lora_target_modules} linears"
        )
        saved = (
            ", gradient checkpointing" * self.use_gradient_checkpointing
            + ", activations offloaded" * self.use_activation_cpu_offload
        )
        where = f"{self.backend} ({self.framework}, device {self.device})"
        lines = [
            f"backend     {where}, strategy {self.strategy}{f' over {c.mesh}' if c.mesh else ''}, {self.world_size} "
            f"process{'es' * (self.world_size > 1)}",
            f"model       {c.model_name}, frozen weights {self.quantizer}, {trained}",
            f"arithmetic  {self.precision}, optimizer {c.optimizer}{saved}, {self.kernels} kernels"
            + f", frozen weights multiplied in {c.frozen_matmul.replace('_', ' in ')}"
            * registry.FROZEN_MATMULS[c.frozen_matmul].is_rounded,
            *self._choices(),
            f"batch       {self.batch_size} rows x {self.gradient_accumulation_steps} micro-batches"
            f"{f' x {self.data_processes} processes' * (self.data_processes > 1)} = "
            f"{self.global_batch} rows of up to {c.context_length} tokens per step",
        ]
        if self.memory is None:
            lines.append(f"memory      unknown: {self.memory_unknown}{self._one_row()}")
        else:
            free = (
                f"free memory unknown{self._one_row()}"
                if self.memory_free is None
                else f"{format_bytes(self.memory_free)} free"
            )
            free += (
                f" for each of {self.sharing} processes here"
                if self.memory_free is not None and self.sharing > 1
                else ""
            )
            lines.append(
                f"memory      {format_bytes(self.memory.total)} predicted, {free}; most is needed in "
                f"{self.memory.peak}:"
            )
            lines += [f"  {name:22} {format_bytes(part):>10}" for name, part in self.memory.parts.items() if part]
            others = {
                moment: sum(parts.values())
                for moment, parts in self.memory.moments.items()
                if moment != self.memory.peak
            }
            lines.append("  in " + ", ".join(f"{moment} {format_bytes(total)}" for moment, total in others.items()))
        lines += [f"adjusted    {adjustment}" for adjustment in self.adjustments]
        return lines + [f"warning     {warning}" for warning in self.warnings]

    def _one_row(self) -> str:
        """What an unknown memory changes, where nobody has said how many rows to take."""
        is_chosen = self.config.sources.get("batch_size") == "plan"
        return (
            ", so micro-batches are 1 row (--batch_size and --gradient_accumulation_steps state others)"
            if is_chosen
            else ""
        )

    def _choices(self) -> list[str]:
        """The fast paths that are taken, and what each of them buys."""
        c = self.config
        cached = format_bytes(self.memory.parts.get("dequantized weights", 0)) if self.memory else "some memory"
        taken = (
            (c.fused_lora, "LoRA fused with its weight", "no float32 copies, inputs kept once"),
            (
                c.fused_linear_cross_entropy is True,
                "output head and loss in one",
                "no logits in memory, and none that are rounded",
            ),
            (
                c.logits_chunk_tokens and c.fused_linear_cross_entropy is not True,
                f"logits of {c.logits_chunk_tokens} tokens at a time",
                "no logits of a whole batch, none of untrained tokens",
            ),
            (c.padding_free is True, "rows without padding", "no product with padding, no mask of tokens x tokens"),
            (
                c.dequantized_layers not in (0, AUTO),
                f"weights of {c.dequantized_layers} layers kept dequantized",
                f"{cached} for two dequantizations per step",
            ),
            (not c.use_gradient_checkpointing, "activations kept", "no second forward pass"),
            (
                c.use_gradient_checkpointing and c.checkpointed_layers != AUTO,
                f"layers recomputed: the first {c.checkpointed_layers}",
                "no second forward pass through others, whose activations are kept",
            ),
            (
                c.quantized_cache not in (False, AUTO),
                "quantized weights kept on disk",
                "no quantization at the next start",
            ),
            (c.cpu_threads != AUTO, f"{c.cpu_threads} threads", "as many as the layers' width keeps busy"),
        )
        return [
            f"{'fast paths' if not number else '':12}{what}: {buys}"
            for number, (what, buys) in enumerate((w, b) for on, w, b in taken if on)
        ]

    def to_dict(self) -> dict:
        """JSON-able: plan.json of the run directory."""
        names = (
            "backend",
            "framework",
            "device",
            "precision",
            "quantizer",
            "adapter",
            "strategy",
            "world_size",
            "batch_size",
            "gradient_accumulation_steps",
            "use_gradient_checkpointing",
            "use_activation_cpu_offload",
            "packing",
            "kernels",
            "memory_free",
            "sharing",
        )
        return {
            **{name: getattr(self, name) for name in names},
            "backend": str(self.backend),
            "memory": self.memory and self.memory.to_dict(),
            "adjustments": [vars(adjustment) for adjustment in self.adjustments],
            "warnings": list(self.warnings),
            "memory_unknown": self.memory_unknown,
            "config": self.config.settings(),
        }


def _format_value(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class PlanBuilder:
    """A config on its way to a plan, and the ledger of what changed."""

    def __init__(self, config: TrainConfig):
        self.config, self.adjustments, self.warnings, self.memory_unknown = config, [], [*config.notes], ""

    def choose(self, name: str, value) -> None:
        """Resolve an auto (what already has this value keeps its source)."""
        if getattr(self.config, name) == value and type(getattr(self.config, name)) is type(value):
            return
        self.config = self.config.with_(**{name: value}, sources={**self.config.sources, name: "plan"})

    def adjust(self, name: str, value, why: str) -> None:
        """Change what was asked."""
        self.adjustments.append(Adjustment(name, getattr(self.config, name), value, why))
        self.choose(name, value)


def plan_run(config: TrainConfig, backend: str, device: str, capabilities, report) -> RunPlan:
    """The plan of `config` on a backend, from its `row` (Capabilities) and what was `found` on the machine (Found).

    Pure.

    Raises UsageError for what the row or the machine does not allow (and, with strict, for any adjustment), NotBuilt
    for what this version lacks.
    """
    draft = PlanBuilder(validate(config))
    if config.backend not in (AUTO, backend):
        raise UsageError(
            f"backend {config.backend!r} was asked for, and this plan is for {str(backend)!r}",
            where=config.sources.get("backend", ""),
        )
    draft.choose("backend", str(backend))
    if config.strategy in registry.STRATEGIES and config.strategy not in capabilities.strategies:
        _refuse(config, "strategy", backend, "", capabilities.strategies)
    mesh.resolve_mesh(draft, len(report.devices))
    _processes(draft, backend, capabilities, report)
    report = report.used(draft.config.world_size)
    _precision(draft, backend, capabilities, report)
    model_config = _model_config(draft)
    if model_config:
        prequantized.resolve_quantizer(draft, model_config)
        _positions(draft, model_config)
    _quantizer(draft, backend, capabilities, report)
    _adapter(draft, backend, capabilities, report)
    draft.config = validate(draft.config)  # what was changed may contradict what was asked
    _optimizer(draft, backend, capabilities, report)
    _placement(draft, backend, capabilities)
    shapes = _shapes(draft, model_config)
    if model_config and not registry.adapter(draft.config.adapter).trains_base:
        _targets(draft.config, model_config.get("model_type", ""), shapes)
    mesh.check(draft.config, shapes)
    shapes = mesh.slice_of(shapes, draft.config)
    sharing = (
        1 if capabilities.activation_offload else report.sharing
    )  # a device with memory of its own is one process's
    free = None if report.memory_free is None else report.memory_free // sharing
    if shapes is not None and free is not None:
        fitting.plan_sharding(draft, shapes, free)  # before what depends on whether the model is split
    check_sharding(draft.config, shapes)
    _kernels(draft, backend, capabilities, report)
    _products(draft, backend, capabilities, report)
    _fast_paths(draft, capabilities, shapes, report)
    if shapes and not (model_config and prequantized.quantized_as(model_config)):
        _groups(draft, shapes)
    if shapes is not None and free is not None:
        fitting.plan_evaluation(draft, shapes, free)
    fitting.plan_batch(draft, shapes, free)
    fitting.plan_dequantized_layers(draft, shapes, free)
    _quantized_cache(draft, capabilities, model_config, shapes)
    _warn(draft, backend, capabilities, report)
    c = draft.config
    if c.strict and draft.adjustments:
        raise UsageError(
            "strict: this machine does not do what was asked: " + "; ".join(map(str, draft.adjustments)),
            where=c.sources.get("strict", ""),
            cure="ask for what the machine does, or leave out strict",
        )
    return RunPlan(
        config=c,
        backend=backend,
        framework=capabilities.framework,
        device=device,
        memory=memory.estimate(shapes, c) if shapes else None,
        memory_free=free,
        sharing=sharing,
        adjustments=tuple(draft.adjustments),
        warnings=tuple(draft.warnings),
        memory_unknown=draft.memory_unknown,
    )


def _targets(config: TrainConfig, model_type: str, shapes: architectures.ModelShape | None) -> None:
    """Raises UsageError for lora_target_modules that the model does not have; of unknown layers, for what none can
    have.
    """
    stated, where = config.lora_target_modules, config.sources.get("lora_target_modules", "")
    if shapes is None:
        lora_targets.parse_targets(stated, model_type, where)
    else:
        lora_targets.select_targets(stated, model_type, shapes.adaptable_names, where)


def _refuse(config, name: str, backend: str, why: str, offered) -> None:
    """Refuse the value of setting `name`: for `why`, or else because the backend's row has no such cell."""
    value = getattr(config, name)
    raise UsageError(
        f"{name} {value!r} is not available on backend {str(backend)!r}: {why or f'backend {backend} has no {value}'}",
        where=config.sources.get(name, ""),
        cure=f"one of: {', '.join(offered) or 'none'}",
    )


def _why(cell: str, cells: tuple[str, ...], report) -> str:
    """Why this machine does not do a cell that the backend's row has; "" where the row lacks it."""
    return report.why(cell) if cell in cells else ""


def _processes(draft, backend, capabilities, report) -> None:
    """How many processes, and the strategy they share the work by."""
    config, devices = draft.config, len(report.devices)
    offered = [registry.strategy(name) for name in capabilities.strategies] if report.collective else []
    several = [s.name for s in offered if s.several and (not s.tensor_parallel or s.name == config.strategy)]
    if config.world_size == -1:
        draft.choose("world_size", devices if several and config.strategy != "single" else 1)
    elif config.world_size < 1:
        raise UsageError(
            f"world_size: {config.world_size} is neither -1 nor at least 1",
            where=config.sources.get("world_size", ""),
            cure="--world_size 2, or leave it out: one process for each device",
        )
    elif 1 <= devices < config.world_size and backend in GPUS and config.sources.get("world_size") not in LAUNCHERS:
        draft.adjust("world_size", devices, f"this machine has {devices} {backend} devices")
    size = draft.config.world_size
    if size > 1 and config.strategy == "single":
        raise UsageError(
            f"strategy single is one process, and world_size is {size}",
            where=config.sources.get("strategy", ""),
            cure=f"--world_size 1, or a strategy for several: {', '.join(several) or 'none here'}",
        )
    if size > 1 and not several:
        why = (
            report.why("collective")
            if capabilities.collective
            else f"backend {backend} has no way for processes to talk"
        )
        raise UsageError(f"world_size {size}: {why}", where=config.sources.get("world_size", ""), cure="--world_size 1")
    if config.strategy == AUTO:
        strategy, setting = fitting.implied_strategy(config) or ("single" if size == 1 else several[0], "")
        if setting and strategy not in capabilities.strategies:
            raise UsageError(
                f"{setting} {_format_value(getattr(config, setting))} asks for strategy {strategy}, which backend "
                f"{str(backend)!r} does not have",
                where=config.sources.get(setting, ""),
                cure=f"leave out {setting}; strategies here: {', '.join(capabilities.strategies)}",
            )
        draft.choose("strategy", strategy)
    chosen = draft.config.strategy
    is_built_in = chosen in registry.STRATEGIES
    if chosen not in capabilities.strategies and (
        is_built_in or not registry.strategy(chosen).target(capabilities.framework)
    ):
        _refuse(draft.config, "strategy", backend, "", capabilities.strategies)


def _precision(draft, backend, capabilities, report) -> None:
    asked = draft.config.precision
    if not report.dtypes:
        raise UsageError(f"backend {str(backend)!r} has no dtype to compute in: {report.why('fp32')}")
    if asked == AUTO:
        draft.choose("precision", PRECISION_OF[report.dtypes[0]])
    elif (dtype := DTYPE_OF[asked]) not in report.dtypes:
        instead = next(d for d in ("fp16", "fp32", "bf16") if d in report.dtypes)
        why = report.why(dtype) if dtype in capabilities.dtypes else f"backend {backend} does not compute in {dtype}"
        draft.adjust("precision", PRECISION_OF[instead], why)
    elif not capabilities.autocast and PRECISION_OF[dtype] != asked:
        draft.adjust(
            "precision",
            PRECISION_OF[dtype],
            f"backend {backend} has no autocast: what is computed in 16 bits is kept in 16 bits",
        )


def _quantizer(draft, backend, capabilities, report) -> None:
    """What was asked for by name is kept or refused; only the default preset gives way, to more bits."""
    config, quantizer = draft.config, registry.quantizer(draft.config.quantizer)
    why = _why(config.quantizer, capabilities.quantizers, report) or _lacks(quantizer, report)
    if config.quantizer not in report.quantizers and (why or not _is_another_packages(quantizer, capabilities)):
        same_bits = next((name for name in report.quantizers if bits_of([name]) == (quantizer.bits,)), None)
        is_by_bits = config.asked("bits") and not config.asked("quantizer")
        if is_by_bits and same_bits and config.quantizer not in capabilities.quantizers:
            why = f"backend {backend} has no {config.quantizer}; this is its own of {config.bits} bits"
            draft.adjust("quantizer", same_bits, why)
        elif not report.wider(config.quantizer) or any(map(config.asked, ("quantizer", "train_type", "bits"))):
            _refuse(config, "quantizer", backend, why, report.quantizers)
        else:
            draft.adjust(
                "quantizer", report.wider(config.quantizer), why or f"backend {backend} has no {config.quantizer}"
            )
            draft.choose("bits", registry.quantizer(draft.config.quantizer).bits)
    quantizer = registry.quantizer(draft.config.quantizer)
    if quantizer.strategies and draft.config.strategy not in quantizer.strategies:
        raise NotSupported(
            f"quantizer {draft.config.quantizer} with strategy {draft.config.strategy}: its weights are not split over "
            "processes yet",
            where=draft.config.sources.get("quantizer", ""),
            cure=f"--quantizer nf4, or --strategy {' or '.join(quantizer.strategies[:2])}",
        )


def _adapter(draft, backend, capabilities, report) -> None:
    adapter = registry.adapter(draft.config.adapter)
    why = _lacks(adapter, report)
    if draft.config.adapter not in capabilities.adapters and (why or not _is_another_packages(adapter, capabilities)):
        _refuse(draft.config, "adapter", backend, why, capabilities.adapters)


def _is_another_packages(info: Info, capabilities) -> bool:
    """Whether a quantizer or adapter is another package's, for the framework of this row: no backend names it."""
    return info not in (*registry.QUANTIZERS.values(), *registry.ADAPTERS.values()) and bool(
        info.target(capabilities.framework)
    )


def _lacks(info: Info, report) -> str:
    """Why what another package's quantizer or adapter needs is not here; "" where it is, and for our own."""
    if info in (*registry.QUANTIZERS.values(), *registry.ADAPTERS.values()):
        return ""
    tables = registry.QUANTIZERS, registry.OPTIMIZERS
    peers = (name for need in info.needs for name in registry.needing(need, *tables))
    return next(filter(None, map(report.why, peers)), "")


def _groups(draft, shapes) -> None:
    """Affine groups do not cross the end of a row.

    Raises UsageError naming every layer whose inputs are no multiple of one.
    """
    config = draft.config
    group = registry.quantizer(config.quantizer).group_size(config)
    wrong = [f"{linear.name} has {linear.inputs}" for linear in shapes.linears if group and linear.inputs % group]
    if wrong:
        raise UsageError(
            f"quantizer {config.quantizer}: inputs are taken in groups of {group}, and {', '.join(wrong)}",
            where=config.sources.get("quantizer", ""),
            cure="--affine_group_size 32 where that divides them, or --quantizer nf4",
        )


def _optimizer(draft, backend, capabilities, report) -> None:
    if draft.config.optimizer not in report.optimizers:
        _refuse(
            draft.config,
            "optimizer",
            backend,
            _why(draft.config.optimizer, capabilities.optimizers, report),
            report.optimizers,
        )


def check_sharding(config: TrainConfig, shapes: architectures.ModelShape | None) -> None:
    """Raises NotSupported for what the strategy would split over processes and nobody can. Strategy tp has a check of
    its own (mesh.check).
    """
    strategy = registry.strategy(config.strategy)
    options = strategy_options.strategy_options(config) if strategy.options else None
    replicas = "--strategy ddp" if config.strategy == "fsdp" else "--deepspeed_zero_stage 2"
    if strategy.splits_weights(options):
        if not registry.quantizer(config.quantizer).shardable:
            raise NotSupported(
                f"quantizer {config.quantizer} with strategy {config.strategy}: {config.quantizer} weights cannot be "
                "sharded: their scales are not with them",
                where=config.sources.get("quantizer", ""),
                cure=f"--quantizer nf4, or {replicas}",
            )
        if shapes is not None and shapes.experts and registry.quantizer(config.quantizer).is_quantized:
            raise NotSupported(
                f"quantizer {config.quantizer} with strategy {config.strategy} ({shapes.model_type}): quantized "
                "experts cannot be sharded yet: every process would hold all of them",
                where=config.sources.get("quantizer", ""),
                cure=f"{replicas}, or --quantizer none",
            )
    if strategy.splits_optimizer(options) and not registry.OPTIMIZERS[config.optimizer].shardable:
        raise NotSupported(
            f"optimizer {config.optimizer} with strategy {config.strategy}: it does not know a sharded optimizer state",
            where=config.sources.get("optimizer", ""),
            cure="--optimizer adamw",
        )


def _kernels(draft, backend, capabilities, report) -> None:
    """Ours take the place of modules that this process has whole: where strategies split the model, the framework's own
    run.
    """
    config = draft.config
    is_split = not registry.strategy(config.strategy).fusable
    kernels = registry.KERNELS[report.kernels[0] if config.kernels == AUTO else config.kernels]
    is_for_it = not kernels.precisions or config.precision in kernels.precisions
    if config.kernels == AUTO:
        draft.choose("kernels", kernels.name if is_for_it and not is_split else "portable")
    elif is_split and config.kernels != "portable":
        whole = ", ".join(name for name, strategy in registry.STRATEGIES.items() if strategy.fusable)
        raise UsageError(
            f"kernels {config.kernels}: they are for strategies {whole}; {config.strategy} runs on portable ones",
            where=config.sources.get("kernels", ""),
            cure="--kernels portable, or leave it out",
        )
    elif config.kernels not in report.kernels:
        _refuse(config, "kernels", backend, _why(config.kernels, capabilities.kernels, report), report.kernels)
    elif not is_for_it:
        raise UsageError(
            f"kernels {config.kernels}: they are for precision {' or '.join(kernels.precisions)}, and this is "
            f"{config.precision}",
            where=config.sources.get("kernels", ""),
            cure=f"--precision {kernels.precisions[0]}, or leave out kernels",
        )


def _products(draft, backend, capabilities, report) -> None:
    """Products of frozen weights in fewer bits are for 16-bit arithmetic, where they are twice as fast."""
    config, asked = draft.config, draft.config.frozen_matmul
    where = config.sources.get("frozen_matmul", "")
    if not registry.FROZEN_MATMULS[asked].is_rounded:
        return
    if asked not in report.products:
        why = report.why(f"{asked} products") or f"backend {backend} has no {asked} products"
        raise UsageError(f"frozen_matmul {asked}: {why}", where=where, cure=f"one of: {', '.join(report.products)}")
    if DTYPE_OF[config.precision] != "bf16":
        raise UsageError(
            f"frozen_matmul {asked}: it is for precision bf16, and this is {config.precision}",
            where=where,
            cure="--frozen_matmul full",
        )
    if not registry.strategy(config.strategy).fusable:
        raise NotSupported(
            f"frozen_matmul {asked}: not built for strategy {config.strategy} yet",
            where=where,
            cure="--frozen_matmul full",
        )


def _placement(draft, backend, capabilities) -> None:
    """Where weights and activations stay."""
    config = draft.config
    for name, why in capabilities.lacks.items():
        if getattr(config, name) not in (False, 0, AUTO):
            raise UsageError(
                f"{name} has no effect on backend {str(backend)!r}: {why}",
                where=config.sources.get(name, ""),
                cure=f"leave out {name}",
            )
    if config.use_cpu_offload is True and not registry.strategy(config.strategy).offloads:
        raise UsageError(
            f"use_cpu_offload: strategy {config.strategy} keeps all weights on the device",
            where=config.sources.get("use_cpu_offload", ""),
            cure="--strategy fsdp or deepspeed, --use_activation_cpu_offload true, or leave it out",
        )
    if config.use_cpu_offload == AUTO:
        draft.choose("use_cpu_offload", False)
    if config.use_activation_cpu_offload and not capabilities.activation_offload:
        raise UsageError(
            f"use_activation_cpu_offload: on backend {str(backend)!r} activations already are in host memory",
            where=config.sources.get("use_activation_cpu_offload", ""),
            cure="leave it out; --use_gradient_checkpointing true saves memory",
        )
    if config.packing == AUTO:
        draft.choose("packing", False)
    if config.use_gradient_checkpointing == AUTO and config.reentrant_checkpointing:
        draft.choose("use_gradient_checkpointing", True)


def _fast_paths(draft, capabilities, shapes, report) -> None:
    """What computes the same in less time or memory, wherever it applies."""
    is_built = capabilities.framework == "torch" and registry.strategy(draft.config.strategy).fusable
    for name in ("fused_lora", "padding_free"):
        if getattr(draft.config, name) is True and not is_built:
            raise NotSupported(
                f"{name}: not built for strategy {draft.config.strategy} on {capabilities.framework} yet",
                where=draft.config.sources.get(name, ""),
                cure=f"--{name} auto",
            )
    if draft.config.dropout_masks == AUTO:
        draft.choose("dropout_masks", "token")
    draft.choose("fused_lora", is_built and memory.is_fused(draft.config))
    if draft.config.padding_free == AUTO:
        draft.choose(
            "padding_free", is_built and capabilities.device == "cpu" and draft.config.logits_chunk_tokens != 0
        )
    _fused_head(draft, shapes, report)
    draft.choose("logits_chunk_tokens", memory.logits_chunk_tokens(shapes, draft.config))
    if draft.config.cpu_threads == AUTO and report.cores:
        narrow = shapes is not None and shapes.hidden * shapes.intermediate < NARROW
        draft.choose(
            "cpu_threads", report.threads or (1 if narrow else max(1, report.cores // max(1, report.processes)))
        )


def _fused_head(draft, shapes, report) -> None:
    """The head and its loss in C: a way of `native` kernels, where the head is frozen and nothing but a factor comes
    after it.
    """
    config = draft.config
    why = next(
        (
            why
            for holds, why in (
                (
                    not registry.KERNELS[config.kernels].in_c,
                    f"it is one of the native kernels, and this runs on {config.kernels} ones",
                ),
                (report.why("fused head"), report.why("fused head")),
                (registry.adapter(config.adapter).trains_base, "the head learns, whose gradient is made of logits"),
                (config.logits_chunk_tokens == 0, "logits_chunk_tokens 0 asks for all logits"),
                (shapes is not None and shapes.capped_logits, "the model caps its logits"),
            )
            if holds
        ),
        "",
    )
    if why and config.fused_linear_cross_entropy is True and config.asked("fused_linear_cross_entropy"):
        raise UsageError(
            f"fused_linear_cross_entropy: {why}",
            where=config.sources["fused_linear_cross_entropy"],
            cure="--fused_linear_cross_entropy auto",
        )
    if why or config.fused_linear_cross_entropy == AUTO:
        draft.choose("fused_linear_cross_entropy", not why)


def _quantized_cache(draft, capabilities, model_config: dict | None, shapes) -> None:
    """Quantized weights are kept for the next start where one process quantizes the files' own weights whole, and that
    takes seconds.
    """
    config, asked = draft.config, draft.config.quantized_cache
    quantizer, adapter = registry.quantizer(config.quantizer), registry.adapter(config.adapter)
    if asked is False:
        return
    why = next(
        (
            why
            for holds, why in (
                (capabilities.framework != "torch", "it is not built for this backend"),
                (
                    model_config and prequantized.quantized_as(model_config),
                    "the checkpoint's weights are quantized already",
                ),
                (not quantizer.writes_files, f"quantizer {config.quantizer} writes no files"),
                (adapter.needs_full_weights, f"adapter {config.adapter} needs the full-precision weights"),
                (
                    not registry.strategy(config.strategy).quantizes_whole,
                    f"strategy {config.strategy} may quantize slices of weights",
                ),
                (config.trust_remote_code, "the model may have code of its own"),
                (shapes is not None and shapes.experts, "the experts of a mixture are written to no files"),
            )
            if holds
        ),
        "",
    )
    if why and asked != AUTO:
        raise UsageError(
            f"quantized_cache: nothing can be kept: {why}",
            where=config.sources.get("quantized_cache", ""),
            cure="--quantized_cache auto",
        )
    if asked == AUTO:
        draft.choose("quantized_cache", not why and shapes is not None and shapes.linear_parameters >= KEPT_FROM)


def _model_config(draft) -> dict | None:
    """The model's config.json; None for a hub id that is not on this machine."""
    directory = architectures.model_directory(draft.config)
    if directory is None:
        draft.memory_unknown = f"{draft.config.model_name} is not on this machine"
        return None
    model_config = architectures.read_config(directory)
    if architectures.is_bidirectional(model_config):
        raise UsageError(
            f"model_type {model_config['model_type']!r} sees the tokens that it would have to predict",
            where=str(directory / "config.json"),
            cure='"is_decoder": true there, or a causal language model',
        )
    return model_config


def _positions(draft, model_config: dict) -> None:
    """Rows no longer than the model has positions for, unless longer ones were asked for and its positions are not a
    table.
    """
    longest, asked = architectures.max_positions(model_config), draft.config.context_length
    if longest is None or asked <= longest:
        return
    if not draft.config.asked("context_length"):
        draft.choose("context_length", longest)
        draft.warnings.append(f"rows have up to {longest} tokens: the model has no more positions")
    elif architectures.position_table(model_config):
        raise UsageError(
            f"context_length {asked}: the model has {longest} positions and no way to make more",
            where=draft.config.sources["context_length"],
            cure=f"--context_length {longest}",
        )
    else:
        draft.warnings.append(f"context_length {asked} is beyond the {longest} positions that the model was made for")


def fitted_context_length(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """`config` with rows as long as a plan makes them on any machine, and what there is to say of it.

    Raises UsageError as a plan does.
    """
    draft = PlanBuilder(config)
    _positions(draft, architectures.model_config(config))
    return draft.config, [*map(str, draft.adjustments), *draft.warnings]


def _shapes(draft, model_config: dict | None) -> architectures.ModelShape | None:
    if not model_config:
        return None
    try:
        shapes = architectures.model_shape(model_config)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"config.json does not describe a {model_config.get('model_type')} model: {error}",
            where=draft.config.model_name,
            cure="download it again",
        ) from None
    if not shapes:
        draft.memory_unknown = f"no formulas for model_type {model_config.get('model_type')!r}"
    return shapes


def _warn(draft, backend, capabilities, report) -> None:
    """What is worth knowing and changes nothing."""
    config = draft.config
    cells = ["", config.quantizer, DTYPE_OF[config.precision], config.optimizer, config.kernels]
    if _would_be_faster(config, capabilities):
        cells.append("kernels")
    draft.warnings += [f"{backend}: {report.slow[cell]}" for cell in cells if cell in report.slow]


def _would_be_faster(config: TrainConfig, capabilities) -> bool:
    """Whether `kernels auto` would have taken the backend's best kernels if this machine had them."""
    best = capabilities.kernels[0]
    if config.asked("kernels") or config.kernels == best or not registry.strategy(config.strategy).fusable:
        return False
    return best != "native" or config.precision == "bf16" or not config.asked("precision")
