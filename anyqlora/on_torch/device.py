"""Seeds, determinism and memory of a torch device."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import torch

from anyqlora.core.errors import RunError
from anyqlora.on_torch.memory.malloc import MallocTuner

NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")
SAMPLED = 0.01  # seconds between two looks at the process's memory: the peak of a backward pass lasts longer


def seed_everything(seed: int) -> None:
    """Seed every generator that a step may draw from (dropout draws from torch's)."""
    random.seed(seed % 2**32)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_deterministic(wanted: bool) -> None:
    """Deterministic algorithms only, and a warning where there is none; attention's has to be asked for
    (kernels/deterministic.py). cuBLAS needs its workspace fixed before its first call.
    """
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = (
        False  # shows a read of unwritten memory, at 7 % of a step; nothing reads any
    )
    torch.backends.cudnn.benchmark = False
    # Of the attention kernels that torch chooses from by device and shape, cuDNN's adds gradients in any order, and
    # warn_only lets it.
    torch.backends.cuda.enable_cudnn_sdp(not wanted)


def highest_precision(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has no such numbers: Metal, and Intel's cheaper GPUs."""
    has = torch.xpu.get_device_properties(device).has_fp64 if device.type == "xpu" else device.type != "mps"
    return torch.float64 if has else torch.float32


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's or the host's allocator has run out. torch has a type for CUDA's own allocator only: MPS, the
    driver, cuBLAS and Triton say it in words.
    """
    return (
        isinstance(error, torch.OutOfMemoryError)
        or isinstance(error, RuntimeError)
        and any(phrase in str(error).lower() for phrase in NO_MEMORY)
    )


@contextlib.contextmanager
def room_for(what: str, cure: str) -> Iterator[None]:
    """Raises RunError where memory runs out in what cannot be done again in smaller parts."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(f"out of memory in {what}: {str(error).splitlines()[0]}", cure=cure) from None


def to_device(array: np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A host's numbers on a device, which is not waited for."""
    tensor = torch.from_numpy(array).to(dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type in ("cuda", "xpu") else tensor.to(device)


class MemoryMonitor:
    """The bytes that a run takes on its device: in use now, and at most, since it was started.

    On a GPU the allocator counts. In host memory the process's own pages are sampled - not those of files, such as
    libraries and weights that are still being read, which the system can drop - and what they were before the run is
    taken away, so that the figure is the rise that the plan predicts. Whoever samples also keeps the heap within the
    plan.
    """

    def __init__(self, device: torch.device, planned: int = 0):
        """`planned` bytes; 0: unknown."""
        self.device, self.planned, self.before, self.highest = device, planned, 0, 0
        self.stopped, self.heap = threading.Event(), MallocTuner(0)
        self._counting = threading.Lock()

    def start(self) -> None:
        """Count from here: before the weights are read, after what is imported for them."""
        self.close()
        if self.device.type in ("cuda", "xpu"):
            getattr(torch, self.device.type).reset_peak_memory_stats(self.device)
        else:
            self.before, self.highest, self.stopped = self.in_use(), 0, threading.Event()
            self.heap = MallocTuner(self.planned)
            weakref.finalize(self, self.heap.close)
            threading.Thread(target=_sample, args=(weakref.ref(self), self.stopped), name="memory", daemon=True).start()

    def in_use(self) -> int:
        if self.device.type in ("cuda", "xpu"):
            return getattr(torch, self.device.type).memory_allocated(self.device)
        return torch.mps.driver_allocated_memory() if self.device.type == "mps" else own_pages()

    def used(self) -> int:
        """Bytes now. The peak is never less than what was once read here, whoever asked."""
        with self._counting:
            used = max(self.in_use() - self.before, 0)
            self.highest = max(self.highest, used)
        return used

    def peak(self) -> int:
        """Bytes at most."""
        if self.device.type in ("cuda", "xpu"):
            return getattr(torch, self.device.type).max_memory_allocated(self.device)
        return max(self.highest, self.used())

    def close(self) -> None:
        """Stop sampling, and let go of what was kept for a step."""
        self.stopped.set()
        self.heap.close()


def _sample(of: weakref.ref, stopped: threading.Event) -> None:
    """Look at a Memory's use until it is stopped or gone."""
    while not stopped.wait(SAMPLED):
        memory = of()
        if memory is None:
            return
        used = memory.used()
        memory.heap.give_back(used)
        del memory


def own_pages() -> int:
    """Bytes of this process's resident pages that belong to no file; where the system does not tell (macOS), all
    resident ones.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared = map(int, file.read().split()[:3])
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import psutil

        return psutil.Process().memory_info().rss
