"""python -m anyqlora doctor: a real, tiny QLoRA run on each backend of this machine, and how to mend what fails."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from anyqlora.cli import arguments
from anyqlora.config.accelerate_environment import from_accelerates_environment
from anyqlora.config.resolve import ENV_PREFIX, from_environment
from anyqlora.config.schema import parse_value
from anyqlora.core.errors import RunError, UsageError
from anyqlora.core.terminal import format_bytes, printable
from anyqlora.planning.machine import observe

USAGE = """usage: python -m anyqlora doctor [--backend NAME] [--output_dir DIR]

Trains, saves, loads and evaluates the embedded base on each backend of this machine (or
on the one that is named), and looks at what a run needs beside it. Exit code 1 when
something is wrong."""
INDEX = "https://download.pytorch.org/whl"
BUILDS = {  # what is in the machine -> (torch's name of its build, how to get it)
    "NVIDIA GPU": ("cuda", "pip install --force-reinstall torch==2.13.0"),
    "AMD GPU": ("hip", f"pip install --force-reinstall torch==2.13.0 --index-url {INDEX}/rocm7.2"),
}
NEEDED = {
    "torch": "2.11",
    "transformers": "5.17",
    "peft": "0.21",
    "bitsandbytes": "0.50",
    "safetensors": "0.8",
}  # the oldest tested
SMALL = 1 << 30  # bytes of free disk under which a run may not end
ROOMY = 20 << 30  # bytes that an 8B model's files take
PATIENCE = 300  # seconds for the run of one backend
TINY = {
    "model_name": "demo",
    "dataset": "demo",
    "eval_dataset": "demo",
    "train_type": "qlora",
    "context_length": 128,
    "batch_size": 8,
    "max_steps": 6,
    "lr": 3e-3,
    "warmup_steps": 0,
    "lora_dropout": 0.1,
    "exact_match": False,
    "log_to": "none",
    "run_name": "doctor",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report. `mark` is ok, no (absent, and nothing to mend), note or WRONG."""

    mark: str
    what: str
    mend: str = ""

    def __str__(self) -> str:
        return printable(f"{self.mark:6}{self.what}" + (f"\n      mend: {self.mend}" if self.mend else ""))


def main(argv: list[str]) -> int:
    if arguments.wants_help(argv):
        print(USAGE)
        return 0
    name, values = arguments.read(argv, {}, ("backend", "output_dir"))
    if name:
        raise UsageError(
            f"unexpected argument {name!r}", where=arguments.WHERE, cure=USAGE.splitlines()[0].removeprefix("usage: ")
        )
    wrong = 0
    for finding in findings(values.get("backend", ""), values.get("output_dir", "")):
        print(finding, flush=True)
        wrong += finding.mark == "WRONG"
    print(f"\n{wrong} thing{'s' * (wrong != 1)} to mend" if wrong else "\nnothing to mend")
    return int(wrong > 0)


def findings(only: str, output_dir: str) -> Iterator[Finding]:
    """All of them, cheapest first. `only` names one backend. Raises UsageError when it is unknown or not here."""
    from anyqlora.planning.backends import BackendManager
    from anyqlora.planning.capabilities import BackendUnavailable

    try:
        manager = BackendManager(only or "auto")
    except BackendUnavailable:
        if only:
            raise
        manager = None
    yield from packages()
    yield from environment(os.environ)
    yield from places(Path(output_dir or os.environ.get(f"{ENV_PREFIX}OUTPUT_DIR", "runs")), hub_cache(os.environ))
    machine = manager.machine if manager else observe()
    yield from builds(machine, hardware())
    if manager is None:
        yield Finding("WRONG", "no backend can be used", "see above")
        return
    yield Finding(
        "ok",
        f"{machine.system} {machine.os_version} {machine.arch}, Python {machine.python}, "
        f"torch {machine.torch.get('version')}, {machine.cores} cores, {format_bytes(machine.memory_available)} of "
        f"{format_bytes(machine.memory_total)} memory available",
    )
    for name in [only] if only else manager.names():
        why = manager.probe(name).why("available") or manager.no_loop(name)
        yield Finding("no", f"{name}: {why}") if why else trained(name)


