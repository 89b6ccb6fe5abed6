"""Accelerate's verbs over one strategy: what `train.py` and people's own loops use."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from anyqlora.config import strategy_options
from anyqlora.core import registry
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.on_torch.device import MemoryMonitor, room_for
from anyqlora.on_torch.kernels.dropout import current_tokens
from anyqlora.on_torch.memory.activation_offload import offload_activations
from anyqlora.on_torch.memory.malloc import set_primitive_cache, trim
from anyqlora.on_torch.runtime.accelerate_plugins import CURE, settings_of_objects
from anyqlora.on_torch.runtime.collectives import Collectives
from anyqlora.on_torch.runtime.loaders import Round, ShardedLoader, SkippedLoader
from anyqlora.on_torch.runtime.logging import Logging
from anyqlora.on_torch.runtime.prepared import PreparedOptimizer, PreparedScheduler, SeveralOptimizers, rebuilt
from anyqlora.on_torch.runtime.state import Saving
from anyqlora.planning.memory.estimate import COMPILED
from anyqlora.reporting.trackers import installed_trackers
from anyqlora.training.state import StepResult

NOT_STEPPED = "this micro-batch ended a step of the optimizer, and no step was taken: its gradients would train nothing"
STEP = (
    "runtime.optimizer_step_and_zero_grad(optimizer, model, max_grad_norm=...) or optimizer.step() after its backward"
)
# Accelerator's arguments that are no settings -> what they are here
ARGUMENTS = {"cpu": "backend", "log_with": "log_to", "project_dir": "output_dir"}


class Runtime(Collectives, Saving, Logging):
    """One planned run's device, precision and strategy.

    A step is any number of micro-batches; the last one is its boundary. It is announced by `micro_batch`, by
    `accumulate`, by `set_gradient_accumulation_boundary` or by `backward` itself, the same way under every strategy. A
    boundary that no step follows is an error.

    `loss` says what a micro-batch's loss is. "sum": a part of the step's whole loss; nothing is divided, and gradients
    are summed over micro-batches and processes. "mean": the mean over the micro-batch's rows, as Accelerate has it;
    gradients are those of the mean over the step's micro-batches, however many there were, and over the processes.
    """

    def __init__(self, plan, loss: str = "sum"):
        if loss not in ("mean", "sum"):
            raise UsageError(f"loss: {loss!r} is neither mean nor sum", where="Runtime")
        self.plan, self.reduction = plan, loss
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
        self.step_scheduler_with_optimizer = True
        self._announced = True  # what a backward takes for granted that says nothing of boundaries
        self._is_open = False  # whether a micro-batch is under way that has a boundary of its own
        self._counted, self._micro_batches = 0, 0  # blocks of `accumulate`, and micro-batches, since the last step
        self._unstepped = ""  # the backward that ended a step which was not taken yet
        self._is_divided = False  # whether this step's gradients are those of a mean already
        self._left: list = []  # optimizers that the last step has left gradients to
        self._is_new = True  # whether the next backward is the first one of its micro-batch
        self._given: list[Round] = []  # of the batches that prepared loaders have given since the last step
        self._prepared, self._loaders, self._checkpointed = [], [], []
        self._triggered = False

    @classmethod
    def of(cls, loss: str = "mean", step_scheduler_with_optimizer: bool = True, **settings) -> Runtime:
        """For a loop of your own: strategy, backend, precision, gradient_accumulation_steps, strategy_opt ... as
        train.py has them; Accelerator's own names are known, too.

        The processes are those that torchrun (or srun) started. Raises UsageError for settings that this machine does
        not do.
        """
        from anyqlora.config.resolve import resolve
        from anyqlora.planning.backends import BackendManager
        from anyqlora.processes.environment import ProcessContext

        settings = _of_accelerator(settings)
        # A plan is one of a model and rows; a loop of your own has both, so what stands in for them here is not read.
        config = resolve(
            {"train_type": "full", "model_name": "demo", "dataset": "demo", **settings},
            origin="Runtime.of",
        )
        config = ProcessContext.here(config).apply_to(config)
        if config.world_size == -1:
            config = config.with_(world_size=1)
        manager = BackendManager(config.backend, where=config.sources.get("backend", ""))
        runtime = cls(manager.plan(config), loss)
        runtime.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        atexit.register(_say_unstepped, weakref.ref(runtime))
        return runtime

    def end_training(self) -> None:
        """A loop's last call: the strategy lets go of what it holds, and leaves the process group if it was the one to
        form it. Raises UsageError where the last boundary was not followed by a step.
        """
        self._assert_stepped()
        self.close_trackers()
        self.strategy.teardown()

    def close(self) -> None:
        """`end_training`, unless something went wrong: the other processes may be gone then, and nobody waits for
        them.
        """
        if sys.exc_info()[0] is None:
            self.end_training()

    # ------------------------------------------------------------------------------------------------ what is used

    def prepare(self, *objects):
        """A model and whatever goes with it, in any order; what comes back stands in the same order, alone if it was
        given alone.

        - a module: wrapped and sharded. One is required; others may come with it that have no parameters.
        - {name: parameter} of what is trained; else every parameter that requires a gradient, by its own name.
        - an optimizer: made again over the parameters as they are afterwards, with its options; it has not stepped yet.
          Or a function, parameters -> optimizer. Several optimizers each have their own parameters.
        - a learning rate scheduler: goes on with its optimizer.
        - a DataLoader: each process gets its part of every round of batches, each row as often as the sampler says.
        - anything else, None too, comes back as it is.
        """
        given = _Given(objects)
        model = given.model
        trainable = given.trainable or {name: p for name, p in model.named_parameters() if p.requires_grad}
        prepared = self.strategy.prepare(model, trainable, self._factory(given, trainable))
        made = prepared.optimizer
        of = dict(
            zip(map(id, given.optimizers), made.optimizers if len(given.optimizers) > 1 else [made], strict=False)
        )
        done = {
            "model": lambda one: prepared.model,
            "trainable": lambda one: trainable,
            "optimizer": lambda one: PreparedOptimizer(self, of[id(one)]),
            "factory": lambda one: PreparedOptimizer(self, made),
            "scheduler": lambda one: PreparedScheduler(self, one, of.get(id(one.optimizer), made)),
            "loader": lambda one: ShardedLoader(self, one),
            "module": lambda one: one.to(self.device),
            "other": lambda one: one,
        }
        results = [done[kind](one) for kind, one in given.kinds]
        self._prepared += [one for one in results if isinstance(one, (PreparedScheduler, ShardedLoader))]
        return results[0] if len(results) == 1 else tuple(results)

    def _factory(self, given: _Given, trainable: dict[str, nn.Parameter]):
        if given.factory is not None:
            return given.factory
        factories = [rebuilt(optimizer, trainable) for optimizer in given.optimizers]
        if not factories:
            return lambda parameters: torch.optim.SGD(parameters, lr=0.0)
        if len(factories) == 1:
            return factories[0]
        if self.strategy.owns_optimizer:
            raise NotSupported(
                f"{len(factories)} optimizers under strategy {self.strategy.name}: its engine has one",
                cure="one optimizer with a parameter group for each, or --strategy fsdp",
            )
        _assert_apart(given.optimizers)
        return lambda parameters: SeveralOptimizers([make(parameters) for make in factories])

    def prepare_model(self, model: nn.Module, **options) -> nn.Module:
        return self.prepare(model)

    def prepare_data_loader(self, data_loader: DataLoader, **options) -> ShardedLoader:
        """A loader alone, as one for evaluation that comes later."""
        loader = ShardedLoader(self, data_loader)
        self._prepared.append(loader)
        return loader

    def skip_first_batches(self, dataloader, num_batches: int = 0):
        """A prepared loader whose next iteration begins after so many of its batches: an epoch is gone on with."""
        if not isinstance(dataloader, ShardedLoader):
            raise UsageError(
                f"skip_first_batches: {type(dataloader).__name__} is no prepared loader", cure="runtime.prepare(loader)"
            )
        return SkippedLoader(dataloader, num_batches)

    def unwrap_model(self, model: nn.Module | None = None, keep_fp32_wrapper: bool = True) -> nn.Module:
        """The model without what the strategy has put around it: what evaluates, generates and is saved."""
        return self.strategy.unwrap()

    def free_memory(self, *objects) -> list[None]:
        """Let go of what was prepared; another model may be prepared then. Returns a None for each object given, to be
        put in its place.
        """
        self._assert_stepped()
        self.strategy.release()
        self._prepared.clear()
        self._checkpointed.clear()
        self.empty_cache()
        return [None] * len(objects)

    clear = free_memory

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

    # ------------------------------------------------------------------------------------------------- iterations

    def begin_loader(self, loader: ShardedLoader) -> None:
        self._loaders.append(loader)

    def note_round(self, given: Round) -> None:
        """A batch was given: micro-batches are those of a step's batches, in their order."""
        if len(self._loaders) == 1 and torch.is_grad_enabled():
            self._given.append(given)

    def end_loader(self, loader: ShardedLoader) -> None:
        self._loaders = [one for one in self._loaders if one is not loader]

    @property
    def round(self) -> Round | None:
        """Of the batch that was given last by the innermost of the loaders under way."""
        return self._loaders[-1].round if self._loaders else None

    @property
    def schedule_steps(self) -> int:
        """Of a prepared scheduler at each step of its optimizer. Accelerate's loops count them on the loader as it was
        before `prepare`, which is as many times longer as there are processes.
        """
        return self.strategy.data_size if self.reduction == "mean" and self.step_scheduler_with_optimizer else 1

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables=(), even_batches: bool | None = None) -> Iterator[None]:
        """Nothing is to be done: prepared loaders give every process as many batches."""
        yield

    # -------------------------------------------------------------------------------------------------- boundaries

    @contextlib.contextmanager
    def micro_batch(self, is_final: bool):
        """Around forward and backward of one micro-batch; `is_final` marks the boundary of the optimizer step."""
        self._begin_micro_batch(is_final)
        before, self._announced, self._is_open = self._announced, is_final, True
        try:
            with self.strategy.micro_batch(is_final):
                yield
        finally:
            self._announced, self._is_open = before, False

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module):
        """The automatic boundary: every `gradient_accumulation_steps` micro-batches, and at the end of a prepared
        DataLoader.
        """
        self._counted += 1
        ends = any(one.at_end for one in self._loaders)
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
        self._begin_micro_batch(is_boundary)
        self._announced = is_boundary

    set_deepspeed_gradient_accumulation_boundary = set_gradient_accumulation_boundary

    def _begin_micro_batch(self, is_final: bool) -> None:
        self._assert_stepped()
        self.sync_gradients = is_final
        self._is_new = True

    def _assert_stepped(self) -> None:
        if self._unstepped:
            where, self._unstepped = self._unstepped, ""
            raise UsageError(NOT_STEPPED, where=where, cure=STEP)

    def backward(self, loss: torch.Tensor, is_final_micro_batch: bool | None = None, **options) -> None:
        """Accumulate gradients of `loss`; what it stands for, Runtime's own `loss` says.

        `is_final_micro_batch` says whether the micro-batch ends its step; None: as announced, else it does. Raises
        UsageError where the one before it ended its step and none was taken.
        """
        if is_final_micro_batch is not None and not self._is_open:
            self._begin_micro_batch(is_final_micro_batch)
        elif is_final_micro_batch is not None:
            self.sync_gradients = is_final_micro_batch
        elif not self._is_open:
            self._is_new = self._is_new or not self._unstepped
            self.sync_gradients = self._announced
        if self._left:
            self._refuse_left()
        self._micro_batches += self._is_new
        self._is_new = False
        given = self._given[self._micro_batches - 1] if self._micro_batches <= len(self._given) else None
        weight = given.weight(self.strategy.data_rank) if given else 1.0
        if weight != 1.0 and (weight == 0.0 or self.reduction == "mean"):
            loss = loss * weight
        self.strategy.backward(loss, is_final_micro_batch=self.sync_gradients)
        current_tokens.set(None)  # what a loop gives the model next are other tokens
        if self.sync_gradients:
            self._unstepped = f"backward of micro-batch {self._micro_batches}"

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | None, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """At a boundary: cut the norm of all trained parameters' gradients.

        Returns the norm before; None off a boundary, and under ZeRO 1 to 3, which measure in their step (`grad_norm`
        has it then).
        """
        if norm_type != 2:
            raise NotSupported(f"clip_grad_norm_ by the {norm_type}-norm", cure="norm_type=2")
        if not self.sync_gradients:
            return None
        self._divide()
        return self.strategy.clip(max_norm)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter] | None, clip_value: float) -> None:
        """At a boundary: cut each number of all trained parameters' gradients."""
        if self.sync_gradients:
            self._divide()
            if self.strategy.clip(None) is None:
                raise NotSupported(
                    f"clip_grad_value_ under strategy {self.strategy.name}, whose engine cuts by the norm",
                    cure="clip_grad_norm_, or --deepspeed_zero_stage 0",
                )
            for gradient in self.strategy.gradients(self.strategy.trainable.values()):
                gradient.clamp_(-clip_value, clip_value)

    def unscale_gradients(self, optimizer=None) -> None:
        """At a boundary: gradients as the optimizer will see them, without the loss scale."""
        if self.sync_gradients:
            self._divide()
            self.strategy.clip(None)

    def _divide(self) -> None:
        """Make the gradients those of a mean: once for each step, of the micro-batches that there were."""
        if (
            self.reduction == "mean"
            and not self._is_divided
            and (parts := self._micro_batches * self.strategy.data_size) > 1
        ):
            self.strategy.multiply(1 / parts)
        self._is_divided = True

    def optimizer_step_and_zero_grad(
        self, optimizer=None, model=None, max_grad_norm: float | None = None
    ) -> float | None:
        """At a boundary: clip, update, clear.

        Returns the gradient norm before clipping; None off a boundary, where nothing happens.
        """
        if not self.sync_gradients:
            return None
        self.step_optimizer(getattr(optimizer, "optimizer", None), max_grad_norm)
        return self.grad_norm

    def step_optimizer(self, optimizer: Optimizer | None, max_grad_norm: float | None = None) -> None:
        """The step of one of several prepared optimizers, or of all (None)."""
        several = getattr(self.strategy, "optimizer", None)
        if not isinstance(several, SeveralOptimizers) or optimizer not in several.optimizers:
            self._step(max_grad_norm)
            return
        self._left = [one for one in self._left or several.optimizers if one is not optimizer and _has_gradients(one)]
        several.at_work = [optimizer]
        self._step(max_grad_norm)
        several.at_work = several.optimizers
        if self._left:  # whose gradients are summed already
            self.strategy.clipped = torch.tensor(self.grad_norm)

    def drop_gradients(self, optimizer: Optimizer) -> None:
        """Of a step that is complete and was not taken, or of an optimizer that it left out."""
        several = getattr(self.strategy, "optimizer", None)
        if optimizer in self._left:
            optimizer.zero_grad(set_to_none=True)
            self._left = [one for one in self._left if one is not optimizer]
            if not self._left:
                self.strategy.clipped = None
        elif self._unstepped and not isinstance(several, SeveralOptimizers):
            self.strategy.zero_grad()
            self._end_step()

    def _refuse_left(self) -> None:
        raise UsageError(
            f"{len(self._left)} of the optimizers did not step, and have gradients of the last step",
            where="backward",
            cure="step() or zero_grad() of each prepared optimizer before the next backward",
        )

    def step(self, lr: float, max_grad_norm: float | None, skip: bool = False) -> StepResult:
        """Clip and update at rate `lr`, unless gradients are not finite or `skip` says so; gradients are cleared either
        way.
        """
        self.strategy.set_lr(lr)
        return self._step(max_grad_norm, skip)

    def _step(self, max_grad_norm: float | None, skip: bool = False) -> StepResult:
        self._divide()
        with room_for(
            "the optimizer's step", "--optimizer adamw_8bit or sgd, a smaller --lora_rank, or a smaller --batch_size"
        ):
            result = self.strategy.step(max_grad_norm=max_grad_norm, skip=skip)
        self.grad_norm, self.skipped = result.grad_norm, result.skipped
        self._end_step()
        return result

    def _end_step(self) -> None:
        self._unstepped, self._micro_batches, self._is_divided, self._is_new = "", 0, False, True
        self._given.clear()

    def discard_step(self) -> None:
        """Drop the gradients of a step that is done again and what its forward left behind, and give the allocator's
        free memory back.
        """
        from anyqlora.on_torch.adapters.fused_layers import fused_layers

        self.strategy.zero_grad()
        self._end_step()
        for layer in fused_layers(self.strategy.model):
            layer.group.forget()
        self.empty_cache()

    @property
    def optimizer_step_was_skipped(self) -> bool:
        return self.skipped

    def set_trigger(self) -> None:
        """Ask for something that `check_trigger` tells to all processes, as to stop early."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has called `set_trigger` since the last time; all call it."""
        triggered = bool(self.reduce(torch.tensor(float(self._triggered), device=self.device)))
        self._triggered = self._triggered and not triggered
        return triggered

    def empty_cache(self) -> None:
        """Give the allocator's free memory back."""
        if self.device.type in ("cuda", "xpu", "mps"):
            getattr(torch, self.device.type).empty_cache()
        else:
            trim()


