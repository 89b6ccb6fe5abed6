"""What a run takes, when somebody asks: torch.profiler around some of its steps, and bytes after each of its phases."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
from torch.profiler import ProfilerAction

from anyqlora.config.schema import TrainConfig
from anyqlora.on_torch.device import MemoryMonitor
from anyqlora.on_torch.profiling.hooks import HookList, NullHooks
from anyqlora.on_torch.profiling.timeline import Timeline

ROWS = 40  # operators in a profile's table
CATEGORIES = 9  # of a memory timeline, torch's


def make_hooks(run, memory: MemoryMonitor) -> NullHooks:
    """What watches `run`: nothing, unless its settings ask for it."""
    watches = [] if not run.config.profile_memory else [MemoryWatch(run, memory)]
    if run.config.profile:
        watches += profiler(run)
    if run.config.timeline:
        watches.append(Timeline(run))
    return HookList(watches) if watches else NullHooks()


class MemoryWatch(NullHooks):
    """memory.json: a list of {step, phase, bytes}, where bytes are those in use when the phase ends, once for each
    micro-batch. In host memory pages are in use that are kept for the next step.

    `step` counts from 1 as in metrics.jsonl; what is loaded or evaluated before the first step has 0.
    """

    def __init__(self, run, memory: MemoryMonitor):
        self.run, self.memory, self.path = run, memory, run.directory / "memory.json"
        before = json.loads(self.path.read_text()) if self.path.exists() else []
        self.entries = [entry for entry in before if entry["step"] <= run.first_step]  # later ones are done again

    @contextlib.contextmanager
    def phase(self, name: str, is_final: bool = True):
        yield
        step = self.run.last_step + (name in ("forward", "backward", "step"))
        self.entries.append({"step": step, "phase": name, "bytes": self.memory.used()})

    def close(self) -> None:
        self.path.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in self.entries) + "\n]\n")


def profiler(run) -> list[NullHooks]:
    """The profiler of a run; none where profiles already are and are not to be overwritten."""
    output = run.directory / run.config.profiling_output
    if output.exists() and not run.config.overwrite_profiling_output:
        run.console.info(f"{output} has profiles already and is left as it is")
        return []
    if output.exists():
        shutil.rmtree(output)
    return [Profiler(run, output)]


class Profiler(NullHooks):
    """torch.profiler over cycles of steps.

    Each cycle writes step-<its last step>/: a table of operators, a trace, a memory timeline.
    """

    def __init__(self, run, output: Path):
        self.config, self.output, self.first_step, self.warn = run.config, output, run.first_step, run.console.warn
        config, steps = run.config, run.total_steps - run.first_step
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports each start and stop on standard error
        timeline = config.export_memory_timeline  # which torch makes of shapes, stacks and allocations
        self.profile = torch.profiler.profile(
            schedule=lambda step: action(config, step, steps),
            on_trace_ready=self.write,
            profile_memory=timeline,
            record_shapes=config.with_shapes or timeline,
            with_stack=config.with_stack or timeline,
        )
        self.is_started = False

    def phase(self, name: str, is_final: bool = True):
        if (
            not self.is_started and name == "forward"
        ):  # of the first step: loading and the first evaluation are not profiled
            self.profile.start()
            self.is_started = True
        return torch.profiler.record_function(f"anyqlora::{name}")

    def step_done(self) -> None:
        self.profile.step()

    def close(self) -> None:
        if self.is_started:
            self.profile.stop()

    def write(self, profile) -> None:
        place = self.output / f"step-{self.first_step + profile.step_num:06d}"
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # that each cycle is a profile of its own, and that torch will have another timeline one day
            try:
                self._write(profile, place)
            except (
                OSError,
                RuntimeError,
                ValueError,
            ) as error:  # torch cannot read some stacks; the run does not depend on it
                self.warn(f"{place} is not whole: {type(error).__name__}: {error}")

    def _write(self, profile, place: Path) -> None:
        place.mkdir(parents=True)
        averages = profile.key_averages(
            group_by_input_shape=self.config.with_shapes, group_by_stack_n=5 if self.config.with_stack else 0
        )
        (place / "operators.txt").write_text(averages.table(sort_by="self_cpu_time_total", row_limit=ROWS))
        if self.config.export_trace:
            profile.export_chrome_trace(str(place / "trace.json"))
        if self.config.export_memory_timeline:
            self._write_timeline(profile, place / "memory_timeline.json")

    def _write_timeline(self, profile, path: Path) -> None:
        try:
            profile.export_memory_timeline(str(path))
        except (
            AssertionError,
            KeyError,
        ) as error:  # torch cannot always follow the versions of each tensor: its issue 167838
            self.warn(
                f"{path} has every byte as of an unknown category, since torch could not tell what its tensors are: "
                f"{str(error)[:60]}"
            )
            path.write_text(json.dumps(plain_timeline(profile)))


def plain_timeline(profile) -> list[list]:
    """Bytes in use at each allocation, in the form of torch's memory timeline: [times in microseconds, [bytes of each
    category at that time]].

    All of them are in the last category, which is torch's for the unknown. What was there before the profile and stayed
    is not in it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        profile.export_chrome_trace(f"{scratch}/trace.json")
        trace = json.loads(Path(scratch, "trace.json").read_text())
    device = 1 if torch.cuda.is_available() else 0  # c10's numbers; the one whose timeline torch writes
    seen = sorted(
        (event["ts"], event["args"]["Bytes"])
        for event in trace["traceEvents"]
        if event["name"] == "[memory]" and event["args"]["Device Type"] == device
    )
    used = list(itertools.accumulate(size for _, size in seen))
    before = max(0, -min(used, default=0))  # freed in here, so there already
    start = trace["baseTimeNanoseconds"] // 1000
    return [[start + int(time) for time, _ in seen], [[0] * (CATEGORIES - 1) + [before + size] for size in used]]


def action(config: TrainConfig, step: int, steps: int) -> ProfilerAction:
    """What the profiler does in a step (from 0) of `steps`.

    A cycle begins every profiling_frequency steps: wait, warm up, record, rest.
    """
    cycle, place = divmod(step, config.profiling_frequency)
    recording = config.profile_wait + config.profiler_warmup_steps
    is_over = step >= steps or (config.profile_repeat and cycle >= config.profile_repeat)
    if is_over or not config.profile_wait <= place < recording + config.profile_active:
        return ProfilerAction.NONE
    if place < recording:
        return ProfilerAction.WARMUP
    is_last = place == recording + config.profile_active - 1 or step == steps - 1
    return ProfilerAction.RECORD_AND_SAVE if is_last else ProfilerAction.RECORD
