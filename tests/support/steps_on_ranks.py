"""Optimizer steps of one planned run on this process of a world, with any number of micro-batches in each, and what
they leave.
"""

import os
from collections import Counter
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from anyqlora.config.resolve import resolve
from anyqlora.core.errors import RunError
from anyqlora.data import dataset, stream, tokenizer
from anyqlora.on_torch.assembly.build import build, optimizer_factory
from anyqlora.on_torch.assembly.checks import check_gradients
from anyqlora.on_torch.device import seed_everything, set_deterministic
from anyqlora.on_torch.runtime import Runtime
from anyqlora.planning.backends import BackendManager


def whole(strategy, parameter) -> torch.Tensor:
    """All of a trained tensor, on every process."""
    value = parameter.detach()
    return strategy.full_tensor(value) if isinstance(value, DTensor) else value


def joined():
    """Meet the others of the world that the environment describes, once. Returns this process's rank."""
    if not dist.is_initialized() and int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return int(os.environ["RANK"])


COUNTS = [3, 1, 4, 2, 3]  # micro-batches of each step
ROWS = 4  # of a micro-batch, over all processes
SETTINGS = {
    "backend": "cpu",
    "dataset": "demo",
    "lora_dropout": 0.0,
    "lr": 2e-4,
    "precision": "fp32",
    "context_length": 128,
    "weight_decay": 0.01,
    "lora_rank": 8,
    "lora_alpha": 16,
    "warmup_steps": 0,
    "lr_scheduler": "constant",
    "max_steps": len(COUNTS),
}


class Started:
    """A planned run's model on this process, ready to step."""

    def __init__(self, **settings):
        joined()
        single = {} if settings.get("quantizer") == "none" else {"double_quant": False}
        config = resolve({**SETTINGS, **single, **settings}, environ={}, origin="test")
        self.plan = BackendManager("cpu").plan(config)
        self.config = config = self.plan.config
        set_deterministic(True)
        seed_everything(config.seed)
        words = tokenizer.load_tokenizer(config.model_name)
        self.rows = dataset.load_data(config, words).train
        self.runtime = Runtime(self.plan)
        self.strategy = self.runtime.strategy
        self.built = build(config, self.runtime)
        self.model, _, self.optimizer = self.runtime.prepare(
            self.built.model, self.built.trainable, optimizer_factory(config)
        )

    def batches(self, step, count):
        """(this process's micro-batches, trained tokens of the step over all processes)."""
        share = slice(
            self.strategy.data_rank * ROWS // self.strategy.data_size,
            (self.strategy.data_rank + 1) * ROWS // self.strategy.data_size,
        )
        first = 20 * step
        whole = [self.rows[first + ROWS * i : first + ROWS * (i + 1)] for i in range(count)]
        keys = np.random.default_rng(step).integers(1 << 63, size=(count, ROWS), dtype=np.uint64)
        trained = sum(stream.collate([[e] for e in rows], 0).trained for rows in whole)
        batches = [
            stream.collate([[e] for e in rows[share]], 0, of[share]) for rows, of in zip(whole, keys, strict=True)
        ]
        return batches, trained

    def step(self, number, count=1, max_norm=1.0):
        """One optimizer step of `count` micro-batches. Returns (this process's part of the loss, gradient norm)."""
        batches, trained = self.batches(number, count)
        seed_everything(number)
        total = 0.0
        for i, batch in enumerate(batches, 1):
            with self.runtime.micro_batch(is_final=i == count), self.runtime.forward():
                loss = self.built.loss(self.model, batch, self.runtime.device) / trained
                self.runtime.backward(loss)
            total += loss.item()
        if number == 0:
            check_gradients(self.runtime.strategy)
        return total, self.runtime.step(self.config.lr, max_norm).grad_norm

    def adapter(self):
        """All of it, on every process."""
        return {name: whole(self.strategy, p).clone() for name, p in self.strategy.trainable.items()}


def trained(settings, counts=COUNTS):
    """{losses, norms, start, adapter, moments, bytes} of a run of len(counts) steps."""
    started = Started(**settings)
    start = started.adapter()
    steps = [started.step(number, count) for number, count in enumerate(counts)]
    return {
        "losses": [loss for loss, _ in steps],
        "norms": [norm for _, norm in steps],
        "start": arrays(start),
        "adapter": arrays(started.adapter()),
        "gathered": arrays(started.strategy.gather_trainable()),
        "moments": arrays(started.strategy.gather_moments()),
        "data": (started.strategy.data_rank, started.strategy.data_size),
    }


def arrays(tensors):
    return {name: np.array(tensor) for name, tensor in tensors.items()}


def distance(a, b, start):
    """|a - b| / |a - start|, 2-norm over all tensors."""
    assert a.keys() == b.keys() == start.keys()
    far = sum(np.square(a[k].astype(np.float64) - b[k]).sum() for k in a)
    return float(np.sqrt(far / sum(np.square(a[k].astype(np.float64) - start[k]).sum() for k in a)))


def compared(settings, counts, mesh="model=2", layout="default"):
    """(largest relative difference of a norm, distance of adapters) from one process, which is run right here too."""
    found = trained({**settings, "mesh": mesh, "tensor_layout": layout}, counts)
    alone = trained(settings, counts)
    norms = max(abs(a / b - 1) for a, b in zip(found["norms"], alone["norms"], strict=True))
    return norms, distance(alone["adapter"], found["adapter"], alone["start"])


def continued(settings, counts, after, adapter, moments):
    """The adapter of a run that goes on from another's adapter and moments after `after` steps."""
    started = Started(**settings)
    started.strategy.load_trainable({name: torch.from_numpy(value) for name, value in adapter.items()})
    started.strategy.load_moments({name: torch.from_numpy(value) for name, value in moments.items()})
    for number in range(after, len(counts)):
        started.step(number, counts[number])
    return arrays(started.adapter())


def watched(settings, counts):
    """Of a run of these micro-batches: (collectives that add gradients in each micro-batch, bytes of codes here and in
    all).
    """
    started = Started(**settings)
    found = []
    for number, count in enumerate(counts):
        batches, trained_tokens = started.batches(number, count)
        for i, batch in enumerate(batches, 1):
            loss = started.built.loss(started.model, batch, started.runtime.device) / trained_tokens
            with (
                torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
                started.runtime.micro_batch(is_final=i == count),
            ):
                started.runtime.backward(loss)
            seen = Counter(
                {event.key: event.count for event in profile.key_averages() if event.key.startswith("c10d::")}
            )
            found.append({key: seen[key] for key in sorted(seen)})
        started.runtime.step(started.config.lr, 1.0)
    codes = {name: p for name, p in started.built.model.named_parameters() if p.dtype == torch.uint8}
    return found, sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in codes.values()), len(codes)


def error_of(settings):
    """What building a run says."""
    try:
        Started(**settings)
    except RunError as error:
        return str(error)
    finally:
        dist.barrier()  # nobody leaves while another is still in the same place
    return ""


def guarded(settings):
    """What the guard says of a trained tensor that has come off the mesh, and of one that is whole where it should be
    split.
    """
    started = Started(**settings)
    name = min(name for name in started.built.trainable if "q_proj.lora_B" in name)
    full = whole(started.strategy, started.strategy.trainable[name])
    spread = distribute_tensor(full, started.strategy.along, [Replicate()], src_data_rank=None)
    found = []
    for other in (full, spread):
        try:
            started.strategy.assert_in_effect(
                started.model, {**started.built.trainable, name: torch.nn.Parameter(other)}
            )
        except RunError as error:
            found.append(str(error))
    return found
