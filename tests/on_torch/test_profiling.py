"""Profiling flags and the memory of a run."""

import json
import mmap
import re
import threading
import time

import pytest
import torch
from torch.profiler import ProfilerAction
from torch.profiler._memory_profiler import MemoryProfileTimeline

from anyqlora.config.resolve import resolve
from anyqlora.core.errors import UsageError
from anyqlora.on_torch.device import MemoryMonitor, own_pages
from anyqlora.on_torch.profiling.hooks import NullHooks
from anyqlora.on_torch.profiling.profiler import action, plain_timeline
from tests.support import runs
from tests.support.paths import ROOT

HELD_OUT = ROOT / "anyqlora" / "demo" / "task" / "heldout.jsonl"
SMALL = {
    "model_name": "demo",
    "dataset": "demo",
    "context_length": 128,
    "batch_size": 2,
    "precision": "fp32",
    "max_steps": 6,
    "lr": 3e-3,
    "lora_rank": 4,
    "lora_dropout": 0.1,
    "log_to": "none",
}
PROFILED = {"profile": True, "profiling_frequency": 3, "profile_wait": 1, "profile_active": 1}
BARE = {**PROFILED, "export_trace": False}
FULL = {
    **PROFILED,
    "profile_wait": 0,
    "profile_repeat": 1,
    "with_stack": True,
    "with_shapes": True,
    "export_memory_timeline": True,
    "profile_memory": True,
    "eval_steps": 3,
    "exact_match": False,
    "eval_batch_size": 64,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return runs.run(tmp_path_factory.mktemp("plain"), **SMALL)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    few = tmp_path_factory.mktemp("rows") / "few.jsonl"
    few.write_text("".join(HELD_OUT.read_text().splitlines(keepends=True)[:4]))
    return runs.fresh(tmp_path_factory.mktemp("profiled"), **{**SMALL, **FULL, "eval_dataset": str(few)})


def test_off_is_nothing(plain):
    watched = NullHooks()
    function = object()
    assert watched.evaluation(function) is function
    with watched.phase("forward"):
        watched.step_done()
    assert not (plain / "profiles").exists() and not (plain / "memory.json").exists()


def test_profiling_changes_nothing_of_training(plain, profiled):
    assert runs.result(plain)["adapter_sha256"] == runs.result(profiled)["adapter_sha256"]


def test_everything_that_is_asked_for_is_written(profiled):
    """Of the one cycle of three steps the first is recorded: one micro-batch and one update, and nothing of what came
    before.
    """
    (place,) = (profiled / "profiles").iterdir()
    assert place.name == "step-000001"
    events = json.loads((place / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
    counted = {name: names.count(f"anyqlora::{name}") for name in ("forward", "backward", "step", "load", "evaluate")}
    assert counted == {"forward": 1, "backward": 1, "step": 1, "load": 0, "evaluate": 0}
    assert any("Input Dims" in event.get("args", {}) for event in events) and any(
        event.get("cat") == "python_function" for event in events
    )
    table = (place / "operators.txt").read_text()
    listed = set(
        re.findall(r"^ *(aten::\w+)  ", table, re.MULTILINE)
    )  # those that took longest, which are each processor's own
    assert "Self CPU" in table and len(listed) > 5
    assert listed <= {event["name"] for event in events if event.get("cat") == "cpu_op"}
    times, sizes = json.loads((place / "memory_timeline.json").read_text())
    assert len(times) == len(sizes) > 100


def test_a_timeline_without_categories():
    """What is written where torch cannot make its own: of tensors it can tell, the same bytes at the same times."""
    with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True) as profile:
        first = torch.zeros(1 << 20)
        second = torch.zeros(1 << 18)
        del first
        third = torch.zeros(1 << 19)
        del second
    times, sizes = plain_timeline(profile)
    theirs, categories = MemoryProfileTimeline(profile._memory_profile())._coalesce_timeline("cpu")
    assert [row[-1] >> 20 for row in sizes] == [4, 5, 1, 3, 2]
    assert third.numel() and len(sizes[0]) == len(categories[0])
    assert all(abs(time - other) <= 1 for time, other in zip(times, theirs, strict=True))
    assert [sum(row) for row in sizes] == [sum(row) for row in categories]


def test_each_cycle_is_written_and_only_what_is_asked_for(tmp_path):
    directory = runs.run(tmp_path, **{**SMALL, **BARE, "profiling_output": "looked"})
    assert sorted(str(path.relative_to(directory)) for path in (directory / "looked").rglob("*.*")) == [
        "looked/step-000002/operators.txt",
        "looked/step-000005/operators.txt",
    ]
    assert "Input Shapes" not in (directory / "looked/step-000005/operators.txt").read_text()


def test_profiles_that_are_there_are_kept_or_made_anew(tmp_path):
    for overwrite, kept in ((False, True), (True, False)):
        directory = tmp_path / str(overwrite)
        old = directory / "run" / "profiles" / "step-000999"
        old.mkdir(parents=True)
        runs.run(directory, **{**SMALL, **BARE, "max_steps": 2, "overwrite_profiling_output": overwrite})
        assert old.exists() == kept and (old.parent / "step-000002").exists() != kept


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys):
    directory = runs.run(
        tmp_path, during=lambda step: (tmp_path / "run" / "profiles").touch(), **{**SMALL, **BARE, "max_steps": 3}
    )
    assert runs.result(directory)["steps"] == 3
    assert "profiles/step-000002 is not whole: NotADirectoryError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wait", "warmup", "active", "repeat"), [(0, 0, 2, 0), (3, 1, 2, 0), (1, 2, 1, 2), (0, 1, 3, 1)]
)
def test_the_schedule_is_that_of_torch(wait, warmup, active, repeat):
    """The reference is torch.profiler.schedule, whose cycle is as long as profiling_frequency when it is wait + warm-up
    + active.
    """
    config = resolve(
        {
            "profile": True,
            "profile_wait": wait,
            "profiler_warmup_steps": warmup,
            "profile_active": active,
            "profile_repeat": repeat,
            "profiling_frequency": wait + warmup + active,
        },
        environ={},
    )
    reference = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
    assert [action(config, step, 1000) for step in range(50)] == [reference(step) for step in range(50)]


