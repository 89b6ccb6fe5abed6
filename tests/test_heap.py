"""The heap of a real process: what was freed inside it goes back to the system when the process outgrows its plan."""

import json
import os
import subprocess
import sys

import pytest

from anyqlora.memory import COMPILED, OF_PRODUCT
from backend_manager import BackendManager

HOARD = """
import json, sys
import torch
from anyqlora.on_torch.device import Memory
from anyqlora.on_torch.heap import Heap

memory = Memory(torch.device("cpu"))
heap = Heap(planned=int(sys.argv[1]))
before = memory.in_use()
blocks = [torch.zeros(16_000) for _ in range(6_000)]  # 64 kB each, from the heap and not mapped by themselves
kept = blocks[::2]
del blocks  # every other one is a hole that stays resident
holes = memory.in_use() - before
heap.give_back(holes)
print(json.dumps({"holes": holes, "after": memory.in_use() - before, "kept": sum(b.nbytes for b in kept), "can_tell": heap.can_tell}))
"""


def resident(planned: int) -> dict:
    done = subprocess.run([sys.executable, "-c", HOARD, str(planned)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_process_that_outgrows_its_plan_gives_back_what_it_hoards():
    found = resident(planned=200 << 20)
    if not found["can_tell"]:
        pytest.skip("this C library does not tell what its heap holds")
    assert found["holes"] > 1.6 * found["kept"]  # else there is nothing to see here
    assert found["after"] < 1.25 * found["kept"]


def test_a_process_within_its_plan_keeps_its_pages():
    """Pages that are used again cost time."""
    found = resident(planned=1 << 30)
    assert found["after"] > 0.9 * found["holes"]


def test_a_process_a_little_beyond_its_plan_keeps_them_too():
    """Giving back in every step costs more than a twentieth of memory."""
    holes = resident(planned=1 << 30)["holes"]
    assert resident(planned=holes - (16 << 20))["after"] > 0.9 * holes


LENGTHS = """
import torch
from anyqlora.on_torch.heap import Heap
from anyqlora.on_torch.runtime import Runtime

Runtime.of(backend="cpu", precision="bf16")
heap, weight = Heap(0), torch.ones(64, 64, dtype=torch.bfloat16)
for length in range(1, 501):
    torch.ones(length, 64, dtype=torch.bfloat16) @ weight
print(heap._alive() - heap.before)
"""


@pytest.mark.skipif("native" not in BackendManager("cpu").found.kernels, reason="no AVX512-BF16: products in 16 bits are other ones")
def test_products_of_five_hundred_lengths_keep_what_the_plan_has_for_them():
    fresh = {name: value for name, value in os.environ.items() if not name.endswith("_CACHE_CAPACITY")}  # and not as this process has set it
    kept = int(subprocess.run([sys.executable, "-c", LENGTHS], env=fresh, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert 0.5 * COMPILED * OF_PRODUCT < kept < 1.25 * COMPILED * OF_PRODUCT  # without a limit 300 MB
