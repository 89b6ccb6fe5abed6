"""Data parallel through Hugging Face Accelerate: its Accelerator wraps the model and the optimizer and runs
backward.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from anyqlora.config.strategy_options import AccelerateOptions
from anyqlora.core.errors import NotSupported, RunError, UsageError
from anyqlora.on_torch.parallel.base import Prepared
from anyqlora.on_torch.parallel.ddp import Ddp

ENGINES = {
    "ACCELERATE_USE_FSDP": "--strategy fsdp",
    "ACCELERATE_USE_DEEPSPEED": "--strategy deepspeed",
    "ACCELERATE_USE_MEGATRON_LM": "--strategy fsdp",
}


class Accelerate(Ddp):
    """Accelerate's data parallelism with our boundaries, sums and loss scale.

    What Accelerate 1.15 takes and does not do is refused: its FSDP and DeepSpeed plugins on a CPU are plain data
    parallelism without a word, and without `cpu=True` processes on CPUs are not connected at all.
    """

    name = "accelerate"
    plugin_cls = AccelerateOptions

    def setup(self) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        asked = [
            (name, cure) for name, cure in ENGINES.items() if os.environ.get(name, "").lower() in ("1", "true", "yes")
        ]
        if asked:
            raise UsageError(
                f"{asked[0][0]} is set: strategy accelerate is data parallel, and Accelerate may drop that engine "
                f"silently",
                where="environment",
                cure=f"unset it; {asked[0][1]}",
            )
        super().setup()
        if self.world_size == 1:
            raise NotSupported(
                "strategy accelerate in one process: Accelerate wraps nothing there", cure="--strategy single"
            )
        options = {
            "bucket_cap_mb": self.options.bucket_cap_mb,
            "find_unused_parameters": self.options.find_unused_parameters,
            "broadcast_buffers": False,
        }
        self.accelerator = Accelerator(
            cpu=self.device.type == "cpu",
            mixed_precision="no",
            kwargs_handlers=[DistributedDataParallelKwargs(**options)],
        )
        if (self.accelerator.num_processes, self.accelerator.process_index) != (self.world_size, self.rank):
            raise RunError(
                f"accelerate: it sees {self.accelerator.num_processes} processes, and {self.world_size} are here"
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        return self.accelerator.prepare_model(model)

    def prepare(self, model: nn.Module, trainable: dict[str, nn.Parameter], optimizer_factory: Callable) -> Prepared:
        prepared = super().prepare(model, trainable, optimizer_factory)
        self.accelerated = self.accelerator.prepare_optimizer(self.optimizer)
        return prepared

    def accumulate(self, scaled: torch.Tensor, is_final: bool) -> None:
        self.reduced = 0
        self.accelerator.backward(scaled)
        self.note_summed()

    def update(self) -> None:
        self.accelerated.step()

    def teardown(self) -> None:
        self.accelerator.free_memory()
        super().teardown()