def test_the_last_step_of_a_run_ends_a_recording():
    config = resolve({"profile": True, "profile_active": 3, "profiling_frequency": 5}, environ={})
    assert [action(config, step, 7) for step in (5, 6, 7)] == [
        ProfilerAction.RECORD,
        ProfilerAction.RECORD_AND_SAVE,
        ProfilerAction.NONE,
    ]


def test_flags_that_would_do_nothing_are_refused():
    with pytest.raises(UsageError, match="with_stack needs profile"):
        resolve({"with_stack": True}, environ={})
    with pytest.raises(UsageError, match="longer than profiling_frequency"):
        resolve({"profile": True, "profile_active": 11}, environ={})


# ------------------------------------------------------------------------------------------------------------ memory


def test_memory_json_has_every_phase(profiled):
    entries = json.loads((profiled / "memory.json").read_text())
    seen = [(entry["step"], entry["phase"]) for entry in entries]
    a_step = ["forward", "backward", "step"]
    expected = [(0, "load"), (0, "evaluate")]
    for step in range(1, 7):
        expected += [(step, phase) for phase in a_step] + ([(step, "evaluate")] if step in (3, 6) else [])
    assert seen == expected
    assert all(isinstance(entry["bytes"], int) and entry["bytes"] > 0 for entry in entries)
    assert runs.result(profiled)["peak_memory_bytes"] >= max(entry["bytes"] for entry in entries)
    assert (
        runs.result(profiled)["planned_memory_bytes"]
        == json.loads((profiled / "plan.json").read_text())["memory"]["total"]
    )


def test_memory_json_goes_on_where_a_resumed_run_does(tmp_path):
    def stop(step):
        if step == 4:
            raise KeyboardInterrupt

    settings = {**SMALL, "profile_memory": True, "save_steps": 3, "gradient_accumulation_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        runs.run(tmp_path, during=stop, **settings)
    path = tmp_path / "run" / "memory.json"
    assert max(entry["step"] for entry in json.loads(path.read_text())) == 4
    runs.run(tmp_path, **settings)
    entries = json.loads(path.read_text())
    assert [entry["step"] for entry in entries if entry["phase"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [entry["step"] for entry in entries if entry["phase"] == "backward"] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


def test_memory_is_the_rise_of_own_pages_and_its_peak(tmp_path):
    """The reference is the size of what is allocated; pages of a file do not count, and what is freed stays in the
    peak.
    """
    size = 256 << 20
    memory = MemoryMonitor(torch.device("cpu"))
    memory.start()
    block = torch.ones(size, dtype=torch.uint8)
    assert memory.used() == pytest.approx(size, rel=0.05)
    time.sleep(0.1)
    del block
    assert memory.used() < 0.1 * size and memory.peak() == pytest.approx(size, rel=0.05)
    memory.close()

    file = tmp_path / "weights"
    file.write_bytes(bytes(64 << 20))
    before = own_pages()
    with open(file, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[i] for i in range(0, len(pages), 4096)) == 0
        assert own_pages() - before < 8 << 20


def test_memory_stops_looking_when_it_is_gone():
    memory = MemoryMonitor(torch.device("cpu"))
    memory.start()
    (thread,) = [t for t in threading.enumerate() if t.name == "memory" and t.is_alive()][-1:]
    del memory
    thread.join(5)
    assert not thread.is_alive()
