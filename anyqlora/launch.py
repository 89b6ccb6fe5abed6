"""The processes of a run on one machine: started, watched, ended together, and started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from .config import TrainConfig
from .describe import cores
from .errors import PeerLost, RunError

WATCHED = 0.05  # seconds between two looks at the processes
GRACE = 5.0  # seconds that the others have to end by themselves once one has: to say why, and to take their run back
STACKS = 1.0  # seconds in which those that do not end write where they are
FORWARDED = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]


class Failed(RunError):
    """A process of the run has failed and has said why."""


@dataclass
class Processes:
    """The processes of one attempt. `ends` has the exit codes of those that have ended, in the order in which they did."""

    folder: Path
    running: dict[int, subprocess.Popen] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)  # ranks that had to be ended, because they did not answer
    interrupts: int = 0

    def start(self, size: int, address: str, port: str) -> None:
        """Start `size` processes. The first one speaks; what the others have to say on standard error is kept for when it matters."""
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // size))
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        for rank in range(size):
            environ = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
                       "MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": threads, "PYTHONPATH": path}
            command = [sys.executable, "-m", "anyqlora.worker", str(self.folder), str(os.getpid())]
            with open(self.said(rank), "wb") as said:
                out, err = (None, None) if rank == 0 else (subprocess.DEVNULL, said)
                # A session of its own: Ctrl-C reaches it through `forward`, once.
                self.running[rank] = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)

    def said(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.txt"

    def wait(self) -> None:
        """Until all have ended. After the first failure the others get some time, then are asked where they are, then are ended."""
        failed_at = None
        while self.running:
            for rank, process in list(self.running.items()):
                if process.poll() is not None:
                    self.ends[rank] = process.returncode
                    del self.running[rank]
                    if process.returncode and failed_at is None:
                        failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > GRACE:
                self.end()
            time.sleep(WATCHED)

    def end(self) -> None:
        """End those that do not end by themselves; each first writes the stacks of its threads, a stopped one too."""
        self.silent += list(self.running)
        for number, seconds in ((signal.SIGCONT, 0), (signal.SIGUSR2, STACKS), (signal.SIGKILL, 0)):
            self.send(number)
            time.sleep(seconds)

    def send(self, number: int) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def forward(self, number: int, _frame) -> None:
        """What is asked of the run is asked of every process; a second SIGINT ends them where they are."""
        self.interrupts += number == signal.SIGINT
        self.send(signal.SIGKILL if self.interrupts > 1 else number)

    @property
    def culprit(self) -> int | None:
        """The rank that failed, rather than noticed that another was gone; None when all is well."""
        failed = [rank for rank, code in self.ends.items() if code and rank not in self.silent]
        own = [rank for rank in failed if self.ends[rank] != PeerLost.exit_code]
        if own:
            return 0 if 0 in own and self.ends[0] == self.ends[own[0]] else own[0]  # where all found the same, the first has said it
        return next(iter(self.silent or failed), None)


def launch(config: TrainConfig) -> dict:
    """Train in `config.world_size` processes of this machine. Returns the content of result.json.

    Raises RunError, with the exit code of the process that failed. One that was killed or does not answer is named, and the run is
    started again from its last checkpoint up to `max_restarts` times.
    """
    for left in range(config.max_restarts, -1, -1):
        with tempfile.TemporaryDirectory(prefix="anyqlora-") as folder:
            processes = Processes(Path(folder))
            (processes.folder / "config.json").write_text(json.dumps({"settings": config.settings(), "sources": dict(config.sources)}))
            attend(processes, config)
            if processes.culprit is None:
                return json.loads((processes.folder / "result.json").read_bytes())
            failure = _failure(processes)
        if isinstance(failure, Failed) or not left:
            raise failure
        print(f"{failure.message}; starting again from the last checkpoint", file=sys.stderr, flush=True)
    raise AssertionError("max_restarts is not negative")


def attend(processes: Processes, config: TrainConfig) -> None:
    """Start the processes and see them through, handing on the signals that come meanwhile."""
    port = config.master_port if config.asked("master_port") else free_port()
    before = {number: signal.signal(number, processes.forward) for number in FORWARDED}
    try:
        processes.start(config.world_size, config.master_addr, port)
        processes.wait()
    finally:
        processes.send(signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)


def _failure(processes: Processes) -> RunError:
    """The error that ended the run: `Failed` where the process has explained itself, so that starting again would not help."""
    rank = processes.culprit
    code = processes.ends[rank]
    said = processes.said(rank).read_text(errors="replace").strip()
    if rank in processes.silent:
        return PeerLost(f"rank {rank} did not answer any more and was ended", cure="the same command continues from the last checkpoint")
    if code < 0:
        return PeerLost(f"rank {rank} was killed by {signal.Signals(-code).name}", cure="the same command continues from the last checkpoint")
    if code == PeerLost.exit_code:
        return PeerLost(f"rank {rank} lost the others" + (f":\n{said}" if said else ""), cure="the same command continues from the last checkpoint")
    failed = Failed(f"rank {rank}: {said}" if said else "")
    failed.exit_code = code
    return failed


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(probe.getsockname()[1])
