"""Where the time of the first steps goes, and what the processes say to each other meanwhile, as a trace that browsers
show.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter

import torch

from anyqlora.core.files import FileSystem, replace_file
from anyqlora.on_torch.profiling.hooks import NullHooks

STEPS = 10  # that are recorded: a profile of a whole run would not fit in memory
PHASE, COLLECTIVES = "anyqlora::", ("c10d::", "_c10d_functional::")
NO_COLLECTIVES = ("wait_tensor", "monitored_barrier_", "barrier")
BETWEEN = "between"  # the phases: what all processes agree on


class Timeline(NullHooks):
    """A Chrome trace (chrome://tracing, ui.perfetto.dev) with a process for each rank: its phases - data, forward,
    accumulate (a backward before the step's last), backward (the last one), reduce, clip, update, zero - and the
    collectives that begin in each.

    The same counts stand in it under otherData: {phase: {collective: count}} of the first rank.
    """

    def __init__(self, run):
        self.run, self.path = run, run.directory / run.config.timeline
        self.profile, self.left = None, min(STEPS, run.total_steps - run.first_step)

    def span(self, name: str):
        if self.profile is None and self.left and name == "data":
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profile.start()
        return torch.profiler.record_function(PHASE + name) if self.profile is not None else contextlib.nullcontext()

    def phase(self, name: str, is_final: bool = True):
        return self.span(name if is_final else "accumulate")

    def step_done(self) -> None:
        self.left = max(0, self.left - 1)
        if self.profile is not None and not self.left:
            self.profile.stop()
            step_events = events(self.profile.events(), self.run.process_group.rank)
            self.profile = None
            self._write([event for rank in self.run.process_group.all_gather_object(step_events) for event in rank])

    def close(self) -> None:
        if self.profile is not None:  # the run ended before; the others are not asked any more
            self.profile.stop()
            self._write(events(self.profile.events(), self.run.process_group.rank))
            self.profile = None

    def _write(self, step_events: list[dict]) -> None:
        if self.run.process_group.is_first:
            trace = {
                "traceEvents": step_events,
                "displayTimeUnit": "ms",
                "otherData": {"collectives": counted(step_events, self.run.process_group.rank)},
            }
            replace_file(self.path, json.dumps(trace).encode(), FileSystem())


def events(recorded, rank: int) -> list[dict]:
    """The profiler's events that are phases or collectives, in the Trace Event Format; times in microseconds."""
    collected = []
    for event in recorded:
        start, length = event.time_range.start, event.time_range.end - event.time_range.start
        if event.name.startswith(PHASE):
            collected.append(
                {
                    "name": event.name.removeprefix(PHASE),
                    "cat": "phase",
                    "ph": "X",
                    "ts": start,
                    "dur": length,
                    "pid": rank,
                    "tid": 0,
                }
            )
        elif event.name.startswith(COLLECTIVES) and not event.name.endswith(NO_COLLECTIVES):
            collected.append(
                {
                    "name": event.name.partition("::")[2].strip("_"),
                    "cat": "collective",
                    "ph": "X",
                    "ts": start,
                    "dur": length,
                    "pid": rank,
                    "tid": 1,
                }
            )
    phases = [event for event in collected if event["cat"] == "phase"]
    for event in collected:
        around = [phase for phase in phases if phase["ts"] <= event["ts"] < phase["ts"] + phase["dur"]]
        if event["cat"] == "collective":  # the innermost phase in which it began
            event["args"] = {"phase": max(around, key=lambda phase: phase["ts"])["name"] if around else BETWEEN}
    return sorted(collected, key=lambda event: event["ts"])


def counted(step_events: list[dict], rank: int) -> dict[str, dict[str, int]]:
    """{phase: {collective: count}} of one rank."""
    counts: dict[str, Counter] = {}
    for event in step_events:
        if event["pid"] == rank and event["cat"] == "collective":
            counts.setdefault(event["args"]["phase"], Counter())[event["name"]] += 1
    return {phase: dict(names) for phase, names in counts.items()}
