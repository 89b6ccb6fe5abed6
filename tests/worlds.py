"""Small worlds: a function run by 2 or 4 gloo processes that a fork server, which has imported torch already, starts in tenths of a second."""

import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

os.environ.setdefault("KERAS_BACKEND", "torch")
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["conftest", "torch", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers", "peft", "bitsandbytes",
                                "peft.tuners.lora", "steps_on_ranks", "keras"])
LIMIT = 120  # seconds


class Failed(AssertionError):
    """What a process of the world raised."""


def run(size, function, *args, alone=False):
    """[function(rank, *args) of each rank]; `function` is a module's own. `alone`: without a process group."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
        processes = [CONTEXT.Process(target=_member, args=(rank, size, folder, ends[rank][1], alone, function, args)) for rank in range(size)]
        for process in processes:
            process.start()
        results = []
        try:
            for rank, (end, _) in enumerate(ends):
                if not end.poll(LIMIT):
                    raise Failed(f"rank {rank} of {size} did not answer in {LIMIT} s")
                results.append(end.recv())
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
    failures = [f"rank {rank}:\n{text}" for rank, (is_fine, text) in enumerate(results) if not is_fine]
    if failures:
        raise Failed("\n".join(failures))
    return [value for _, value in results]


def _member(rank, size, folder, end, alone, function, args):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(OMP_NUM_THREADS="1")
    try:
        if not alone:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60))
        end.send((True, function(rank, *args)))
        if not alone:
            dist.barrier()
    except BaseException:
        end.send((False, traceback.format_exc()))
    finally:
        end.close()
        os._exit(0)  # a world that lost a member cannot be left in order
