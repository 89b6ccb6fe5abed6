#!/usr/bin/env python3
"""Prove that a refactoring changed no number: run tiny jobs with two checkouts and compare what they write bit by bit.

    python scripts/same_bytes.py BASE_TREE [THIS_TREE] [--only SUBSTRING] [--jobs N] [--json FILE] [--reference FILE]

THIS_TREE is the checkout that holds this script, unless another is given. Each case trains the embedded demo model for
a few steps with each checkout, in processes of their own, outside both trees, on one thread. These must be equal:
sha256 of the adapter (or model) and of the optimizer's moments, losses and gradient norms of every step, evaluations,
samples, answers, and predicted memory. Texts and names of settings are not compared; flags are names that the base
knows, which this checkout must still accept.

A `resume` case stops this checkout's run by SIGTERM and continues it: it must end like the base's run, which nobody
stopped. An `open` case evaluates a finished run and generates with it. "begun by the base" means that the base wrote
the checkpoint, or the finished run, that this checkout takes over.

--json writes all results. --reference takes the base's results from such a file in place of running the base, if they
are of the same commit, processor and versions. Exit code 0: all equal; 1: something differs or failed; 2: usage.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

TIMEOUT = 300  # seconds for one process
STOPPED = 75  # exit code of a run that was stopped and can be resumed
STOP_AFTER = 5  # steps of a run that is to be stopped
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
NOT_INHERITED = "ANYQLORA_ SLURM_ MLX_ RANK WORLD_SIZE LOCAL_ MASTER_ ACCELERATE_ FSDP_ OMP_ PYTHONPATH"  # prefixes
PACKAGES = "torch transformers peft bitsandbytes accelerate deepspeed safetensors tokenizers numpy mlx mlx-lm"
STEP_FIELDS = "step loss grad_norm lr skipped loss_scale tokens trained_tokens"  # of metrics.jsonl
PLAN_FIELDS = "batch_size world_size precision quantizer"  # of plan.json, beside its memory
TIMING = ("seconds", "_per_second", "_bytes")  # ends of the names of fields that vary from run to run

# ------------------------------------------------------------------------------------------------------------- cases

# What the plan would choose by free memory is stated, so that it is the same each time. `name=` leaves the flag out.
COMMON = (
    "model_name=demo dataset=demo context_length=96 batch_size=2 max_steps=4 lr=2e-3 warmup_steps=1 lora_rank=4 "
    "lora_dropout=0 save_steps=0 use_gradient_checkpointing=false log_to=none "
)
TORCH = f"{COMMON} backend=cpu precision=fp32 kernels=portable threads=1 weight_cache=0 quantized_cache=false "
MLX = f"{COMMON} backend=mlx precision=fp32 "
FULL = "train_type=full lr=1e-4 lora_rank= lora_dropout="
NATIVE = "precision=bf16 kernels=native fused_head=true"
EVALUATED = "eval_fraction=0.02 eval_steps=2 samples=2 max_new_tokens=12 exact_match=true"
LONG = "max_steps=24 save_steps=3 lora_dropout=0.1 gradient_accumulation_steps=2"  # enough steps to be stopped midway
RECOMPUTED = "use_gradient_checkpointing=true lora_dropout=0.1"

ON_TORCH = {
    "nf4 fp32": "",
    "nf4 bf16, kernels portable": "precision=bf16",
    "nf4 bf16_autocast": "precision=bf16_autocast",
    "nf4 fp16_autocast": "precision=fp16_autocast initial_loss_scale=64 loss_scale_growth_interval=2",
    "nf4, no double quantization": "double_quant=false",
    "fp4": "quantizer=fp4",
    "int8": "quantizer=int8",
    "affine4": "quantizer=affine4",
    "none (lora)": "train_type=lora",
    "custom_qlora": "train_type=custom_qlora",
    "dora": "adapter=dora",
    "rslora": "adapter=rslora",
    "pissa": "adapter=pissa",
    "loftq": "adapter=loftq",
    "full": FULL,
    "two target modules, alpha": "lora_target_modules=q_proj,v_proj lora_alpha=8",
    "dropout": "lora_dropout=0.2",
    "fused false": "fused=false",
    "packed": "packing=true batch_size=4",
    "padded": "flat=false",
    "conversations, weighted mixture": "dataset=talks.jsonl=2,texts.jsonl=0.5 chat_template=zephyr context_length=64",
    "all logits at once": "loss_rows=0",
    "weight cache": "precision=bf16 weight_cache=2",
    "kernels native, fused_head false": f"{NATIVE} fused_head=false",
    "kernels native, fused_head true": NATIVE,
    "kernels native, packed, dropout": f"{NATIVE} packing=true lora_dropout=0.2",
    "frozen_products int8": f"{NATIVE} frozen_products=int8",
    "frozen_products int8_backward": f"{NATIVE} frozen_products=int8_backward",
    "frozen_products int8, kernels portable": "precision=bf16 frozen_products=int8",
    "gradient accumulation": "gradient_accumulation_steps=3",
    "gradient checkpointing, 2 layers": f"{RECOMPUTED} recomputed_layers=2",
    "gradient checkpointing, reentrant": f"{RECOMPUTED} reentrant_checkpointing=true",
    "adam, linear": "optimizer=adam lr_scheduler=linear",
    "sgd, cosine_with_restarts": "optimizer=sgd lr_scheduler=cosine_with_restarts lr_cycles=2 max_steps=6",
    "adadelta, polynomial": "optimizer=adadelta lr=1.0 lr_scheduler=polynomial lr_power=2 cosine_min_lr_ratio=0.1",
    "fused_adamw, exponential": "optimizer=fused_adamw lr_scheduler=exponential lr_decay=0.2",
    "adamw_8bit": "optimizer=adamw_8bit lora_rank=64",
    "evaluation, keep best": f"{EVALUATED} keep=best lr=3e-2 lr_scheduler=constant",
}
WORLD_2 = {
    "ddp": "strategy=ddp",
    "ddp, kernels native": f"strategy=ddp {NATIVE}",
    "accelerate": "strategy=accelerate",
    "fsdp full_shard": "strategy=fsdp sharding_strategy=full_shard",
    "fsdp shard_grad_op": "strategy=fsdp sharding_strategy=shard_grad_op",
    "fsdp, gradient checkpointing": f"strategy=fsdp {RECOMPUTED}",
    **{f"deepspeed ZeRO {n}": f"strategy=deepspeed deepspeed_zero_stage={n}" for n in range(4)},
    "tp": "mesh=model=2",
}
ON_MLX = {
    "affine4": "quantizer=affine4",
    "affine4 bf16": "quantizer=affine4 precision=bf16",
    "nf4": "quantizer=nf4",
    "none": "train_type=lora",
    "dora": "adapter=dora quantizer=affine4",
    "full": FULL,
    "gradient checkpointing, packed": f"train_type=lora packing=true {RECOMPUTED}",
    "evaluation, keep best": f"train_type=lora {EVALUATED} keep=best",
    "world 2": "train_type=lora world_size=2",
}
RESUMED = {
    "torch": f"{TORCH}{LONG} max_steps=60",  # which take 0.02 s each
    "fsdp": f"{TORCH}{LONG} strategy=fsdp world_size=2",
    "mlx": f"{MLX}{LONG} train_type=lora",
}
OPENED = {"torch": TORCH + EVALUATED, "mlx": f"{MLX}{EVALUATED} quantizer=affine4"}
FIRST_RUN = (
    "backend=cpu threads=1 weight_cache=0 use_gradient_checkpointing=false max_steps=3 max_new_tokens=8 log_to=none"
)
PROMPTS = ("Lanin found 4 old drums in Quaydale. JSON:", "Danric sold 14 round clocks in Kingwick. JSON:")
ROWS = {  # files that cases train on
    "talks.jsonl": [
        {"messages": [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": f"{n} drums"}]}
        for n in range(12)
    ],
    "texts.jsonl": [{"text": f"Lanin found {n} old drums in Quaydale."} for n in range(16)],
}

PLANNED = """
batch_size=4 precision=bf16 use_gradient_checkpointing=true
batch_size=1 train_type=full optimizer=sgd
train_type=bnb_dora lora_rank=64 eval_fraction=0.1
train_type=lora context_length=2048 gradient_accumulation_steps=4
n_bits=8 batch_size=64
quantizer=affine4
use_activation_cpu_offload=true packing=true
strategy=fsdp world_size=8 batch_size=2
strategy=deepspeed deepspeed_zero_stage=3 world_size=8
mesh=batch=2,model=4
"""
# Plans these settings for all recorded machines and for models of which only config.json is there; None is a refusal.
# Arguments: the directory of the tests, where both are, the settings, the fields of a plan.
PLANNER = """
import json, sys
from itertools import product
from pathlib import Path
from backend_manager import BackendManager, Machine
from train import resolve

