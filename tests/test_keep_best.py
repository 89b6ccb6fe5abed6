"""What a run with --keep best ends with, and what it says of it: real runs on the embedded base."""

import io

import runs
from rich.console import Console
from test_run import HELD_OUT

from anyqlora.checkpoint import ADAPTER, Checkpoints
from anyqlora.outcome import show

BEST = {**HELD_OUT, "keep": "best", "save_steps": 0, "eval_steps": 2, "samples": 1, "max_new_tokens": 2}
WRECKED = {**BEST, "lr": 0.03, "lr_scheduler": "constant", "wd": 0, "warmup_steps": 0, "grad_norm": 100}  # the model is wrecked after its best step


def losses(directory):
    """{step: held-out loss}"""
    return {e["step"]: e["loss"] for e in runs.evaluations(directory) if e["step"] > 0}


def adapter_bytes(folder):
    return (folder / ADAPTER).read_bytes()


def shown(directory):
    stream = io.StringIO()
    show(directory, Console(file=stream, width=200))
    return stream.getvalue()


def test_the_best_step_is_written_and_named(tmp_path):
    directory = runs.run(tmp_path, **WRECKED)
    seen = losses(directory)
    best = min(seen, key=seen.get)
    assert best < 8 and list(seen) == [2, 4, 6, 8] and seen[8] > seen[best], "each step has its own number"
    after = runs.result(directory)["eval"]["after"]
    assert (after["step"], after["loss"]) == (best, seen[best]) and runs.result(directory)["steps"] == 8
    kept = Checkpoints(directory / "checkpoints")
    assert adapter_bytes(directory / "adapter") == adapter_bytes(kept.path(best))
    assert f"| optimizer steps, rows per step | {best}, 4 |" in (directory / "adapter/README.md").read_text()
    assert f"| trained tokens | {kept.read(best).state['tokens_trained']} |" in (directory / "adapter/README.md").read_text()
    assert f"after step {best}" in shown(directory)


def test_the_last_step_may_be_the_best(tmp_path):
    """The reference is the same run that keeps the last ones."""
    best, plain = (runs.run(tmp_path, str(keep), **{**BEST, "keep": keep}) for keep in ("best", 2))
    seen = losses(best)
    assert min(seen, key=seen.get) == 8, "or nothing would have been shown"
    assert adapter_bytes(best / "adapter") == adapter_bytes(plain / "adapter")
    assert runs.result(best)["eval"] == runs.result(plain)["eval"] and runs.result(best)["eval"]["after"]["step"] == 8
    assert "after step" not in shown(best)
