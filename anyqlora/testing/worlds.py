"""Worlds of real processes, forked from a server that has imported the frameworks."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any, cast

from anyqlora.processes.environment import environment_variables, free_port

PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "peft",
    "bitsandbytes",
    "accelerate",
    "deepspeed",
    "anyqlora.on_torch.assembly.build",
    "anyqlora.planning.backends",
]
GRACE = 2.0  # seconds that the other ranks have to end once one has failed


class WorldFailed(AssertionError):
    """A rank raised; the message is its traceback."""


def server() -> ForkServerContext:
    """The server from which processes are forked, with PRELOADED imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in PRELOADED if importlib.util.find_spec(name.partition(".")[0])])
    # cpython 3.11 does not hand on sys.path; and a server that has had two threads at work forks children whose first
    # parallel loop waits for ever for one of them (libgomp)
    with environment_variables(PYTHONPATH=os.pathsep.join(sys.path), DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


def world(size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
    """`function(*arguments)` in `size` processes that talk over gloo and are set up as torchrun does it.

    Returns what each rank returned.

    They are forked from a server that has imported the frameworks, so a world takes 0.1 to 0.6 s. The function stands
    in a module, and what goes in and out can be pickled. Raises WorldFailed with the first rank's traceback.
    """
    context = server()
    environ = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_NUM_THREADS": 1,
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": 1,
        "TOKENIZERS_PARALLELISM": "false",
    }
    processes, pipes = [], []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        own = {key: str(value) for key, value in {**environ, "RANK": rank, "LOCAL_RANK": rank}.items()}
        process = context.Process(target=_rank, args=(there, own, list(sys.path), function, arguments), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    try:
        return _collected(pipes, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()


def _collected(pipes: list[Connection], until: float) -> list[Any]:
    results, failures, waiting = {}, {}, list(pipes)
    while waiting and time.monotonic() < until:
        for pipe in cast("list[Connection]", wait(waiting, timeout=0.2)):
            waiting.remove(pipe)
            rank = pipes.index(pipe)
            try:
                is_good, value = pipe.recv()
            except EOFError:
                is_good, value = False, "ended without a word"
            (results if is_good else failures)[rank] = value
            if failures:
                until = min(until, time.monotonic() + GRACE)
    if failures:
        rank = next((r for r in failures if "Connection closed by peer" not in failures[r]), next(iter(failures)))
        raise WorldFailed(f"rank {rank} of {len(pipes)}:\n{failures[rank]}")
    if waiting:
        raise WorldFailed(f"ranks {sorted(pipes.index(pipe) for pipe in waiting)} did not answer in time")
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    pipe: Connection,
    environ: Mapping[str, str],
    path: list[str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(environ)
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)
    try:
        answer = True, function(*arguments)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send(answer)
    if answer[0] and torch.distributed.is_initialized():
        with contextlib.suppress(RuntimeError):  # another one has failed
            torch.distributed.barrier()  # the first process keeps what the others still meet by
        torch.distributed.destroy_process_group()