tests, settings, fields = Path(sys.argv[1]), sys.argv[2].strip().splitlines(), [*sys.argv[3].split(), "memory"]
machines, models = sorted(tests.glob("**/machines/*.json")), sorted(tests.glob("**/models/*/config.json"))
assert machines and models, f"no recorded machines or no models in {tests}"
plans = []
for machine, model, line in product(machines, models, settings):
    recorded = Machine.from_dict(json.loads(machine.read_text())["machine"])
    asked = dict(setting.split("=", 1) for setting in line.split())
    config = resolve({"model_name": str(model.parent), "dataset": "alpaca_sample", **asked}, environ={})
    try:
        plan = BackendManager("auto", machine=recorded).plan(config).to_dict()
        plans.append({name: plan[name] for name in fields})
    except Exception as error:
        if not hasattr(error, "exit_code"):  # no explained refusal
            raise
        plans.append(None)
print(json.dumps(plans))
"""


@dataclass(frozen=True)
class Case:
    """One job: `settings` as name=value, of which the last of a name counts; `kind` is a key of KINDS."""

    name: str
    kind: str
    settings: str = ""
    begun_by_base: bool = False

    @property
    def flags(self) -> list[str]:
        values = dict(setting.split("=", 1) for setting in self.settings.split())
        return [f"--{name}={value}" for name, value in values.items() if value]

    @property
    def missing(self) -> str:
        """What this machine lacks for the case; "" if nothing."""
        features = processor()[1].split()
        has_compiler = bool(shutil.which(os.environ.get("CC", "cc")))
        needs = (
            ("backend=mlx", importlib.util.find_spec("mlx"), "mlx"),
            ("strategy=deepspeed", importlib.util.find_spec("deepspeed"), "deepspeed"),
            ("kernels=native", "avx512_bf16" in features and has_compiler, "AVX512-BF16 and a C compiler"),
            ("products=int8", {"avx512_vnni", "amx_int8"} & {*features}, "AVX512-VNNI or AMX"),
        )
        return next((lack for setting, is_there, lack in needs if setting in self.settings and not is_there), "")


def all_cases() -> list[Case]:
    cases = [Case(f"torch: {name}", "train", TORCH + settings) for name, settings in ON_TORCH.items()]
    cases += [Case("torch: first run, no model named", "train", FIRST_RUN)]
    cases += [Case(f"world 2: {name}", "train", f"{TORCH}world_size=2 {more}") for name, more in WORLD_2.items()]
    cases += [Case("world 4: tp, 2-D mesh", "train", f"{TORCH}mesh=batch=2,model=2")]
    cases += [Case(f"mlx: {name}", "train", MLX + settings) for name, settings in ON_MLX.items()]
    for kind, table in (("resume", RESUMED), ("open", OPENED)):
        cases += [Case(f"{kind}: {name}", kind, settings) for name, settings in table.items()]
        cases += [Case(f"{kind}: {name}, begun by the base", kind, table[name], begun_by_base=True) for name in table]
    return [*cases, Case("plan: recorded machines, large models", "plan", PLANNED)]


# -------------------------------------------------------------------------------------------------- running one case


class Failed(Exception):
    """A process did not end as expected; the message has the end of its standard error."""


def run(command: list, place: Path, *, code: int = 0, stop: Callable | None = None, **environment: str) -> str:
    """Run Python with these arguments in `place`, and `stop` it on the way. Returns its standard output."""
    command = [sys.executable, *map(str, command)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(tuple(NOT_INHERITED.split()))}
    cache = place.parent.parent / f"cache-{place.name}"  # of compiled kernels: one per checkout
    environment = {**inherited, **ENVIRONMENT, "XDG_CACHE_HOME": str(cache), **environment}
    with open(place / "out.txt", "wb") as out, open(place / "err.txt", "wb") as err:
        process = subprocess.Popen(command, cwd=place, env=environment, stdout=out, stderr=err)
        try:
            if stop:
                stop(process)
            process.wait(TIMEOUT)
        finally:
            process.kill()
    if process.returncode != code:
        said = (place / "err.txt").read_text(errors="replace").splitlines()[-12:]
        words = " ".join(" ".join(command).split())
        raise Failed("\n".join([f"exit code {process.returncode}, not {code}: {words[:240]}", *said]))
    return (place / "out.txt").read_text()


def train_command(case: Case, tree: Path) -> list:
    return [tree / "train.py", *case.flags, "--output_dir=.", "--run_name=run"]


def train(case: Case, tree: Path, _first: Path, place: Path) -> dict:
    run(train_command(case, tree), place)
    return numbers_of(place / "run")


def resume(case: Case, tree: Path, first: Path, place: Path) -> dict:
    """Train with checkout `first`, stop it after some steps, and continue with `tree`."""
    metrics = place / "run" / "metrics.jsonl"

    def stop(process: subprocess.Popen) -> None:
        began = time.monotonic()
        while process.poll() is None and len(read_lines(metrics)) < STOP_AFTER and time.monotonic() - began < TIMEOUT:
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)

    run(train_command(case, first), place, code=STOPPED, stop=stop)
    return train(case, tree, first, place)


def open_finished(case: Case, tree: Path, first: Path, place: Path) -> dict:
    """Train with checkout `first`, then evaluate, generate and plan with `tree`."""
    run(train_command(case, first), place)
    (place / "prompts.txt").write_text("\n".join(PROMPTS))

    def verb(*words: str) -> str:
        return run(["-m", "anyqlora", *words], place, PYTHONPATH=str(tree))

    def answers(temperature: str) -> list[str]:
        said = verb("generate", "run", "--file=prompts.txt", f"--temperature={temperature}", "--seed=3")
        return [json.loads(line)["answer"] for line in said.splitlines()]

    verb("plan", "--config=run/config.resolved.yaml")  # texts may change; `numbers_of` has its memory
    opened = {"greedy": answers("0"), "drawn": answers("0.8"), "eval": re.findall(r"\d+\.\d+", verb("eval", "run"))}
    return numbers_of(place / "run") | opened


def plan(case: Case, tree: Path, _first: Path, place: Path) -> dict:
    """No run: memory predictions. Each checkout describes the machines in its own words."""
    said = run(["-c", PLANNER, tree / "tests", case.settings, PLAN_FIELDS], place, PYTHONPATH=str(tree))
    plans = [planned and numbers_of_plan(planned) for planned in json.loads(said)]
    return {"sha256": hashlib.sha256(json.dumps(plans).encode()).hexdigest(), "plans": plans}


KINDS = {"train": train, "resume": resume, "open": open_finished, "plan": plan}


def numbers_of(directory: Path) -> dict:
    """All numbers of a finished run that are to be equal."""
    folder = directory / ("adapter" if (directory / "adapter").is_dir() else "model")
    moments = sorted(directory.glob("checkpoints/*/optimizer.safetensors"))[-1:]
    lines = read_lines(directory / "metrics.jsonl")
    return {
        "sha256": sha256(folder / f"{folder.name.replace('adapter', 'adapter_model')}.safetensors"),
        "moments": [sha256(path) for path in moments],
        "steps": [{name: line[name] for name in STEP_FIELDS.split()} for line in lines if "event" not in line],
        "evaluations": [without_timing(line) for line in lines if line.get("event") == "evaluation"],
        "eval": without_timing(json.loads((directory / "result.json").read_bytes())["eval"]),
        "samples": read_lines(directory / "samples.jsonl"),
        "plan": numbers_of_plan(json.loads((directory / "plan.json").read_bytes())),
    }


def numbers_of_plan(planned: dict) -> dict:
    """Memory part by part at each moment; both may be renamed, so their order is that of the numbers."""
    moments = planned["memory"]["moments"].values() if planned["memory"] else ()
    memory = sorted(sorted(parts.values()) for parts in moments)
    return {**{name: planned[name] for name in PLAN_FIELDS.split()}, "memory": memory}


def without_timing(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {name: without_timing(inner) for name, inner in value.items() if not name.endswith(TIMING)}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_lines(path: Path) -> list[dict]:
    """The complete lines of a JSON-lines file; none if there is no file."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


