"""Two hosts: network namespaces of this machine, each with an address of its own, joined by torchrun's rendezvous.

Needs root.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from tests.support import runs
from tests.support.launched import command, environment
from tests.support.paths import ROOT

NAMES, ADDRESSES, CARDS = ("anyqlora-a", "anyqlora-b"), ("10.77.0.1", "10.77.0.2"), ("hosta", "hostb")
STEPS = 40


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts():
    """Two namespaces with a cable between them."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", CARDS[0], "netns", NAMES[0], "type", "veth", "peer", "name", CARDS[1], "netns", NAMES[1])
        for name, address, card in zip(NAMES, ADDRESSES, CARDS, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", card)
            ip("-n", name, "link", "set", card, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Host:
    """torchrun on one host, with a disk of its own."""

    def __init__(self, number: int, place):
        self.output, self.said = place / NAMES[number], place / f"{NAMES[number]}.txt"
        train = command(self.output, world_size="", strategy="ddp", max_steps=STEPS, save_steps=2, dist_timeout=10)[1:]
        run = [
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={ADDRESSES[0]}:29400",
            f"--rdzv-conf=is_host={int(number == 0)},keep_alive_interval=1",
            "--rdzv-id=hosts",
            "--max-restarts=3",
            f"--local-addr={ADDRESSES[number]}",
        ]
        with open(self.said, "a") as said:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", NAMES[number], sys.executable, *run, *train],
                stdout=said,
                stderr=said,
                cwd=ROOT,
                env={**environment(), "GLOO_SOCKET_IFNAME": CARDS[number]},
                start_new_session=True,
            )

    def end(self) -> None:
        """Also its workers, which torchrun starts in sessions of their own."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait()


def until(condition, within: float, hosts) -> None:
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, "\n".join(host.said.read_text()[-3000:] for host in hosts)
        time.sleep(0.1)


@pytest.mark.slow
def test_a_host_is_cut_off_and_brought_back(hosts, tmp_path):
    first, second = both = [Host(0, tmp_path), Host(1, tmp_path)]
    metrics = first.output / "run" / "metrics.jsonl"

    def steps() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    try:
        until(lambda: steps() >= 8, 120, both)
        ip("-n", NAMES[1], "link", "set", CARDS[1], "down")
        at = steps()
        until(lambda: "lost another process of the run" in first.said.read_text(), 40, both)
        ip("-n", NAMES[1], "link", "set", CARDS[1], "up")
        until(lambda: first.process.poll() is not None, 180, both)
        assert first.process.returncode == 0, first.said.read_text()[-3000:]
        assert second.process.wait(60) == 0, second.said.read_text()[-3000:]
    finally:
        for host in both:
            host.end()
    directory = first.output / "run"
    assert at < STEPS and runs.result(directory)["steps"] == STEPS and runs.result(directory)["world_size"] == 2
    assert [line["step"] for line in runs.metrics(directory)] == list(range(1, STEPS + 1))
    assert not list(second.output.glob("*/checkpoints"))  # only the first process writes
