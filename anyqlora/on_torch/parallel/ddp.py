"""Data parallel: every rank holds the whole model, and the gradients are summed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anyqlora.config.strategy_options import DdpOptions
from anyqlora.core.errors import RunError
from anyqlora.on_torch._compat import without_buffers
from anyqlora.on_torch.parallel.base import Prepared
from anyqlora.on_torch.parallel.group import MultiProcessStrategy

MANY = 10**8  # trained numbers: their gradients are worth sending while others are still computed


class Ddp(MultiProcessStrategy):
    """torch's DistributedDataParallel, whose mean over the ranks is left out: gradients are sums.

    Adapters are small: their gradients go in one collective in `step`, so that until then a process that runs out of
    memory can still say so. With `overlap`, which is for many trained numbers, the last backward of a step communicates
    as it goes where its boundary is announced before its forward. Nothing is ever communicated in between.
    """

    name = "ddp"
    plugin_cls = DdpOptions
    is_whole = False  # whether all ranks have what rank 0 has read

    def shard_adapter(self, model: nn.Module) -> nn.Module:
        """From here on all ranks have the whole model, and each takes the same fast paths."""
        self.share(model)
        self.is_whole = True
        return model

    def prepare(self, model: nn.Module, trainable: dict[str, nn.Parameter], optimizer_factory: Callable) -> Prepared:
        if not self.is_whole:  # a loop of somebody's own
            owners = self.owners(trainable, model)
            self.share(model)
            self.refresh(trainable, owners)
        super().prepare(model, trainable, optimizer_factory)
        self.trained = sum(p.numel() for p in trainable.values())
        self.wrapped = self.wrap(model)
        if not isinstance(self.wrapped, DistributedDataParallel):
            raise RunError(f"{self.name}: the model is {type(self.wrapped).__name__}, not DistributedDataParallel")
        self.wrapped.register_comm_hook(None, self._sum)
        self.wrapped.require_backward_grad_sync = False  # until a micro-batch is announced as the last
        self.is_summed, self.reduced = False, 0
        if not all(isinstance(p, nn.Parameter) and p.device == self.device for p in trainable.values()):
            raise RunError(f"{self.name}: not every trained tensor is on this rank's device")
        return Prepared(self.wrapped, self.optimizer)

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(
            model,
            **without_buffers(),
            init_sync=False,
            bucket_cap_mb=self.options.bucket_cap_mb,
            find_unused_parameters=self.options.find_unused_parameters,
        )

    def _sum(self, _, bucket):  # without annotations: torch compares them with its types, and here they would be text
        self.reduced += sum(parameter.numel() for parameter in bucket.parameters())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    @property
    def needs_logits(self) -> str:
        return (
            "ddp looks for unused parameters behind the model's output" if self.options.find_unused_parameters else ""
        )

    @property
    def overlaps(self) -> bool:
        return self.options.overlap == "true" or (self.options.overlap == "auto" and self.trained > MANY)

    @contextlib.contextmanager
    def micro_batch(self, is_final: bool):
        self.wrapped.require_backward_grad_sync = is_final and self.overlaps
        try:
            with super().micro_batch(is_final):
                yield
        finally:
            self.wrapped.require_backward_grad_sync = False

    def accumulate(self, scaled: torch.Tensor, is_final: bool) -> None:
        self.reduced = 0
        super().accumulate(scaled, is_final)
        self.note_summed()

    def note_summed(self) -> None:
        """After a backward: whether it has summed the gradients. Raises RunError when it reached only some of them."""
        self.is_summed = self.wrapped.require_backward_grad_sync
        if self.is_summed and self.reduced != self.trained and not self.options.find_unused_parameters:
            raise RunError(
                f"{self.name}: backward reached {self.reduced} of {self.trained} trained numbers, and the rest waits "
                f"for ever",
                cure="--find_unused_parameters true, or train only what every row passes through",
            )

    def sum_gradients(self) -> None:
        if not self.is_summed:
            self.sum_flat(self.trainable.values())
        self.is_summed = False

    def zero_grad(self) -> None:
        super().zero_grad()
        self.is_summed = False

    def release(self) -> None:
        super().release()
        self.wrapped, self.is_whole = None, False
