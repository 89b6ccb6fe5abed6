"""What must not change a byte, what must not grow, and what safety costs.

Rows 11, 12, 14 and 15 of docs/reliability.md.
"""

import json
import os
import subprocess
import sys

import psutil
import pytest

from tests.support import counts, faults, trials
from tests.support.counts import quick_and_full
from tests.support.paths import ROOT
from tests.support.trials import Trial

ADAPTER = "adapter/adapter_model.safetensors"


def test_the_job_is_what_it_says(whole):
    """Quantized weights, dropout, accumulation, shuffling and a schedule are really in effect in the trials."""
    plan = json.loads((whole / "plan.json").read_text())
    said = {**plan, **plan.get("config", {})}
    assert (said["quantizer"], said["adapter"], said["lora_dropout"], said["gradient_accumulation_steps"]) == (
        "nf4",
        "lora",
        0.1,
        4,
    )
    steps = [line for line in trials.metrics(whole) if "event" not in line]
    assert (
        len({line["lr"] for line in steps}) > 20
        and steps[-1]["epoch"] > 2
        and len({line["tokens"] for line in steps}) > 12
    )


@quick_and_full
def test_evaluating_and_sampling_change_no_byte(job, whole, tmp_path, full):
    """Evaluation, generation, samples and what is shown, at any steps and any number of times."""
    every = {"eval_steps": 1, "num_samples": 3, "exact_match": True, "max_new_tokens": 4}
    ways = {
        "at every step, with answers": every,
        "never": {"eval_steps": 0, "eval_dataset": "", "num_samples": 0},
        "in other batches": {"eval_batch_size": 3},
        "at every third": {"eval_steps": 3, "num_samples": 0},
        "shown as a bar": {"log_to": "tqdm"},
        "not shown": {"log_to": "none"},
        "logged now and then": {"log_every_n_steps": 7},
        "profiled": {"profile_memory": True},
        "saved at every step": {"save_steps": 1, "save_total_limit": 30},
    }

    def try_one(item):
        name, changes = item
        trial = trials.run(tmp_path / name.replace(" ", "-"), {**job, **changes})
        same = trial.code == 0 and (trial.directory / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
        return [] if same else [f"{name}: exit code {trial.code}: {trial.said[-800:]}"]

    failures = trials.each(try_one, ways.items() if full else list(ways.items())[:1])
    counts.hold(
        11, full, "evaluating, sampling, showing and saving otherwise: the same adapter", len(failures), failures
    )


def test_a_finished_run_is_reported_and_left_alone(job, whole):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    for _ in range(2):
        trial = trials.run(whole.parent, job)
        assert trial.code == 0 and "is a finished run" in trial.said
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


@quick_and_full
def test_surroundings_change_no_byte(job, whole, tmp_path, full):
    """Processes of their own, with another hash seed, working directory, output path, locale and time zone."""
    every = [
        {"PYTHONHASHSEED": "1", "LC_ALL": "C", "TZ": "Asia/Kolkata"},
        {"PYTHONHASHSEED": "2"},
        {"PYTHONHASHSEED": "3", "TZ": "America/St_Johns"},
        {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"},
        {"PYTHONUTF8": "1", "COLUMNS": "20"},
        {"PYTHONHASHSEED": "4", "HOME": str(tmp_path)},
    ]

    def try_one(item):
        number, changes = item
        directory = tmp_path / f"wörk {number}"
        directory.mkdir()
        output = os.path.join("öut", "of the way") if number % 2 else str(directory / "elsewhere")
        flags = [f"--{name}={value}" for name, value in {**job, "output_dir": output}.items()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
        done = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *flags],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
        )
        found = directory / output / "run"
        problems = [] if done.returncode == 0 else [f"exit code {done.returncode}: {done.stderr[-800:]}"]
        names = (ADAPTER, "adapter/adapter_config.json", "identity.json")
        problems += (
            []
            if problems
            else [f"{name} differs" for name in names if (found / name).read_bytes() != (whole / name).read_bytes()]
        )
        return [f"{changes}: {p}" for p in problems]

    failures = trials.each(try_one, list(enumerate(every if full else every[:1])))
    counts.hold(
        12,
        full,
        "another hash seed, directory, output path, locale, time zone: the same adapter",
        len(failures),
        failures,
    )


@quick_and_full
def test_a_long_run_grows_by_nothing(job, tmp_path, full):
    """Looked at from outside: resident memory and open files of the process, and the directories of its checkpoints."""
    steps = 2000 if full else 120
    trial = Trial(
        tmp_path,
        {
            **job,
            "max_steps": steps,
            "save_steps": 10,
            "save_total_limit": 2,
            "batch_size": 1,
            "gradient_accumulation_steps": 1,
            "eval_steps": 0,
            "eval_dataset": "",
            "num_samples": 0,
            "log_to": "none",
        },
    )
    seen = []

    def look():
        try:
            process = psutil.Process(trial.pid)
            directories = [
                path for path in (trial.directory / "checkpoints").glob("step-*") if path.suffix != ".removed"
            ]
            seen.append((trial.lines(), process.memory_info().rss, process.num_fds(), len(directories)))
        except (psutil.Error, OSError):
            pass
        return False

    trial.wait_until(look, 900) if not full else _look_slowly(trial, look)
    assert trial.wait().code == 0, trial.said
    warm = [one for one in seen if steps * 0.25 <= one[0] <= steps - 2]  # the end writes the result
    quarter = len(warm) // 4
    rss = [sorted(one[1] for one in part)[len(part) // 2] for part in (warm[:quarter], warm[-quarter:])]
    growth, most = (rss[1] - rss[0]) / 2**20, max(one[3] for one in seen)
    files = {one[2] for one in warm}
    problems = [f"grew by {growth:.1f} MiB"] if growth >= 20 else []
    problems += [f"{most} checkpoint directories"] if most > 3 else []
    problems += (
        [f"{min(files)} to {max(files)} open files"] if max(files) - min(files) > 2 else []
    )  # those that a save has open
    counts.hold(
        14,
        full,
        f"{steps} steps, saved every 10, 2 kept",
        1,
        [problems],
        resident_growth_mib=round(growth, 2),
        most_checkpoint_directories=most,
        open_files=[min(files), max(files)],
    )


def _look_slowly(trial, look):
    import time

    while trial.code is None:
        look()
        time.sleep(0.05)


def test_what_a_save_does(job, tmp_path):
    """The quick form of what safety costs, in work instead of time: each byte is hashed and written once, each file
    synced by one call.
    """
    trial = trials.run(tmp_path, job, faults.record_work, str(tmp_path / "work"), max_steps=6, save_steps=3)
    assert trial.code == 0, trial.said
    work = [json.loads(line) for line in (tmp_path / "work").read_text().splitlines()]
    checkpoint = trial.directory / "checkpoints" / "step-000006"
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    began = work.index(
        ["write", f"adapter_model.safetensors in {checkpoint.name}.staged", sizes["adapter_model.safetensors"]]
    )
    save = work[
        began : next(
            number for number in range(began, len(work)) if work[number][:2] == ["sync_directory", "checkpoints"]
        )
        + 1
    ]
    assert sorted((where, size) for name, where, size in save if name == "write") == sorted(
        (f"{name} in {checkpoint.name}.staged", size) for name, size in sizes.items()
    )
    assert [where for name, where, _ in save if name == "sync_directory"] == [
        f"{checkpoint.name}.staged",
        "checkpoints",
    ]
    manifest = sizes.pop("manifest.json")
    assert (
        sum(sizes.values()) <= sum(size for name, _, size in save if name == "hash") <= sum(sizes.values()) + manifest
    )


@pytest.mark.slow
def test_what_safety_costs(tmp_path):
    """Time inside save, hash and verify calls, of the embedded job's wall time."""
    trial = trials.run(tmp_path, {"backend": "cpu", "run_name": "run"})
    assert trial.code == 0, trial.said
    result = json.loads((trial.directory / "result.json").read_text())
    part = (result["saving_seconds"] + result["finding_seconds"]) / (result["seconds"] + result["finding_seconds"])
    counts.hold(
        15,
        True,
        "time in saving, hashing and verifying, of the embedded job",
        1,
        [[f"{part:.2%}"] if part > 0.02 else []],
        percent=round(100 * part, 2),
    )
