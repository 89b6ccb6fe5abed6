"""The processes of a run on torch: they meet, tell each other small things, and notice when one is gone."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import secrets
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import PeerLost, UsageError
from anyqlora.processes.environment import LONG, ProcessContext, collective_backends, environment_variables
from anyqlora.processes.group import ProcessGroup

MEETING = timedelta(hours=2)  # that processes wait for one another to start: the first may be downloading a model
POLLED = 0.1  # seconds between two looks at the store: one long wait in it would keep signals out


class TorchProcessGroup(ProcessGroup):
    """torch.distributed's default group; what is told here goes through host memory."""

    def __init__(self, plan, world: ProcessContext):
        """Meet the others.

        `plan.config.dist_timeout` seconds is how long anybody waits for them afterwards. Raises PeerLost.
        """
        self.rank, self.size, self.is_first = world.rank, world.size, world.is_first
        self.environment = contextlib.ExitStack()
        self.environment.enter_context(
            environment_variables(  # DeepSpeed reads it
                RANK=str(world.rank),
                WORLD_SIZE=str(world.size),
                LOCAL_RANK=str(world.local_rank),
                MASTER_ADDR=world.address,
                MASTER_PORT=world.port,
            )
        )
        self.has_formed = not dist.is_initialized()
        with self.peer_errors():
            if self.has_formed:  # else Ray has, or whoever calls train()
                self._form(plan, world)
            self.patient = dist.new_group(backend="gloo", timeout=LONG)

    def _form(self, plan, world: ProcessContext) -> None:
        store = dist.PrefixStore("anyqlora", rendezvous_address(plan.config, world))
        store = dist.PrefixStore(rendezvous(store, world), store)  # from here on the short timeout holds: all are there
        dist.init_process_group(
            collective_backends(torch.device(plan.device).type),
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=plan.config.dist_timeout),
        )

    def broadcast(self, value):
        return json.loads(self._bytes(json.dumps(value).encode() if self.is_first else b""))

    def broadcast_bytes(self, content):
        dist.broadcast(torch.from_numpy(content), src=0)
        return content

    def all_gather_object(self, value):
        mine = json.dumps(value).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]))
        longest = max(int(size) for size in sizes)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, torch.tensor(list(mine.ljust(longest)), dtype=torch.uint8))
        return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]

    def all_reduce_sum(self, *values):
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed)
        return summed.tolist()

    def barrier(self):
        dist.barrier(group=self.patient)

    def _bytes(self, mine: bytes) -> bytes:
        """The first process's bytes, on all."""
        size = torch.tensor([len(mine)])
        dist.broadcast(size, src=0)
        content = (
            torch.tensor(list(mine), dtype=torch.uint8) if self.is_first else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(content, src=0)
        return bytes(content.tolist())

    def peer_errors(self):
        """A context in which an error of the group becomes a PeerLost, after the stacks are written."""
        return _PeerErrors(self)

    def close(self) -> None:
        """Leave the group that was formed here, and the environment as it was: the next run of this process may be of
        another size.

        A group that has lost a member cannot be left in order, and ends with the process.
        """
        if self.has_formed and dist.is_initialized() and (self.size == 1 or sys.exc_info()[0] is None):
            dist.destroy_process_group()
        self.environment.close()


def rendezvous_address(config: TrainConfig, world: ProcessContext) -> dist.Store:
    """The store at the first process's address. Raises UsageError when something else listens there."""
    try:
        return next(dist.rendezvous("env://", timeout=MEETING))[0]
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UsageError(
            f"port {world.port} of {world.address} is in use",
            where=config.sources.get("master_port", "").replace("default", ""),
            cure="another --master_port, or leave it out: a free one is taken",
        ) from None


def rendezvous(store: dist.Store, world: ProcessContext) -> str:
    """Wait until all processes are there. Returns a name for their meeting.

    torchrun keeps one store when it starts processes again, with all that those before them wrote. So each greets with
    a token of its own, which only a first process that is alive can answer.
    """
    token, until = secrets.token_hex(8), time.monotonic() + MEETING.total_seconds()

    def wait_for(key: str) -> None:
        while not store.check([key]):
            if time.monotonic() > until:
                raise PeerLost(
                    f"rank {world.rank} has waited two hours for the other processes", cure="look at what they say"
                )
            time.sleep(POLLED)

    if not world.is_first:
        store.set(f"hello/{world.rank}", token)
        wait_for(f"answer/{token}")
        name = store.get(f"answer/{token}").decode()
        store.set(f"{name}/{world.rank}", "here")
        return name
    for rank in range(1, world.size):
        wait_for(f"hello/{rank}")
        while not store.check([f"{token}/{rank}"]):
            store.set(f"answer/{store.get(f'hello/{rank}').decode()}", token)
            time.sleep(POLLED)
    return token


class _PeerErrors:
    """What gloo and NCCL raise has no type of its own on every version, so its words decide."""

    WORDS = (
        "gloo",
        "NCCL",
        "Connection closed by peer",
        "Timed out",
        "timed out",
        "timeout",
        "Connection reset",
        "Broken pipe",
        "Socket",
        "TCPStore",
        "wait timeout",
    )

    def __init__(self, ranks: TorchProcessGroup):
        self.process_group = ranks

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        is_lost = isinstance(error, (dist.DistError, RuntimeError)) and any(word in str(error) for word in self.WORDS)
        if not is_lost:
            return
        if self.process_group.stacks is not None:
            faulthandler.dump_traceback(self.process_group.stacks, all_threads=True)
        raise PeerLost(
            f"rank {self.process_group.rank} lost another process of the run: {str(error).strip().splitlines()[0]}",
            cure="the same command continues from the last checkpoint",
        ) from None
