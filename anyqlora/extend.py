"""What is implemented by those who extend AnyQLoRA with a package of their own: a backend, a strategy, a quantizer, an adapter.

| entry point group | what it names | what that is |
|---|---|---|
| `anyqlora.backends` | a `BackendSpec` | a row of `Capabilities`, and a probe that judges a `Machine` and gives a `BackendReport` |
| `anyqlora.strategies` | a class | a `Strategy`: mostly a subclass of `MultiProcessStrategy`, its options a `StrategyOptions` |

Quantizers and adapters are classes that fulfil the protocols `Quantizer` and `Adapter` here; whatever more a quantizer can do is a protocol of
its own. `anyqlora.testing` has the test suite that every built-in one passes, for each of the four. Importing this module imports no framework:
each name is looked up where it stands when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyqlora.config.strategy_options import StrategyOptions, option
    from anyqlora.on_torch.adapters.base import Adapter, ObservingAdapter
    from anyqlora.on_torch.parallel.base import Prepared, Strategy
    from anyqlora.on_torch.parallel.group import MultiProcessStrategy, ShardedStrategy
    from anyqlora.on_torch.quantizers.base import (
        BroadcastQuantizer,
        ExpertQuantizer,
        FileQuantizer,
        KernelQuantizer,
        Quantizer,
    )
    from anyqlora.planning.capabilities import Backend, BackendReport, BackendSpec, Capabilities
    from anyqlora.planning.machine import Device, Machine
    from anyqlora.training.state import StepResult

_MODULES = {
    "anyqlora.config.strategy_options": ["StrategyOptions", "option"],
    "anyqlora.on_torch.adapters.base": ["Adapter", "ObservingAdapter"],
    "anyqlora.on_torch.parallel.base": ["Prepared", "Strategy"],
    "anyqlora.on_torch.parallel.group": ["MultiProcessStrategy", "ShardedStrategy"],
    "anyqlora.on_torch.quantizers.base": [
        "BroadcastQuantizer",
        "ExpertQuantizer",
        "FileQuantizer",
        "KernelQuantizer",
        "Quantizer",
    ],
    "anyqlora.planning.capabilities": ["Backend", "BackendReport", "BackendSpec", "Capabilities"],
    "anyqlora.planning.machine": ["Device", "Machine"],
    "anyqlora.training.state": ["StepResult"],
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Adapter",
    "Backend",
    "BackendReport",
    "BackendSpec",
    "BroadcastQuantizer",
    "Capabilities",
    "Device",
    "ExpertQuantizer",
    "FileQuantizer",
    "KernelQuantizer",
    "Machine",
    "MultiProcessStrategy",
    "ObservingAdapter",
    "Prepared",
    "Quantizer",
    "ShardedStrategy",
    "StepResult",
    "Strategy",
    "StrategyOptions",
    "option",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
