"""What every test needs: one thread, no network, a quiet console."""

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models are slower on two threads, and bytes depend on the number
os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
if not os.environ.get("TEST_ON_GPU"):  # set by benchmarks/gpu.sh
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from anyqlora import testing  # noqa: E402 - found by the path above

# For worlds and for runs that are killed; the last one freezes what is there.
testing.PRELOADED += ["keras", "tests.support.steps_on_ranks", "tests.support.equality", "tests.support.warm"]


def pytest_collection_finish():
    """What the tests have imported is left out of garbage collections, which took 70 of 1,000 seconds."""
    gc.freeze()
