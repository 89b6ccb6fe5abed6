"""What is seen: metrics.jsonl, lines, the panel on a terminal, the end report, the model card."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from dataclasses import replace

import pytest
from rich.console import Console

from anyqlora.cli import generate, verify
from anyqlora.config import resolve
from anyqlora.core import terminal
from anyqlora.core.errors import RunError, UsageError
from anyqlora.core.terminal import format_bytes
from anyqlora.models.architectures import DEMO_BASE
from anyqlora.planning.backends import BackendManager
from anyqlora.planning.planner import Adjustment
from anyqlora.processes.group import SingleProcess
from anyqlora.recipes import sft
from anyqlora.reporting import select
from anyqlora.reporting.console import ConsoleReporter, JsonLines, Metrics, QuietReporter
from anyqlora.reporting.live_panel import LivePanel, ProgressBarReporter
from anyqlora.reporting.summary import next_commands, read_lines, show
from anyqlora.reporting.trackers import Trackers
from tests.support import runs
from tests.support.paths import ROOT

SMALL = {
    "model_name": "demo",
    "dataset": "demo",
    "eval_dataset": "demo",
    "context_length": 128,
    "batch_size": 4,
    "precision": "fp32",
    "max_steps": 3,
    "lr": 3e-3,
    "num_samples": 5,
    "exact_match": False,
}
RECORD = {
    "step": 7,
    "loss": 1.5,
    "grad_norm": 0.25,
    "lr": 3e-4,
    "trained_tokens_per_second": 1234.0,
    "tokens_per_second": 2000.0,
    "memory_bytes": 3 << 20,
    "eta_seconds": 61.0,
}
HOSTILE = "\x1b[2J[red]rows[/red]\x9b\a.jsonl"


def plan_of(**settings):
    return BackendManager("cpu").plan(resolve.resolve({**SMALL, **settings}, environ={}))


def screen(output: str) -> list[str]:
    """The lines that a terminal shows after `output`: carriage return, line feed, cursor up and erase line are
    obeyed.
    """
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


def panel_on(stream, **settings) -> LivePanel:
    panel = LivePanel(plan_of(**settings), 10)
    panel.console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    return panel


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return runs.run(tmp_path_factory.mktemp("log"), **SMALL)


# ---------------------------------------------------------------------------------------------------- metrics.jsonl


def test_metrics_has_no_nan_and_forgets_what_is_done_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    trackers = Trackers(resolve.resolve(SMALL, environ={}), tmp_path, False, print)
    metrics = Metrics(path, 0, trackers, print)
    for step in (1, 2, 3):
        metrics.write({"step": step, "loss": float("nan") if step == 2 else 1.0})
    metrics.close()
    path.write_text(path.read_text() + '{"step": 4, "lo')  # killed while writing
    assert json.loads(path.read_text().splitlines()[1]) == {"step": 2, "loss": "nan"}
    Metrics(path, 2, trackers, print).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.distributed
def test_records_tell_memory_and_speed(tmp_path):
    """In a process of its own: one in which larger runs were before needs no further memory."""
    for record in runs.metrics(runs.fresh(tmp_path, **SMALL)):
        assert record["memory_bytes"] > 0
        assert record["trained_tokens_per_second"] == pytest.approx(record["trained_tokens"] / record["seconds"])


# ------------------------------------------------------------------------------------------------------ which view


@pytest.mark.parametrize(
    ("log_to", "kind"),
    [
        ("auto", ConsoleReporter),
        ("stdout", ConsoleReporter),
        ("tqdm", ProgressBarReporter),
        ("none", QuietReporter),
        ("wandb", ConsoleReporter),
        ("none,wandb", QuietReporter),
    ],
)
def test_log_to_chooses_the_view(log_to, kind):
    """Output is captured, so that auto is no terminal."""
    assert type(select.make_reporter(plan_of(log_to=log_to), 1)) is kind


@pytest.mark.parametrize(
    ("log_to", "said"), [("tqmd", "did you mean 'tqdm'"), ("stdout,none", "contradict"), ("", "unknown log_to")]
)
def test_log_to_refuses(log_to, said):
    with pytest.raises(UsageError, match=said):
        resolve.resolve({**SMALL, "log_to": log_to}, environ={})


def test_lines_say_everything_and_steer_nothing(capsys):
    lines = ConsoleReporter(plan_of(), 10)
    lines.step(RECORD)
    lines.warn(f"rows of {HOSTILE}")
    out, err = capsys.readouterr()
    assert out == "step     7/10  loss 1.5000  norm 0.250  lr 3.00e-04  1234 trained tok/s  eta 1:01\n"
    assert err == "warning: rows of \\x1b[2J[red]rows[/red]\\x9b\\x07.jsonl\n"


def test_errors_cannot_steer_the_terminal():
    assert str(RunError("no rows", where=HOSTILE, cure="line\nbreaks stay")) == (
        "\\x1b[2J[red]rows[/red]\\x9b\\x07.jsonl: no rows\n  cure: line\nbreaks stay"
    )


def test_silent_still_tells_what_the_plan_could_not_do(capsys):
    plan = replace(
        plan_of(log_to="none"), adjustments=(Adjustment("precision", "bf16", "fp16_autocast", "no bf16 here"),)
    )
    select.announce_plan(plan, SingleProcess())
    select.make_reporter(plan, 1).step(RECORD)
    out, err = capsys.readouterr()
    assert out == "" and err == "warning: precision: asked bf16, got fp16_autocast: no bf16 here\n"


def test_bar_is_one_line_with_what_is_said_above_it(capsys):
    bar = ProgressBarReporter(plan_of(), 10)
    bar.step({**RECORD, "step": 1})
    bar.info("said")
    bar.step({**RECORD, "step": 10})
    bar.close()
    out, err = capsys.readouterr()
    assert "said" in out and "10/10" in err and "loss 1.5000, norm 0.250, lr 3.00e-04, 1234 trained tok/s" in err


def test_sparkline():
    assert terminal.sparkline([3, 2, 1]) == "█▅▁"
    assert terminal.sparkline([3, float("nan"), 1]) == "█ ▁"
    assert terminal.sparkline([]) == "" and terminal.sparkline([2, 2]) == "▁▁"
    assert terminal.sparkline([3, 1], "ascii") == "@_"
    assert len(terminal.sparkline(list(range(1000)))) == terminal.WIDTH
    assert terminal.duration(59.6) == "1:00" and terminal.duration(3725) == "1:02:05"


# --------------------------------------------------------------------------------------------------------- the panel


def test_panel_shows_the_step_and_what_is_said_stands_above_it():
    stream = io.StringIO()
    panel = panel_on(stream)
    panel.drawn = -1e9
    panel.step({**RECORD, "step": 1, "loss": 3.0})
    panel.warn("the loss scale shrinks")
    panel.evaluation({"step": 1, "loss": 2.0, "perplexity": 7.4, "exact_match": 0.5})
    panel.step({**RECORD, "step": 10})
    seen = screen(stream.getvalue())
    text = "\n".join(seen)
    assert seen[0] == "warning: the loss scale shrinks" and seen[1].startswith("evaluation at step 1: loss 2.0000")
    assert seen[2].startswith("╭─ demo on demo") and text.count("╭") == 1
    for part in (
        "step 10/10",
        "left 1:01",
        "1.5000  █▁",
        "3.00e-04",
        "0.250",
        "1234 trained tokens/s",
        "3.0 MiB of",
        "planned",
        "exact match 50.0 %",
    ):
        assert part in text, part
    panel.close()
    left = [line for line in screen(stream.getvalue()) if line]
    assert len(left) == 2 and stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1


def test_panel_escapes_what_comes_from_files():
    stream = io.StringIO()
    panel = panel_on(stream, dataset=HOSTILE)
    panel.drawn = -1e9
    panel.step(RECORD)
    panel.info(HOSTILE)
    panel.close()
    assert "\x1b[2J" not in stream.getvalue() and "\x9b" not in stream.getvalue() and "\a" not in stream.getvalue()
    assert "\\x1b[2J[red]rows[/red]\\x9b\\x07.jsonl" in stream.getvalue()


@contextlib.contextmanager
def terminal_of(monkeypatch):
    """A real pseudo-terminal as standard output; yields a list that holds all that was written to it at the end."""
    master, slave = os.openpty()
    written, chunks = [], []

    def drain():
        with contextlib.suppress(OSError):
            while chunk := os.read(master, 1 << 16):
                chunks.append(chunk)

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    reader = threading.Thread(target=drain)
    reader.start()
    with open(slave, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        try:
            yield written
        finally:
            stream.flush()
            monkeypatch.undo()
    reader.join(5)
    os.close(master)
    written.append(b"".join(chunks).decode())


def test_a_run_on_a_terminal_has_a_panel_and_leaves_a_report(tmp_path, monkeypatch):
    settings = resolve.resolve({**SMALL, "output_dir": str(tmp_path), "run_name": "seen", "backend": "cpu"}, environ={})
    with terminal_of(monkeypatch) as written:
        sft.train(settings)
    output = written[0]
    assert "gradient norm" in output and "\x1b[?25h" in output
    seen = "\n".join(screen(output))
    assert "gradient norm" not in seen, "the panel is gone at the end"
    assert "evaluation at step 3" in seen and f"chat {tmp_path}/seen" in seen


def test_a_run_that_fails_gives_the_terminal_back(tmp_path, monkeypatch):
    def fail(run, make_engine):
        run.console.step({**RECORD, "step": 1})
        raise RunError("on purpose")

    monkeypatch.setattr(sft, "train_loop", fail)
    settings = resolve.resolve({**SMALL, "output_dir": str(tmp_path), "backend": "cpu"}, environ={})
    with terminal_of(monkeypatch) as written, pytest.raises(RunError, match="on purpose"):
        sft.train(settings)
    assert written[0].count("\x1b[?25l") == written[0].count("\x1b[?25h") == 1


@pytest.mark.distributed
def test_a_run_in_a_pipe_has_lines_and_nothing_on_standard_error(tmp_path):
    flags = [word for name, value in SMALL.items() for word in (f"--{name}", str(value).lower())]
    done = subprocess.run(
        [sys.executable, "train.py", *flags, "--output_dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout and "step     3/3  loss" in done.stdout


def test_peft_still_reads_what_transformers_deprecates():
    """While this holds, on_torch._compat.quietly is needed."""
    import peft
    import transformers

    from anyqlora.models.architectures import DEMO_BASE

    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_BASE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    assert any("is_gradient_checkpointing" in str(warning.message) for warning in caught)


# ------------------------------------------------------------------------------------------------ report and card


def test_the_end_report_says_what_the_run_directory_says(finished):
    stream = io.StringIO()
    show(finished, Console(file=stream, width=200))
    text, result = stream.getvalue(), runs.result(finished)
    before, after = result["eval"]["before"], result["eval"]["after"]
    assert re.search(rf"loss +{before['loss']:.4f} +{after['loss']:.4f}", text)
    assert re.search(rf"perplexity +{before['perplexity']:.4g} +{after['perplexity']:.4g}", text)
    asked = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    assert len({line["prompt"] for line in asked}) == 5
    for line in asked:
        assert line["prompt"].split()[0] in text and line["expected"][:16] in text
    assert (
        f"{format_bytes(result['planned_memory_bytes'])} planned, {format_bytes(result['peak_memory_bytes'])} measured"
        in text
    )
    assert f"{finished}/adapter  (sha256 {result['adapter_sha256'][:16]})" in text
    for command in next_commands(finished):
        assert command in text
    assert [command.split(" -m anyqlora ")[1].split()[0] for command in next_commands(finished)] == [
        "chat",
        "eval",
        "generate",
    ]


ENDS = "a\u2028b\u2029c\u0085d\x0be\x1cf"  # all of these end a line of text


def test_answers_that_hold_ends_of_lines_are_read_back(tmp_path):
    samples = JsonLines(tmp_path / "samples.jsonl", 0, None)
    written = [{"step": step, "prompt": ENDS, "answer": ENDS} for step in (0, 3)]
    for record in written:
        samples.write(record)
    samples.close()
    assert read_lines(tmp_path / "samples.jsonl") == written
    (tmp_path / "metrics.jsonl").write_bytes((tmp_path / "samples.jsonl").read_bytes())
    assert verify.records(tmp_path) == written
    (tmp_path / "prompts.txt").write_text(f"{ENDS}\n\nanother\n", encoding="utf-8")
    assert generate._prompts(None, str(tmp_path / "prompts.txt")) == [ENDS, "another"]


def test_samples_stand_side_by_side_and_cannot_steer(finished, tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("result.json", "metrics.jsonl", "data_report.json"):
        (tmp_path / "run" / name).write_bytes((finished / name).read_bytes())
    lines = [
        {"step": step, "prompt": "P[b]\x1b[2J", "answer": answer, "expected": "x"}
        for step, answer in ((0, "old"), (3, "new"))
    ]
    (tmp_path / "run" / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stream = io.StringIO()
    show(tmp_path / "run", Console(file=stream))
    row = next(line for line in stream.getvalue().splitlines() if "old" in line)
    assert row.split() == ["P[b]\\x1b[2J", "old", "new", "x"]
    assert "chat" not in stream.getvalue(), "no weights were written, so there is nothing to chat with"


def test_the_card_names_no_private_path_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "letmein-99")
    rows = tmp_path / "private" / "rows|letmein-99`.jsonl"
    rows.parent.mkdir()
    rows.write_bytes((ROOT / "anyqlora/demo/task/heldout.jsonl").read_bytes())
    directory = runs.run(
        tmp_path, **{**SMALL, "dataset": str(rows), "max_steps": 1, "eval_dataset": "", "num_samples": 0}
    )
    card = (directory / "adapter" / "README.md").read_text()
    assert "on `rows\\|***'.jsonl`" in card
    assert str(tmp_path) not in card and "letmein" not in card and "base_model:" not in card


@pytest.mark.parametrize("settings", [{}, {"train_type": "full"}], ids=["adapter", "model"])
def test_the_cards_code_loads_what_it_stands_beside_once_its_paths_are_filled_in(settings, tmp_path):
    base = shutil.copytree(DEMO_BASE, tmp_path / "base")
    directory = runs.run(
        tmp_path, **{**SMALL, "model_name": str(base), "max_steps": 1, "eval_dataset": "", "num_samples": 0, **settings}
    )
    folder = directory / ("model" if settings else "adapter")
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    places = {"PATH/TO/base": base, f"PATH/TO/{folder.name}": folder}
    assert set(re.findall(r'"(PATH/TO/.*?)"', code)) == (places.keys() if not settings else {"PATH/TO/model"})
    for name, path in places.items():
        code = code.replace(name, str(path))
    there = {}
    exec(code, there)
    assert there["model"].get_input_embeddings().num_embeddings > 0
    if not settings:
        assert there["model"].generation_config.eos_token_id == there["tokenizer"].eos_token_id