# ---------------------------------------------------------------------------------------------------- what a run needs


def packages() -> Iterator[Finding]:
    """Those that are missing or too old."""
    for name, oldest in NEEDED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("WRONG", f"{name} is not installed", f"pip install '{name}>={oldest}'")
            continue
        if numbers(version) < numbers(oldest):
            yield Finding(
                "WRONG",
                f"{name} {version} is older than {oldest}, the oldest that is tested",
                f"pip install '{name}>={oldest}'",
            )


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


def environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables of Accelerate's that count here or change nothing, and variables that cannot be used."""
    notes: list[str] = []
    try:
        for name, (raw, where) in from_environment(environ).items():
            parse_value(name, raw, where)
        for name, (raw, where) in from_accelerates_environment(environ, notes).items():
            parse_value(name, raw, where)
            yield Finding("note", f"{where} states {name} {raw} for every run", f"unset {where}, or --{name} VALUE")
    except UsageError as error:
        yield Finding("WRONG", f"{error.where}: {error.message}", error.cure or "unset it, or give it such a value")
    for note in notes:
        yield Finding("note", note, f"unset {note.partition(' ')[0].rstrip(':')}")


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Where models are downloaded to."""
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def places(output_dir: Path, cache: Path) -> Iterator[Finding]:
    """Whether runs and models can be written, and whether there is room for them."""
    for what, place, room in (("output_dir", output_dir, SMALL), ("the cache of models", cache, ROOMY)):
        there = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
        mend = "--output_dir DIR" if what == "output_dir" else "HF_HOME=DIR"
        try:
            with tempfile.TemporaryFile(dir=there):
                free = shutil.disk_usage(there).free
        except OSError as error:
            yield Finding(
                "WRONG",
                f"{what} {place} cannot be written: {error.strerror}",
                f"{mend} with another one, or its permissions",
            )
            continue
        if free < room:
            yield Finding(
                "WRONG" if free < SMALL else "note",
                f"{what} {place} has {format_bytes(free)} free",
                f"delete something, or {mend} on another disk",
            )


def hardware() -> set[str]:
    """The accelerators that the system knows, whatever torch thinks.

    (Intel's driver also drives processors' own graphics.)
    """
    makers = set()
    if Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists():
        makers.add("NVIDIA GPU")
    if Path("/dev/kfd").exists():
        makers.add("AMD GPU")
    return makers


def builds(machine, hardware: set[str]) -> Iterator[Finding]:
    """A torch that is not built for what is in the machine, a driver that fails, a bitsandbytes that does not load, no
    compiler.
    """
    torch = machine.torch
    for what in sorted(hardware):
        build, mend = BUILDS[what]
        if not torch.get("error") and not torch.get(build):
            yield Finding(
                "WRONG" if build == "cuda" else "note",
                f"there is an {what}, and torch {torch.get('version')} is not built for it",
                mend,
            )
    for kind in ("cuda_error", "xpu_error"):
        if torch.get(kind):
            yield Finding(
                "WRONG",
                f"torch cannot use its GPU: {torch[kind]}",
                "a newer driver, or a torch that is built for this one",
            )
    if torch.get("error"):
        yield Finding("WRONG", torch["error"], f"pip install --force-reinstall 'torch>={NEEDED['torch']}'")
    elif machine.bitsandbytes.get("error"):
        yield Finding(
            "WRONG",
            f"no 4-bit and 8-bit weights: {machine.bitsandbytes['error']}",
            "pip install --force-reinstall bitsandbytes==0.50.2",
        )
    if machine.prebuilt.get("error"):
        yield Finding(
            "WRONG", machine.prebuilt["error"], "install the wheel again; until then kernels are compiled here"
        )
    is_for_c = "avx512_bf16" in machine.cpu_features and machine.system == "Linux" and not hardware
    if is_for_c and not machine.compiler and not machine.prebuilt.get("level"):
        yield Finding(
            "note",
            "no C compiler, so bf16 on the CPU runs without our kernels and takes 1.3 to 1.5 times as long",
            "apt install gcc, or name yours in CC",
        )


# --------------------------------------------------------------------------------------------------------- the tiny run


def trained(backend: str) -> Finding:
    """Train on `backend` in a process of its own, which a native library may take down."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", __name__, backend, directory]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return Finding(
                "WRONG",
                f"{backend}: a run of six steps did not end in {PATIENCE} s",
                "is the machine busy, or the driver stuck?",
            )
    if done.returncode < 0:
        return Finding(
            "WRONG",
            f"{backend}: ended by {signal.Signals(-done.returncode).name}; {last_line(done.stderr)}",
            "a library was built for another machine or driver, or memory ran out",
        )
    if done.returncode:
        return Finding(
            "WRONG", f"{backend}: {last_line(done.stderr)}", f"python train.py --backend {backend} shows where"
        )
    return judged(backend, json.loads(done.stdout.splitlines()[-1]))


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def judged(backend: str, result: dict) -> Finding:
    """What `tiny_run` found, as a finding."""
    if "error" in result:
        return Finding(
            "WRONG",
            f"{backend}: {result['error']}",
            result["cure"] or f"python train.py --backend {backend} shows where",
        )
    before, after, again = result["before"], result["after"], result["reloaded"]
    summary = (
        f"{backend}: {result['quantizer']}, {result['precision']}, {result['kernels']} kernels: loss {before:.4f} -> "
        f"{after:.4f} in {result['steps']} steps"
    )
    if not after < before:
        return Finding(
            "WRONG",
            f"{summary}: it does not learn",
            "another --precision; please report it with the output of this command",
        )
    if not result["moved"]:
        return Finding(
            "WRONG",
            f"{summary}, and the adapter that was saved has not moved",
            "please report it with the output of this command",
        )
    if abs(again - after) > 1e-3 * after:
        return Finding(
            "WRONG",
            f"{summary}, and {again:.4f} after loading what was saved",
            "please report it with the output of this command",
        )
    same = "the same" if again == after else f"{again:.4f}"
    return Finding("ok", f"{summary}, {same} after loading what was saved ({result['seconds']:.1f} s)")


