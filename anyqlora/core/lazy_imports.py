"""Importing torch, transformers and peft, which takes longer than reading a quantized model, without work that serves
nobody.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected(package: str) -> Iterator[None]:
    """Within, while `package` is imported for the first time, no garbage is collected, and what is there then is never
    looked through again.

    What 3,400 modules consist of stays, and is yet searched for garbage whenever it has grown: about 1.5 of 8.3 s to
    the end of a first step.
    """
    if package in sys.modules or not gc.isenabled():
        yield
        return
    gc.collect()  # what is garbage now would stay for good
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
