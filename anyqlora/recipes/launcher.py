"""The processes of a run on one machine: started, watched, ended together, and started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from anyqlora.config.schema import AUTO, TrainConfig
from anyqlora.core.errors import OutOfMemory, PeerLost, Stopped
from anyqlora.core.terminal import printable
from anyqlora.processes.environment import free_port, physical_cores

POLL_SECONDS = 0.05  # seconds between two looks at the processes
GRACE = {
    True: 5.0,
    False: 1.0,
}  # seconds that the others have to end by themselves once one has explained itself, or was lost
STACK_DUMP_SECONDS = 0.5  # seconds in which those that do not end write where they are
FORWARDED_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]


@dataclass
class LocalLauncher:
    """The processes of one attempt.

    `ends` has the exit codes of those that have ended, in the order in which they did.
    """

    folder: Path
    running: dict[int, subprocess.Popen] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)  # ranks that had to be ended, because they did not answer
    stop: int | None = None  # the signal that asked the run to stop
    interrupts: int = 0

    def start(self, size: int, address: str, port: str) -> None:
        """Start `size` processes.

        The first one speaks; what the others have to say on standard error is kept for when it matters.
        """
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, physical_cores() // size))
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        for rank in range(size):
            environ = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": threads,
                "PYTHONPATH": path,
            }
            command = [sys.executable, "-m", "anyqlora.recipes.worker", str(self.folder), str(os.getpid())]
            with open(self.exit_messages(rank), "wb") as message_file:
                out, err = (None, None) if rank == 0 else (subprocess.DEVNULL, message_file)
                # A session of its own: Ctrl-C reaches it through `forward`, once.
                self.running[rank] = subprocess.Popen(
                    command, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
                )

    def exit_messages(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.txt"

    def wait(self) -> None:
        """Until all have ended.

        After the first failure the others get some time, then are asked where they are, then are ended.
        """
        failed_at = None
        while self.running:
            for rank, process in list(self.running.items()):
                if process.poll() is not None:
                    self.ends[rank] = process.returncode
                    del self.running[rank]
                    if process.returncode and failed_at is None:
                        failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > GRACE[self.has_explained(self.culprit)]:
                self.end()
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """End those that do not end by themselves; each first writes the stacks of its threads, a stopped one too."""
        self.silent += list(self.running)
        for number, seconds in ((signal.SIGCONT, 0), (signal.SIGUSR2, STACK_DUMP_SECONDS), (signal.SIGKILL, 0)):
            self.send(number)
            time.sleep(seconds)

    def send(self, number: int) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def forward(self, number: int, _frame) -> None:
        """What is asked of the run is asked of every process; a second SIGINT ends them where they are."""
        self.interrupts += number == signal.SIGINT
        self.stop = number if number in (signal.SIGTERM, signal.SIGINT) else self.stop
        self.send(signal.SIGKILL if self.interrupts > 1 else number)

    def has_explained(self, rank: int) -> bool:
        """Whether it ended by itself and said why, so that starting again would not help."""
        return rank not in self.silent and self.ends[rank] > 0 and self.ends[rank] != PeerLost.exit_code

    @property
    def culprit(self) -> int | None:
        """The rank that failed, rather than noticed that another was gone; None when all is well."""
        failed = [rank for rank, code in self.ends.items() if code and rank not in self.silent]
        own = [
            rank for rank in failed if self.ends[rank] != PeerLost.exit_code
        ]  # the others have noticed that it was gone
        if own:
            return (
                0 if 0 in own and self.ends[0] == self.ends[own[0]] else own[0]
            )  # where all found the same, the first has said it
        return next(iter(self.silent or failed), None)


def launch(config: TrainConfig, plan, name: str) -> dict:
    """Train in as many processes of this machine as the plan of `config` says, in the directory `name`.

    Returns the content of result.json.

    Exits as the process that failed, once what it said is shown. Raises PeerLost for one that was killed or does not
    answer, unless the run can be started again from its last checkpoint, as it is up to `max_restarts` times. One that
    ran out of memory makes all start again with half the rows at a time. Raises Stopped for those that a signal ended
    before they could say so: none is started again.
    """
    config, left = config.with_(world_size=plan.world_size), config.max_restarts
    rows, steps = plan.batch_size, plan.gradient_accumulation_steps
    while True:
        with tempfile.TemporaryDirectory(prefix="anyqlora-") as folder:
            processes = LocalLauncher(Path(folder))
            (processes.folder / "config.json").write_text(
                json.dumps(
                    {
                        "settings": config.settings(),
                        "sources": dict(config.sources),
                        "notes": config.notes,
                        "name": name,
                    }
                )
            )
            watch_processes(processes, config)
            if config.resume == "never":
                config = config.with_(resume=AUTO)  # it has begun anew, and goes on from there
            if processes.interrupts > 1:
                sys.exit(130)
            if processes.culprit is None:
                return json.loads((processes.folder / "result.json").read_bytes())
            rank, message = (
                processes.culprit,
                processes.exit_messages(processes.culprit).read_text(errors="replace") if processes.culprit else "",
            )
            print(printable(message), end="", file=sys.stderr)
            has_explained = processes.has_explained(rank)
            if processes.stop is not None and (not has_explained or processes.ends[rank] == OutOfMemory.exit_code):
                raise Stopped.by(processes.stop)
            if processes.ends[rank] == OutOfMemory.exit_code and rows > 1:
                from anyqlora.planning.fitting import halve

                rows, steps = halve(rows, steps)
                config = config.with_(batch_size=rows, gradient_accumulation_steps=steps)
                print(
                    f"train.py: micro-batches of {rows} rows from here on, and from the last checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
                continue
            if has_explained:
                sys.exit(processes.ends[rank])
            how = (
                "did not answer any more and was ended"
                if rank in processes.silent
                else "lost the others"
                if processes.ends[rank] > 0
                else f"was killed by {signal.Signals(-processes.ends[rank]).name}"
            )
        if not left:
            raise PeerLost(f"rank {rank} {how}", cure="the same command continues from the last checkpoint")
        left -= 1
        print(f"train.py: rank {rank} {how}; starting again from the last checkpoint", file=sys.stderr, flush=True)


def watch_processes(processes: LocalLauncher, config: TrainConfig) -> None:
    """Start the processes and see them through, handing on the signals that come meanwhile.

    A signal that asks to stop before all are started ends them at once: `stoppable`, and Python for SIGINT, raise it
    here.
    """
    port = config.master_port if config.asked("master_port") else free_port()
    before = {}
    try:
        processes.start(config.world_size, config.master_addr, port)
        before = {number: signal.signal(number, processes.forward) for number in FORWARDED_SIGNALS}
        processes.wait()
    finally:
        processes.send(signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)
