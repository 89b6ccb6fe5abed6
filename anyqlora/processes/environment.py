"""Which process of a run this one is, as its launcher says, and what the processes say to each other."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import UsageError

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
COLLECTIVES = {
    "cpu": "gloo",
    "cuda": "nccl",
    "xpu": "xccl",
}  # kind of torch device -> torch's name for what its processes talk by
LONG = timedelta(
    days=2
)  # that processes wait for one which reads a large model or writes a checkpoint; one that is killed is noticed at once
PORTS = 20000  # SLURM's jobs meet at port 20000 + job % 20000, so that two of them on one node do not


@dataclass(frozen=True)
class ProcessContext:
    """One of `size` processes.

    `launcher` names who started them ("" when nobody did), `address` and `port` are where they meet.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launcher: str = ""
    address: str = ""
    port: str = ""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @classmethod
    def here(cls, config: TrainConfig, environ: Mapping[str, str] = os.environ) -> ProcessContext:
        """This process, from the environment that torchrun, `srun`, mlx.launch or train.py itself made.

        Raises UsageError for half of one.
        """
        if any(environ.get(name) for name in OF_TORCHRUN[:3]):
            world = cls._of_torchrun(environ)
        elif environ.get("MLX_RANK"):
            world = cls._of_mlx_launch(environ)
        elif environ.get("SLURM_JOB_ID"):
            world = cls._of_slurm(config, environ)
        else:
            return cls()
        if config.asked("world_size") and config.world_size not in (-1, world.size) and world.launcher:
            raise UsageError(
                f"world_size {config.world_size} contradicts {world.launcher}, which started {world.size} processes",
                where=config.sources.get("world_size", ""),
                cure="leave out world_size: the launcher says it",
            )
        return world

    @classmethod
    def _of_torchrun(cls, environ: Mapping[str, str]) -> ProcessContext:
        missing = [name for name in OF_TORCHRUN if not environ.get(name)]
        if missing:
            there = ", ".join(name for name in OF_TORCHRUN if environ.get(name))
            raise UsageError(
                f"half of a launcher's environment: {there} is set and {', '.join(missing)} is not",
                where="environment",
                cure=f"unset {there} for one process, or start with torchrun, which sets all of them",
            )
        rank, size, local = (_number(environ, name) for name in OF_TORCHRUN[:3])
        if not 0 <= rank < size:
            raise UsageError(
                f"RANK {rank} is not one of WORLD_SIZE {size}",
                where="environment",
                cure="start with torchrun, which sets both",
            )
        return cls(rank, size, local, "the launcher", environ["MASTER_ADDR"], environ["MASTER_PORT"])

    @classmethod
    def _of_mlx_launch(cls, environ: Mapping[str, str]) -> ProcessContext:
        """mlx.launch gives each process its rank, and a file with the addresses of all."""
        path = environ.get("MLX_HOSTFILE", "")
        try:
            hosts = _mlx_hosts(path)
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise UsageError(
                f"MLX_RANK is set, and MLX_HOSTFILE {path!r} cannot be read: {error}",
                where="environment",
                cure="mlx.launch --backend ring, which sets both; or --world_size N without it",
            ) from None
        rank, size = _number(environ, "MLX_RANK"), len(hosts)
        if rank >= size:
            raise UsageError(
                f"MLX_RANK {rank} is not one of the {size} of {path}",
                where="environment",
                cure="start with mlx.launch, which sets both",
            )
        return cls(rank, size, hosts[:rank].count(hosts[rank]), "mlx.launch")

    @classmethod
    def _of_slurm(cls, config: TrainConfig, environ: Mapping[str, str]) -> ProcessContext:
        """`srun` starts a process for each task; the batch script itself is none of them, though it sees the same
        variables.
        """
        is_task = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
        size = _number(environ, "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS", 1)
        if size == 1:
            return cls()
        if not is_task:
            if config.asked("world_size"):
                return cls()
            raise UsageError(
                f"this SLURM job has {size} tasks, and its batch script alone would train in one process",
                where="environment",
                cure="srun python train.py ..., or --world_size N for N processes on this node alone",
            )
        rank, local = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        address = environ.get("MASTER_ADDR") or first_host(nodes)
        own = (
            config.master_port if config.asked("master_port") else str(PORTS + _number(environ, "SLURM_JOB_ID") % PORTS)
        )
        return cls(rank, size, local, "srun", address, environ.get("MASTER_PORT") or own)

    def apply_to(self, config: TrainConfig) -> TrainConfig:
        """`config` with the number of processes that the launcher started."""
        if not self.launcher or config.world_size == self.size:
            return config
        return config.with_(world_size=self.size, sources={**config.sources, "world_size": self.launcher})


