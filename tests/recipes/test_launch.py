"""What becomes of a run whose processes are killed, stopped, asked to stop, or asked for different things."""

import hashlib
import json
import random
import subprocess
import sys
import time

import psutil
import pytest

from anyqlora.data.readers.sources import DEMO
from anyqlora.processes.environment import free_port
from tests.support import runs
from tests.support.launched import INT, JOB, KILL, STOP, TERM, USR1, Launched, command, environment


def sha256(directory) -> str:
    return hashlib.sha256((directory / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of two processes that is left alone."""
    with Launched(tmp_path_factory.mktemp("whole")) as run:
        assert run.end() == 0, run.said()
    return run.directory


def killed(run: Launched, rank: int, step: int) -> float:
    """Seconds from the death of a rank to the message that names it."""
    run.reach(step)
    run.process_group()[rank].send_signal(KILL)
    return run.wait_for(f"rank {rank} was killed by SIGKILL", within=5)


def test_train_py_starts_the_processes_and_one_of_them_writes(whole):
    result = runs.result(whole)
    assert (result["world_size"], result["strategy"], result["steps"]) == (2, "ddp", 30)
    assert [line["step"] for line in runs.metrics(whole)] == list(range(1, 31))
    assert json.loads((whole / "plan.json").read_text())["world_size"] == 2
    assert not (whole / "stacks" / "rank-1.txt").read_text()  # nothing was lost


def test_a_killed_rank_is_named_and_the_run_starts_again_by_itself(whole, tmp_path):
    """Started again it goes on, though it was told to begin anew and was not given a name."""
    with Launched(tmp_path, max_restarts=1, resume="never", run_name="") as run:
        assert killed(run, 1, 8) < 5
        assert "starting again from the last checkpoint" in run.said()
        assert run.end() == 0, run.said()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [run.directory]
    assert sha256(run.directory) == sha256(whole)
    assert [line["step"] for line in runs.metrics(run.directory)] == list(range(1, 31))


@pytest.mark.slow
def test_a_process_that_has_no_row_in_a_step_takes_part_in_it(tmp_path):
    """The last step of an epoch has two rows left, all of them the first process's."""
    few = tmp_path / "rows.jsonl"
    few.write_text("".join((DEMO / "train.jsonl").read_text().splitlines(keepends=True)[:10]))
    alike = {"dataset": few, "gradient_accumulation_steps": 1, "max_steps": 4, "lora_dropout": 0.1, "save_steps": 0}
    with Launched(tmp_path, **alike, batch_size=4) as run:
        assert run.end() == 0, run.said()
    alone = runs.run(
        tmp_path,
        "alone",
        **{
            **JOB,
            **alike,
            "run_name": "alone",
            "dataset": str(few),
            "world_size": 1,
            "strategy": "single",
            "batch_size": 8,
        },
    )
    assert [m["loss"] for m in runs.metrics(run.directory)] == pytest.approx(
        [m["loss"] for m in runs.metrics(alone)], rel=1e-5
    )


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_with_the_stacks_of_all(tmp_path):
    with Launched(tmp_path, dist_timeout=10) as run:
        run.reach(4)
        ranks = run.process_group()
        ranks[1].send_signal(STOP)
        began = time.monotonic()
        assert run.end() == 70, run.said()
        assert time.monotonic() - began < 15
        assert "rank 1 did not answer any more and was ended" in run.said() and "Traceback" not in run.said()
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    for rank in (0, 1):
        assert "train.py" in (run.directory / "stacks" / f"rank-{rank}.txt").read_text()


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_of_them(whole, tmp_path):
    with Launched(tmp_path) as run:
        run.reach(5)
        run.process_group()[1].send_signal(TERM)
        assert run.end() == 75, run.said()
        assert "stopped by SIGTERM" in run.said() and run.said().count("stopped by") == 1
    again = subprocess.run(command(tmp_path), capture_output=True, text=True, env=environment())
    assert again.returncode == 0, again.stderr
    assert sha256(run.directory) == sha256(whole)


SLOW_TO_START = """
import os, time
if "RANK" in os.environ:
    time.sleep(20)
"""


def test_a_signal_that_comes_while_the_processes_start_is_answered(tmp_path, monkeypatch):
    """The interpreter itself dies of it there, and is not started again.

    One that asks to save finds nothing to save.
    """
    (tmp_path / "sitecustomize.py").write_text(SLOW_TO_START)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Launched(tmp_path / "runs", max_restarts=1) as run:
        until = time.monotonic() + 60
        while len(run.process_group()) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.1)  # the launcher is about to hand on what comes
        run.process.send_signal(USR1)
        time.sleep(0.3)
        assert len(run.process_group()) == 2 and run.process.poll() is None, run.said()
        run.process.send_signal(TERM)
        assert run.end(within=10) == 75, run.said()
    assert "stopped by SIGTERM" in run.said() and "starting again" not in run.said()


def refused(output, *different: dict, places=(None, None)) -> str:
    """What two processes say that were started as torchrun does it and are not to train together: one message, exit 2,
    no hang.
    """
    shared = {**environment(), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    started = [
        subprocess.Popen(
            command(output, world_size="", **settings),
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=place,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, (settings, place) in enumerate(zip(different, places, strict=True))
    ]
    ended = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [2, 2], ended
    assert ended[1][1] == "" and not (output / "run").exists()
    return ended[0][1]


def test_what_the_first_one_finds_wrong_with_the_model_is_said_once(tmp_path):
    """A regex: whether any layer has such a name is seen when the model is there."""
    done = subprocess.run(
        command(tmp_path, lora_target_modules="nosuch.*"),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )
    assert (
        done.returncode == 2
        and done.stderr.count("train.py: ") == 1
        and "'nosuch.*' matches no linear layer" in done.stderr
    ), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_one_rank_was_asked_for_is_compared_before_the_first_step(tmp_path):
    assert "rank 1 has lr 0.002, rank 0 0.001" in refused(tmp_path, {"lr": 1e-3}, {"lr": 2e-3})


@pytest.mark.slow
def test_what_one_rank_has_read_is_compared_before_the_first_step(tmp_path):
    """The same name, and on the second machine another file."""
    places = tmp_path / "a", tmp_path / "b"
    for number, place in enumerate(places):
        place.mkdir()
        (place / "rows.jsonl").write_text(
            "".join(f'{{"prompt": "{n}?", "completion": "{n + number}"}}\n' for n in range(16))
        )
    assert "rank 1 has read other rows than rank 0" in refused(
        tmp_path / "runs", *2 * [{"dataset": "rows.jsonl"}], places=places
    )


def test_what_no_process_can_do_is_said_once_under_torchrun(tmp_path):
    asked = {"strategy": "tp", "mesh": "batch=1,model=2", "tensor_layout": str(tmp_path / "absent.yaml")}
    _, *rest = command(tmp_path, world_size="", **asked)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port(), *rest],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0 and (done.stdout + done.stderr).count("absent.yaml") == 1, done.stderr
    assert not (tmp_path / "run").exists()


LEAVING = """
import atexit, contextlib, sys
from types import SimpleNamespace
from anyqlora.config.resolve import TrainConfig
from anyqlora.core.errors import UsageError, explained
from anyqlora.processes.environment import ProcessContext, free_port

atexit.register(print, "the interpreter ended")
group, end = sys.argv[1:]
with explained("it"):
    if group == "of the caller":
        import torch.distributed as dist
        dist.init_process_group("gloo", init_method=f"tcp://localhost:{free_port()}", rank=0, world_size=1)
    if group == "of the run":
        from anyqlora.on_torch.parallel.process_group import TorchProcessGroup
        context = ProcessContext(launcher="itself", address="localhost", port=free_port())
        with contextlib.closing(TorchProcessGroup(SimpleNamespace(config=TrainConfig(), device="cpu"), context)):
            pass
    if end == "refused":
        raise UsageError("not like this")
    if end == "early":
        sys.exit(0)
    if end == "broken":
        raise ValueError("no reason")
print("after it", flush=True)
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("refused", 2, "it: not like this"),
        pytest.param("broken", 1, "ValueError: no reason", marks=pytest.mark.slow),
        pytest.param("well", 0, "", marks=pytest.mark.slow),
        pytest.param("early", 0, "", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("group", ["none", "of the run", pytest.param("of the caller", marks=pytest.mark.slow)])
def test_a_process_that_was_in_a_group_ends_at_once(group, end, code, said):
    """A thread of gloo's that lets go of a tensor while the interpreter ends aborts it, and the exit code would be
    lost.
    """
    done = subprocess.run([sys.executable, "-c", LEAVING, group, end], capture_output=True, text=True)
    assert done.returncode == code and done.stderr.strip().endswith(said) and bool(done.stderr) == bool(said)
    assert ("the interpreter ended" in done.stdout) == (group == "none") and ("after it" in done.stdout) == (
        group == "none" and end == "well"
    )


NARROW = """
import os, sys
if os.environ.get("RANK") == "1":
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "anyqlora.on_torch.assembly.build":  # torch is there by now
                sys.meta_path.remove(self)
                import torch
                def refuse(module, arguments, kwargs):
                    positions = kwargs.get("position_ids")  # rows come one after another: each begins at 0
                    if positions is not None and torch.is_grad_enabled() and int((positions == 0).sum()) > 1:
                        raise torch.OutOfMemoryError("out of memory")
                from transformers import LlamaForCausalLM
                start = LlamaForCausalLM.__init__
                def started(self, *given, **options):
                    start(self, *given, **options)
                    self.register_forward_pre_hook(refuse, with_kwargs=True)
                LlamaForCausalLM.__init__ = started
    sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
def test_memory_that_runs_out_on_one_rank_halves_the_rows_of_all(tmp_path, monkeypatch):
    """Rank 1's model refuses more than one row at a time, from the first step on: the run ends as one that was started
    so.
    """
    (tmp_path / "sitecustomize.py").write_text(NARROW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Launched(tmp_path / "narrow", max_steps=4) as run:
        assert run.end() == 0, run.said()
    assert "rank 1 ran out of memory in step 1" in run.said() and "micro-batches of 1 rows from here on" in run.said()
    with Launched(tmp_path / "told", max_steps=4, batch_size=1, gradient_accumulation_steps=4) as told:
        assert told.end() == 0, told.said()
    assert sha256(run.directory) == sha256(told.directory)


@pytest.mark.slow
def test_collectives_of_ddp_are_at_boundaries_only(tmp_path):
    with Launched(tmp_path, max_steps=3, timeline="trace.json") as run:
        assert run.end() == 0, run.said()
    trace = json.loads((run.directory / "trace.json").read_text())
    counts = trace["otherData"]["collectives"]
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    assert set(counts) <= {"backward", "step", "between"} and counts["between"] == {
        "allreduce": 3
    }  # what all agree on, once a step
    assert sum(counts.get("backward", {}).values()) + sum(counts.get("step", {}).values()) == 3


@pytest.mark.slow
def test_a_port_in_use_is_told_once(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = subprocess.run(
            command(tmp_path, master_addr="127.0.0.1", master_port=taken.getsockname()[1]),
            capture_output=True,
            text=True,
            env=environment(),
            timeout=60,
        )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("is in use") == 1 and "--master_port" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_launcher_that_is_killed_takes_its_processes_with_it(tmp_path):
    with Launched(tmp_path, max_steps=2000) as run:
        run.reach(2)
        ranks = run.process_group()
        run.process.send_signal(KILL)
        gone, alive = psutil.wait_procs(ranks, timeout=5)
    assert len(gone) == 2 and not alive


@pytest.mark.slow
def test_a_second_interrupt_ends_the_run_at_once(tmp_path):
    with Launched(tmp_path, max_steps=2000) as run:
        run.reach(2)
        ranks = run.process_group()
        for rank in ranks:
            rank.send_signal(STOP)  # as in a step that takes long: the first interrupt waits for its end
        run.process.send_signal(INT)
        time.sleep(0.3)
        assert run.process.poll() is None
        run.process.send_signal(INT)
        assert run.end(within=5) == 130, run.said()
        assert not psutil.wait_procs(ranks, timeout=5)[1]


@pytest.mark.slow
def test_ten_kills_in_one_run(whole, tmp_path):
    """Each at a random step of either rank; the run starts itself again after each."""
    draw, slowest = random.Random(5), 0.0
    with Launched(tmp_path, max_restarts=10) as run:
        for kill in range(1, 11):
            rank = draw.randrange(2)
            run.reach(min(2 * kill + draw.randrange(4), 27))
            while len(run.process_group()) < 2:
                time.sleep(0.02)
            before = run.said().count("was killed by SIGKILL")
            began = time.monotonic()
            run.process_group()[rank].send_signal(KILL)
            while run.said().count("was killed by SIGKILL") == before:
                assert time.monotonic() - began < 5, run.said()
                time.sleep(0.02)
            slowest = max(slowest, time.monotonic() - began)
        assert run.end() == 0, run.said()
    print(f"10 of 10 kills noticed, the slowest after {slowest:.1f} s")
    assert sha256(run.directory) == sha256(whole)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3, 6, 10, 14])
def test_five_hangs(tmp_path, step):
    with Launched(tmp_path, dist_timeout=10) as run:
        run.reach(step)
        run.process_group()[step % 2].send_signal(STOP)
        began = time.monotonic()
        assert run.end() == 70, run.said()
        assert time.monotonic() - began < 15
        assert f"rank {step % 2} did not answer any more and was ended" in run.said()
    assert all((run.directory / "stacks" / f"rank-{rank}.txt").read_text() for rank in (0, 1))
