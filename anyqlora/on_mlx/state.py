"""What the MLX loop saves and restores, as named numpy arrays and files: the same that on_torch writes."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np

from anyqlora.core.errors import NotSupported
from anyqlora.core.files import Content, tensors_to_bytes, to_json
from anyqlora.core.registry import ADAPTER, ADAPTER_CONFIG
from anyqlora.models.architectures import read_config
from anyqlora.models.hub import base_directory
from anyqlora.on_mlx.build import BuiltModel
from anyqlora.on_mlx.runtime import Runtime
from anyqlora.runs.checkpoints import check_shapes

STEP = "step"  # among the moments
WEIGHTS = {"adapter": ADAPTER, "model": "model.safetensors"}


def snapshot(runtime: Runtime, built: BuiltModel) -> tuple[dict, dict, dict, dict]:
    """(adapter, moments, adapter_config, loop state) for `Run.save`."""
    count = np.array(runtime.updates, np.float32)  # torch counts for each tensor
    moments = {
        f"{name}|{key}": np.array(value)
        for name, state in runtime.moments.items()
        if state
        for key, value in {**state, STEP: count}.items()
    }
    return arrays_of(runtime.values), moments, built.adapter.adapter_config(), {"scaler": runtime.scaler.state_dict()}


def arrays_of(values: dict[str, mx.array]) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in values.items()}


def restore(runtime: Runtime, run) -> None:
    """Put back what the run goes on from, a checkpoint's tensors and scaler, and let go of them; or the adapter that it starts from."""
    loaded = run.restored
    learned = loaded.adapter if loaded else run.initial_adapter()
    if learned is None:
        return
    load(runtime, learned, str(loaded.path) if loaded else run.config.init_adapter)
    learned.clear()
    if not loaded:
        return
    for name, state in runtime.moments.items():
        state.clear()
        state |= {
            key.partition("|")[2]: mx.array(value)
            for key, value in loaded.moments.items()
            if key.partition("|")[0] == name
        }
        runtime.updates = int(state.pop(STEP, runtime.updates))
    loaded.moments.clear()
    if loaded.state["loop"].get("scaler") and runtime.scaler.enabled:
        runtime.scaler.load_state_dict(loaded.state["loop"]["scaler"])


def load(runtime: Runtime, tensors: dict[str, np.ndarray], where: str) -> None:
    """Put what was learned back. Raises UsageError naming tensors that are not of this run's name and shape."""
    check_shapes(tensors, {name: tuple(value.shape) for name, value in runtime.values.items()}, where)
    runtime.values = {name: mx.array(tensors[name]) for name in runtime.values}
    runtime.set_parameters(runtime.values)


def restore_best(runtime: Runtime, run) -> None:
    """With `keep best`, what was learned is what the best evaluation saw."""
    best = run.best_adapter()
    if best:
        load(runtime, best, str(run.directory))


def finished(runtime: Runtime, built: BuiltModel, run) -> tuple[str, dict[str, Content], str]:
    """(folder, {file: content}, weights file) of what was learned: a PEFT adapter, or a whole model."""
    files = run.pretrained_files("tokenizer", run.tokenizer)
    if built.adapter.folder == "model":
        files |= model_files(runtime, run)
    else:
        files[ADAPTER] = tensors_to_bytes(arrays_of(runtime.values), {"format": "pt"})
        files[ADAPTER_CONFIG] = to_json(built.adapter.adapter_config())
    files["README.md"] = run.card().encode()
    return built.adapter.folder, files, WEIGHTS[built.adapter.folder]


def model_files(runtime: Runtime, run) -> dict[str, Content]:
    """A model directory in Hugging Face's form; its weights have the base's own type."""
    directory = base_directory(run.config)
    described = read_config(directory)
    dtype = str(described.get("dtype") or described.get("torch_dtype") or "float32")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise NotSupported(f"writing weights as {dtype}", where=str(directory / "config.json"))
    values = {name: value.astype(getattr(mx, dtype)) for name, value in runtime.values.items()}
    files: dict[str, Content] = {"model.safetensors": safetensors(values)}
    for name in ("config.json", "generation_config.json"):
        if (directory / name).is_file():
            files[name] = (
                json.dumps(json.loads((directory / name).read_text(encoding="utf-8")), indent=2) + "\n"
            ).encode()
    return files


def safetensors(values: dict[str, mx.array]) -> Content:
    """A safetensors file of MLX arrays; numpy has no bf16, so its bits go as they are."""
    held = {
        name: np.array(value.view(mx.uint16)) if value.dtype == mx.bfloat16 else np.array(value)
        for name, value in values.items()
    }
    return tensors_to_bytes(
        held, {"format": "pt"}, {name: "BF16" for name, value in values.items() if value.dtype == mx.bfloat16}
    )
