"""What every test needs: one thread, no network, a quiet console; what each file of tests needs; who runs what."""

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
from anyqlora.processes.environment import physical_cores  # noqa: E402

# For worlds and for runs that are killed; the last one freezes what is there.
testing.PRELOADED += [
    *(f"anyqlora.on_torch.parallel.{name}" for name in ("ddp", "fsdp")),
    *(f"deepspeed.{name}" for name in ("module_inject.auto_ep_layer", "ops.op_builder.all_ops")),  # else in each world
    "keras",
    "tests.support.steps_on_ranks",
    "tests.support.equality",
    "tests.support.warm",
]

NEEDS = {  # marker: files and folders all of whose tests have it; in other files single tests have it by hand
    "mlx": ["export/test_mlx_adapter.py", "on_mlx"],
    "distributed": [
        *("distribution", "faults", "on_mlx/test_ring.py", "on_torch/parallel", "on_torch/runtime", "recipes"),
        *(f"end_to_end/test_{name}.py" for name in ("demand", "first_run", "foreign_directory", "plugin_guides")),
        "on_torch/test_malloc.py",  # of processes whose memory nothing else has touched
    ],
    "compiler": ["on_torch/kernels/test_cpu.py", "on_torch/kernels/test_lm_head_int8.py"],
    "gpu": ["on_torch/test_gpu.py"],
}


def pytest_configure(config):
    """Slow tests run where an expression asks for them, and not because one does not speak of them."""
    expression = config.option.markexpr
    if "slow" not in expression:
        config.option.markexpr = f"({expression}) and not slow" if expression else "not slow"


def pytest_xdist_auto_num_workers(config):
    """Of `-n auto`, which pyproject.toml states: one worker a core, four at most. Three on two cores take as
    long as two.

    None where single files are named, which start sooner so and can be debugged, nor for slow tests: some measure time.
    """
    is_named = all(".py" in argument for argument in config.args)
    is_slow = "slow" in config.option.markexpr.replace("not slow", "")
    return 0 if is_named or is_slow else min(4, physical_cores())


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
