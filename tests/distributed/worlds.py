"""Worlds of real processes that talk over gloo: forked from a server that has imported the frameworks, so one takes 0.1 to 0.6 s."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import random
import socket
import sys
import time
import traceback
from multiprocessing.connection import wait

PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers.models.llama.modeling_llama", "peft", "bitsandbytes", "accelerate", "deepspeed",
             "keras", "steps_on_ranks"]
GRACE = 2.0  # seconds that the other ranks have to end once one has failed

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("KERAS_BACKEND", "torch")


class WorldFailed(AssertionError):
    """A rank raised; the message is its traceback."""


def world(size: int, function, *arguments, timeout: float = 120) -> list:
    """`function(*arguments)` in `size` processes that are set up as torchrun does it. Returns what each rank returned.

    The function stands in a module, and what goes in and out can be pickled. Raises WorldFailed with the first rank's traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in PRELOADED if importlib.util.find_spec(name.partition(".")[0])])
    environ = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1,
               "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": 1, "TOKENIZERS_PARALLELISM": "false"}
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
            process.join(GRACE if process.exitcode is None else None)
            if process.is_alive():
                process.kill()
                process.join()


def _collected(pipes: list, until: float) -> list:
    found, failures, open_pipes = {}, {}, list(pipes)
    while open_pipes and time.monotonic() < until:
        for pipe in wait(open_pipes, timeout=0.2):
            open_pipes.remove(pipe)
            rank = pipes.index(pipe)
            try:
                is_good, value = pipe.recv()
            except EOFError:
                is_good, value = False, "ended without a word"
            (found if is_good else failures)[rank] = value
            if failures:
                until = min(until, time.monotonic() + GRACE)
    if failures:
        rank = next((r for r in failures if "Connection closed by peer" not in failures[r]), next(iter(failures)))
        raise WorldFailed(f"rank {rank} of {len(pipes)}:\n{failures[rank]}")
    if open_pipes:
        raise WorldFailed(f"ranks {sorted(pipes.index(pipe) for pipe in open_pipes)} did not answer in time")
    return [found[rank] for rank in range(len(pipes))]


def _rank(pipe, environ, path, function, arguments) -> None:
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
        torch.distributed.destroy_process_group()


def free_port() -> int:
    """A port that nobody listens on, below those that the system hands to whoever connects: one of these may be gone again when it is used."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
