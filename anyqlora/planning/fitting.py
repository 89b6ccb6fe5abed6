"""What a plan makes of the free memory: shards, rows at a time, layers that are recomputed, weights that stay
dequantized.
"""

from __future__ import annotations

from anyqlora.config import strategy_options
from anyqlora.config.schema import AUTO, TrainConfig
from anyqlora.core import registry
from anyqlora.core.terminal import format_bytes
from anyqlora.planning import memory, mesh

GLOBAL_BATCH = 16  # rows per optimizer step when nobody says: what QLoRA's paper used for 7B and 13B
TRAINING = ("loading", "loss", "backward", "recomputation", "update")  # moments of memory.estimate that runs come to
HEADROOM = 0.9  # of the free memory that a plan fills: allocators fragment, and the prediction is not exact


def global_batch(config: TrainConfig) -> int:
    """Rows of an optimizer step as they are asked for, which no plan and no machine changes."""
    parts = config.gradient_accumulation_steps * mesh.data_processes(config)
    if config.batch_size == AUTO:
        return parts << (
            max(1, GLOBAL_BATCH // parts).bit_length() - 1
        )  # times a power of two, so that it halves evenly
    return parts * int(config.batch_size)


def implied_strategy(config: TrainConfig) -> tuple[str, str] | None:
    """(strategy, the setting that says so) that a stated option of one asks for."""
    if config.asked("sharding_strategy"):
        return "ddp" if config.sharding_strategy == "ddp" else "fsdp", "sharding_strategy"
    if config.asked("deepspeed_zero_stage") and config.deepspeed_zero_stage >= 0:
        return "deepspeed", "deepspeed_zero_stage"
    if config.find_unused_parameters:
        return "ddp", "find_unused_parameters"
    if strategy := strategy_options.strategy_of(config.strategy_opt):
        return strategy, "strategy_opt"
    return ("fsdp", "use_cpu_offload") if config.use_cpu_offload is True else None


def plan_sharding(draft, shapes, free: int) -> None:
    """Several processes each hold the whole model where it fits, and shards of it where not, unless somebody has said
    which.
    """
    config = draft.config
    can_be_split = registry.quantizer(config.quantizer).shardable and registry.OPTIMIZERS[config.optimizer].shardable
    is_open = config.sources.get("strategy") == "plan" and config.strategy == "ddp" and not implied_strategy(config)
    if is_open and can_be_split:
        trial = config.with_(
            batch_size=1 if config.batch_size == AUTO else config.batch_size, use_gradient_checkpointing=True
        )
        if max(memory.estimate(shapes, trial).needed(moment) for moment in TRAINING) > HEADROOM * free:
            draft.choose("strategy", "fsdp")


def plan_evaluation(draft, shapes, free: int) -> None:
    """Fewer rows per batch of an evaluation, until they fit."""

    def needed(rows: int) -> int:
        trial = draft.config.with_(eval_batch_size=rows, batch_size=1, use_gradient_checkpointing=True)
        return memory.estimate(shapes, trial).needed("evaluation")

    rows = draft.config.eval_batch_size
    fitting = next((n for n in range(rows, 0, -1) if needed(n) <= HEADROOM * free), 1)
    if fitting != rows:
        draft.adjust("eval_batch_size", fitting, f"{format_bytes(needed(rows))} needed, {format_bytes(free)} free")


def plan_batch(draft, shapes, free: int | None) -> None:
    """Micro-batch, accumulation and checkpointing. What was stated of the global batch is kept.

    Checkpointing comes only when a run does not fit otherwise, with batch_size auto not even with one row, and then of
    a quarter of the layers, half of them, three quarters or all.
    """
    config = draft.config
    is_auto, steps = config.batch_size == AUTO, config.gradient_accumulation_steps
    is_known = shapes is not None and free is not None
    rows = global_batch(config) // (steps * mesh.data_processes(config)) if is_auto else int(config.batch_size)

    def needed(micro: int, recomputed: int | str) -> int:
        assert shapes is not None, "asked of a known model only"
        trial = config.with_(
            batch_size=micro,
            use_gradient_checkpointing=int(recomputed) > 0,
            checkpointed_layers=recomputed,
            gradient_accumulation_steps=-(-rows * steps // micro),
        )
        estimate = memory.estimate(shapes, trial)
        return max(estimate.needed(moment) for moment in TRAINING)

    def fits(micro: int, recomputed: int | str) -> bool:
        assert free is not None, "asked where the free memory is known only"
        return needed(micro, recomputed) <= HEADROOM * free

    recomputed = config.checkpointed_layers
    if config.use_gradient_checkpointing == AUTO:
        if recomputed == AUTO:
            parts = (0, 4) if config.use_activation_cpu_offload else (0, 1, 2, 3, 4)
            trials = [-(-shapes.layers * part // 4) for part in parts] if shapes and is_known else []
            recomputed = next((n for n in trials if fits(1 if is_auto else rows, n)), trials[-1] if trials else 0)
        draft.choose("use_gradient_checkpointing", int(recomputed) > 0)
    elif recomputed == AUTO:
        recomputed = 0 if not config.use_gradient_checkpointing else shapes.layers if shapes else AUTO
    draft.choose("checkpointed_layers", recomputed)
    if is_known:
        micro = next((m for m in range(rows, 0, -1) if rows % m == 0 and fits(m, recomputed)), 1)
    else:
        micro = 1 if is_auto else rows
    if is_auto:
        draft.choose("batch_size", micro)
        if config.asked("gradient_accumulation_steps") and micro != rows:
            why = (
                f"{rows} rows at a time do not fit"
                if is_known
                else "a row at a time, as the memory that more take is unknown"
            )
            draft.adjust(
                "gradient_accumulation_steps",
                rows * steps // micro,
                f"{why}; the global batch stays {rows * steps} rows",
            )
        draft.choose("gradient_accumulation_steps", rows * steps // micro)
    elif micro != rows:
        why = (
            f"{format_bytes(needed(rows, recomputed))} needed, {format_bytes(free or 0)} free; the global batch stays "
            f"{rows * steps} rows"
        )
        draft.adjust("batch_size", micro, why)
        draft.adjust("gradient_accumulation_steps", steps * rows // micro, why)
    if is_known and not fits(micro, recomputed):
        predicted = format_bytes(needed(micro, recomputed))
        draft.warnings.append(f"{predicted} predicted and {format_bytes(free or 0)} free: expect to run out of memory")


def plan_dequantized_layers(draft, shapes, free: int | None) -> None:
    """Dequantized weights of as many layers as fit into half of the free memory beside all else: of all, a half, a
    quarter or none, and of the free memory a power of two, so that two runs on one machine hardly ever choose
    otherwise.
    """
    config = draft.config
    if config.dequantized_layers != AUTO:
        return
    layers = 0
    is_quantized = registry.quantizer(config.quantizer).is_quantized
    is_rounded = registry.FROZEN_MATMULS[config.frozen_matmul].is_rounded
    if shapes is not None and free and config.fused_lora and (is_quantized or is_rounded):
        room = (1 << free.bit_length() - 1) // 2
        trials = (shapes.layers, shapes.layers // 2, shapes.layers // 4)
        layers = next(
            (n for n in trials if memory.estimate(shapes, config.with_(dequantized_layers=n)).total <= room), 0
        )
    draft.choose("dequantized_layers", layers)


def halve(batch_size: int, gradient_accumulation_steps: int) -> tuple[int, int]:
    """(batch_size, gradient_accumulation_steps) of the same rows, in whole micro-batches of half the size or the next
    below that.
    """
    rows = batch_size * gradient_accumulation_steps
    size = next(size for size in range(max(batch_size // 2, 1), 0, -1) if rows % size == 0)
    return size, rows // size
