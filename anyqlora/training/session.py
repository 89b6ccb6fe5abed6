"""What both loops share: which step comes next, its batches and seed, what is logged, when to evaluate and save, how a run stops."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from statistics import median

from anyqlora.config import init_adapter
from anyqlora.core.errors import DiskFull, NonFinite, OutOfMemory, RunError, UsageError
from anyqlora.core.files import (
    Content,
    FileSystem,
    pretrained_files,
    replace_file,
    size_and_sha256,
    to_json,
    write_directory,
)
from anyqlora.core.redaction import redacted
from anyqlora.core.registry import ADAPTER, ADAPTER_CONFIG
from anyqlora.data.audit import warnings
from anyqlora.data.dataset import DataSplits
from anyqlora.data.stream import Batch, BatchStream
from anyqlora.planning.fitting import halve
from anyqlora.processes.group import SingleProcess
from anyqlora.reporting.console import JsonLines, Metrics
from anyqlora.reporting.select import make_reporter
from anyqlora.reporting.trackers import Trackers
from anyqlora.runs.checkpoints import read_adapter
from anyqlora.runs.directory import IDENTITY, RESULT, RunDirectory, read_json, unwritable
from anyqlora.runs.model_card import model_card
from anyqlora.runs.provenance import environment, run_files
from anyqlora.runs.saver import CheckpointSaver
from anyqlora.training.schedule import learning_rate, seed_at
from anyqlora.training.signals import Interrupted, Signals
from anyqlora.training.spike_guard import SpikeGuard
from anyqlora.training.state import TrainState, is_better

NON_FINITE_LIMIT = 3


class TrainingSession:
    """One run: its directory, its position, and its cadence."""

    def __init__(
        self,
        place: RunDirectory,
        plan,
        data: DataSplits,
        stream: BatchStream,
        tokenizer,
        ranks: SingleProcess | None = None,
    ):
        self.run_directory, self.plan, self.config, self.data, self.stream, self.tokenizer = (
            place,
            plan,
            plan.config,
            data,
            stream,
            tokenizer,
        )
        self.directory, self.restored, self.finished = place.directory, place.restored, place.finished
        self.total_steps = stream.total_steps
        self.process_group = ranks or SingleProcess()
        self.disk = FileSystem()
        self.console = self._view()
        self._exit_stack = contextlib.ExitStack()  # closed on every way out, the last first
        self._exit_stack.callback(self.console.close)
        if self.finished:
            return
        self.progress = TrainState.from_state(self.restored.state) if self.restored else TrainState()
        self.first_step, self.after = self.progress.step, self.progress.after
        self.saved_step = self.first_step  # or as near to it as the disk allows
        self.written_state = self.progress  # of the step whose weights are written in the end
        self.spikes = SpikeGuard(self.config.spike_guard, self.progress.recent_losses)
        self.machine = environment(plan)
        self._compare()
        self._describe()
        if self.process_group.size > 1:
            self._write_stacks()
        for finding in warnings(data.report):
            self.console.warn(finding)
        self._open()
        self.step_started = time.perf_counter()
        self.started = self.step_started - self.progress.seconds  # as if one process had done it all
        self.recent_seconds: deque[float] = deque(maxlen=20)
        self.first_step_at: float | None = None
        self.is_spike = self.gradients_shown = False
        self.signals = self.on_exit(
            Signals(lambda: self.saver.describe(self.last_step), is_alone=self.process_group.size == 1)
        )

    def __enter__(self) -> TrainingSession:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._exit_stack.close()

    def on_exit(self, thing):
        """`thing`, which is closed when the run ends, however it ends."""
        self._exit_stack.callback(thing.close)
        return thing

    def _view(self):
        return make_reporter(self.plan, self.total_steps)

    def _open(self) -> None:
        """The files that grow with the run, and its checkpoints."""
        warn, lines = self.console.warn, self.progress.lines
        trackers = Trackers(self.config, self.directory, self.restored is not None, warn, self.first_step)
        self.samples = self.on_exit(JsonLines(self.directory / "samples.jsonl", lines.get("samples.jsonl", 0), warn))
        self.metrics = self.on_exit(
            Metrics(self.directory / "metrics.jsonl", lines.get("metrics.jsonl", 0), trackers, warn)
        )
        self.saver = CheckpointSaver(
            self.run_directory, self.config, self.machine, self.disk, warn, self.progress.saving_seconds
        )
        self._forget_lost_best()

    def _forget_lost_best(self) -> None:
        """A best step without a checkpoint, since `keep` was a number before or it was damaged, is none that `keep best` can end with."""
        progress = self.progress
        if self.config.keep == "best" and progress.best and not self.saver.contains(progress.kept):
            self.console.warn(
                f"the best step so far, {(progress.kept or progress.best)['step']}, has no checkpoint: keep best looks for another one from here on"
            )
            progress.kept = None

    def _compare(self) -> None:
        """Say what was passed over to find the checkpoint that the run goes on from, and what ends byte-identity with it."""
        for path, reason in self.run_directory.rejected:
            self.console.warn(f"{path} is not used: {reason}")
        if not self.restored:
            return
        if self.run_directory.replaces and self.first_step >= self.total_steps:
            raise UsageError(
                f"--resume force: {self.first_step} steps are done, and with these settings the run has {self.total_steps}",
                where=str(self.directory),
                cure="a larger --max_steps or --num_epochs; or the settings that it had",
            )
        there, here = self.restored.machine, self.machine
        if there != here:
            changed = [
                f"{key} {there.get(key)} -> {here.get(key)}"
                for key in sorted({*there, *here})
                if there.get(key) != here.get(key)
            ]
            self.console.warn(
                f"goes on from step {self.first_step}, but not to the same bytes as before: {'; '.join(changed)}"
            )
        if there.get("batch_size") == here["batch_size"]:  # else somebody has chosen another one since
            self.stream.resize(self.progress.batch_size)

    def _describe(self) -> None:
        """Write what was asked, what was planned, and where it runs."""
        files = run_files(self.plan, self.machine, self.data.report)
        if not (
            self.restored and self.run_directory.replaces
        ):  # else the checkpoints there are of another identity, until one is saved
            files = {IDENTITY: to_json(self.run_directory.identity), **files}  # by which the run is found again
        try:
            self.disk.make_directory(self.directory)
            self.run_directory.lock()
            self.run_directory.reopen(
                self.disk
            )  # before its identity is another: a kill in between leaves the old run, short of its end
            for name, content in files.items():
                replace_file(self.directory / name, content, self.disk)
        except OSError as error:
            raise unwritable(self.directory, error) from None

    def _write_stacks(self) -> None:
        """From here on, where the processes of a run that hangs are goes into its directory."""
        self.process_group.broadcast(None)  # the first one has made the directory and taken it
        try:
            self.process_group.write_stacks(self.directory / "stacks")
        except OSError as error:  # the first one's disk is full, or another's machine has none for it: that ends no run
            self.console.warn(
                f"where processes that hang are will not be told: {self.directory / 'stacks'}: {error.strerror or error}"
            )

    @property
    def last_step(self) -> int:
        return self.progress.step

    @property
    def pending_evaluation(self) -> bool:
        return self.progress.pending_evaluation

    @property
    def stops_early(self) -> bool:
        return 0 < self.config.early_stopping <= self.progress.without_improvement

    @property
    def ends_unevaluated(self) -> bool:
        """Whether the held-out rows have not seen the last step yet: an evaluation that ended the run early has shown it to them."""
        return bool(self.data.held_out) and (self.after is None or self.after["step"] != self.last_step)

    def check_room(self, trained_numbers: int) -> None:
        """Raises DiskFull when what the run will write clearly does not fit."""
        self.saver.check_room(trained_numbers)

    # ------------------------------------------------------------------------------------------------ the steps

    def steps(self) -> Iterator[tuple[int, float]]:
        """(step, learning rate) of every optimizer step that is left. Raises Stopped after a signal, as soon as what was trained is saved."""
        self.signals.in_loop = True
        for step in range(self.first_step, self.total_steps):
            if (
                step == self.saved_step
            ):  # else the signal came when it was decided not to save, and the next step will be saved
                self.signals.check()
            if self.stops_early:
                break
            self.step_started = time.perf_counter()
            yield step, learning_rate(step, self.total_steps, self.config)
        self.signals.in_loop = False  # from here on a stop is raised at once; one that came before is raised now
        self.sync_signals()
        self.signals.check()

    def batches(self, step: int) -> list[Batch]:
        """This process's micro-batches of a step."""
        return self.stream[step]

    def trained(self, step: int) -> int:
        """Trained tokens of the whole step, over all micro-batches and processes."""
        return self.stream.counts(step)[0]

    def all_reduce_loss(self, step: int, total: float | None) -> float | None:
        """The step's loss per trained token, from each process's sum over its own tokens; None when one of them ran out of memory.

        The processes also agree here on the signals that came to any of them.
        """
        share = self.plan.data_processes / self.plan.world_size  # processes with the same rows have the same sum
        sums = self.sync_signals(total or 0.0, float(total is None))
        return None if sums[1] else sums[0] * share / self.trained(step)

    def sync_signals(self, *values: float) -> list[float]:
        """Each value summed over all processes, which learn on the way of the signals that came to any of them."""
        sums = self.process_group.all_reduce_sum(*values, *self.signals.asked_numbers())
        self.signals.agree(sums[len(values) :])
        return sums[: len(values)]

    def out_of_memory(self, step: int) -> None:
        """Raises OutOfMemory where there are other processes: they are in the middle of the step, and wait for this one."""
        if self.process_group.size > 1:
            raise OutOfMemory(
                f"rank {self.process_group.rank} ran out of memory in step {step + 1}",
                cure=f"a --batch_size below {self.stream.batch_size}, and as many more --gradient_accumulation_steps",
            )

    def halve_micro_batch(self, step: int) -> list[Batch]:
        """The same step in micro-batches of half the size or a little less, from now on; the rows, their order and the global batch stay.

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
            f"out of memory in step {step + 1}: micro-batches of {smaller} rows instead of {size} from here on, and the step again"
        )
        return self.stream[step]

    def seed(self, step: int) -> int:
        """The seed of dropout: processes with the same rows draw the same."""
        return seed_at(self.config.seed, step, self.stream.rank)

    def should_check_gradients(self, step: int) -> bool:
        """Whether this is the first step of this process after which every trained tensor must have a gradient."""
        if self.gradients_shown or not self.stream.attends(step):
            return False
        self.gradients_shown = True
        return True

    def should_skip(self, loss: float) -> bool:
        """Whether the step with this loss is to be skipped: not finite, or a spike."""
        self.is_spike = self.spikes.refuses(loss)
        return self.is_spike or not math.isfinite(loss)

    def due(self, event: str, step: int) -> bool:
        """Whether `event` ("evaluate", "save", "log") comes after step `step` (from 0)."""
        done = step + 1
        last = done == self.total_steps
        evaluate = (
            bool(self.data.held_out) and not last and self.config.eval_steps > 0 and done % self.config.eval_steps == 0
        )
        if event == "evaluate":
            return evaluate
        if event == "save":
            every = self.config.save_steps and done % self.config.save_steps == 0
            best = evaluate and self.config.keep == "best"  # so that the best one has a checkpoint
            return bool(every or best or last or self.signals.save or self.signals.stop is not None or self.stops_early)
        return last or done % self.config.log_every_n_steps == 0

    def report(self, step: int, loss: float, result, lr: float, memory_bytes: int) -> None:
        """Record a finished step. Raises NonFinite when the third step in a row could not be used."""
        trained, seen = self.stream.counts(step)
        seconds = time.perf_counter() - self.step_started
        self.recent_seconds.append(seconds)
        if self.first_step_at is None:
            self.first_step_at = seconds_since_process_start()
        scaler_mends = result.skipped and result.loss_scale > 1 and math.isfinite(loss) and not self.is_spike
        progress = self.progress
        progress.step = step + 1
        self.run_directory.is_empty = False
        progress.non_finite = (
            progress.non_finite + 1 if result.skipped and not scaler_mends and not self.is_spike else 0
        )
        progress.tokens_trained += 0 if result.skipped else trained
        progress.tokens_seen += seen
        progress.loop_seconds += seconds
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
            self.metrics.write(record)
            self.console.step({**record, "eta_seconds": median(self.recent_seconds) * (self.total_steps - step - 1)})
        if progress.non_finite >= NON_FINITE_LIMIT:
            raise NonFinite(
                f"{NON_FINITE_LIMIT} steps in a row were not finite; the last was step {step + 1}",
                where=self.stream.rows(step)[0],
                cure="a smaller --lr, --precision fp32 or bf16, or look at the rows named above",
            )

    def evaluate(self, step: int, evaluation: Callable[[], dict]) -> None:
        """Evaluate after `step` finished steps; keeps the best and counts towards early stopping.

        A signal drops what was found so far: in the loop the checkpoint then says that this evaluation comes first.
        """
        progress = self.progress
        try:
            found = evaluation()
        except Interrupted:
            progress.pending_evaluation = True
            return
        progress.pending_evaluation = False
        record = {"step": step, "event": "evaluation", **without_samples(found)}
        self.metrics.write(record)
        self.console.evaluation(record)
        for sample in found.get("samples", []):
            self.samples.write({"step": step, **sample})
        if step == 0:
            progress.before = without_samples(found)
            return
        self.after = progress.after = {"step": step, **without_samples(found)}
        progress.evaluated(self.after)
        if step == self.first_step:  # its checkpoint is what the run goes on from
            progress.kept = self._kept(step)
        if self.stops_early:
            self.console.info(f"stopping early: {progress.without_improvement} evaluations without improvement")

    def check_signals(self) -> None:
        """Called between batches of an evaluation, of which all processes have the same. Raises Interrupted after a signal."""
        self.sync_signals()
        self.signals.interrupt()

    # ------------------------------------------------------------------------------------------------ what is kept

    def save(self, step: int, snapshot: Callable[[], tuple[dict, dict, dict, dict]]) -> None:
        """Write the checkpoint of `step` finished steps. `snapshot()` gives adapter, moments, adapter_config, loop state."""
        progress = self.progress
        progress.recent_losses, progress.batch_size = list(self.spikes.recent), self.stream.batch_size
        progress.seconds, progress.saving_seconds = time.perf_counter() - self.started, self.saver.seconds
        progress.lines = {file.path.name: file.count for file in (self.metrics, self.samples)}
        for file in (self.metrics, self.samples):
            file.sync()
        before, progress.kept = progress.kept, self._kept(step)  # which is so once it is written, and stands in it
        if not self.saver.write(step, progress.to_state(), progress.kept, self.signals.stop is not None, snapshot):
            progress.kept = before
        if self.signals.stop is not None:
            self.process_group.barrier()  # a process that ended before the first one has written would have it ended in the middle of that
        self.signals.save, self.saved_step = False, step

    def _kept(self, step: int) -> dict | None:
        """The best evaluation whose step has a checkpoint, if `step` has one."""
        is_best = self.after and self.after["step"] == step and is_better(self.after, self.progress.kept)
        return self.after if is_best else self.progress.kept

    def write_finished(self, folder: str, files: dict[str, Content], weights: str) -> str:
        """Write what was learned as `folder` of the run directory. Returns the sha256 of the file `weights`."""
        if self.config.save_model:
            try:
                write_directory(self.directory / folder, files, self.disk)
            except OSError as error:
                raise self._unfinished(folder, error) from None
        return size_and_sha256(files[weights])["sha256"]

    def pretrained_files(self, name: str, thing, **options) -> dict[str, Content]:
        """{file: content} of what `thing.save_pretrained` writes; nothing on a process that is not the first. Raises DiskFull."""
        try:
            return pretrained_files(thing, self.directory, self.disk, **options)
        except OSError as error:
            raise self._unfinished(name, error) from None

    def _unfinished(self, name: str, error: OSError) -> DiskFull:
        return DiskFull(
            f"{name} cannot be written: {error.strerror or error}",
            where=str(self.directory),
            cure="make room; the same command goes on from the last checkpoint",
        )

    def initial_adapter(self) -> dict | None:
        """What the adapter that the run starts from has learned, {name: array}; None for a run without one."""
        config = self.config
        if not config.init_adapter:
            return None
        directory = init_adapter.init_adapter_directory(config)
        made_for = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
        self.console.info(
            f"starts from {config.init_adapter}: {config.adapter}, rank {config.lora_rank}, alpha {config.lora_alpha:g}, trained on {made_for}"
        )
        return self.process_group.broadcast_arrays(
            read_adapter(directory / ADAPTER) if self.process_group.is_first else None
        )

    def best_adapter(self) -> dict | None:
        """What was learned at the step that `keep best` ends with, {name: array}; None where that is the last step anyway."""
        if self.config.keep != "best":
            return None
        best = self.progress.kept
        is_earlier = best and best["step"] != self.last_step and not is_better(self.after, best)
        loaded = self.saver.best(best["step"]) if is_earlier else None
        if loaded:
            self.console.info(
                f"step {best['step']} was the best: its held-out loss is {best['loss']:.4f}, that of step {self.last_step} is "
                f"{self.after['loss']:.4f}; what it had learned is written"
            )
            self.written_state, self.after = TrainState.from_state(loaded.state), best
        return self.process_group.broadcast_arrays(loaded and loaded.adapter)  # only the first process can say

    def already_finished(self) -> dict:
        """A finished run is reported and left as it is."""
        self.console.report(self.directory)
        self.console.info(
            f"{self.directory} is a finished run; another --run_name starts a new one, --resume force with more --max_steps or --num_epochs trains it further"
        )
        return read_json(self.directory / RESULT)

    def card(self) -> str:
        return model_card(self)

    def finish(self, adapter_sha256: str, peak_memory_bytes: int) -> dict:
        """Write result.json, last of all. Returns it."""
        progress, plan, spent = self.progress, self.plan, self.progress.loop_seconds or math.inf
        result = {
            "status": "finished",
            "backend": str(plan.backend),
            "strategy": plan.strategy,
            "quantizer": plan.quantizer,
            "adapter": plan.adapter,
            "world_size": plan.world_size,
            "steps": self.last_step,
            "epochs": round(self.stream.epoch(self.last_step), 4),
            "tokens_trained": progress.tokens_trained,
            "tokens_seen": progress.tokens_seen,
            "seconds": time.perf_counter() - self.started,
            "tokens_per_second": progress.tokens_seen / spent,
            "trained_tokens_per_second": progress.tokens_trained / spent,
            "saving_seconds": self.saver.seconds,
            "finding_seconds": self.run_directory.seconds,
            "time_to_first_step_s": self.first_step_at,
            "peak_memory_bytes": peak_memory_bytes,
            "planned_memory_bytes": plan.memory.total if plan.memory else None,
            "adapter_sha256": adapter_sha256,
            "adjustments": [asdict(a) for a in plan.adjustments],
            "eval": {"before": progress.before, "after": self.after} if self.after else None,
        }
        self._compare_held_out()
        self._exit_stack.close()
        try:
            replace_file(
                self.directory / IDENTITY, to_json(self.run_directory.identity), self.disk
            )  # of a forced run that stopped before any checkpoint
            replace_file(self.directory / RESULT, to_json(result), self.disk)
            self.disk.sync_directory(self.directory)
        except OSError as error:
            raise self._unfinished(RESULT, error) from None
        self.console.report(self.directory)
        return result

    def _compare_held_out(self) -> None:
        """Say when the held-out rows have gained nothing: a falling training loss does not tell."""
        before, after = self.progress.before, self.after
        if before and after and not is_better(after, before):
            self.console.warn(
                f"the held-out loss was {before['loss']:.4f} before step 1 and is {after['loss']:.4f} after step {after['step']}: on rows that it was "
                "not trained on the model is no better than it was; a lower --learning_rate, fewer epochs, or --keep best with --eval_steps may help"
            )


def without_samples(found: dict | None) -> dict | None:
    return {k: v for k, v in found.items() if k != "samples"} if found else None


def seconds_since_process_start() -> float:
    import psutil

    return time.time() - psutil.Process().create_time()
