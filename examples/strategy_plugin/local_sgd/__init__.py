"""Local SGD (Stich 2019): each process takes steps by itself, and every so often all take the average of what they have
learned.
"""

from dataclasses import dataclass

import torch

from anyqlora.extend import MultiProcessStrategy, Prepared, StepResult, Strategy, StrategyOptions, option


@dataclass(frozen=True, kw_only=True)
class LocalSgdOptions(StrategyOptions):
    every: int = option(4, "steps between two averages", low=1)


class LocalSgd(MultiProcessStrategy):
    """One collective of two numbers per step, and one of the trained numbers every `every` steps."""

    name = "local-sgd"
    plugin_cls = LocalSgdOptions

    def prepare(self, model, trainable, optimizer_factory) -> Prepared:
        owners = self.owners(trainable, model)
        self.share(model)
        self.refresh(trainable, owners)
        self.steps = 0
        return Strategy.prepare(self, model, trainable, optimizer_factory)

    def accumulate(self, scaled: torch.Tensor, is_final: bool) -> None:
        # The loss is this process's part of the whole step's; as many times that is its estimate of the whole.
        super().accumulate(scaled * self.world_size, is_final)

    def step(self, *, max_grad_norm, skip=False) -> StepResult:
        scale = self.scaler.get_scale()
        norm = self.clip(max_grad_norm).double()
        square, bad = self.all_reduce_sum(
            torch.stack([norm.nan_to_num(0, 0, 0) ** 2, (~torch.isfinite(norm)).double()])
        ).tolist()
        is_finite = not bad  # on any process: all skip together
        if is_finite and not skip:
            self.update()
        self.scaler.update(overflowed=not is_finite)
        self.zero_grad()
        self.steps += 1
        if self.steps % self.options.every == 0:
            self.load_trainable(self.average())
        return StepResult(
            (square / self.world_size) ** 0.5 if is_finite else float("inf"), skip or not is_finite, scale
        )

    def average(self) -> dict[str, torch.Tensor]:
        return {name: self.all_reduce_sum(p.detach().clone()) / self.world_size for name, p in self.trainable.items()}

    def gather_trainable(self) -> dict[str, torch.Tensor]:
        average = self.average()
        return {name: value.cpu() for name, value in average.items()} if self.rank == 0 else {}
