"""The loop's engine on MLX: Apple silicon, or MLX's builds for Linux."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from anyqlora.core.errors import NotSupported
from anyqlora.core.files import Content, tensors_to_bytes, to_json
from anyqlora.core.registry import ADAPTER, ADAPTER_CONFIG
from anyqlora.data.stream import Batch
from anyqlora.models.architectures import read_config
from anyqlora.models.hub import base_directory
from anyqlora.on_mlx.build import build, check_gradients
from anyqlora.on_mlx.evaluate import evaluator
from anyqlora.on_mlx.memory import is_out_of_memory
from anyqlora.on_mlx.runtime import Runtime
from anyqlora.runs.checkpoints import check_shapes
from anyqlora.training.session import TrainingSession
from anyqlora.training.state import Arrays, FinalFiles, LoadSummary, Snapshot, StartingPoint, StepResult

STEP = "step"  # among the moments
WEIGHTS = {"adapter": ADAPTER, "model": "model.safetensors"}


class MlxEngine:
    """Fulfils training/engine.py's protocol; it writes the same files that torch's does."""

    def __init__(self, session: TrainingSession):
        self.config, self.process_group = session.config, session.process_group
        self.directory = str(session.directory)
        self.runtime = Runtime(session.plan)
        self.memory = session.on_exit(self.runtime.memory)

    def load(self, sample: Sequence[Batch]) -> LoadSummary:
        self.built = build(self.config, self.runtime)
        trained_numbers = sum(value.size for value in self.built.trainable().values())
        self.runtime.prepare(self.built, self.process_group)
        return LoadSummary(self.built.notes, (), trained_numbers)

    def restore(self, start: StartingPoint) -> None:
        runtime = self.runtime
        load(runtime, start.adapter, start.origin)
        start.adapter.clear()
        if start.moments is None:
            return
        for name, state in runtime.moments.items():
            state.clear()
            state |= {
                key.partition("|")[2]: mx.array(value)
                for key, value in start.moments.items()
                if key.partition("|")[0] == name
            }
            runtime.updates = int(state.pop(STEP, runtime.updates))
        start.moments.clear()
        if start.loop and start.loop.get("scaler") and runtime.scaler.enabled:
            runtime.scaler.load_state_dict(start.loop["scaler"])

    def load_trainable(self, arrays: Arrays) -> None:
        load(self.runtime, arrays, self.directory)

    def evaluator(self, session: TrainingSession) -> Callable[[], dict]:
        return evaluator(session, self.built)

    def gradients(self, batches: Sequence[Batch], seed: int, trained_tokens: int) -> float | None:
        self.runtime.seed(seed)
        try:
            return sum(self.runtime.backward(batch, trained_tokens) for batch in batches)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def discard_step(self) -> None:
        self.runtime.discard_step()

    def check_gradients(self) -> None:
        check_gradients(self.runtime.reduced())

    def step(self, lr: float, max_grad_norm: float | None, skip: bool) -> StepResult:
        return self.runtime.step(lr, max_grad_norm, skip=skip)

    def step_done(self) -> Sequence[str]:
        note = self.memory.strained()
        return (note,) if note else ()

    def snapshot(self) -> Snapshot:
        runtime = self.runtime
        count = np.array(runtime.updates, np.float32)  # torch counts for each tensor
        moments = {
            f"{name}|{key}": np.array(value)
            for name, state in runtime.moments.items()
            if state
            for key, value in {**state, STEP: count}.items()
        }
        scaler = {"scaler": runtime.scaler.state_dict()}
        return Snapshot(arrays_of(runtime.values), moments, self.built.adapter.adapter_config(), scaler)

    def final_files(self, tokenizer, pretrained_files: Callable[..., dict[str, Content]]) -> FinalFiles:
        adapter = self.built.adapter
        files = pretrained_files("tokenizer", tokenizer)
        if adapter.folder == "model":
            files |= self._whole_model()
        else:
            files[ADAPTER] = tensors_to_bytes(arrays_of(self.runtime.values), {"format": "pt"})
            files[ADAPTER_CONFIG] = to_json(adapter.adapter_config())
        return FinalFiles(adapter.folder, files, WEIGHTS[adapter.folder])

    def _whole_model(self) -> dict[str, Content]:
        """A model directory in Hugging Face's form; its weights have the base's own type."""
        directory = base_directory(self.config)
        model_config = read_config(directory)
        dtype = str(model_config.get("dtype") or model_config.get("torch_dtype") or "float32")
        if dtype not in ("float32", "float16", "bfloat16"):
            raise NotSupported(f"writing weights as {dtype}", where=str(directory / "config.json"))
        values = {name: value.astype(getattr(mx, dtype)) for name, value in self.runtime.values.items()}
        files: dict[str, Content] = {WEIGHTS["model"]: safetensors(values)}
        for name in ("config.json", "generation_config.json"):
            if (directory / name).is_file():
                content = json.loads((directory / name).read_text(encoding="utf-8"))
                files[name] = (json.dumps(content, indent=2) + "\n").encode()
        return files

    def used_memory(self) -> int:
        return self.memory.used()

    def peak_memory(self) -> int:
        return self.memory.peak()

    def phase(self, name: str):
        return contextlib.nullcontext()

    def span(self, name: str):
        return contextlib.nullcontext()


def load(runtime: Runtime, tensors: Arrays, where: str) -> None:
    """Put what was learned back. Raises UsageError naming tensors that are not of this run's name and shape."""
    check_shapes(tensors, {name: tuple(value.shape) for name, value in runtime.values.items()}, where)
    runtime.values = {name: mx.array(tensors[name]) for name in runtime.values}
    runtime.set_parameters(runtime.values)


def arrays_of(values: dict[str, mx.array]) -> Arrays:
    return {name: np.array(value) for name, value in values.items()}


def safetensors(values: dict[str, mx.array]) -> Content:
    """A safetensors file of MLX arrays; numpy has no bf16, so its bits go as they are."""
    arrays = {
        name: np.array(value.view(mx.uint16)) if value.dtype == mx.bfloat16 else np.array(value)
        for name, value in values.items()
    }
    dtypes = {name: "BF16" for name, value in values.items() if value.dtype == mx.bfloat16}
    return tensors_to_bytes(arrays, {"format": "pt"}, dtypes)
