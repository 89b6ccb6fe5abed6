"""A run described in its directory: every setting with its source, and the machine and versions that its bytes depend
on.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import yaml

from anyqlora.config.schema import AUTO, TrainConfig, settings_with
from anyqlora.core.files import to_json
from anyqlora.core.redaction import redacted
from anyqlora.core.registry import CHAT_TEMPLATES
from anyqlora.data.readers.sources import placed
from anyqlora.processes.environment import physical_cores

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "safetensors", "tokenizers", "numpy", "mlx")


def resolved_yaml(config: TrainConfig) -> str:
    """Every setting as YAML, with where it came from as a comment; `--config` reads it back."""
    lines = []
    for name, value in config.settings().items():
        if name not in ("config", "trust_remote_code"):
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
            lines.append(f"{name}: {text}  # {config.sources.get(name, 'default')}\n")
    return "".join(lines)


def public_config(config: TrainConfig) -> TrainConfig:
    """The configuration as a run directory keeps it: without secrets, and readable from any working directory.

    The whole path of a model, an adapter, a template or of rows that are on this machine is no secret, whatever else
    has the same letters: the run is read again by it.
    """
    places = {name: placed(getattr(config, name), redacted) for name in ("dataset", "eval_dataset")}
    for name, is_here, built_in in (
        ("model_name", os.path.isdir, ("demo",)),
        ("init_adapter", os.path.isdir, ()),
        ("chat_template", os.path.isfile, CHAT_TEMPLATES),
    ):
        value = getattr(config, name)
        if value not in built_in and is_here(os.path.expanduser(value)):
            places[name] = os.path.abspath(os.path.expanduser(value))
    return config.with_(**{**redacted(config.settings()), **places})


def run_files(plan, machine: dict, data_report: dict) -> dict[str, bytes]:
    """{file: content} of what a run directory says about its run. What looks like a secret is not in it."""
    return {
        "config.resolved.yaml": resolved_yaml(public_config(plan.config)).encode(),
        "plan.json": to_json(redacted(plan.to_dict())),
        "env.json": to_json(machine),
        "data_report.json": to_json(redacted(data_report)),
    }


def environment(plan) -> dict:
    """What the bytes of a run depend on beside its identity: versions, machine, the plan's choices. Names no person."""
    config = plan.config
    threads = os.environ.get("OMP_NUM_THREADS") or physical_cores()  # where the plan left them alone
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "release": platform.release(),
        "processor": processor(),
        **versions(),
        **{name: getattr(config, name) for name in settings_with("on_resume", "recorded", "planned")},
        "cpu_threads": config.cpu_threads if config.cpu_threads != AUTO else threads,
        "backend": str(plan.backend),
        "device": plan.device,
    }


def versions() -> dict[str, str]:
    """Those of the libraries whose arithmetic and files a run depends on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[f"version of {package}"] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def processor() -> str:
    """Its name, where the system tells: kernels choose their instructions by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
