"""What tests run in a world: a tiny model trained through build and Runtime on rows that are dealt to the ranks, and
what came of it.
"""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pytest
import torch

from anyqlora.config.resolve import resolve
from anyqlora.data.stream import IGNORE_INDEX, Batch
from anyqlora.on_torch.adapters.fused_layers import fused_layers
from anyqlora.on_torch.assembly.build import build, optimizer_factory
from anyqlora.on_torch.assembly.checks import check_gradients
from anyqlora.on_torch.kernels.frozen_matmul import CpuFullMatmul, CpuInt8Matmul, SplitMatmul
from anyqlora.on_torch.loss import TrainedTokenLoss
from anyqlora.on_torch.runtime import Runtime
from anyqlora.planning.backends import BackendManager


def some(values, default) -> list:
    """Test parameters; those that are not among `default` run by name only, marked slow."""
    return [
        value
        if value in default
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]


PLANS = [3, 1, 4, 2, 2]  # micro-batches of each step
ROWS = 2  # per micro-batch


def planned(base, world_size: int, **settings):
    """A real plan. SGD and AdamW take a rate of 1e-2; dropout is the default's, by token."""
    given = {
        "model_name": str(base),
        "dataset": "demo",
        "backend": "cpu",
        "precision": "fp32",
        "batch_size": ROWS,
        "lora_rank": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "lr": 1e-2,
        "weight_decay": 0.01,
        "log_to": "none",
        "use_gradient_checkpointing": False,
        "context_length": 64,
        "fused_lora": False,
        "padding_free": False,
        **settings,
    }  # the fast paths of one process round otherwise in 16 bits
    if given.get("train_type") == "full" or given.get("adapter") == "full":
        given = {key: value for key, value in given.items() if not key.startswith("lora_")}
    config = resolve({**given, "world_size": world_size} if world_size > 1 else given, environ={}, origin="test")
    return BackendManager("cpu").plan(config)


def batch(step: int, rank: int, number: int, vocabulary: int = 128, ragged: bool = True) -> Batch:
    """ROWS random rows of lengths that differ, the same wherever they are asked for."""
    draw = np.random.default_rng([step, rank, number])
    lengths = draw.integers(5, 20, ROWS) if ragged else np.full(ROWS, 12)
    shape = (ROWS, int(lengths.max()))
    ids, targets, segments = (
        np.zeros(shape, np.int32),
        np.full(shape, IGNORE_INDEX, np.int32),
        np.full(shape, -1, np.int32),
    )
    for row, length in enumerate(lengths):
        ids[row, :length] = draw.integers(3, vocabulary, length)
        targets[row, 1 : length - 1] = ids[row, 2:length]
        segments[row, :length] = 0
    return Batch(
        ids,
        targets,
        np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape).copy(),
        segments,
        tuple("test:1" for _ in range(ROWS)),
        draw.integers(1 << 63, size=ROWS, dtype=np.uint64),
    )


def packed(step: int, rank: int, number: int) -> Batch:
    """ROWS rows of two such documents each, one behind the other, which see nothing of each other."""
    pair = batch(step, rank, number), batch(step, rank + 100, number)
    ends = np.array([(one.segments >= 0).sum(1) for one in pair])  # [2, ROWS]
    shape = (ROWS, int(ends.sum(0).max()))
    ids, targets = np.zeros(shape, np.int32), np.full(shape, IGNORE_INDEX, np.int32)
    positions, segments = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    for row in range(ROWS):
        first = 0
        for number_of_document, one in enumerate(pair):
            end = ends[number_of_document, row]
            here = slice(first, first + end)
            ids[row, here], targets[row, here] = one.ids[row, :end], one.targets[row, :end]
            positions[row, here], segments[row, here] = np.arange(end), number_of_document
            first += end
        positions[row, first:] = np.arange(shape[1] - first)
    return Batch(ids, targets, positions, segments, tuple("test:1" for _ in range(2 * ROWS)), pair[0].row_keys)


def rows_of(step: int, ranks, plan, of=batch) -> list[Batch]:
    return [of(step, rank, number) for number in range(plan[step]) for rank in ranks]


def counted(profile) -> int:
    """Collectives that the profiler saw."""
    return sum(
        event.count for event in profile.key_averages() if event.key.startswith("c10d::") and "barrier" not in event.key
    )


def gradient_traffic(profile) -> int:
    """Collectives that add: all-reduce, reduce-scatter, reduce."""
    return sum(
        event.count for event in profile.key_averages() if event.key.startswith("c10d::") and "reduce" in event.key
    )


class Trained:
    """A run of a world: losses, norms and collectives of each step, and what rank 0 gathered at the end."""

    def __init__(self, runtime):
        strategy = runtime.strategy
        self.losses, self.norms, self.scales, self.skipped = [], [], [], []
        self.in_micro_batches, self.in_steps = [], []  # [[count of each micro-batch]], [count of each step]
        self.rank, self.size = strategy.rank, strategy.world_size


