"""Accelerate's verbs over one strategy: what `train.py` and people's own loops use."""

from anyqlora.on_torch.runtime.logging import get_logger
from anyqlora.on_torch.runtime.runtime import Runtime

__all__ = ["Runtime", "get_logger"]
