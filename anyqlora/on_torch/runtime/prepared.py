"""What `Runtime.prepare` gives back beside the model: optimizers and schedulers that act at boundaries."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, MutableMapping

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anyqlora.core.errors import NotSupported, UsageError


def rebuilt(optimizer: Optimizer, trainable: dict[str, nn.Parameter]) -> Callable[[list[nn.Parameter]], Optimizer]:
    """parameters -> an optimizer of the same kind, groups and options over them; they stand in the order of
    `trainable`.

    Raises UsageError when it has stepped already, or updates what is not trained.
    """
    if optimizer.state:
        raise UsageError(
            "the optimizer has stepped already: what it has learned belongs to parameters that sharding replaces",
            cure="prepare before the first step; load_state brings a state back",
        )
    number = {id(p): place for place, p in enumerate(trainable.values())}
    strange = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in number]
    if strange:
        raise UsageError(
            f"the optimizer has {len(strange)} parameters that the model does not train, the first of shape "
            f"{list(strange[0])}",
            cure="an optimizer over the model's own parameters",
        )
    groups = [
        ({key: value for key, value in group.items() if key != "params"}, [number[id(p)] for p in group["params"]])
        for group in optimizer.param_groups
    ]

    taken = inspect.signature(type(optimizer)).parameters  # defaults also has what the class adds by itself
    defaults = {key: value for key, value in optimizer.defaults.items() if key in taken}

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return type(optimizer)(
            [{"params": [parameters[place] for place in places], **options} for options, places in groups], **defaults
        )

    return make


class SeveralOptimizers:
    """Optimizers over different parameters of one model, as one: a strategy updates with those that are `at_work`."""

    def __init__(self, optimizers: list[Optimizer]):
        self.optimizers = self.at_work = optimizers

    @property
    def param_groups(self) -> list[dict]:
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> MutableMapping:
        return _States(self.optimizers)

    def step(self) -> None:
        for one in self.at_work:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.at_work:
            one.zero_grad(set_to_none=set_to_none)


class _States(MutableMapping):
    """{parameter: its state}, each kept by the optimizer that updates it."""

    def __init__(self, optimizers: list[Optimizer]):
        self.optimizers = optimizers
        self.owners = {p: one for one in optimizers for group in one.param_groups for p in group["params"]}

    def __getitem__(self, p):
        if p not in self.owners[p].state:
            raise KeyError(p)
        return self.owners[p].state[p]

    def __setitem__(self, p, state) -> None:
        self.owners[p].state[p] = state

    def __delitem__(self, p) -> None:
        del self.owners[p].state[p]

    def __iter__(self):
        return (p for one in self.optimizers for p in one.state)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self.optimizers)


class PreparedOptimizer:
    """An optimizer whose `step` updates, and whose `zero_grad` clears, at boundaries only."""

    def __init__(self, runtime, optimizer: Optimizer):
        self.runtime, self.optimizer = runtime, optimizer

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups

    @property
    def state(self) -> MutableMapping:
        return self.optimizer.state

    @property
    def step_was_skipped(self) -> bool:
        return self.runtime.skipped

    def step(self, closure=None) -> None:
        """At a boundary: the update, with the clipping that was asked for before; gradients are cleared with it."""
        if closure is not None:
            raise NotSupported("an optimizer with a closure: a strategy owns the backward pass")
        if self.runtime.sync_gradients:
            self.runtime.step_optimizer(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a step that is complete and was not taken. A step clears what it has used, and within
        one gradients stay.
        """
        self.runtime.drop_gradients(self.optimizer)

    def state_dict(self) -> dict:
        return self.optimizer.state_dict()


class _WithEmptyGroups:
    """An optimizer with the groups without parameters that its maker gave it: DeepSpeed's engine leaves them out, and a
    scheduler has a rate for each.
    """

    def __init__(self, optimizer: Optimizer, groups: list[dict]):
        others = iter(optimizer.param_groups)
        self.optimizer, self.param_groups = (
            optimizer,
            [next(others) if group["params"] else dict(group) for group in groups],
        )

    def __getattr__(self, name: str):
        return getattr(self.optimizer, name)


class PreparedScheduler:
    """A scheduler that goes on when the optimizer has: at boundaries, unless the step was skipped."""

    def __init__(self, runtime, scheduler: LRScheduler, optimizer: Optimizer):
        self.runtime, self.scheduler = runtime, scheduler
        groups = scheduler.optimizer.param_groups
        is_whole = len(optimizer.param_groups) == len(groups)
        scheduler.optimizer = optimizer if is_whole else _WithEmptyGroups(optimizer, groups)

    def step(self, *args) -> None:
        if self.runtime.sync_gradients and not self.runtime.skipped:
            for _ in range(self.runtime.schedule_steps):
                self._step(*args)

    def _step(self, *args) -> None:
        if getattr(self.scheduler, "total_steps", math.inf) > self.scheduler.last_epoch:
            with warnings.catch_warnings():
                # torch's reminder of the order of calls looks at the optimizer that the scheduler was made for. Here
                # another one has stepped.
                warnings.filterwarnings("ignore", message=r"Seems like `optimizer\.step\(\)` has been overridden")
                self.scheduler.step(*args)

    def get_last_lr(self) -> list[float]:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict:
        return {
            key: value
            for key, value in self.scheduler.state_dict().items()
            if isinstance(value, (int, float, str, list))
        }

    def load_state_dict(self, state: dict) -> None:
        self.scheduler.load_state_dict(state)
        for group, lr in zip(self.scheduler.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = lr
