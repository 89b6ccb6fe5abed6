"""DeepSpeed's engine: ZeRO stage 0 (replicas), 1 (moments sharded), 2 (gradients too), 3 (weights too)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from anyqlora.config.strategy_options import DeepSpeedOptions
from anyqlora.core.errors import NotSupported, RunError, UsageError
from anyqlora.on_torch._compat import gather_where_read, link_moments, without_shared_memory_operation
from anyqlora.on_torch.memory.malloc import return_freed_pages
from anyqlora.on_torch.parallel.base import Prepared, Strategy, by_parameter_name
from anyqlora.on_torch.parallel.fsdp import blocks
from anyqlora.on_torch.parallel.group import MultiProcessStrategy
from anyqlora.on_torch.precision import autocast
from anyqlora.on_torch.quantizers.experts import PackedExperts
from anyqlora.training.state import StepResult

BUCKET = 1 << 26  # gradients that are reduced together at most; DeepSpeed's own 5e8 take 2 GB however small the adapter
ALIGNED = 2  # numbers that stages 1 and 2 gather at a time are a multiple of: 4 bytes of float16, whatever they are


def rounded_up(size: int | float) -> int:
    """The next size that stages 1 and 2 take as `allgather_bucket_size`."""
    return -(-int(size) // ALIGNED) * ALIGNED


class Autocasting(nn.Module):
    """The model in the precision's context: DeepSpeed switches an outer one off, and its own would round what is
    communicated.
    """

    def __init__(self, module: nn.Module, autocast: Callable):
        super().__init__()
        self.module, self.autocast = module, autocast

    def forward(self, *inputs, **named):
        with self.autocast():
            return self.module(*inputs, **named)


class DeepSpeed(MultiProcessStrategy):
    """The caller owns the boundary (DeepSpeed's unmanaged accumulation): gradients accumulate until `step`.

    Stages 0 and 1 communicate gradients in `step` alone; 2 and 3 reduce in every backward, which is what sharding them
    means. DeepSpeed's mean over ranks is undone in the loss. Its engine runs in float32 arithmetic with our precision
    inside and our loss scale as its own, so adapters and moments are float32 in every precision.
    """

    name = "deepspeed"
    plugin_cls = DeepSpeedOptions
    owns_optimizer = True

    @classmethod
    def unavailable_reason(cls, env: dict) -> str | None:
        from importlib.util import find_spec

        return None if find_spec("deepspeed") else "deepspeed is not installed: pip install deepspeed"

    def setup(self) -> None:
        if why := self.unavailable_reason({}):
            raise UsageError(f"strategy deepspeed: {why}", cure="install it, or --strategy fsdp")
        super().setup()
        self.stage = self.options.zero_stage
        self.keeps_whole = self.stage != 3
        if self.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        deepspeed.utils.logger.setLevel(logging.ERROR)
        without_shared_memory_operation()
        self.library = deepspeed

    @property
    def needs_logits(self) -> str:
        return "ZeRO stage 3 lets go of the head's weight after the forward pass" if self.stage == 3 else ""

    def autocast(self):
        """Stage 3 takes a weight away after each use: one cast for two uses (DoRA's) would find nothing in backward."""
        return autocast(self.plan, self.device, cache=self.stage != 3)

    def config(self) -> dict:
        """What the engine is told. The step's own entries (clipping, accumulation, precision) are ours."""
        zero = {
            "overlap_comm": False,
            "reduce_bucket_size": self.bucket,
            "allgather_bucket_size": self.bucket,
            **self.options.zero_options,
            "stage": self.stage,
        }
        zero["allgather_bucket_size"] = rounded_up(zero["allgather_bucket_size"])
        if self.stage == 3:
            zero.setdefault("stage3_param_persistence_threshold", 0)  # every weight is sharded, small ones too
            zero.setdefault(
                "memory_efficient_linear", False
            )  # DeepSpeed's own product rounds otherwise under autocast, and replaces torch's
        if self.options.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.options.offload_param:
            zero["offload_param"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
        }

    # --------------------------------------------------------------------------------------------------- the model

    def prepare(self, model: nn.Module, trainable: dict[str, nn.Parameter], optimizer_factory: Callable) -> Prepared:
        self._refuse(model)
        owners = self.owners(trainable, model)
        sizes = [p.numel() for p in trainable.values()]
        self.bucket = max(*sizes, min(sum(sizes), BUCKET), 1)
        self.inner = (
            next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
            if self.stage == 3
            else model
        )
        if self.stage == 3:
            self._shard(self.inner)
        else:
            self.share(model)
        self.refresh(trainable, owners)
        Strategy.prepare(self, model, trainable, optimizer_factory)
        own = self.optimizer
        self.engine, *_ = self.library.initialize(
            model=Autocasting(self.inner, self.autocast), optimizer=own, config=self.config(), dist_init_required=False
        )
        self.refresh(trainable, owners)
        self.reading = gather_where_read(self.inner) if self.stage == 3 else []
        if self.stage == 0:
            self.engine.enable_backward_allreduce = False  # summed in `step`, where the norm is still to be taken
        else:
            self.zero = self.engine.optimizer
            self.optimizer = self.zero.optimizer
            self._make_skippable()
        self._guard("backward", "runtime.backward(loss, is_final_micro_batch=...)")
        self._guard("set_gradient_accumulation_boundary", "runtime.set_gradient_accumulation_boundary(is_boundary)")
        self._guard("step", "runtime.optimizer_step_and_zero_grad(optimizer, model, max_grad_norm=...)")
        self.limit: float | None = None
        self.factor = 1.0  # by which the step's gradients are multiplied, where the engine has them
        self._watch_first_gradients()
        self._assert_sharded()
        return Prepared(self.engine, self.optimizer)

    def _refuse(self, model: nn.Module) -> None:
        if self.stage == 3 and any(isinstance(module, PackedExperts) for module in model.modules()):
            raise NotSupported(
                "quantized experts cannot be sharded yet: every process would hold all of them",
                cure="--deepspeed_zero_stage 2",
            )

    def _shard(self, root: nn.Module) -> None:
        """One layer at a time, so that no rank but the one that reads holds more than its shards and a layer."""
        done: set[int] = set()
        with return_freed_pages():
            for part in [*blocks(root), root]:
                self.share(part, done=lambda module: id(module) in done)
                self.library.zero.Init(module=part, config_dict_or_path=self.config(), dtype=torch.float32)
                done.add(id(part))

    def _assert_sharded(self) -> None:
        stage = self.engine.zero_optimization_stage()
        if stage != self.stage:
            raise RunError(f"deepspeed: ZeRO stage {self.stage} was asked for, and the engine has {stage}")
        whole = (
            [name for name, p in self.inner.named_parameters() if not hasattr(p, "ds_tensor")]
            if self.stage == 3
            else []
        )
        if whole:
            raise RunError(f"deepspeed: {len(whole)} parameters are not sharded, {whole[0]} is the first")

    def _make_skippable(self) -> None:
        """Gradients that a step is to leave out are taken away as torch's optimizer begins: what has no gradient is not
        updated.
        """
        self.skipping, taken = False, {}

        def before(optimizer, *_):
            for p in (p for group in optimizer.param_groups for p in group["params"] if self.skipping):
                taken[p], p.grad = p.grad, None

        def after(optimizer, *_):
            for p, gradient in taken.items():
                p.grad = gradient
            taken.clear()

        self.optimizer.register_step_pre_hook(before)
        self.optimizer.register_step_post_hook(after)

    def _guard(self, name: str, instead: str) -> None:
        """A loop that calls the engine itself would leave out what is done around it: the boundary, sums, scales."""

        def refuse(*inputs, **named):
            raise UsageError(f"deepspeed: the engine's own {name} is called by the strategy", cure=instead)

        setattr(self.engine, name, refuse)

    def _call_engine(self, name: str, *inputs, **named) -> None:
        getattr(type(self.engine), name)(self.engine, *inputs, **named)

    def _watch_first_gradients(self) -> None:
        """ZeRO leaves no gradient where others look for it; the first step's are seen as they come."""
        self.seen: dict[str, list[bool]] = {name: [False, False] for name in self.trainable}

        def watch(name: str):
            def look(gradient):
                self.seen[name] = [True, self.seen[name][1] or bool(gradient.any())]

            return look

        self.watches = [p.register_hook(watch(name)) for name, p in self.trainable.items()]

    # -------------------------------------------------------------------------------------------------------- the step

    def accumulate(self, scaled: torch.Tensor, is_final: bool) -> None:
        loss = scaled if self.stage == 0 else scaled * self.world_size
        self._call_engine("backward", loss, scale_wrt_gas=False)

    def sum_gradients(self) -> None:
        self.sum_flat(self.trainable.values())

    def clip(self, max_grad_norm: float | None) -> torch.Tensor | None:
        if self.stage == 0:
            return super().clip(max_grad_norm)
        self.limit = max_grad_norm  # DeepSpeed measures and cuts in its step
        return None

    def multiply(self, factor: float) -> None:
        if self.stage == 0:
            super().multiply(factor)
        else:
            self.factor *= factor

    def step(self, *, max_grad_norm: float | None, skip: bool = False) -> StepResult:
        for watch in self.watches:
            watch.remove()
        self.watches = []
        if self.stage == 0:
            return super().step(max_grad_norm=max_grad_norm, skip=skip)
        scale = self.scaler.get_scale()
        self.zero.clip_grad = max_grad_norm or self.limit or 0.0
        self.limit = None
        self.zero.loss_scaler.cur_scale = scale / self.factor  # only now: our loss has it already
        self.factor = 1.0
        self.skipping = skip
        self._call_engine("step")
        self.zero.loss_scaler.cur_scale = 1.0
        norm = float(self.engine.get_global_grad_norm())
        overflowed = bool(self.zero.overflow)
        self.scaler.update(overflowed=overflowed)
        return StepResult(norm, skip or overflowed, scale)

    def update(self) -> None:
        self._call_engine("step")

    def zero_grad(self) -> None:
        if self.stage >= 2:
            raise RunError(
                f"out of memory: ZeRO stage {self.stage} has sent a part of the step's gradients already, so it cannot "
                f"be done again",
                cure="a smaller --batch_size, or --deepspeed_zero_stage 1",
            )
        if self.stage == 0:
            super().zero_grad()
        else:
            self.zero.zero_grad(set_to_none=True)

    def missing_gradients(self) -> dict[str, bool]:
        missing = self.all_reduce_sum(
            torch.tensor(list(self.seen.values()), dtype=torch.float32, device=self.device)
        ).tolist()
        return {name: has > 0 for name, (has, moves) in zip(self.seen, missing, strict=True) if not moves}

    # ------------------------------------------------------------------------------------------------ what is kept

    def gather_trainable(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, p in self.trainable.items():
            with self.library.zero.GatheredParameters([p], enabled=self.stage == 3):
                if self.rank == 0:
                    tensors[name] = p.detach().cpu().clone()
        return tensors

    def gather_moments(self) -> dict[str, torch.Tensor]:
        if self.stage == 0:
            return super().gather_moments()
        if self.stage < 3:
            link_moments(self.zero)
        tensors = {}
        for name, p in self.trainable.items():
            flat = self._flat(p)
            for key, value in sorted(self.optimizer.state.get(flat, {}).items()):
                if torch.is_tensor(value):
                    is_sharded = value.shape == flat.shape
                    full = self.library.utils.safe_get_full_optimizer_state(p, key) if is_sharded else value
                    if self.rank == 0:
                        tensors[f"{name}|{key}"] = (
                            full.detach().cpu().clone().view(self.shape(p) if is_sharded else value.shape)
                        )
        return tensors

    def load_trainable(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, p in self.trainable.items():
            value = tensors[name].to(self.device)
            with torch.no_grad(), self.library.zero.GatheredParameters([p], modifier_rank=0, enabled=self.stage == 3):
                if self.stage != 3 or self.rank == 0:
                    p.copy_(value)
            if self.stage == 3:
                self.library.utils.safe_set_local_fp32_param(p, self._own(p, value))
            elif self.stage:
                self.library.utils.safe_set_full_fp32_param(p, value)

    def load_moments(self, tensors: dict[str, torch.Tensor]) -> None:
        if self.stage == 0:
            super().load_moments(tensors)
            return
        states = by_parameter_name(tensors)
        for name, state in states.items():
            p = self.trainable[name]
            flat, shape = self._flat(p), self.shape(p)
            there = self.optimizer.state[flat]
            for key, value in state.items():
                if key not in there:
                    there[key] = (
                        torch.zeros_like(flat)
                        if tuple(value.shape) == tuple(shape)
                        else self.restore_step(value, flat.device)
                    )
        if self.stage < 3:
            link_moments(self.zero)
        for name, state in states.items():
            p = self.trainable[name]
            for key, value in state.items():
                if tuple(value.shape) != tuple(self.shape(p)):
                    continue
                if self.stage == 3:
                    self.library.utils.safe_set_local_optimizer_state(p, self._own(p, value.to(self.device)), key)
                else:
                    self.library.utils.safe_set_full_optimizer_state(p, value.to(self.device), key)

    def _own(self, p: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter as stage 3 cuts it: equal parts of the flat tensor, the last one padded."""
        size = p.ds_tensor.numel()
        flat = full.reshape(-1)
        return pad(flat, (0, size * self.world_size - flat.numel()))[self.rank * size : (self.rank + 1) * size].clone()

    def shape(self, p: nn.Parameter) -> torch.Size:
        return p.ds_shape if self.stage == 3 else p.shape

    def _flat(self, p: nn.Parameter) -> torch.Tensor:
        """The flat tensor that DeepSpeed's optimizer updates in the parameter's place."""
        if self.stage == 3:
            return self.zero.fp32_partitioned_groups_flat[self.zero.grad_position[self.zero.get_param_id(p)][0]]
        return next(
            flat
            for group, flat in zip(self.zero.bit16_groups, self.zero.single_partition_of_fp32_groups, strict=True)
            if any(q is p for q in group)
        )

    def unwrap(self) -> nn.Module:
        return self.inner

    def release(self) -> None:
        super().release()
        self.engine.destroy()
        self.engine = self.zero = self.inner = None
