"""What the torch loop saves and restores, as named numpy arrays and files."""

from __future__ import annotations

import torch

from anyqlora.core.files import Content, tensors_to_bytes, to_json
from anyqlora.core.registry import ADAPTER, ADAPTER_CONFIG
from anyqlora.on_torch._compat import quietly
from anyqlora.on_torch.assembly.checks import BuiltModel
from anyqlora.on_torch.runtime import Runtime
from anyqlora.runs.checkpoints import check_shapes

WEIGHTS = {"adapter": ADAPTER, "model": "model.safetensors"}


def snapshot(runtime: Runtime, built: BuiltModel) -> tuple[dict, dict, dict, dict]:
    """(adapter, moments, adapter_config, loop state) for `Run.save`."""
    strategy = runtime.strategy
    return (
        {name: tensor.numpy() for name, tensor in strategy.gather_trainable().items()},
        {name: tensor.numpy() for name, tensor in strategy.gather_moments().items()},
        built.adapter.adapter_config(),
        {"scaler": strategy.scaler.state_dict()},
    )


def restore(runtime: Runtime, run) -> None:
    """Put back what the run goes on from, a checkpoint's tensors and scaler, and let go of them; or the adapter that it starts from."""
    strategy, loaded = runtime.strategy, run.restored
    learned = loaded.adapter if loaded else run.initial_adapter()
    if learned is None:
        return
    here = {name: tuple(strategy.shape(p)) for name, p in strategy.trainable.items()}
    check_shapes(learned, here, str(loaded.path) if loaded else run.config.init_adapter)
    strategy.load_trainable({name: torch.from_numpy(array) for name, array in learned.items()})
    learned.clear()
    if not loaded:
        return
    strategy.load_moments({name: torch.from_numpy(array) for name, array in loaded.moments.items()})
    loaded.moments.clear()
    if loaded.state["loop"].get("scaler"):
        strategy.scaler.load_state_dict(loaded.state["loop"]["scaler"])


def restore_best(runtime: Runtime, run) -> None:
    """With `keep best`, what was learned is what the best evaluation saw."""
    best = run.best_adapter()
    if best:
        runtime.strategy.load_trainable({name: torch.from_numpy(array) for name, array in best.items()})


def finished(runtime: Runtime, built: BuiltModel, run) -> tuple[str, dict[str, Content], str]:
    """(folder, {file: content}, weights file) of what was learned: a PEFT adapter, or a whole model."""
    with quietly():
        files = run.pretrained_files("tokenizer", run.tokenizer)
    if built.adapter.folder == "model":
        files |= whole_model(runtime, run)
    else:
        tensors = built.adapter.tensors(runtime.strategy.gather_trainable())
        files[ADAPTER] = tensors_to_bytes({name: t.numpy() for name, t in tensors.items()}, {"format": "pt"})
        files[ADAPTER_CONFIG] = to_json(built.adapter.adapter_config())
    files["README.md"] = run.card().encode()
    return built.adapter.folder, files, WEIGHTS[built.adapter.folder]


def whole_model(runtime: Runtime, run) -> dict[str, Content]:
    """The files of a model that was trained whole, in the base's own type; the run is over. Nothing on a process that is not the first."""
    strategy, options = runtime.strategy, {"max_shard_size": "1000GB"}
    model = strategy.unwrap()
    dtype = getattr(torch, str(model.config.to_dict().get("dtype") or "float32"))
    if strategy.keeps_whole:
        return _files(run, model.to(dtype), **options) if runtime.is_main_process else {}
    learned = strategy.gather_trainable()
    values = {name: tensor.to(dtype) for name, tensor in learned.items()}
    return _files(run, model, **options, state_dict=values) if runtime.is_main_process else {}


def _files(run, model, **options) -> dict[str, Content]:
    with quietly():
        return run.pretrained_files("model", model, **options)
