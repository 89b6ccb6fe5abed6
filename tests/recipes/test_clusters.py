"""The recipes for clusters, as far as one machine can tell: the SLURM script before a scheduler that is a shell
script.
"""

import os
import subprocess
import sys

import pytest
import yaml

from anyqlora.config.resolve import canonical_argv, resolve
from anyqlora.processes.environment import ProcessContext
from tests.support.paths import ROOT

SCRIPT = ROOT / "examples" / "clusters" / "slurm.sbatch"
# srun: both tasks of the job, one after the other, with what SLURM tells each; then the exit code that the test asks
# for.
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
for task in 0 1; do
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$task SLURM_LOCALID=$task \\
        SLURM_STEP_NODELIST='gpu[07-08]' "$@" || exit $?
done
exit "$TASKS_END_WITH"
"""
# train.py's stand-in: says what a real process would make of its environment and flags.
TOLD = """
import sys
from anyqlora.config.resolve import canonical_argv, resolve
from anyqlora.processes.environment import ProcessContext
flags = dict(word.removeprefix("--").split("=", 1) for word in canonical_argv(sys.argv[2:]))
config = resolve(flags)
world = ProcessContext.here(config)
print("task", world.rank, world.size, world.local_rank, world.address, world.port,
      world.apply_to(config).world_size, config.run_name, config.lr)
"""


def submitted(tmp_path, code: int):
    """The script run as sbatch runs it, in an allocation of two tasks."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in {
        "srun": SRUN,
        "scontrol": '#!/bin/bash\necho "scontrol $*"\n',
        "python": f'#!/bin/bash\nexec {sys.executable} {tmp_path}/told.py "$@"\n',
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "told.py").write_text(TOLD)
    environ = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHON": str(tools / "python"),
        "SLURM_JOB_ID": "70001",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "0",
        "SLURM_JOB_NODELIST": "gpu[07-08]",
        "TASKS_END_WITH": str(code),
    }
    return subprocess.run(["bash", str(SCRIPT), "--lr", "1e-3"], capture_output=True, text=True, cwd=ROOT, env=environ)


def test_the_slurm_script_is_a_script():
    assert subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True).returncode == 0
    asked = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH --")]
    assert len(asked) >= 6 and all("=" in line or line.endswith("requeue") for line in asked)


@pytest.mark.parametrize("code", [0, 2, 75])
def test_each_task_is_a_process_of_one_run(code, tmp_path):
    done = submitted(tmp_path, code)
    port = 20000 + 70001 % 20000
    assert done.stdout.splitlines()[:2] == [
        f"task {rank} 2 {rank} gpu07 {port} 2 slurm-70001 0.001" for rank in (0, 1)
    ], done.stderr
    assert done.returncode == code
    assert ("scontrol requeue 70001" in done.stdout) == (code == 75)  # stopped and resumable: queued again


def test_the_kubeflow_job_starts_train_py_by_torchrun():
    job = yaml.safe_load((ROOT / "examples" / "clusters" / "kubeflow.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert (
        container["command"][:2] == ["torchrun", "train.py"] and container["name"] == "pytorch"
    )  # the name that the operator looks for
    flags = dict(word.removeprefix("--").split("=", 1) for word in canonical_argv(container["command"][2:]))
    config = resolve(flags, environ={})
    assert config.output_dir in {mount["mountPath"] for mount in container["volumeMounts"]}
    size = worker["replicas"] * int(job["spec"]["nprocPerNode"])
    pod = {
        "RANK": "5",
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "kubeflow-worker-0",
        "MASTER_PORT": "29500",
    }  # what torchrun sets in a pod
    assert ProcessContext.here(config, pod).size == size == 8


def test_the_ray_recipe_takes_the_flags_of_train_py():
    """Ray itself is not installed here: what is seen is that the file says how it is used, and that its flags are
    ours.
    """
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "clusters" / "ray_train.py")], capture_output=True, text=True, cwd=ROOT
    )
    assert (
        done.returncode == 1
        and "usage: ray_train.py --workers N [flags of train.py]" in done.stderr
        and "Traceback" not in done.stderr
    )
