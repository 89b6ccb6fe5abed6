"""Several processes on MLX: a ring of two is one process over the same global batch, whoever starts it."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.support.paths import ROOT

pytest.importorskip("mlx.core", reason="needs mlx: pip install 'mlx[cpu]' mlx-lm")

from anyqlora.config.resolve import resolve
from anyqlora.core.errors import UsageError
from anyqlora.processes.environment import ProcessContext
from tests.support import runs

SETTINGS = {
    "model_name": "demo",
    "dataset": "demo",
    "train_type": "lora",
    "precision": "fp32",
    "context_length": 96,
    "lora_dropout": 0.1,
    "lora_rank": 4,
    "max_steps": 4,
    "lr": 2e-3,
    "warmup_steps": 0,
    "save_steps": 0,
    "backend": "mlx",
    "use_gradient_checkpointing": False,
}


def start(output, name, *launcher, **settings):
    """Train in processes of their own. Returns the run directory."""
    flags = [
        f"--{key}={value}" for key, value in {**SETTINGS, "output_dir": output, "run_name": name, **settings}.items()
    ]
    done = subprocess.run(
        [*launcher, sys.executable, str(ROOT / "train.py"), *flags],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return output / name


@pytest.mark.slow
def test_two_processes_are_one_over_the_same_rows(tmp_path):
    one = start(tmp_path, "one", batch_size=2, gradient_accumulation_steps=2)
    two = start(tmp_path, "two", batch_size=2, world_size=2)
    begun = start(tmp_path, "start", batch_size=2, gradient_accumulation_steps=2, max_steps=1, lr=0)
    assert runs.result(two)["world_size"] == 2 and runs.result(two)["strategy"] == "mlx"
    for name, near in (("loss", 1e-6), ("grad_norm", 1e-6)):
        np.testing.assert_allclose(
            [m[name] for m in runs.metrics(two)], [m[name] for m in runs.metrics(one)], rtol=near
        )
    far = runs.distance(runs.adapter(one), runs.adapter(two), runs.adapter(begun))
    print("adapter", far)
    assert far < 1e-6


@pytest.mark.slow
def test_mlx_launch_starts_the_same(tmp_path):
    launcher = shutil.which("mlx.launch", path=os.path.dirname(sys.executable))
    mine = start(tmp_path, "mine", batch_size=2, world_size=2)
    theirs = start(tmp_path, "theirs", launcher, "-n", "2", "--backend", "ring", "--", batch_size=2)
    assert (mine / "adapter/adapter_model.safetensors").read_bytes() == (
        theirs / "adapter/adapter_model.safetensors"
    ).read_bytes()


def test_the_world_of_mlx_launch(tmp_path):
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([["10.0.0.1:5000"], ["10.0.0.1:5001"], ["10.0.0.2:5000"]]))
    config = resolve({})
    here = [ProcessContext.here(config, {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}) for rank in range(3)]
    assert [(world.rank, world.size, world.local_rank) for world in here] == [(0, 3, 0), (1, 3, 1), (2, 3, 0)]
    for environ in (
        {"MLX_RANK": "0"},
        {"MLX_RANK": "3", "MLX_HOSTFILE": str(hosts)},
        {"MLX_RANK": "x", "MLX_HOSTFILE": str(hosts)},
    ):
        with pytest.raises(UsageError, match="MLX_|environment"):
            ProcessContext.here(config, environ)