def train(base, form="early", plans=PLANS, count=False, load=None, spoil=None, skips=(), **settings):
    """Train `len(plans)` steps and return a Trained, as plain values.

    `form` is how boundaries are made known: early (micro_batch), late (backward alone), setter. `load` is (adapter,
    moments, step) to go on from. `spoil(step, rank, loss)` may change a loss. `skips` are steps that are to change
    nothing.
    """
    import os

    size = int(os.environ.get("WORLD_SIZE", 1)) if settings.get("strategy", "single") != "single" else 1
    whole = settings.pop("dealt_to", size)  # ranks that the rows are dealt to; one process takes the rows of all
    plan = planned(base, size, **settings)
    runtime = Runtime(plan)
    rows = functools.partial(rows_of, plan=plans, of=packed if plan.packing else batch)
    built = build(plan.config, runtime, rows(0, [0])[:1])
    model, *_ = runtime.prepare(built.model, built.trainable, optimizer_factory(plan.config))
    strategy, first = runtime.strategy, 0
    if load:
        adapter, moments, first = load
        strategy.load_trainable({k: torch.from_numpy(v) for k, v in adapter.items()})
        strategy.load_moments({k: torch.from_numpy(v) for k, v in moments.items()})
    found = Trained(runtime)
    found.fast = fast_paths(built) if isinstance(built.loss, TrainedTokenLoss) else {}
    found.start = numpy_of(strategy.gather_trainable())
    mine = range(strategy.data_rank, whole, strategy.data_size)
    for step in range(first, len(plans)):
        everything = sum(b.trained for b in rows(step, range(whole)))
        batches, total, inside = rows(step, mine), 0.0, []
        for number, one in enumerate(batches, 1):
            with watching(count) as seen:
                total += micro_batch(
                    runtime, model, built.loss, one, everything, number == len(batches), form, spoil, step
                )
            inside.append(gradient_traffic(seen) if count else 0)
        if step == 0 and not spoil:
            check_gradients(strategy)
        with watching(count) as seen:
            result = runtime.step(plan.config.lr, plan.config.clip_norm, skip=step in skips)
        found.in_micro_batches.append(inside)
        found.in_steps.append(gradient_traffic(seen) if count else 0)
        found.losses.append(total)
        found.norms.append(result.grad_norm)
        found.scales.append(result.loss_scale)
        found.skipped.append(result.skipped)
    found.adapter, found.moments = numpy_of(strategy.gather_trainable()), numpy_of(strategy.gather_moments())
    found.data_size = strategy.data_size
    found.codes = sum(held(p) for p in built.model.parameters() if p.dtype == torch.uint8)
    return found


def fast_paths(built) -> dict:
    """What this process runs on: fused layers, those with products in 8 bits and those in C, modules of our kernels,
    and what a batch is for the model.
    """
    layers = fused_layers(built.model)
    return {
        "fused": len(layers),
        "rounded": sum(layer.group.products is not layer.group.whole for layer in layers),
        "in_c": sum(is_in_c(layer.group.products) for layer in layers),
        "kernels": sum(
            type(module).__module__ == "anyqlora.on_torch.kernels.swap_modules" for module in built.model.modules()
        ),
        "unpadded": built.loss.spec.is_unpadded,
        "last_mlp": built.loss.last_mlp is not None,
    }


def is_in_c(products) -> bool:
    return (
        is_in_c(products.ahead) and is_in_c(products.back)
        if isinstance(products, SplitMatmul)
        else isinstance(products, CpuFullMatmul | CpuInt8Matmul)
    )


def micro_batch(runtime, model, loss_of, rows, everything, is_final, form, spoil, step) -> float:
    import contextlib

    announced = runtime.micro_batch(is_final) if form == "early" else contextlib.nullcontext()
    if form == "setter":
        runtime.set_gradient_accumulation_boundary(is_final)
    with announced:
        with runtime.forward():
            loss = loss_of(model, rows, runtime.device) / everything
        if spoil:
            loss = spoil(step, runtime.strategy.rank, loss)
        if form == "late":
            runtime.backward(loss, is_final_micro_batch=is_final)
        else:
            runtime.backward(loss)
    return loss.item()


def watching(count: bool):
    import contextlib

    return (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        if count
        else contextlib.nullcontext(Counter())
    )


def numpy_of(tensors) -> dict:
    return {name: tensor.numpy().copy() for name, tensor in tensors.items()}


def held(parameter) -> int:
    """Bytes of a parameter on this rank."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.numel() * parameter.ds_tensor.element_size()
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.numel() * local.element_size()


def distance(a: dict, b: dict, start: dict) -> float:
    """|a - b| / |a - start|, 2-norm over all tensors."""
    assert a.keys() == b.keys() == start.keys()
    far = sum(np.square(a[k].astype(np.float64) - b[k]).sum() for k in a) ** 0.5
    return far / sum(np.square(a[k].astype(np.float64) - start[k]).sum() for k in a) ** 0.5
