"""Runs that commit 9268e7a wrote, with the names that settings had then: they go on, and they are opened.

tests/support/old_runs has, for torch and MLX, one that was stopped by SIGTERM after 7 of 12 steps, and one of the same
settings that nobody stopped: the reference. made_on.json says by which command and on which processor they were made.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from anyqlora.__main__ import main
from anyqlora.config.resolve import from_file, resolve
from anyqlora.config.schema import ALIASES, SETTINGS, SPLIT_ALIASES, current_names
from anyqlora.data import formats
from anyqlora.runs import directory
from anyqlora.runs.directory import IDENTITY, locate_run
from anyqlora.runs.finished import read_run
from tests.support import runs
from tests.support.paths import SUPPORT

OLD = SUPPORT / "old_runs"
NEAR = 1e-5  # of a matrix' norm, where another processor adds up in another order; 8e-8 was seen
THEN = {  # what they were asked for, in the words of 9268e7a
    "model_name": "demo",
    "dataset": "demo",
    "eval_fraction": 0.01,
    "eval_steps": 4,
    "samples": 1,
    "max_new_tokens": 4,
    "exact_match": False,
    "context_length": 96,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 12,
    "save_steps": 4,
    "keep": "best",
    "early_stopping": 9,
    "lr": 2e-3,
    "wd": 0.05,
    "grad_norm": 0.7,
    "warmup_steps": 2,
    "lora_rank": 2,
    "lora_dropout": 0.1,
    "lora_target_modules": "q_proj,v_proj",
    "precision": "fp32",
    "log_to": "none",
}
NOW = {
    **{ALIASES.get(name, name): value for name, value in THEN.items() if name != "keep"},
    "save_total_limit": 2,
    "load_best_model_at_end": True,
}
HERE = {"torch": {"backend": "cpu", "kernels": "portable", "quantized_cache": False}, "mlx": {"backend": "mlx"}}


needs_mlx = pytest.mark.skipif(not importlib.util.find_spec("mlx"), reason="no mlx here")


@pytest.fixture(scope="module", params=["torch", pytest.param("mlx", marks=needs_mlx)])
def framework(request):
    return request.param


@pytest.fixture
def stopped(framework, tmp_path) -> Path:
    return shutil.copytree(OLD / framework / "stopped", tmp_path / "run")


@pytest.fixture
def finished(framework, tmp_path) -> Path:
    return shutil.copytree(OLD / framework / "finished", tmp_path / "run")


@pytest.fixture(scope="module")
def resumed(framework, tmp_path_factory):
    """(the stopped run, which has gone on to its end; what was said meanwhile)."""
    directory = shutil.copytree(OLD / framework / "stopped", tmp_path_factory.mktemp(framework) / "run")
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setenv(
            "OMP_NUM_THREADS", "2"
        )  # as then; MLX has no setting for it, and its record of the machine has this
        return goes_on(directory, framework, NOW), said.getvalue()


def goes_on(directory: Path, framework: str, settings: dict) -> Path:
    return runs.run(directory.parent, **{**settings, **HERE[framework]})


def read(directory: Path, name: str) -> dict:
    return json.loads((directory / name).read_text())


def adds_up_as_then(directory: Path, framework: str) -> bool:
    """Whether processor and versions are those that the old runs were made with, so that the bytes are, too."""
    made_on, then = read(OLD, "made_on.json"), read(OLD / framework / "finished", "env.json")
    now, info = read(directory, "env.json"), Path("/proc/cpuinfo")
    flags = re.search(r"^flags\s*:\s*(.*)$", info.read_text() if info.exists() else "", re.MULTILINE)
    return (
        all(then[name] == now[name] for name in then if name.startswith(("version", "processor", "machine")))
        and hashlib.sha256(flags[1].encode() if flags else b"").hexdigest() == made_on["cpu_flags_sha256"]
        and torch.backends.cpu.get_cpu_capability() == made_on["cpu_capability"]  # which a variable can lower
        and "ONEDNN_MAX_CPU_ISA" not in os.environ
    )


def test_a_stopped_run_goes_on_to_the_bytes_of_the_one_that_nobody_stopped(resumed, framework):
    (directory, said), reference = resumed, OLD / framework / "finished"
    changed = re.search(r"not to the same bytes as before: (.*)", said)
    assert not changed or not {part.split()[0] for part in changed[1].split("; ")} & {*SETTINGS, *ALIASES}, said
    assert "is not used" not in said
    assert [line["step"] for line in runs.metrics(directory)] == list(range(1, 13))
    ours, theirs = (load_file(run / "adapter/adapter_model.safetensors") for run in (directory, reference))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert np.linalg.norm(ours[name] - value) <= NEAR * np.linalg.norm(value), name
    if adds_up_as_then(directory, framework):
        assert runs.result(directory)["adapter_sha256"] == runs.result(reference)["adapter_sha256"]
        assert runs.result(directory)["eval"] == runs.result(reference)["eval"]


def test_what_a_run_that_went_on_says_of_itself_has_the_new_names(resumed, framework):
    """And what the plan chose then stays in effect."""
    then, (directory, _) = current_names(read(OLD / framework / "stopped", "env.json")), resumed
    manifest = read(directory / "checkpoints/step-000012", "manifest.json")
    for said in (
        read(directory, "plan.json")["config"],
        from_file(directory / "config.resolved.yaml"),
        read(directory, IDENTITY),
        read(directory, "env.json"),
        manifest["identity"],
        manifest["machine"],
    ):
        assert not {*said} & {*ALIASES, *SPLIT_ALIASES}
    assert manifest["machine"] == read(directory, "env.json") and manifest["machine"].keys() == {*then, "dropout_masks"}
    assert manifest["machine"]["dropout_masks"] == "process"  # the only ones that there were
    of_settings = {name: value for name, value in then.items() if name in SETTINGS}
    assert len(of_settings) >= 10 and of_settings.items() <= manifest["machine"].items()
    if framework == "torch":
        assert read(directory, "plan.json")["config"]["dequantized_layers"] == of_settings["dequantized_layers"] == 3


def test_old_names_ask_for_the_same():
    assert resolve(THEN, environ={}) == resolve(NOW, environ={})


@pytest.mark.parametrize("settings", [THEN, NOW], ids=["old names", "new names"])
def test_an_unfinished_run_is_found_without_its_name(stopped, framework, settings):
    config = resolve({**settings, **HERE[framework], "output_dir": str(stopped.parent)}, environ={})
    with locate_run(config) as found:
        assert found.directory == stopped and found.restored.step == 7 and not found.rejected


def test_another_setting_is_another_run(stopped, framework):
    """Names are translated, values are compared as ever."""
    config = resolve({**NOW, **HERE[framework], "weight_decay": 0.06, "output_dir": str(stopped.parent)}, environ={})
    with locate_run(config) as found:
        assert found.directory != stopped and found.restored is None


def test_a_finished_run_stays_finished_and_is_forced_on(finished, framework):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    goes_on(finished, framework, NOW)
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    directory = goes_on(finished, framework, {**NOW, "max_steps": 14, "resume": "force"})
    assert runs.result(directory)["steps"] == 14 and read_run(directory).config.early_stopping_patience == 9
    assert [line["step"] for line in runs.metrics(directory)] == list(range(1, 15))


def test_a_finished_run_is_opened(finished, framework, capsys):
    """The reference is what the run said at its end."""
    run = read_run(finished)
    assert (run.config.weight_decay, run.config.max_grad_norm, run.config.num_samples) == (0.05, 0.7, 1)
    assert (run.config.save_total_limit, run.config.load_best_model_at_end) == (2, True)
    assert main(["eval", str(finished)]) == 0
    loss = float(re.search(r"loss +([\d.]+)", capsys.readouterr().out)[1])
    assert loss == pytest.approx(run.result["eval"]["after"]["loss"], rel=1e-4)
    sample = json.loads((finished / "samples.jsonl").read_text().splitlines()[-1])
    assert main(["generate", str(finished), "--prompt", sample["prompt"], "--max_new_tokens", "4"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == sample["answer"] != ""


def test_a_run_that_began_before_chat_templates_were_the_default_keeps_its_rows(tmp_path, monkeypatch):
    """As an older version wrote one: plain text in spite of the template, and nothing of that in its identity."""
    settings = {
        "model_name": "demo",
        "dataset": "demo",
        "chat_template": "zephyr",
        "context_length": 96,
        "lora_rank": 2,
        "batch_size": 2,
        "gradient_accumulation_steps": 1,
        "save_steps": 1,
        "save_total_limit": 9,
        "max_steps": 4,
        "exact_match": False,
        "run_name": "run",
    }

    with monkeypatch.context() as older:
        older.setattr(formats, "style_of", lambda name, prompt_format, has_template: "text")
        own = directory.run_identity
        older.setattr(
            directory, "run_identity", lambda config: {k: v for k, v in own(config).items() if k != "rendering"}
        )
        whole, stopped = (runs.run(tmp_path / place, **settings) for place in ("whole", "stopped"))
    (stopped / "result.json").unlink()  # as one that was killed after two steps
    for step in (3, 4):
        shutil.rmtree(stopped / "checkpoints" / f"step-{step:06d}")
    assert "rendering" not in read(stopped, IDENTITY)
    went_on = runs.run(tmp_path / "stopped", **settings)
    assert read(went_on, "data_report.json")["identity"] == read(whole, "data_report.json")["identity"]
    assert runs.result(went_on)["adapter_sha256"] == runs.result(whole)["adapter_sha256"]
    assert "rendering" not in read(went_on, IDENTITY)
    now = runs.run(tmp_path / "now", **settings)
    assert read(now, "data_report.json")["sources"][0]["style"] == "chat"
    assert read(now, "data_report.json")["identity"] != read(whole, "data_report.json")["identity"]
    assert read(now, IDENTITY)["rendering"] == 2
