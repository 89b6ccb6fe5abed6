"""The processes that share a computation, one device each: who they are, what they have, how they meet."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from anyqlora.core.errors import UsageError
from anyqlora.processes.environment import collective_backends, device_index

# Keras's names of device types -> torch's
KINDS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "xpu": "xpu", "mps": "mps"}
FROM_KERAS = {
    "job_addresses": "KERAS_DISTRIBUTION_JOB_ADDRESSES",
    "num_processes": "KERAS_DISTRIBUTION_NUM_PROCESSES",
    "process_id": "KERAS_DISTRIBUTION_PROCESS_ID",
}
FROM_LAUNCHER = {"num_processes": "WORLD_SIZE", "process_id": "RANK"}  # beside MASTER_ADDR and MASTER_PORT


class DistributionError(UsageError, ValueError):
    """A distribution that was asked for and cannot be in effect."""


def _kind(device_type: str | None) -> str:
    """torch's name for a device type of this machine; None: the best one that has collectives."""
    here = [kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()] + ["cpu"]
    if device_type is None:
        return here[0]
    kind = _torch_name(device_type)
    if kind not in here:
        raise DistributionError(
            f"torch has no collectives for {device_type}" if kind == "mps" else f"this machine has no {device_type}",
            cure=f"one of: {', '.join(here)}",
        )
    return kind


def _torch_name(device_type: str) -> str:
    kind = KINDS.get(device_type.lower())
    if kind is None:
        raise DistributionError(f"unknown device type {device_type!r}", cure=f"one of: {', '.join(KINDS)}")
    return kind


def list_devices(device_type: str | None = None) -> list[str]:
    """The devices of all processes, as "gpu:1" or "cpu:0"; of one type, the best that there is unless `device_type`
    names it.

    Each process has one, so in a world of N the number is the process's. Before `initialize` they are those of this
    machine. None of a type that this machine does not have: [].
    """
    kind = _kind(None) if device_type is None else _torch_name(device_type)
    if not (kind == "cpu" or getattr(torch, kind).is_available()):
        return []
    if dist.is_initialized():
        count = dist.get_world_size()
    else:
        count = 1 if kind == "cpu" else getattr(torch, kind).device_count()
    return [f"{'gpu' if kind == 'cuda' else kind}:{number}" for number in range(count)]


def get_device_count(device_type: str | None = None) -> int:
    return len(list_devices(device_type))


def num_processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def process_id() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    device_type: str | None = None,
    timeout: float = 600.0,
) -> None:
    """Meet the other processes; no launcher is needed.

    `job_addresses` is "host:port" of process 0, or of all, comma-separated, of which the first counts. What is not
    given is taken from KERAS_DISTRIBUTION_JOB_ADDRESSES, ..._NUM_PROCESSES and ..._PROCESS_ID, then from torchrun's
    environment. `timeout` is in seconds. Raises DistributionError for half of what is needed: nobody goes on alone who
    was told of others.
    """
    given = {"job_addresses": job_addresses, "num_processes": num_processes, "process_id": process_id}
    stated = {name: os.environ.get(FROM_KERAS[name]) if value is None else value for name, value in given.items()}
    stated = {
        name: os.environ.get(FROM_LAUNCHER.get(name, "")) if value is None else value for name, value in stated.items()
    }
    if stated["job_addresses"] is None and os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        stated["job_addresses"] = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    missing = [name for name, value in stated.items() if value is None]
    if missing:
        raise DistributionError(
            f"initialize does not know {' and '.join(missing)}",
            cure='initialize("host:port", num_processes=2, process_id=0), the same host and port in each process',
        )
    size, rank = (_whole(name, stated[name]) for name in ("num_processes", "process_id"))
    addresses = [address.strip() for address in str(stated["job_addresses"]).split(",")]
    host, _, port = addresses[0].rpartition(":")
    if not host or not port.isdecimal():
        raise DistributionError(
            f"job_addresses: {addresses[0]!r} is not host:port", cure="the address of process 0, with a free port"
        )
    if len(addresses) > 1 and len(addresses) != size:
        raise DistributionError(
            f"job_addresses has {len(addresses)} addresses, and num_processes is {size}",
            cure="one for each process, or the first alone",
        )
    if not 0 <= rank < size:
        raise DistributionError(f"process_id {rank} is not one of {size} processes", cure=f"0 to {size - 1}")
    kind = _kind(device_type)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise DistributionError(
                f"this is process {dist.get_rank()} of {dist.get_world_size()} already, not {rank} of {size}",
                cure="initialize once",
            )
        return
    if kind != "cpu":
        module = getattr(torch, kind)
        visible = module.device_count()
        module.set_device(device_index(int(os.environ.get("LOCAL_RANK") or rank % visible), visible))
    dist.init_process_group(
        collective_backends(kind),
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not str(value).lstrip("-").isdecimal():
        raise DistributionError(f"{name}: {value!r} is not a whole number", cure=f"{name}=2")
    return int(str(value))
