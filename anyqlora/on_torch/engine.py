"""The loop's engine on torch: CUDA, ROCm, XPU, MPS or CPU, under any strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from anyqlora.core.files import Content, tensors_to_bytes, to_json
from anyqlora.core.registry import ADAPTER, ADAPTER_CONFIG
from anyqlora.data.stream import Batch
from anyqlora.on_torch._compat import quietly
from anyqlora.on_torch.assembly.build import build, optimizer_factory
from anyqlora.on_torch.assembly.checks import check_gradients
from anyqlora.on_torch.device import is_out_of_memory, seed_everything, set_deterministic
from anyqlora.on_torch.evaluate import evaluator
from anyqlora.on_torch.profiling.profiler import make_hooks
from anyqlora.on_torch.runtime import Runtime
from anyqlora.runs.checkpoints import check_shapes
from anyqlora.training.session import TrainingSession
from anyqlora.training.state import Arrays, FinalFiles, LoadSummary, Snapshot, StartingPoint, StepResult

WEIGHTS = {"adapter": ADAPTER, "model": "model.safetensors"}


class TorchEngine:
    """Fulfils training/engine.py's protocol over a Runtime, which is Accelerate's verbs over one strategy."""

    def __init__(self, session: TrainingSession):
        self.config = session.config
        set_deterministic(self.config.deterministic)
        seed_everything(self.config.seed)
        self.runtime = session.on_exit(Runtime(session.plan))
        self.memory = session.on_exit(self.runtime.memory)
        self.hooks = session.on_exit(make_hooks(session, self.memory))  # nothing, unless profiling is asked for
        self.phase, self.span = self.hooks.phase, self.hooks.span

    def load(self, sample: Sequence[Batch]) -> LoadSummary:
        self.built = build(self.config, self.runtime, sample)
        trained_numbers = sum(p.numel() for p in self.built.trainable.values())
        self.model, *_ = self.runtime.prepare(self.built.model, self.built.trainable, optimizer_factory(self.config))
        return LoadSummary(self.built.notes, self.built.news, trained_numbers)

    def restore(self, start: StartingPoint) -> None:
        strategy = self.runtime.strategy
        shapes = {name: tuple(strategy.shape(p)) for name, p in strategy.trainable.items()}
        check_shapes(start.adapter, shapes, start.origin)
        self.load_trainable(start.adapter)
        start.adapter.clear()
        if start.moments is not None:
            strategy.load_moments({name: torch.from_numpy(array) for name, array in start.moments.items()})
            start.moments.clear()
        if start.loop and start.loop.get("scaler"):
            strategy.scaler.load_state_dict(start.loop["scaler"])

    def load_trainable(self, arrays: Arrays) -> None:
        self.runtime.strategy.load_trainable({name: torch.from_numpy(array) for name, array in arrays.items()})

    def evaluator(self, session: TrainingSession) -> Callable[[], dict]:
        model = self.runtime.unwrap_model(self.model)
        return self.hooks.evaluation(evaluator(session, model, self.built.loss, self.runtime))

    def gradients(self, batches: Sequence[Batch], seed: int, trained_tokens: int) -> float | None:
        runtime = self.runtime
        seed_everything(seed)
        total = torch.zeros((), device=runtime.device)
        try:
            for number, batch in enumerate(batches, 1):
                is_final = number == len(batches)
                with runtime.micro_batch(is_final):
                    with self.hooks.phase("forward"), runtime.forward():
                        loss = self.built.loss(self.model, batch, runtime.device)
                    with self.hooks.phase("backward", is_final):
                        runtime.backward(loss / trained_tokens)  # every token of the step weighs the same
                total += loss.detach()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None
        return float(total)

    def discard_step(self) -> None:
        self.runtime.discard_step()

    def check_gradients(self) -> None:
        check_gradients(self.runtime.strategy)

    def step(self, lr: float, max_grad_norm: float | None, skip: bool) -> StepResult:
        return self.runtime.step(lr, max_grad_norm, skip=skip)

    def step_done(self) -> Sequence[str]:
        self.hooks.step_done()
        return ()

    def snapshot(self) -> Snapshot:
        strategy = self.runtime.strategy
        return Snapshot(
            adapter={name: tensor.numpy() for name, tensor in strategy.gather_trainable().items()},
            moments={name: tensor.numpy() for name, tensor in strategy.gather_moments().items()},
            adapter_config=self.built.adapter.adapter_config(),
            loop={"scaler": strategy.scaler.state_dict()},
        )

    def final_files(self, tokenizer, pretrained_files: Callable[..., dict[str, Content]]) -> FinalFiles:
        adapter = self.built.adapter
        with quietly():
            files = pretrained_files("tokenizer", tokenizer)
        if adapter.folder == "model":
            files |= self._whole_model(pretrained_files)
        else:
            tensors = adapter.tensors(self.runtime.strategy.gather_trainable())
            files[ADAPTER] = tensors_to_bytes({name: t.numpy() for name, t in tensors.items()}, {"format": "pt"})
            files[ADAPTER_CONFIG] = to_json(adapter.adapter_config())
        return FinalFiles(adapter.folder, files, WEIGHTS[adapter.folder])

    def _whole_model(self, pretrained_files: Callable[..., dict[str, Content]]) -> dict[str, Content]:
        """A model that was trained whole, in the base's own type; the run is over.

        Nothing on a process that is not the first.
        """
        strategy, options = self.runtime.strategy, {"max_shard_size": "1000GB"}
        model = strategy.unwrap()
        dtype = getattr(torch, str(model.config.to_dict().get("dtype") or "float32"))
        if strategy.keeps_whole:
            model = model.to(dtype) if self.runtime.is_main_process else model
        else:
            learned = strategy.gather_trainable()
            options["state_dict"] = {name: tensor.to(dtype) for name, tensor in learned.items()}
        with quietly():
            return pretrained_files("model", model, **options) if self.runtime.is_main_process else {}

    def used_memory(self) -> int:
        return self.memory.used()

    def peak_memory(self) -> int:
        return self.memory.peak()
