"""Which process this is, from what launchers say."""

import pytest

from anyqlora.config.resolve import resolve
from anyqlora.core.errors import UsageError
from anyqlora.core.files import to_json
from anyqlora.processes.environment import (
    ProcessContext,
    cores_per_process,
    device_index,
    first_host,
    local_rank,
    local_size,
)
from anyqlora.runs import directory
from anyqlora.runs.checkpoints import LoadedCheckpoint

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def config(**given):
    return resolve(given, environ={})


def test_alone():
    assert ProcessContext.here(config(), {}) == ProcessContext(0, 1, 0)
    assert (
        ProcessContext.here(config(), {"MASTER_ADDR": "somewhere"}) == ProcessContext()
    )  # clusters export it for everybody


def test_torchrun():
    world = ProcessContext.here(config(), TORCHRUN)
    assert world == ProcessContext(3, 4, 1, "the launcher", "10.0.0.1", "29500") and not world.is_first
    stated = world.apply_to(config())
    assert stated.world_size == 4 and stated.sources["world_size"] == "the launcher"


@pytest.mark.parametrize("missing", TORCHRUN)
def test_half_a_launcher_is_an_error(missing):
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(UsageError, match=f"{missing} is not"):
        ProcessContext.here(config(), environ)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"RANK": "4"}, "RANK 4 is not one of WORLD_SIZE 4"), ({"WORLD_SIZE": "four"}, "not a number")],
)
def test_a_launcher_that_errs(changed, reason):
    with pytest.raises(UsageError, match=reason):
        ProcessContext.here(config(), TORCHRUN | changed)


def test_a_world_size_that_the_launcher_contradicts():
    with pytest.raises(UsageError, match="started 4 processes"):
        ProcessContext.here(config(world_size=2), TORCHRUN)
    assert ProcessContext.here(config(world_size=4), TORCHRUN).size == 4


def test_srun():
    assert ProcessContext.here(config(), SRUN) == ProcessContext(3, 4, 1, "srun", "gpu07", str(20000 + 70001 % 20000))
    assert ProcessContext.here(config(master_port="444"), SRUN).port == "444"
    assert ProcessContext.here(config(), SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "5"}).address == "head"
    assert (
        ProcessContext.here(config(), SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) == ProcessContext()
    )  # srun --ntasks=1 inside a larger job


def test_the_batch_script_itself_is_no_task():
    environ = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    with pytest.raises(UsageError, match="srun python train.py"):
        ProcessContext.here(config(), environ)
    assert (
        ProcessContext.here(config(world_size=2), environ) == ProcessContext()
    )  # asked for by name: train.py starts them on this node


@pytest.mark.parametrize(
    ("nodes", "first"), [("a1", "a1"), ("node[03-05,9],gpu1", "node03"), ("x,y", "x"), ("rack-2-n[7]", "rack-2-n7")]
)
def test_node_lists(nodes, first):
    assert first_host(nodes) == first


# ---------------------------------------------------------------------------- how many devices a run in a directory had


@pytest.fixture
def left(tmp_path):
    """A run directory that eight processes left behind: eight times the rows of one to a step."""
    mine = config(model_name="demo", dataset="demo", batch_size=2, output_dir=str(tmp_path), run_name="run")
    identity = directory.run_identity(mine)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / directory.IDENTITY).write_bytes(
        to_json({**identity, "global_batch": 8 * identity["global_batch"]})
    )
    return mine


def test_another_global_batch_is_another_run(left, monkeypatch):
    monkeypatch.setattr(directory, "may_have_several_gpus", lambda: False)
    with pytest.raises(UsageError, match="global_batch: 16 there, 2 now"):
        directory.locate_run(left)


def test_where_there_may_be_several_gpus_the_plan_tells(left, monkeypatch):
    monkeypatch.setattr(directory, "may_have_several_gpus", lambda: True)
    with pytest.raises(UsageError, match="global_batch: 16 there, 2 now"):
        directory.locate_run(left.with_(world_size=1))  # somebody has said how many
    with directory.locate_run(left) as found:
        found.restored = LoadedCheckpoint(3, found.directory, {}, {}, {}, {})
        with pytest.raises(UsageError, match="a run of 16 rows to a step, and with these devices it would be 8"):
            found.check(left, 8)
        found.identity["global_batch"] = 16
        found.check(left, 16)


@pytest.mark.parametrize(("number", "visible", "own"), [(0, 8, 0), (3, 8, 3), (3, 1, 0)])
def test_the_only_device_that_a_task_sees_is_its_own(number, visible, own):
    """srun --gpus-per-task=1: each task sees its GPU as the first one, whatever its number on the machine."""
    assert device_index(number, visible) == own


def test_the_number_on_the_machine_is_known_where_somebody_started_several():
    batch_script = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert [local_rank(environ) for environ in (TORCHRUN, SRUN, batch_script, {})] == [1, 1, None, None]


@pytest.mark.parametrize(("node", "size"), [("0", 2), ("2", 2), ("3", 1), ("9", 0), ("x", 0)])
def test_how_many_are_on_this_machine(node, size):
    """SLURM tells it for each node of a step; what cannot be read says nothing, and World.here what is wrong with
    it.
    """
    assert local_size({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": node}) == size
    assert local_size({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}) == 2 and local_size(TORCHRUN) == local_size({}) == 0
    assert local_size({**TORCHRUN, "LOCAL_WORLD_SIZE": "\u00b2"}) == 0


@pytest.mark.parametrize(
    ("own", "node", "of_all"),
    [(2, "8", 8), (1, "4", 4), (8, "8", 8), (4, "8", 4), (2, "7", 2), (2, "", 2), (2, "x", 2)],
)
def test_cores_to_which_srun_has_bound_a_task_are_its_own(own, node, of_all):
    """Four tasks on a node: each of them sees two of eight cores, or all eight."""
    step = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_CPUS_ON_NODE": node}
    assert cores_per_process(own, step) == of_all
    assert cores_per_process(own, {**step, "LOCAL_WORLD_SIZE": "4"}) == own  # torchrun's, in one task
    assert cores_per_process(own, {"SLURM_CPUS_ON_NODE": node}) == own


def test_the_only_task_of_a_step_says_nothing_of_processes_that_it_starts():
    """srun --pty bash, and --world_size 4 in it."""
    assert local_size({**SRUN, "SLURM_NTASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}) == 0


def test_how_many_of_mlx_launch_are_on_this_machine(tmp_path):
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[["10.0.0.1:5000"], ["10.0.0.2:5000"], ["10.0.0.1:5001"]]')
    assert [local_size({"MLX_RANK": rank, "MLX_HOSTFILE": str(hosts)}) for rank in ("0", "1", "2", "3")] == [2, 1, 2, 0]
    assert local_size({"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "absent")}) == 0
    hosts.write_text('[{"ssh": "m1"}, {"ssh": "m2"}]')
    of_ssh = {"MLX_RANK": "0", "MLX_HOSTFILE": str(hosts)}
    assert local_size(of_ssh) == 0
    with pytest.raises(UsageError, match="cannot be read"):
        ProcessContext.here(config(), of_ssh)
