"""What every test needs: one thread, no network, a quiet console; what each file of tests needs; how the suite is shared out."""

import gc
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models are slower on two threads, and bytes depend on the number
os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
if not os.environ.get("TEST_ON_GPU"):  # set by benchmarks/gpu.sh
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined
TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent))

from anyqlora import testing  # noqa: E402 - found by the path above

# For worlds and for runs that are killed; the last one freezes what is there.
testing.PRELOADED += ["keras", "tests.support.steps_on_ranks", "tests.support.equality", "tests.support.warm"]

NEEDS = {  # marker: files and folders whose tests all have it; single tests of other files have it by hand
    "mlx": ["on_mlx", "export/test_mlx_adapter.py"],
    "distributed": ["distribution", "on_mlx/test_ring.py", "on_torch/parallel", "recipes"],
    "compiler": ["on_torch/kernels/test_cpu.py", "on_torch/kernels/test_lm_head_int8.py"],
    "gpu": ["on_torch/test_gpu.py"],
}


def pytest_configure(config):
    """Slow tests run where they are asked for by that name, and not because an expression does not speak of them."""
    expression = config.option.markexpr
    if "slow" not in expression:
        config.option.markexpr = f"({expression}) and not slow" if expression else "not slow"


def pytest_xdist_auto_num_workers(config):
    """`-n auto` is in pyproject.toml: the suite runs on as many workers as there are cores, up to four. Named files run in this process,
    where they start sooner and can be debugged, and so do slow tests, some of which measure time."""
    is_named = config.args_source is config.ArgsSource.ARGS
    is_slow = "slow" in config.option.markexpr and "not slow" not in config.option.markexpr
    return 0 if is_named or is_slow else min(4, len(os.sched_getaffinity(0)))


@pytest.hookimpl(tryfirst=True)  # before what is not asked for is left out
def pytest_collection_modifyitems(items):
    for item in items:
        path = item.path.relative_to(TESTS)
        for marker, places in NEEDS.items():
            if any(path.is_relative_to(place) for place in places):
                item.add_marker(marker)


def pytest_collection_finish():
    """What the tests have imported is left out of garbage collections, which took 70 of 1,000 seconds."""
    gc.freeze()
