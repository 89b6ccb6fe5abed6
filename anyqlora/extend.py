"""What a package of your own implements to extend AnyQLoRA: a backend, a strategy, a quantizer, an adapter.

| entry point group | what it names | what that is |
|---|---|---|
| `anyqlora.backends` | a `BackendSpec` | `Capabilities`, and a probe that makes a `BackendReport` of a `Machine` |
| `anyqlora.strategies` | a class | a `Strategy`, mostly a `MultiProcessStrategy`; its options are a `StrategyOptions` |
| `anyqlora.quantizers` | a `QuantizerInfo` | what it needs and costs; it names a class that fulfils `Quantizer` |
| `anyqlora.adapters` | an `AdapterInfo` | the same; it names a class that fulfils `Adapter` |

Whatever more a quantizer can do is a protocol of its own. `anyqlora.testing` has the test suite that every built-in one
passes, for each of the four. Importing this module imports no framework: each name is looked up when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyqlora.config.schema import TrainConfig
    from anyqlora.config.strategy_options import StrategyOptions, option
    from anyqlora.core.descriptors import AdapterInfo, QuantizerInfo
    from anyqlora.core.errors import UsageError
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
    from anyqlora.on_torch.quantizers.dequant_matmul import dequant_matmul
    from anyqlora.planning.capabilities import Backend, BackendReport, BackendSpec, Capabilities
    from anyqlora.planning.machine import Device, Machine
    from anyqlora.training.state import StepResult

_MODULES = {
    "anyqlora.config.schema": ["TrainConfig"],
    "anyqlora.core.descriptors": ["AdapterInfo", "QuantizerInfo"],
    "anyqlora.core.errors": ["UsageError"],
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
    "anyqlora.on_torch.quantizers.dequant_matmul": ["dequant_matmul"],
    "anyqlora.planning.capabilities": ["Backend", "BackendReport", "BackendSpec", "Capabilities"],
    "anyqlora.planning.machine": ["Device", "Machine"],
    "anyqlora.training.state": ["StepResult"],
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Adapter",
    "AdapterInfo",
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
    "QuantizerInfo",
    "ShardedStrategy",
    "StepResult",
    "Strategy",
    "StrategyOptions",
    "TrainConfig",
    "UsageError",
    "dequant_matmul",
    "option",
]


_PAGE = "docs/writing-a-strategy.md"
_OF_ACCELERATE = {  # names that Accelerate's guide to a custom backend edits, and what to write instead
    "Accelerator": (
        "Accelerator is anyqlora.Runtime here, and is not edited: Runtime.of(strategy='module:Class', "
        f"strategy_opt=plugin) calls the prepare, backward and step of your Strategy ({_PAGE})"
    ),
    "AcceleratorState": (
        "there is no AcceleratorState to edit: --strategy module:Class or ANYQLORA_STRATEGY=module:Class chooses a "
        f"strategy, and its plugin_cls is the class of its options ({_PAGE})"
    ),
    "DistributedType": (
        "there is no DistributedType to add to: a strategy is named module:Class, or by an entry point of the group "
        f"anyqlora.strategies ({_PAGE})"
    ),
    "ClusterConfig": (
        "there is no ClusterConfig to add flags to: every field of the class that plugin_cls names is an option, "
        f"--strategy_opt NAME=VALUE ({_PAGE})"
    ),
}
_OF_ACCELERATE |= {"PartialState": _OF_ACCELERATE["AcceleratorState"], "BaseConfig": _OF_ACCELERATE["ClusterConfig"]}


def __getattr__(name: str) -> Any:
    if name in _OF_ACCELERATE:  # an ImportError, since `from ... import` has words of its own for an AttributeError
        raise ImportError(_OF_ACCELERATE[name], name=name)
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
