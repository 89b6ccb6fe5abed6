"""One run in one process: which step comes next, its batches and seed, what is reported, when to evaluate and save, how
it stops.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from statistics import median
from typing import Protocol, TypeVar

import psutil

from anyqlora.config import init_adapter
from anyqlora.core.errors import NonFinite, OutOfMemory, RunError, UsageError
from anyqlora.core.files import to_json
from anyqlora.core.redaction import redacted
from anyqlora.core.registry import ADAPTER, ADAPTER_CONFIG
from anyqlora.data.audit import shortened, warnings, written_as
from anyqlora.data.dataset import DataSplits
from anyqlora.data.stream import Batch, BatchStream
from anyqlora.models.hub import base_directory
from anyqlora.planning.fitting import halve
from anyqlora.processes.group import ProcessGroup, SingleProcess
from anyqlora.runs.checkpoints import read_adapter
from anyqlora.runs.directory import RunDirectory, read_json
from anyqlora.runs.model_card import model_card
from anyqlora.runs.provenance import environment
from anyqlora.runs.stop_tokens import GENERATION_CONFIG, generation_config, name_end_token
from anyqlora.training.evaluation_policy import EvaluationPolicy
from anyqlora.training.outputs import NullOutputs, RunOutputs
from anyqlora.training.schedule import learning_rate, seed_at
from anyqlora.training.signals import Signals
from anyqlora.training.spike_guard import SpikeGuard
from anyqlora.training.state import Arrays, FinalFiles, LoadSummary, Snapshot, StartingPoint, StepResult, TrainState

NON_FINITE_LIMIT = 3


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class TrainingSession:
    """Steps, and what the processes of a run agree on in each.

    What is written and what evaluations decide are collaborators.
    """

    def __init__(
        self,
        run_directory: RunDirectory,
        plan,
        data: DataSplits,
        stream: BatchStream,
        tokenizer,
        process_group: SingleProcess | None = None,
    ):
        self.run_directory, self.directory = run_directory, run_directory.directory
        self.restored, self.is_finished = run_directory.restored, run_directory.finished
        self.plan, self.config = plan, plan.config
        self.data, self.stream, self.tokenizer = data, stream, tokenizer
        self.total_steps = stream.total_steps
        self.process_group = process_group or SingleProcess()
        kind = RunOutputs if self.process_group.is_first else NullOutputs
        self.outputs = kind(run_directory, plan, self.total_steps)
        self.console = self.outputs.console
        self._exit_stack = contextlib.ExitStack()  # closed on every way out, the last first
        self.on_exit(self.outputs)
        if not self.is_finished:
            self._open()

    def _open(self) -> None:
        restored = self.restored
        self.state = TrainState.from_state(restored.state) if restored else TrainState()
        self.written_state = self.state  # of the step whose weights are written in the end
        self.first_step = self.saved_step = self.state.step  # saved: or as near to it as the disk allows
        self.spike_guard = SpikeGuard(self.config.spike_guard, self.state.recent_losses)
        self.machine = environment(self.plan)
        self._check_resume()
        self.outputs.open(self.machine, self.data, self.state)
        if isinstance(self.process_group, ProcessGroup):
            self._write_stacks(self.process_group)
        for warning in warnings(self.data.report):
            self.console.warn(warning)
        for note in self.data.notes:
            self.console.warn(note)
        for line in self.data.news:
            self.console.info(line)
        if not restored and self.data.train:
            self.console.info(written_as(self.data.report))
            self.console.info(f"the first: {shortened(self.data.train[0], self.tokenizer)}")
        self.evaluations = EvaluationPolicy(
            self.config, self.state, self.outputs, bool(self.data.held_out), is_resumed=restored is not None
        )
        self.step_started = time.perf_counter()
        self.started = self.step_started - self.state.seconds  # as if one process had done it all
        self.recent_seconds: deque[float] = deque(maxlen=20)
        self.first_step_at: float | None = None  # seconds since the process started
        self.is_spike = self.gradients_checked = False
        self.signals = self.on_exit(
            Signals(lambda: self.outputs.describe_saved(self.last_step), is_alone=self.process_group.size == 1)
        )

    def __enter__(self) -> TrainingSession:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._exit_stack.close()

    def on_exit(self, thing: C) -> C:
        """`thing`, which is closed when the run ends, however it ends."""
        self._exit_stack.callback(thing.close)
        return thing

    def _check_resume(self) -> None:
        """Say what was passed over to find the checkpoint that the run goes on from, and what ends byte-identity with
        it.
        """
        for path, reason in self.run_directory.rejected:
            self.console.warn(f"{path} is not used: {reason}")
        if not self.restored:
            return
        if self.run_directory.replaces and self.first_step >= self.total_steps:
            raise UsageError(
                f"--resume force: {self.first_step} steps are done, and with these settings the run has "
                f"{self.total_steps}",
                where=str(self.directory),
                cure="a larger --max_steps or --num_epochs; or the settings that it had",
            )
        before, now = self.restored.machine, self.machine
        if before != now:
            changed = [
                f"{key} {before.get(key)} -> {now.get(key)}"
                for key in sorted({*before, *now})
                if before.get(key) != now.get(key)
            ]
            self.console.warn(
                f"goes on from step {self.first_step}, but not to the same bytes as before: {'; '.join(changed)}"
            )
        if before.get("batch_size") == now["batch_size"]:  # else somebody has chosen another one since
            self.stream.resize(self.state.batch_size)

    def _write_stacks(self, process_group: ProcessGroup) -> None:
        """From here on, where the processes of a run that hangs are goes into its directory."""
        process_group.broadcast(None)  # the first one has made the directory and taken it
        directory = self.directory / "stacks"
        try:
            process_group.write_stacks(directory)
        except OSError as error:  # the first one's disk is full, or another's machine has none for it: that ends no run
            self.console.warn(f"where processes that hang are will not be told: {directory}: {error.strerror or error}")

    # ------------------------------------------------------------------------------------------------ the beginning

    def announce(self, loaded: LoadSummary) -> None:
        """Say what the model cannot take of the plan.

        Raises DiskFull when what the run will write clearly does not fit.
        """
        for note in loaded.notes:
            self.console.warn(note)
        for line in loaded.news:
            self.console.info(line)
        self.outputs.check_room(loaded.trained_numbers)

    def starting_point(self) -> StartingPoint | None:
        """A checkpoint, or the adapter that init_adapter names; None for a run that starts from the base model
        alone.
        """
        restored, config = self.restored, self.config
        if restored:
            return StartingPoint(str(restored.path), restored.adapter, restored.moments, restored.state["loop"])
        if not config.init_adapter:
            return None
        directory = init_adapter.init_adapter_directory(config)
        base = (read_json(directory / ADAPTER_CONFIG) or {}).get("base_model_name_or_path")
        self.console.info(
            f"starts from {config.init_adapter}: {config.adapter}, rank {config.lora_rank}, alpha "
            f"{config.lora_alpha:g}, "
            f"trained on {base}"
        )
        adapter = read_adapter(directory / ADAPTER) if self.process_group.is_first else None
        return StartingPoint(config.init_adapter, self.process_group.broadcast_arrays(adapter) or {})

    # ------------------------------------------------------------------------------------------------ the steps

    @property
    def last_step(self) -> int:
        """Finished steps."""
        return self.state.step

    def steps(self) -> Iterator[tuple[int, float]]:
        """(step, learning rate) of every optimizer step that is left.

        Raises Stopped after a signal, once what was trained is saved.
        """
        self.signals.in_loop = True
        for step in range(self.first_step, self.total_steps):
            # Elsewhere the signal came when it was decided not to save, and the next step will be saved.
            if step == self.saved_step:
                self.signals.check()
            if self.evaluations.stops_early:
                break
            self.step_started = time.perf_counter()
            yield step, learning_rate(step, self.total_steps, self.config)
        self.signals.in_loop = False  # from here on a stop is raised at once; one that came before is raised now
        self.sync_signals()
        self.signals.check()

    def batches(self, step: int) -> list[Batch]:
        """This process's micro-batches of a step."""
        return self.stream[step]

    def trained_tokens(self, step: int) -> int:
        """Trained tokens of the whole step, over all micro-batches and processes."""
        return self.stream.counts(step)[0]

    def seed(self, step: int) -> int:
        """The seed of dropout: processes with the same rows draw the same."""
        return seed_at(self.config.seed, step, self.stream.rank)

    def all_reduce_loss(self, step: int, total: float | None) -> float | None:
        """The step's loss per trained token, from each process's sum over its own tokens; None when memory ran out.

        The processes also agree here on the signals that came to any of them. Raises OutOfMemory where memory ran out
        and there are other processes: they are in the middle of the step, and wait for this one.
        """
        if total is None and self.process_group.size > 1:
            raise OutOfMemory(
                f"rank {self.process_group.rank} ran out of memory in step {step + 1}",
                cure=f"a --batch_size below {self.stream.batch_size}, and as many more --gradient_accumulation_steps",
            )
        share = self.plan.data_processes / self.plan.world_size  # processes with the same rows have the same sum
        (everybodys,) = self.sync_signals(total or 0.0)
        return None if total is None else everybodys * share / self.trained_tokens(step)

    def sync_signals(self, *values: float) -> list[float]:
        """Each value summed over all processes, which learn on the way of the signals that came to any of them."""
        sums = self.process_group.all_reduce_sum(*values, *self.signals.asked_numbers())
        self.signals.agree(sums[len(values) :])
        return sums[: len(values)]

    def check_signals(self) -> None:
        """Called between batches of an evaluation, of which all processes have the same.

        Raises Interrupted after a signal.
        """
        self.sync_signals()
        self.signals.interrupt()

    def halve_micro_batch(self, step: int) -> list[Batch]:
        """The same step in micro-batches of half the size or a little less, from now on; rows, order and global batch
        stay.

        Raises RunError when a micro-batch is a single row already.
        """
        size = self.stream.batch_size
        if size == 1:
            raise RunError(
                "out of memory with a single row in the micro-batch",
                where=self.stream[step][0].rows[0],
                cure="a shorter --context_length, --use_gradient_checkpointing true, or a smaller --lora_rank",
            )
        smaller, _ = halve(size, self.stream.accumulation)
        self.stream.resize(smaller)
        self.console.warn(
            f"out of memory in step {step + 1}: micro-batches of {smaller} rows instead of {size} from here on, and "
            f"the step again"
        )
        return self.stream[step]

    def should_check_gradients(self, step: int) -> bool:
        """Whether this is the first step of this process after which every trained tensor must have a gradient."""
        if self.gradients_checked or not self.stream.attends(step):
            return False
        self.gradients_checked = True
        return True

    def should_skip(self, loss: float) -> bool:
        """Whether the step with this loss is to be skipped: not finite, or a spike."""
        self.is_spike = self.spike_guard.refuses(loss)
        return self.is_spike or not math.isfinite(loss)

    def report(self, step: int, loss: float, result: StepResult, lr: float, memory_bytes: int) -> None:
        """Record a finished step. Raises NonFinite when the third step in a row could not be used."""
        trained, seen = self.stream.counts(step)
        seconds = time.perf_counter() - self.step_started
        self.recent_seconds.append(seconds)
        if self.first_step_at is None:
            self.first_step_at = seconds_since_process_start()
        scaler_mends = result.skipped and result.loss_scale > 1 and math.isfinite(loss) and not self.is_spike
        is_lost = result.skipped and not scaler_mends and not self.is_spike
        state = self.state
        state.step = step + 1
        self.run_directory.is_empty = False
        state.non_finite = state.non_finite + 1 if is_lost else 0
        state.tokens_trained += 0 if result.skipped else trained
        state.tokens_seen += seen
        state.loop_seconds += seconds
        record = {
            "step": step + 1,
            "epoch": round(self.stream.epoch(step + 1), 4),
            "loss": loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "skipped": result.skipped,
            "loss_scale": result.loss_scale,
            "tokens": seen,
            "trained_tokens": trained,
            "seconds": seconds,
            "tokens_per_second": seen / seconds,
            "trained_tokens_per_second": trained / seconds,
            "memory_bytes": memory_bytes,
        }
        if result.skipped:
            record["rows"] = redacted(", ".join(self.stream.rows(step)))
            why = (
                "its loss is a spike"
                if self.is_spike
                else "fp16 overflowed and the loss scale shrinks"
                if scaler_mends
                else "loss or gradient is not finite"
            )
            self.console.warn(f"step {step + 1} is skipped: {why}; its rows: {record['rows']}")
        if self.due("log", step) or result.skipped:
            self.outputs.write_step(record, median(self.recent_seconds) * (self.total_steps - step - 1))
        if state.non_finite >= NON_FINITE_LIMIT:
            raise NonFinite(
                f"{NON_FINITE_LIMIT} steps in a row were not finite; the last was step {step + 1}",
                where=self.stream.rows(step)[0],
                cure="a smaller --lr, --precision fp32 or bf16, or look at the rows named above",
            )

    # ------------------------------------------------------------------------------------------------ once in a while

    def due(self, event: str, step: int) -> bool:
        """Whether `event` ("evaluate", "save", "log") comes after step `step` (from 0)."""
        done, config = step + 1, self.config
        is_last = done == self.total_steps
        evaluate = self.evaluations.due(done, is_last)
        if event == "evaluate":
            return evaluate
        if event == "save":
            regular = config.save_steps and done % config.save_steps == 0
            best = evaluate and self.evaluations.keeps_best  # so that the best one has a checkpoint
            asked = self.signals.save or self.signals.stop is not None
            return bool(regular or best or is_last or asked or self.evaluations.stops_early)
        return is_last or done % config.log_every_n_steps == 0

    def evaluate(self, step: int, evaluator: Callable[[], dict]) -> None:
        """Evaluate after `step` finished steps."""
        self.evaluations.evaluate(step, evaluator)

    def save(self, step: int, snapshot: Callable[[], Snapshot]) -> None:
        """Write the checkpoint of `step` finished steps."""
        state = self.state
        state.recent_losses, state.batch_size = list(self.spike_guard.recent), self.stream.batch_size
        state.seconds, state.saving_seconds = time.perf_counter() - self.started, self.outputs.saving_seconds
        state.lines = self.outputs.line_counts()
        # Which is so once it is written, and stands in it.
        before, state.best_saved = state.best_saved, self.evaluations.best_with_checkpoint(step)
        if not self.outputs.save(state, self.signals.stop is not None, snapshot):
            state.best_saved = before
        if self.signals.stop is not None:
            # A process that ended before the first one has written would have it ended in the middle of that.
            self.process_group.barrier()
        self.signals.save, self.saved_step = False, step

    # ------------------------------------------------------------------------------------------------ the end

    def best_adapter(self) -> Arrays | None:
        """What was learned at the step that `load_best_model_at_end` ends with; None where that is the last step
        anyway.
        """
        if not self.evaluations.keeps_best:
            return None
        best, last = self.evaluations.earlier_best(), self.evaluations.final
        loaded = self.outputs.best_checkpoint(best["step"]) if best else None
        if best and loaded and last:
            self.console.info(
                f"step {best['step']} was the best: its evaluation loss is {best['loss']:.4f}, that of step "
                f"{self.last_step} is "
                f"{last['loss']:.4f}; what it had learned is written"
            )
            self.written_state, self.evaluations.final = TrainState.from_state(loaded.state), best
        return self.process_group.broadcast_arrays(loaded and loaded.adapter)  # only the first process can say

    def stopping_tokenizer(self):
        """The tokenizer as it is saved: its end token is the one that the answers end with."""
        name_end_token(self.tokenizer, base_directory(self.config), self.data.report)
        return self.tokenizer

    def finish(self, final: FinalFiles, peak_memory_bytes: int) -> dict:
        """Write what was learned, and result.json last of all. Returns its content."""
        settings = generation_config(base_directory(self.config), self.tokenizer, self.data.report)
        final.files[GENERATION_CONFIG] = to_json(settings)
        adapter_sha256 = self.outputs.write_final(final, lambda: model_card(self))
        state, plan, spent = self.state, self.plan, self.state.loop_seconds or math.inf
        result = {
            "status": "finished",
            "backend": str(plan.backend),
            "strategy": plan.strategy,
            "quantizer": plan.quantizer,
            "adapter": plan.adapter,
            "world_size": plan.world_size,
            "steps": self.last_step,
            "epochs": round(self.stream.epoch(self.last_step), 4),
            "tokens_trained": state.tokens_trained,
            "tokens_seen": state.tokens_seen,
            "seconds": time.perf_counter() - self.started,
            "tokens_per_second": state.tokens_seen / spent,
            "trained_tokens_per_second": state.tokens_trained / spent,
            "saving_seconds": self.outputs.saving_seconds,
            "finding_seconds": self.run_directory.seconds,
            "time_to_first_step_s": self.first_step_at,
            "peak_memory_bytes": peak_memory_bytes,
            "planned_memory_bytes": plan.memory.total if plan.memory else None,
            "adapter_sha256": adapter_sha256,
            "adjustments": [asdict(adjustment) for adjustment in plan.adjustments],
            "eval": {"before": state.before, "after": self.evaluations.final} if self.evaluations.final else None,
        }
        self.evaluations.warn_if_nothing_gained()
        self._exit_stack.close()
        return self.outputs.write_result(result)


def seconds_since_process_start() -> float:
    return time.time() - psutil.Process().create_time()
