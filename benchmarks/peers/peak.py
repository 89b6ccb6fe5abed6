"""Peak memory of one process, above what it held before the weights were read."""

from __future__ import annotations

import resource
import sys


class Peak:
    """Made just before the model is loaded; `rise()` is the peak since then, in bytes: GPU allocations, or resident
    memory.
    """

    def __init__(self):
        import torch

        self.cuda = torch.cuda.is_available()
        self.before = self._highest()

    def _highest(self) -> int:
        if self.cuda:
            import torch

            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def rise(self) -> int:
        return self._highest() - self.before
