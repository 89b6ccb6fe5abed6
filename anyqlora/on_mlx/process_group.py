"""The processes of a run on MLX: a ring of sockets, in which they tell each other small things and sum their
gradients.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np

from anyqlora.core.errors import PeerLost
from anyqlora.processes.environment import ProcessContext
from anyqlora.processes.group import ProcessGroup

LOCAL = {"localhost": "127.0.0.1", "": "127.0.0.1"}


class MlxProcessGroup(ProcessGroup):
    """Data parallel over mx.distributed: every process has the whole model and a part of each step's rows."""

    name = "mlx"
    plugin_cls = None

    def __init__(self, plan, world: ProcessContext):
        """Meet the others: at the addresses that mlx.launch has written, or on this machine at `world.port` and those
        after it.
        """
        self.rank, self.size, self.is_first = world.rank, world.size, world.is_first
        with tempfile.TemporaryDirectory() as folder, self.peer_errors():
            if "MLX_HOSTFILE" not in os.environ:
                path = Path(folder, "hosts.json")
                path.write_text(
                    json.dumps(
                        [
                            [f"{LOCAL.get(world.address, world.address)}:{int(world.port) + rank}"]
                            for rank in range(world.size)
                        ]
                    )
                )
                os.environ.update(MLX_RANK=str(world.rank), MLX_HOSTFILE=str(path))
                try:
                    self.group = mx.distributed.init(strict=world.size > 1, backend="ring")
                finally:
                    del os.environ["MLX_HOSTFILE"]
            else:
                self.group = mx.distributed.init(strict=True, backend="ring")
        assert self.group.size() == world.size and self.group.rank() == world.rank, "MLX has formed another group"

    @classmethod
    def unavailable_reason(cls, env: dict) -> str | None:
        """Why this strategy cannot run here, or None."""
        return None if mx.distributed.is_available() else "this mlx is built without a ring"

    def broadcast(self, value):
        return self.all_gather_object(value if self.is_first else None)[0]

    def broadcast_bytes(self, content):
        return np.array(
            mx.distributed.all_sum(mx.array(content if self.is_first else np.zeros_like(content)), group=self.group)
        )

    def all_gather_object(self, value):
        mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = mx.distributed.all_gather(mx.array([len(mine)]), group=self.group).tolist()
        padded = np.zeros(max(sizes), np.uint8)
        padded[: len(mine)] = mine
        parts = np.array(mx.distributed.all_gather(mx.array(padded)[None], group=self.group))  # [processes, longest]
        return [json.loads(bytes(part[:size])) for part, size in zip(parts, sizes, strict=True)]

    def all_reduce_sum(self, *values):
        return [
            sum(column) for column in zip(*self.all_gather_object(list(values)), strict=True)
        ]  # MLX's devices have no float64

    def barrier(self):
        self.all_gather_object(None)

    def all_reduce_gradients(self, gradients: dict[str, mx.array]) -> dict[str, mx.array]:
        """Each float32 gradient, summed over the processes: one message for all of them."""
        names, values = list(gradients), list(gradients.values())
        flat = mx.distributed.all_sum(mx.concatenate([value.reshape(-1) for value in values]), group=self.group)
        parts = mx.split(flat, np.cumsum([value.size for value in values])[:-1].tolist())
        return {name: part.reshape(value.shape) for name, part, value in zip(names, parts, values, strict=True)}

    @contextlib.contextmanager
    def peer_errors(self):
        """A context in which an error of the ring becomes a PeerLost."""
        try:
            yield
        except RuntimeError as error:
            if not any(word in str(error) for word in ("[ring]", "[distributed]", "socket", "Socket")):
                raise
            raise PeerLost(
                f"rank {self.rank} lost another process of the run: {str(error).strip().splitlines()[0]}",
                cure="the same command continues from the last checkpoint",
            ) from None

    def close(self) -> None:
        """MLX leaves the ring when the process ends."""
