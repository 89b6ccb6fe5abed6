"""Numbers that are not finite, loss spikes, and memory that runs out. Rows 8, 9 and 10 of docs/reliability.md."""

import json
import math
import random
import shutil
import signal

import numpy as np

from anyqlora.data.packing import shuffled
from anyqlora.runs.checkpoints import Checkpoints
from tests.support import counts, faults, trials
from tests.support.counts import quick_and_full

NAN, INF = math.nan, math.inf
EACH_STEP = {"save_steps": 1, "save_total_limit": 100}  # so that what each step did can be looked at


@quick_and_full
def test_what_is_not_finite_is_caught_before_the_update(job, tmp_path, full):
    """NaN and infinity, by turns, in ten steps of a run.

    The reference for a poisoned step is the checkpoint before it.
    """
    steps = list(range(1, 21, 2)) if full else [1, 3]
    values = [NAN if n % 2 else INF for n in range(len(steps))]
    length = trials.STEPS if full else 5

    def poison(where):
        trial = trials.run(tmp_path / where, job, faults.poison, where, steps, values, **EACH_STEP, max_steps=length)
        if trial.code != 0:
            return [[f"{where}: exit code {trial.code}: {trial.said[-1500:]}"]]
        checkpoints = Checkpoints(trial.directory / "checkpoints")
        kept = {step: checkpoints.read(step) for step in checkpoints.steps()}
        lines = {line["step"]: line for line in trials.metrics(trial.directory) if "event" not in line}
        finite = all(
            np.isfinite(tensor).all()
            for loaded in kept.values()
            for tensors in (loaded.adapter, loaded.moments)
            for tensor in tensors.values()
        )
        failures = [[] if finite and len(kept) == length else [f"{where}: something that is not finite was saved"]]
        for step in steps:
            line = lines[step + 1]
            problems = (
                []
                if line["skipped"] and line["rows"].count("rows.jsonl:") == 8
                else [f"not skipped, or its rows not named: {line}"]
            )
            problems += (
                []
                if {line["loss"], line["grad_norm"]} & {"nan", "inf"} and 0 not in (line["loss"], line["grad_norm"])
                else [f"told as {line}"]
            )
            problems += (
                [] if f"step {step + 1} is skipped: loss or gradient is not finite" in trial.said else ["no warning"]
            )
            same = all(
                (getattr(kept[step], what)[name] == getattr(kept[step + 1], what)[name]).all()
                for what in ("adapter", "moments")
                for name in getattr(kept[step], what)
            )
            failures.append(
                [f"{where}, step {step + 1}: {p}" for p in problems + ([] if same else ["adapter or moments changed"])]
            )
        untouched = [line["step"] for line in lines.values() if line["skipped"] and line["step"] - 1 not in steps]
        return [*failures, [f"{where}: steps {untouched} were skipped too"] if untouched else []]

    failures = [one for group in trials.each(poison, ("loss", "activation", "gradient")) for one in group]
    counts.hold(8, full, "NaN and inf in loss, one activation, one gradient", 3 * len(steps), failures)


@quick_and_full
def test_three_in_a_row_end_the_run(job, tmp_path, full):
    def poison(item):
        where, value = item
        trial = trials.run(tmp_path / f"{where}-{value}", job, faults.poison, where, [7, 8, 9], [value] * 3)
        good = trials.good_steps(trial.directory)
        held = (
            trial.code == 4
            and good == [6, 9]
            and "Traceback" not in trial.said
            and "3 steps in a row were not finite" in trial.said
        )
        return [] if held else [f"{where} {value}: exit code {trial.code}, checkpoints {good}: {trial.said[-800:]}"]

    every = [(where, value) for where in ("loss", "activation", "gradient") for value in (NAN, INF)]
    failures = trials.each(poison, every if full else every[-1:])
    counts.hold("8b", full, "three steps in a row that are not finite: exit code 4", len(failures), failures)


def test_three_in_a_row_count_across_a_stop(job, tmp_path):
    """Two before the stop and one after it are three."""
    trial = trials.run(tmp_path, job, faults.poison_and_stop, "gradient", [7, 8], [NAN, INF], 8)
    assert trial.code == 75
    again = trials.run(tmp_path, job, faults.poison, "gradient", [9], [NAN])
    assert again.code == 4, again.said


def test_a_held_out_loss_that_is_not_finite_is_told_and_saved_as_such(job, tmp_path):
    """The base's final norm is infinite: every loss, held out or not, is NaN.

    Nothing is printed as 0, and what has no JSON number is text.
    """
    base = tmp_path / "base"
    shutil.copytree(job["model_name"], base)
    weights = load_base(base)
    weights["model.norm.weight"][:] = INF
    save_base(base, weights)
    trial = trials.run(tmp_path, job, model_name=str(base), save_steps=1)
    assert trial.code == 4 and "Traceback" not in trial.said, trial.said
    first = trials.metrics(trial.directory)[0]
    assert first["loss"] == "nan" and "loss nan" in trial.said and "loss 0.0000" not in trial.said


def load_base(directory):
    from safetensors.torch import load_file as load

    return load(directory / "model.safetensors")


def save_base(directory, weights):
    from safetensors.torch import save_file as save

    save(weights, directory / "model.safetensors", metadata={"format": "pt"})


# --------------------------------------------------------------------------------------------------------------- spikes