# -------------------------------------------------------------------------------------------------------- comparison


def compare(case: Case, base: Path, this: Path, place: Path, known: dict | None) -> dict:
    """The results of both checkouts, of which the base's may be `known`, or the error that ended one."""
    found = {"settings": case.settings}
    began = time.monotonic()
    for side, tree in (("base", base), ("this", this)):
        if side == "base" and known:
            found[side] = known
            continue
        there = place / re.sub(r"\W+", "-", case.name) / side
        there.mkdir(parents=True)
        for name, rows in ROWS.items():
            (there / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        is_uninterrupted = side == "base" and case.kind == "resume"
        try:
            found[side] = KINDS["train" if is_uninterrupted else case.kind](
                case, tree, base if case.begun_by_base else tree, there
            )
        except Exception as error:  # whatever it is, it concerns this case alone
            found["error"] = f"{side}: {error if isinstance(error, Failed) else repr(error)}"
            break
        shutil.rmtree(there)
    return found | {"seconds": time.monotonic() - began}


def differences(base: object, this: object, where: str = "") -> Iterator[str]:
    """Where two results are not the same, and how."""
    if isinstance(base, dict) and isinstance(this, dict) and base.keys() == this.keys():
        for name in base:
            yield from differences(base[name], this[name], f"{where}.{name}".lstrip("."))
    elif isinstance(base, list) and isinstance(this, list) and len(base) == len(this):
        for number, (one, other) in enumerate(zip(base, this, strict=True)):
            yield from differences(one, other, f"{where}[{number}]")
    elif base != this:
        yield f"{where}: {str(base)[:100]} in the base, {str(this)[:100]} here"


def report(case: Case, found: dict) -> bool:
    """Print the case's line of the table, and what differs. Returns whether nothing does."""
    base, this = found.get("base", {}), found.get("this", {})
    details = found["error"].splitlines() if "error" in found else list(differences(base, this))
    verdict = "FAILED" if "error" in found else "DIFFERENT" if details else "ok"
    losses = [[(step["loss"], step["grad_norm"]) for step in side.get("steps", ())] for side in (base, this)]
    are_equal = "-" if not all(losses) else "yes" if losses[0] == losses[1] else "NO"
    shas = [side.get("sha256", "-")[:12] for side in (base, this)]
    print(f"{case.name:45} {shas[0]:13} {shas[1]:13} {are_equal:7} {verdict:10} {found['seconds']:5.1f}")
    shown = details if "error" in found else details[:4] + [f"... and {len(details) - 4} more"] * (len(details) > 4)
    print("".join(f"    {line}\n" for line in shown), end="", flush=True)
    return verdict == "ok"


def machine(base: Path) -> dict[str, str]:
    """What the base's results depend on."""
    name, features = processor()
    git = ["git", "-C", base, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    found = {
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "processor": name,
        "processor features": hashlib.sha256(features.encode()).hexdigest()[:12],
        "system": " ".join([platform.system(), *platform.libc_ver()]),
        "python": platform.python_version(),
    }
    for package in PACKAGES.split():
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def processor() -> tuple[str, str]:
    """Name and features; no features where the system does not list them."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(re.findall(r"^(model name|flags|Features)\s*:\s*(.*)$", info, re.MULTILINE))
    return fields.get("model name", platform.machine()), fields.get("flags", fields.get("Features", ""))


def read_reference(path: Path, here: dict[str, str]) -> dict[str, dict]:
    """The cases of an earlier call. Raises ValueError if the base would give other results here and now."""
    kept = json.loads(path.read_bytes())
    changed = [
        f"{name} was {kept['machine'].get(name)}, is {here[name]}"
        for name in here
        if kept["machine"].get(name) != here[name]
    ]
    if changed:
        raise ValueError(
            f"{path} cannot stand for the base: {'; '.join(changed)}. Without --reference the base runs again."
        )
    return kept["cases"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="checkout from before the refactoring")
    parser.add_argument("this", type=Path, nargs="?", default=Path(__file__).parent.parent, help="checkout to compare")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only cases whose names contain this")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1, help="cases at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--reference", type=Path, metavar="FILE", help="read the base's results from this file")
    asked = parser.parse_args()
    base, this = asked.base.resolve(), asked.this.resolve()
    for tree in (base, this):
        if not (tree / "train.py").is_file():
            parser.error(f"{tree} is no checkout: it has no train.py")
    cases = [case for case in all_cases() if asked.only in case.name]
    if not cases:
        parser.error(f"no case has {asked.only!r} in its name")
    here = machine(base)
    try:
        reference = read_reference(asked.reference, here) if asked.reference else {}
    except (OSError, ValueError) as error:
        parser.error(str(error))

    began, results, is_equal = time.monotonic(), {}, True
    possible = [case for case in cases if not case.missing]
    for case in cases:
        if case.missing:
            print(f"skipped, as this machine has no {case.missing}: {case.name}")
    print(f"{'case':45} {'base':13} {'this':13} {'losses':7} {'':10} seconds", flush=True)
    with tempfile.TemporaryDirectory(prefix="same-bytes-") as place, ThreadPoolExecutor(asked.jobs) as pool:

        def compared(case: Case) -> dict:
            earlier = reference.get(case.name, {})
            known = earlier.get("base") if earlier.get("settings") == case.settings else None
            return compare(case, base, this, Path(place), known)

        for case, found in zip(possible, pool.map(compared, possible), strict=True):
            results[case.name] = found
            is_equal &= report(case, found)
    if asked.json:
        asked.json.write_text(json.dumps({"machine": here, "cases": results}, indent=1) + "\n")
    seconds = time.monotonic() - began
    print(f"{len(possible)} of {len(cases)} cases in {seconds:.0f} s: {'all' if is_equal else 'NOT all'} equal")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