def first_host(nodes: str) -> str:
    """The first host of SLURM's list: node[03-05,9],gpu1 -> node03."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", nodes)
    if not match:
        raise UsageError(
            f"SLURM's node list {nodes!r} names no host", where="environment", cure="set MASTER_ADDR to the first node"
        )
    return match[1] + (match[2] or "")


def _mlx_hosts(path: str) -> list[str]:
    """The host of each process, from the file that mlx.launch gives them. Raises what a file that is none raises."""
    return [addresses[0].rpartition(":")[0] for addresses in json.loads(Path(path).read_text(encoding="utf-8"))]


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise UsageError(
            f"{name} is {text!r}, not a number", where="environment", cure="start with torchrun or srun, which set it"
        )
    return int(text)


def device_index(local_rank: int, visible: int) -> int:
    """Which of the devices that a process sees is its own: the only one, where its launcher shows it no other (srun
    --gpus-per-task=1).
    """
    return 0 if visible == 1 else local_rank


def local_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """The process's number on its machine, as torchrun or srun says it; None where nobody has started several."""
    is_task = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    stated = environ.get("LOCAL_RANK") or (environ.get("SLURM_LOCALID") if is_task and _has_others(environ) else None)
    return int(stated) if stated and stated.isdigit() else None


def local_size(environ: Mapping[str, str] = os.environ) -> int:
    """How many of a run's processes torchrun, mlx.launch or srun has started on this machine; 0 where it does not
    say.
    """
    try:
        if environ.get("LOCAL_WORLD_SIZE"):
            return int(environ["LOCAL_WORLD_SIZE"])
        if environ.get("MLX_RANK"):
            hosts = _mlx_hosts(environ.get("MLX_HOSTFILE", ""))
            return hosts.count(hosts[int(environ["MLX_RANK"])])
        if environ.get("SLURM_STEP_TASKS_PER_NODE") and _has_others(
            environ
        ):  # 2(x3),1: two on each of three nodes, one on the next
            parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ["SLURM_STEP_TASKS_PER_NODE"])
            return [int(count) for count, nodes in parts for _ in range(int(nodes or 1))][
                int(environ.get("SLURM_NODEID", "0"))
            ]
    except (OSError, ValueError, TypeError, LookupError, AttributeError):  # what cannot be read says nothing
        return 0
    return 0


def cores_per_process(own: int, environ: Mapping[str, str] = os.environ) -> int:
    """The cores that a run's processes on this machine have together, where this one may use `own`: those, unless srun
    has bound each task to its own.
    """
    node = environ.get("SLURM_CPUS_ON_NODE", "")  # of the step, on this machine
    tasks = 0 if environ.get("LOCAL_WORLD_SIZE") or not node.isdecimal() else local_size(environ)
    return own * tasks if 0 < own * tasks <= int(node) else own


def _has_others(environ: Mapping[str, str]) -> bool:
    """Whether the SLURM step, or else the job, has several tasks."""
    return (environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")) != "1"


def collective_backends(kind: str) -> str:
    """What torch's init_process_group takes for devices of this kind: the device's own, and gloo for host memory.

    Not "cpu:gloo" on a CPU: torch 2.13 then knows no default backend where the compiler has been imported, and says so
    when the group is left.
    """
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{COLLECTIVES[kind]}"


@contextlib.contextmanager
def environment_variables(**values: str) -> Iterator[None]:
    """These variables in this process's environment, which is as it was afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def physical_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port() -> str:
    """A port that nobody listens on, below those that the system hands to whoever connects: one of these may be gone
    when it is used.
    """
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return str(port)