@quick_and_full
def test_label_noise_is_skipped_and_nothing_else(job, tmp_path, full):
    """All rows of some steps get answers of random letters; which rows those are is known, since the order is a
    function of the seed.
    """
    steps, spikes = (525, [60, 140, 230, 310, 450]) if full else (40, [22, 30])
    rows = 8 * steps
    settings = {
        **job,
        "gradient_accumulation_steps": 1,
        "batch_size": 8,
        "max_steps": steps,
        "eval_steps": 0,
        "eval_dataset": "",
        "num_samples": 0,
        "save_steps": 100,
        "spike_guard": 8.0,
        "dataset": str(tmp_path / "noisy.jsonl"),
        "lr": 1e-3,
    }
    source = [json.loads(line) for line in (trials.DEMO_ROWS / "train.jsonl").read_text().splitlines()]
    lines = [dict(source[n % len(source)]) for n in range(rows)]
    drawn, answer = random.Random(9), next(key for key in ("completion", "answer", "output") if key in source[0])
    for spike in spikes:
        for row in shuffled(rows, 42, 0)[spike * 8 : (spike + 1) * 8]:
            lines[row][answer] = "".join(drawn.choice("zqxkvjwy#%&@") for _ in range(len(lines[row][answer])))
    (tmp_path / "noisy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trial = trials.run(tmp_path, settings)
    assert trial.code == 0, trial.said
    skipped = [line["step"] - 1 for line in trials.metrics(trial.directory) if line.get("skipped")]
    failures = [[f"step {spike} was not skipped"] if spike not in skipped else [] for spike in spikes]
    false = [step for step in skipped if step not in spikes]
    counts.hold(
        9,
        full,
        "loss spikes by label noise are skipped",
        len(spikes),
        [*failures, [f"steps {false} were skipped too"] if false else []],
        clean_steps=steps - len(spikes),
        false_skips=len(false),
    )
    assert trial.said.count("its loss is a spike") == len(spikes)


# --------------------------------------------------------------------------------------------------------------- memory


@quick_and_full
def test_memory_that_runs_out(job, tmp_path, full):
    """Micro-batches of 8 do not fit, nor do those of 4.

    In the first step: as a run started with 2. Later: as a run told to change there.
    """
    four = {**job, "batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 24 if full else 6}
    at_two = {**four, "batch_size": 2, "gradient_accumulation_steps": 4}
    started = trials.run(tmp_path / "started", at_two).directory
    failures = []

    def compare(name, reference, fault, *arguments):
        trial = trials.run(tmp_path / name, four, fault, *arguments)
        problems = (
            [f"exit code {trial.code}: {trial.said[-1500:]}"]
            if trial.code
            else trials.differences(trial.directory, reference)
        )
        problems += [] if "out of memory in step" in trial.said else ["not told"]
        state = json.loads((trial.directory / f"checkpoints/step-{four['max_steps']:06d}/state.json").read_text())
        problems += [] if state["batch_size"] == 2 else [f"the checkpoint says {state['batch_size']}"]
        failures.append([f"{name}: {p}" for p in problems])

    compare("in-the-first-step", started, faults.run_out, 2)
    for step in (1, 7, 15, 22) if full else (3,):
        told = trials.run(tmp_path / f"told-{step}", four, faults.resize_at, step, 2).directory
        compare(f"in-step-{step}", told, faults.run_out, 2, step)
    counts.hold(10, full, "out of memory whenever the micro-batch exceeds 2", len(failures), failures)


@quick_and_full
def test_memory_that_runs_out_once_in_a_backward_pass(job, tmp_path, full):
    """The whole step is run again, with nothing left of its first half; the reference is told to change at that
    step.
    """
    failures, job = [], {**job, "max_steps": 24 if full else 5}
    for step, micro_batch in ((0, 1), (5, 2), (5, 4), (23, 3)) if full else ((2, 3),):
        told = trials.run(tmp_path / f"told-{step}-{micro_batch}", job, faults.resize_at, step, 1)
        trial = trials.run(tmp_path / f"out-{step}-{micro_batch}", job, faults.run_out_backward, step, micro_batch)
        problems = (
            [f"exit code {trial.code}: {trial.said[-1500:]}"]
            if trial.code
            else trials.differences(trial.directory, told.directory)
        )
        problems += [] if f"out of memory in step {step + 1}" in trial.said else ["it did not run out"]
        failures.append([f"{step}, {micro_batch}: {p}" for p in problems])
    counts.hold("10b", full, "out of memory once, in the middle of backward", len(failures), failures)


@quick_and_full
def test_a_run_that_was_halved_goes_on_halved(job, tmp_path, full):
    """Out of memory in step 4, stopped in step 6: the checkpoint knows the new size, and nothing runs out again."""
    job = {**job, "max_steps": 24 if full else 8}
    told = trials.run(tmp_path / "told", job, faults.resize_at, 3, 1).directory
    output = tmp_path / "stopped"
    first = trials.run(output, job, faults.run_out_and_stop, 3, 2, 5, signal.SIGTERM)
    problems = [] if first.code == 75 else [f"exit code {first.code}: {first.said[-800:]}"]
    problems += trials.finished(output, job, told)
    counts.hold("10c", full, "out of memory, stopped, resumed", 1, [problems])


def test_a_single_row_that_does_not_fit(job, tmp_path):
    trial = trials.run(tmp_path, job, faults.run_out, 0)
    assert (
        trial.code == 1
        and "out of memory with a single row" in trial.said
        and "rows.jsonl:" in trial.said
        and "Traceback" not in trial.said
    )