def tiny_run(backend: str, directory: str) -> dict:
    """Train, save, load and evaluate on `backend`, by the program's own parts."""
    from safetensors import safe_open

    from anyqlora.config.resolve import resolve
    from anyqlora.recipes.sft import train
    from anyqlora.runs.finished import read_run

    try:
        result = train(resolve({**TINY, "backend": backend, "output_dir": directory}, environ={}, origin="doctor"))
        run = read_run(Path(directory) / TINY["run_name"])
        with safe_open(run.folder / "adapter_model.safetensors", "np") as file:
            names = file.keys()  # a handle, not a dict
            moved = all(file.get_tensor(name).any() for name in names if ".lora_B." in name)
        from anyqlora.runs.opened import load_finetuned  # not before the plan has refused what this machine lacks

        tuned = load_finetuned(run, {})
        again = tuned.evaluate()["loss"]
    except RunError as error:
        return {"error": error.message, "cure": error.cure}
    return {
        "before": result["eval"]["before"]["loss"],
        "after": result["eval"]["after"]["loss"],
        "reloaded": again,
        "moved": moved,
        "steps": result["steps"],
        "seconds": result["seconds"],
        "quantizer": result["quantizer"],
        "precision": tuned.plan.precision,
        "kernels": tuned.plan.kernels,
    }


if __name__ == "__main__":
    print(json.dumps(tiny_run(*sys.argv[1:])))
