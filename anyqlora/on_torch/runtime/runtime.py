"""Accelerate's verbs over one strategy: what `train.py` and people's own loops use."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from anyqlora.config import strategy_options
from anyqlora.core import registry
from anyqlora.core.errors import UsageError
from anyqlora.core.files import FileSystem, tensors_to_bytes, to_json, write_directory
from anyqlora.on_torch.device import MemoryMonitor, room_for
from anyqlora.on_torch.memory.activation_offload import offload_activations
from anyqlora.on_torch.memory.malloc import set_primitive_cache, trim
from anyqlora.on_torch.runtime.prepared import PreparedOptimizer, PreparedScheduler, ShardedLoader, rebuilt
from anyqlora.planning.memory.estimate import COMPILED
from anyqlora.training.state import StepResult

LEARNED, MOMENTS, LOOP = "learned.safetensors", "moments.safetensors", "loop.json"


class Runtime:
    """One planned run's device, precision and strategy.

    A step is any number of micro-batches; the last one is its boundary. It is announced by `micro_batch`, by
    `accumulate`, by `set_gradient_accumulation_boundary` or by `backward` itself, the same way under every strategy.
    Nothing is divided here: a loss is a part of the step's whole loss, and gradients are summed over micro-batches and
    processes.
    """

    def __init__(self, plan):
        self.plan = plan
        self.strategy = registry.strategy_class(plan.strategy)(
            plan, strategy_options.strategy_options(plan.config, plan.strategy)
        )
        self.strategy.setup()
        self.device = self.strategy.device
        self.memory = MemoryMonitor(self.device, plan.memory.total if plan.memory else 0)
        if self.device.type == "cpu":
            set_primitive_cache(plan.memory.products if plan.memory else COMPILED)
            if plan.config.cpu_threads != "auto":
                torch.set_num_threads(plan.config.cpu_threads)
        self.gradient_accumulation_steps = plan.gradient_accumulation_steps
        self.sync_gradients = True  # whether the micro-batch that is under way, or was the last, ends its step
        self.grad_norm: float | None = None  # of the last step
        self.skipped = False  # whether the last step changed nothing, since its gradients were not finite
        self._counted, self._prepared = 0, []

    @classmethod
    def of(cls, **settings) -> Runtime:
        """For a loop of your own: strategy, backend, precision, gradient_accumulation_steps, strategy_opt ... as
        train.py has them.

        The processes are those that torchrun (or srun) started. Raises UsageError for settings that this machine does
        not do.
        """
        from anyqlora.config.resolve import resolve
        from anyqlora.planning.backends import BackendManager
        from anyqlora.processes.environment import ProcessContext

        # A plan is one of a model and rows; a loop of your own has both, so what stands in for them here is not read.
        config = resolve(
            {"train_type": "full", "model_name": "demo", "dataset": "demo", "batch_size": 1, **settings},
            origin="Runtime.of",
        )
        config = ProcessContext.here(config).apply_to(config)
        if config.world_size == -1:
            config = config.with_(world_size=1)
        return cls(BackendManager(config.backend).plan(config))

    # ------------------------------------------------------------------------------------------------- who is here

    @property
    def process_index(self) -> int:
        return self.strategy.rank

    @property
    def num_processes(self) -> int:
        return self.strategy.world_size

    @property
    def is_main_process(self) -> bool:
        return self.strategy.rank == 0

    def print(self, *values, **options) -> None:
        """Once, whatever the number of processes."""
        if self.is_main_process:
            print(*values, **options)

    def end_training(self) -> None:
        """A loop's last call: the strategy lets go of what it holds, and leaves the process group if it was the one to
        form it.
        """
        self.strategy.teardown()

    def close(self) -> None:
        """`end_training`, unless something went wrong: the other processes may be gone then, and nobody waits for
        them.
        """
        if sys.exc_info()[0] is None:
            self.end_training()

    def wait_for_everyone(self) -> None:
        if self.num_processes > 1:
            self.gather(torch.zeros(1, device=self.device))

    # ------------------------------------------------------------------------------------------------ what is used

    def prepare(self, *objects):
        """A model and whatever goes with it, in any order; what comes back stands in the same order, alone if it was
        given alone.

        - a module: wrapped and sharded. One is required.
        - {name: parameter} of what is trained; else every parameter that requires a gradient, by its own name.
        - an optimizer: made again over the parameters as they are afterwards, with its options; it has not stepped yet.
          Or a factory, parameters -> optimizer.
        - a learning rate scheduler: goes on with that optimizer.
        - a DataLoader: each process gets its part of every batch, each row once.

        Raises UsageError for anything else.
        """
        kinds = {
            "model": nn.Module,
            "trainable": dict,
            "optimizer": Optimizer,
            "scheduler": LRScheduler,
            "loader": DataLoader,
        }
        named = [
            next((name for name, kind in kinds.items() if isinstance(one, kind)), "factory" if callable(one) else "")
            for one in objects
        ]
        if named.count("model") != 1 or "" in named:
            strange = [type(one).__name__ for one, name in zip(objects, named, strict=True) if not name]
            raise UsageError(
                f"prepare: {', '.join(strange)} cannot be prepared"
                if strange
                else f"prepare: {named.count('model')} models, not one",
                cure="one model, and optimizers, schedulers and DataLoaders that go with it",
            )
        given = dict(zip(named, objects, strict=True))
        model = given["model"]
        trainable = given.get("trainable") or {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer, factory = given.get("optimizer"), given.get("factory")
        if factory is None:
            factory = (
                rebuilt(optimizer, trainable)
                if optimizer is not None
                else lambda parameters: torch.optim.SGD(parameters, lr=0.0)
            )
        prepared = self.strategy.prepare(model, trainable, factory)
        wrapped = PreparedOptimizer(self, prepared.optimizer)
        done = {
            "model": lambda one: prepared.model,
            "trainable": lambda one: trainable,
            "optimizer": lambda one: wrapped,
            "factory": lambda one: wrapped,
            "scheduler": lambda one: PreparedScheduler(self, one, prepared.optimizer),
            "loader": lambda one: ShardedLoader(self, one),
        }
        results = [done[name](one) for name, one in zip(named, objects, strict=True)]
        self._prepared += [one for one in results if isinstance(one, (PreparedScheduler, ShardedLoader))]
        return results[0] if len(results) == 1 else tuple(results)

    def unwrap_model(self, model: nn.Module | None = None) -> nn.Module:
        """The model without what the strategy has put around it: what evaluates, generates and is saved."""
        return self.strategy.unwrap()

    def autocast(self):
        """The precision's context for a forward pass."""
        return self.strategy.autocast()

    @contextlib.contextmanager
    def forward(self):
        """Around the forward pass of a micro-batch: the precision's context, and where the activations stay until
        backward.
        """
        with (
            offload_activations() if self.plan.use_activation_cpu_offload else contextlib.nullcontext(),
            self.autocast(),
        ):
            yield

    # -------------------------------------------------------------------------------------------------- boundaries

    @contextlib.contextmanager
    def micro_batch(self, is_final: bool):
        """Around forward and backward of one micro-batch; `is_final` marks the boundary of the optimizer step."""
        self.sync_gradients = is_final
        with self.strategy.micro_batch(is_final):
            yield

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module | None = None):
        """The automatic boundary: every `gradient_accumulation_steps` micro-batches, and at the end of a prepared
        DataLoader.
        """
        self._counted += 1
        ends = any(one.at_end for one in self._prepared if isinstance(one, ShardedLoader))
        is_final = ends or self._counted % self.gradient_accumulation_steps == 0
        if is_final:
            self._counted = 0
        with self.micro_batch(is_final):
            yield

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module | None = None):
        """Micro-batches in it do not end their step."""
        with self.micro_batch(False):
            yield

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Before a backward: whether it ends its step. It stays so until it is set again."""
        self.sync_gradients = is_boundary

    set_deepspeed_gradient_accumulation_boundary = set_gradient_accumulation_boundary

    def backward(self, loss: torch.Tensor, is_final_micro_batch: bool | None = None) -> None:
        """Accumulate gradients of `loss`, which is a part of the step's whole loss: nothing is divided here.

        `is_final_micro_batch` says whether the micro-batch ends its step; None: as announced.
        """
        if is_final_micro_batch is not None:
            self.sync_gradients = is_final_micro_batch
        self.strategy.backward(loss, is_final_micro_batch=self.sync_gradients)

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter] | None, max_norm: float) -> torch.Tensor | None:
        """At a boundary: cut the norm of all trained parameters' gradients.

        Returns the norm before; None off a boundary, and under ZeRO 1 to 3, which measure in their step (`grad_norm`
        has it then).
        """
        return self.strategy.clip(max_norm) if self.sync_gradients else None

    def optimizer_step_and_zero_grad(
        self, optimizer=None, model=None, max_grad_norm: float | None = None
    ) -> float | None:
        """At a boundary: clip, update, clear.

        Returns the gradient norm before clipping; None off a boundary, where nothing happens.
        """
        if not self.sync_gradients:
            return None
        self._step(max_grad_norm)
        return self.grad_norm

    def step(self, lr: float, max_grad_norm: float | None, skip: bool = False) -> StepResult:
        """Clip and update at rate `lr`, unless gradients are not finite or `skip` says so; gradients are cleared either
        way.
        """
        self.strategy.set_lr(lr)
        return self._step(max_grad_norm, skip)

    def _step(self, max_grad_norm: float | None, skip: bool = False) -> StepResult:
        with room_for(
            "the optimizer's step", "--optimizer adamw_8bit or sgd, a smaller --lora_rank, or a smaller --batch_size"
        ):
            result = self.strategy.step(max_grad_norm=max_grad_norm, skip=skip)
        self.grad_norm, self.skipped = result.grad_norm, result.skipped
        return result

    def discard_step(self) -> None:
        """Drop the gradients of a step that is done again and what its forward left behind, and give the allocator's
        free memory back.
        """
        from anyqlora.on_torch.adapters.fused_layers import fused_layers

        self.strategy.zero_grad()
        for layer in fused_layers(self.strategy.model):
            layer.group.forget()
        self.empty_cache()

    def empty_cache(self) -> None:
        """Give the allocator's free memory back."""
        if self.device.type in ("cuda", "xpu", "mps"):
            getattr(torch, self.device.type).empty_cache()
        else:
            trim()

    # ----------------------------------------------------------------------------------------- between processes

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all processes, of one shape, one after another along the first axis; all have it."""
        tensor = tensor.detach().to(self.device)
        tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor.contiguous()
        if self.num_processes == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.num_processes)]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        """The sum, or the mean, of the processes' tensors; all have it."""
        if reduction not in ("sum", "mean"):
            raise UsageError(f"reduce: {reduction!r} is neither sum nor mean")
        tensor = tensor.detach().to(self.device, copy=True)
        if self.num_processes > 1:
            dist.all_reduce(tensor)
        return tensor / self.num_processes if reduction == "mean" else tensor

    # ----------------------------------------------------------------------------------------------- what is kept

    def save_state(self, directory: str | Path) -> None:
        """Write what is learned, its moments, the loss scale, schedulers and loaders, full tensors: it loads under any
        strategy and number of processes. All processes call it; the first one writes.
        """
        learned, moments = self.strategy.gather_trainable(), self.strategy.gather_moments()
        if self.is_main_process:
            loop = {
                "scaler": self.strategy.scaler.state_dict(),
                "counted": self._counted,
                "prepared": [one.state_dict() for one in self._prepared],
            }
            files = {LEARNED: _bytes(learned), MOMENTS: _bytes(moments), LOOP: to_json(loop)}
            write_directory(Path(directory), files, FileSystem(), manifest={})
        self.wait_for_everyone()

    def load_state(self, directory: str | Path) -> None:
        """What `save_state` wrote, whatever it was written under. Raises UsageError for another model's."""
        directory = Path(directory)
        try:
            learned, moments = load_file(directory / LEARNED), load_file(directory / MOMENTS)
            loop = json.loads((directory / LOOP).read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(
                f"no state that can be read: {error}", where=str(directory), cure="a directory that save_state wrote"
            ) from None
        if learned.keys() != self.strategy.trainable.keys():
            strange = sorted(learned.keys() ^ self.strategy.trainable.keys())
            raise UsageError(
                f"the state of another model: {len(strange)} names differ, {strange[0]} is the first",
                where=str(directory),
            )
        self.strategy.load_trainable(learned)
        self.strategy.load_moments(moments)
        self.strategy.scaler.load_state_dict(loop["scaler"]) if loop["scaler"] else None
        self._counted = loop["counted"]
        for one, state in zip(self._prepared, loop["prepared"], strict=True):
            one.load_state_dict(state)


def _bytes(tensors: dict[str, torch.Tensor]) -> list:
    return tensors_to_bytes({name: tensor.contiguous().numpy() for name, tensor in tensors.items()})
