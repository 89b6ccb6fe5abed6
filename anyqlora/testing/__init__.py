"""For those who write a strategy, a backend, a quantizer or an adapter: the test suites that every built-in one passes.

    from anyqlora.testing import StrategyContract

    class TestMine(StrategyContract):
        strategy = "my_package.strategy:Mine"
        options = {"every": 4}

`world` runs a function in several real processes. pytest is all that is needed beside the package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from anyqlora.testing.worlds import PRELOADED, WorldFailed, server, world

if TYPE_CHECKING:
    from anyqlora.testing.adapters import AdapterContract
    from anyqlora.testing.backends import BackendContract
    from anyqlora.testing.quantizers import QuantizerContract
    from anyqlora.testing.strategies import StrategyContract

__all__ = [
    "PRELOADED",
    "AdapterContract",
    "BackendContract",
    "QuantizerContract",
    "StrategyContract",
    "WorldFailed",
    "server",
    "world",
]

_MODULES = {
    "AdapterContract": "anyqlora.testing.adapters",
    "BackendContract": "anyqlora.testing.backends",
    "QuantizerContract": "anyqlora.testing.quantizers",
    "StrategyContract": "anyqlora.testing.strategies",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
