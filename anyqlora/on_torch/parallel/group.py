"""What all strategies of several processes share: who is in the group, how the model reaches every rank, and sums over
all of them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from anyqlora.core.errors import PeerLost, UsageError
from anyqlora.on_torch.parallel.base import Strategy
from anyqlora.on_torch.parallel.broadcast import Broadcaster, broadcast_model
from anyqlora.processes.environment import COLLECTIVES, LONG, OF_TORCHRUN, collective_backends, device_index


def join_group(device: torch.device) -> bool:
    """Form the process group that the launcher's environment describes, unless this process is in one.

    Returns whether it was formed. Raises UsageError for half of an environment.
    """
    if dist.is_initialized():
        return False
    missing = [name for name in OF_TORCHRUN if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"no other processes are there to work with: {', '.join(missing)} not set",
            where="environment",
            cure="start with torchrun, or --strategy single",
        )
    dist.init_process_group(collective_backends(device.type))
    return True


class MultiProcessStrategy(Strategy):
    """Several processes, each with a device of its own."""

    def __init__(self, plan, options=None):
        super().__init__(plan, options)
        if self.device.type in ("cuda", "xpu"):
            own = device_index(int(os.environ.get("LOCAL_RANK", 0)), getattr(torch, self.device.type).device_count())
            self.device = torch.device(self.device.type, own)
        self.quantizer = None

    @classmethod
    def unavailable_reason(cls, env: dict) -> str | None:
        return None if dist.is_available() else "this torch has no torch.distributed"

    def setup(self) -> None:
        if self.device.type not in COLLECTIVES:
            raise UsageError(
                f"strategy {self.name!r}: {self.device.type} devices have no way to talk to each other",
                cure="--strategy single",
            )
        self.has_formed = join_group(self.device)
        if self.device.type in ("cuda", "xpu"):
            getattr(torch, self.device.type).set_device(self.device)
            if "LOCAL_RANK" in os.environ:  # by which DeepSpeed and Accelerate choose theirs
                os.environ["LOCAL_RANK"] = str(self.device.index)
        self.rank, self.world_size = self.data_rank, self.data_size = dist.get_rank(), dist.get_world_size()
        if self.plan.world_size not in (-1, self.world_size):
            raise UsageError(
                f"the plan is for {self.plan.world_size} processes, and {self.world_size} are here",
                cure="leave out world_size",
            )
        self.patient = dist.new_group(backend="gloo", timeout=LONG)
        self.link = Broadcaster(self.rank, self.device, self.patient)

    # --------------------------------------------------------------------------------------------------- the model

    def load_model(self, loader, pack: Callable) -> nn.Module:
        """Rank 0 reads and quantizes; the others get an outline, and what it holds part by part in `prepare`."""
        self.quantizer = loader.quantizer
        model, outline = None, None
        if self.rank == 0:
            try:
                if self.keeps_whole or self.device.type == "cpu":
                    model = loader.load(pack)
                else:
                    model = loader.load(functools.partial(self._pack_on_device, pack), torch.device("cpu"))
                outline = loader.outline(model)
            except BaseException as error:
                self.link.broadcast({"failed": type(error).__name__})
                raise
        outline = self.link.broadcast(outline)
        if "failed" in outline:
            raise PeerLost(f"rank {self.rank} ends: rank 0 could not read the model ({outline['failed']})")
        return loader.outlined(outline) if model is None else model

    def _pack_on_device(self, pack: Callable, name: str, module: nn.Module, weight: torch.Tensor) -> nn.Parameter:
        """A weight is quantized where that is fast and waits in host memory until its layer is sharded."""
        return pack(name, module, weight.to(self.device)).to("cpu")

    def share(
        self, module: nn.Module, done: Callable[[nn.Module], bool] = lambda part: False, keeps: bool = True
    ) -> None:
        """`module` with what rank 0 holds of it, on the device; unless this process only passes it on."""
        broadcast_model(module, self.quantizer, self.link, done, keeps)

    def owners(self, trainable: dict[str, nn.Parameter], model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
        """{name: (module, attribute)} of what is trained, so that it is found again when parameters are replaced."""
        places = {
            id(p): (module, key)
            for module in model.modules()
            for key, p in module.named_parameters(recurse=False, remove_duplicate=False)
        }
        return {name: places[id(p)] for name, p in trainable.items()}

    def refresh(self, trainable: dict[str, nn.Parameter], owners: dict) -> None:
        """The parameters as they are now under the same names."""
        trainable.update({name: getattr(module, key) for name, (module, key) in owners.items()})

    def broadcast(self, value):
        return self.link.broadcast(value)

    # ---------------------------------------------------------------------------------------------------- the sums

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        """Summed over all ranks."""
        dist.all_reduce(value)
        return value

    def sum_flat(self, parameters: Iterable[nn.Parameter]) -> None:
        """Every gradient becomes the sum over all ranks, in one collective.

        One that no rank has stays away, as in one process.
        """
        parameters = list(parameters)
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32, device=self.device)
        parts = [has, *(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)]
        flat = self.all_reduce_sum(torch.cat([part.detach().reshape(-1).float() for part in parts]))
        counts, *sums = flat.split([part.numel() for part in parts])
        for p, count, total in zip(parameters, counts.tolist(), sums, strict=True):
            if count:
                total = total.view_as(p).to(p.dtype)
                p.grad = total.clone() if p.grad is None else p.grad.copy_(total)

    def gather_trainable(self) -> dict[str, torch.Tensor]:
        return super().gather_trainable() if self.rank == 0 else {}

    def gather_moments(self) -> dict[str, torch.Tensor]:
        return super().gather_moments() if self.rank == 0 else {}

    def teardown(self) -> None:
        if self.has_formed:
            dist.destroy_process_group()


class ShardedStrategy(MultiProcessStrategy):
    """What is trained lies in parts, DTensors, on several ranks; what no mesh splits lies on each of them."""

    def missing_gradients(self) -> dict[str, bool]:
        parameters = list(self.trainable.values())
        missing = torch.tensor(
            [[p.grad is not None, p.grad is not None and bool(local(p.grad).any())] for p in parameters],
            dtype=torch.float32,
        )
        missing = self.all_reduce_sum(missing.to(self.device)).tolist()
        return {name: has > 0 for name, (has, moves) in zip(self.trainable, missing, strict=True) if not moves}

    def gather_trainable(self) -> dict[str, torch.Tensor]:
        return self._on_the_first({name: p.detach() for name, p in self.trainable.items()})

    def gather_moments(self) -> dict[str, torch.Tensor]:
        return self._on_the_first(
            {
                f"{name}|{key}": value
                for name, p in self.trainable.items()
                for key, value in sorted(self.optimizer.state.get(p, {}).items())
                if torch.is_tensor(value)
            }
        )

    def _on_the_first(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        gathered = {}
        for name, value in tensors.items():
            full = self.full_tensor(value) if isinstance(value, DTensor) else value
            if self.rank == 0:
                gathered[name] = full.cpu()
        return gathered

    def full_tensor(self, tensor: DTensor) -> torch.Tensor:
        """All of a tensor, on every rank; parts in host memory go through the device to be put together."""
        return tensor.to(self.device).full_tensor()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