class _Given:
    """What `prepare` was given, sorted."""

    def __init__(self, objects: tuple):
        modules = [one for one in objects if isinstance(one, nn.Module)]
        trained = [one for one in modules if any(True for _ in one.parameters())] or modules
        self.kinds = [(self._kind(one, trained), one) for one in objects]
        models = self.all("model")
        if len(models) != 1:
            raise UsageError(
                f"prepare: {len(models)} models, not one",
                cure="one model, and optimizers, schedulers and DataLoaders that go with it; for a loader alone "
                "prepare_data_loader(loader)",
            )
        self.model = models[0]
        self.optimizers = self.all("optimizer")
        self.trainable = next(iter(self.all("trainable")), None)
        self.factory = next(iter(self.all("factory")), None)

    def all(self, kind: str) -> list:
        return [one for name, one in self.kinds if name == kind]

    @staticmethod
    def _kind(one, trained: list[nn.Module]) -> str:
        if isinstance(one, nn.Module):
            return "model" if any(one is other for other in trained) else "module"
        kinds = {"trainable": dict, "optimizer": Optimizer, "scheduler": LRScheduler, "loader": DataLoader}
        kinds["factory"] = (types.FunctionType, functools.partial)
        return next((name for name, kind in kinds.items() if isinstance(one, kind)), "other")


