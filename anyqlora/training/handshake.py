"""How the processes of a run meet, and what they make sure of before the first step: that they were asked for the
same.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

from anyqlora.config.schema import SETTINGS, TrainConfig, settings_with
from anyqlora.core import registry
from anyqlora.core.errors import UsageError
from anyqlora.data.dataset import DataSplits
from anyqlora.processes.environment import ProcessContext, free_port
from anyqlora.processes.group import SingleProcess
from anyqlora.runs.directory import RunDirectory


@contextlib.contextmanager
def join_processes(plan, world: ProcessContext) -> Iterator[SingleProcess]:
    """The processes of the run; one alone has nobody to meet, unless its strategy works on a group of one."""
    if world.size == 1 and plan.strategy == "single":
        yield SingleProcess()
        return
    if world.size == 1:
        world = ProcessContext(launcher="itself", address="localhost", port=free_port())
    ranks = registry.load(registry.PROCESS_GROUPS[plan.framework])(plan, world)
    with contextlib.closing(ranks), ranks.peer_errors():
        yield ranks


def agree_on_plan(ranks: SingleProcess, run_dir: RunDirectory, plan, config: TrainConfig):
    """The plan of all: what machines decide otherwise, such as free memory, is as on the first.

    `config` is what was asked for.

    Raises UsageError when a process was asked for something else.
    """
    run_dir.check(plan.config, plan.global_batch)
    if ranks.size == 1:
        return plan
    own = settings_with("each_process")  # only the first process acts on these
    first, *others = ranks.all_gather_object({name: getattr(config, name) for name in SETTINGS if name not in own})
    for rank, other in enumerate(others, 1):
        for name in sorted(first):
            if first[name] != other[name]:
                _refuse(
                    ranks,
                    f"rank {rank} has {name} {other[name]!r}, rank 0 {first[name]!r}",
                    "the same command on every process",
                )
    run_dir.broadcast(ranks)
    return replace(plan, config=plan.config.with_(**ranks.broadcast(plan.config.settings())))


def check_same_data(ranks: SingleProcess, rows: DataSplits) -> None:
    """Raises UsageError when a process has read other rows."""
    first, *others = ranks.all_gather_object(rows.identity)
    for rank, identity in enumerate(others, 1):
        if identity != first:
            _refuse(ranks, f"rank {rank} has read other rows than rank 0", "the same files on every machine")


def _refuse(ranks: SingleProcess, why: str, cure: str) -> None:
    """All processes end; the first one says why."""
    if ranks.is_first:
        raise UsageError(why, where="between processes", cure=cure)
    sys.exit(UsageError.exit_code)
