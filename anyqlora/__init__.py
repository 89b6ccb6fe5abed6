"""QLoRA fine-tuning with one command on whatever hardware there is.

    import anyqlora

    settings = {"model_name": "demo", "dataset": "demo", "max_steps": 20}
    plan = anyqlora.plan(**settings)      # what a run would do, and the memory it takes
    result = anyqlora.train(**settings)   # trains; the content of result.json
    model = anyqlora.load_finetuned(result["directory"])
    print(model.generate("Name three colours."))

Importing this takes milliseconds: each name is looked up where it stands when it is first used.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as type checkers know it, without the 5 ms that importing typing takes
if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike
    from typing import Any

    from anyqlora.config.resolve import TrainConfig, resolve
    from anyqlora.core.errors import RunError, UsageError
    from anyqlora.on_torch.runtime import Runtime, get_logger
    from anyqlora.planning.backends import Backend, BackendManager, RunPlan
    from anyqlora.runs.opened import FineTunedModel

__version__ = "0.1.0"
__all__ = [
    "Backend",
    "BackendManager",
    "FineTunedModel",
    "RunError",
    "RunPlan",
    "Runtime",
    "TrainConfig",
    "UsageError",
    "__version__",
    "get_logger",
    "load_finetuned",
    "plan",
    "resolve",
    "train",
]

_MODULES = {  # name -> the module that it stands in
    "Backend": "anyqlora.planning.backends",
    "BackendManager": "anyqlora.planning.backends",
    "FineTunedModel": "anyqlora.runs.opened",
    "RunError": "anyqlora.core.errors",
    "RunPlan": "anyqlora.planning.backends",
    "Runtime": "anyqlora.on_torch.runtime",
    "TrainConfig": "anyqlora.config.resolve",
    "UsageError": "anyqlora.core.errors",
    "get_logger": "anyqlora.on_torch.runtime",
    "resolve": "anyqlora.config.resolve",
}


def train(config: TrainConfig | None = None, /, **settings: object) -> dict[str, Any]:
    """Train as `config` or as `settings` say: from the rows to the finished adapter.

    `settings` are those of the command line (`python train.py --help`), with Python values; environment and files count
    as they do there, and without any setting the embedded job is run. A strategy for several processes starts them on
    this machine.

    Returns the content of result.json (status, figures, evaluation) and `directory`, the run directory. Raises RunError
    (UsageError for what cannot be used), whose text says where, why and what to do; SystemExit with its code where one
    of several processes has failed and said why.
    """
    from anyqlora.recipes import sft

    return sft.train(_config(config, settings))


def plan(config: TrainConfig | None = None, /, **settings: object) -> RunPlan:
    """What `train` would do with the same arguments on this machine: nothing is loaded, downloaded or written.

    The plan has each choice and why it was made (`explain()`, `adjustments`) and the predicted memory (`memory`, in
    bytes). Raises UsageError for what the run would refuse.
    """
    from anyqlora.planning.backends import BackendManager

    config = _config(config, settings)
    return BackendManager(config.backend, where=config.sources.get("backend", "")).plan(config)


def load_finetuned(run: str | PathLike[str] = "", /, **settings: object) -> FineTunedModel:
    """The model of a finished run, with what it has learned, ready to `generate` and to `evaluate`.

    `run` is a run directory or the name of one in ./runs; without it, the newest finished run is taken. `settings` take
    the place of the run's own where this machine or this use differs: backend, model_name, max_new_tokens, seed,
    eval_batch_size, offline ... Raises UsageError for a run that is not finished or was changed, and for a base model
    or a backend that is not here.
    """
    from anyqlora.config.resolve import canonical_settings, parse_value
    from anyqlora.runs import opened
    from anyqlora.runs.finished import find_run

    named = {k: v for name, value in settings.items() for k, v in canonical_settings(name, value, _WHERE).items()}
    return opened.load_finetuned(
        find_run(str(run)), {name: parse_value(name, value, _WHERE) for name, value in named.items()}
    )


_WHERE = "code"  # the source of a value that a caller gives


def _config(config: TrainConfig | None, settings: Mapping[str, object]) -> TrainConfig:
    from anyqlora.config.resolve import resolve

    if config is None:
        return resolve(settings, origin=_WHERE)
    if settings:
        raise TypeError(
            f"a TrainConfig and settings ({', '.join(settings)}): give one; config.with_(...) changes a setting"
        )
    return config


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