def _say_unstepped(runtime: weakref.ref[Runtime]) -> None:
    """At the end of a script without `end_training`."""
    if (one := runtime()) is not None and one._unstepped and one.is_main_process:
        print(f"error: {NOT_STEPPED}\n  where: {one._unstepped}\n  cure: {STEP}", file=sys.stderr)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _assert_apart(optimizers: list[Optimizer]) -> None:
    owned = [id(p) for one in optimizers for group in one.param_groups for p in group["params"]]
    if len(set(owned)) != len(owned):
        raise UsageError("prepare: two optimizers update the same parameter", cure="each parameter in one optimizer")


def _of_accelerator(settings: dict) -> dict:
    """Settings, with those of Accelerator's arguments that have another name here under it. Raises UsageError for what
    nothing here does.
    """
    settings = settings_of_objects(settings)
    for name, ours in ARGUMENTS.items():
        if name in settings:
            value = settings.pop(name)
            if name == "cpu":
                settings.update({ours: "cpu"} if value else {})
            elif value is not None:
                settings[ours] = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            if settings.get(ours) == "all":  # every tracker that is installed
                settings[ours] = ",".join(installed_trackers())
    for name in [name for name in settings if name.endswith(("_plugin", "_plugins", "_handlers", "_config"))]:
        value = settings[name]
        if value is None:
            del settings[name]
        elif not name.startswith(("fsdp_config", "strategy")):
            classes = ", ".join(type(one).__name__ for one in (value if isinstance(value, (list, tuple)) else [value]))
            raise UsageError(f"{name}: {classes} of Accelerate's is not offered", where="Runtime.of", cure=CURE)
    if settings.pop("split_batches", False):
        raise UsageError(
            "split_batches: a batch of the loader is one process's", where="Runtime.of", cure="a smaller batch_size"
        )
    for name, value in {"even_batches": True, "dispatch_batches": None, "device_placement": True}.items():
        if settings.pop(name, value) not in (value, False):
            raise UsageError(f"{name}: each row goes to one process, on its device, always", where="Runtime.of")
    return settings
