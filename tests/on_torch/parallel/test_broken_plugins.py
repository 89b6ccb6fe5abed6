"""Plugins that raise, in real runs: they are named with their file and line, the other processes end, and what lies on
disk is whole.
"""

import json
import os
import sys
import time

import pytest

from anyqlora.core.errors import PeerLost, RunError, UsageError
from anyqlora.runs.checkpoints import Checkpoints
from tests.support import runs
from tests.support.launched import Launched

SOURCE = """
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from anyqlora.extend import MultiProcessStrategy, Strategy


def fault(place):
    if os.environ.get("FAULT") == place and os.environ.get("RANK", "none") in os.environ["FAULT_RANKS"].split(","):
        Path(os.environ["FAULT_FILE"]).write_text(str(time.time()))
        raise LookupError(f"broken in {place}")


fault("import")


@dataclass
class Options:
    every: int = 1

    def __post_init__(self):
        fault("__post_init__")


class Broken(MultiProcessStrategy):
    name = "broken"
    plugin_cls = Options

    def __init__(self, plan, options=None):
        super().__init__(plan, options)
        fault("__init__")
        self.taken = 0

    def setup(self):
        super().setup()
        fault("setup")

    def prepare(self, model, trainable, optimizer_factory):
        fault("prepare")
        owners = self.owners(trainable, model)
        self.share(model)
        self.refresh(trainable, owners)
        return Strategy.prepare(self, model, trainable, optimizer_factory)

    def accumulate(self, scaled, is_final):
        fault("accumulate")
        super().accumulate(scaled, is_final)

    def sum_gradients(self):
        self.sum_flat(self.trainable.values())

    def step(self, **more):
        self.taken += 1
        fault("step" if self.taken == 1 else f"step {self.taken}")
        return super().step(**more)

    def gather_moments(self):
        fault("gather_moments")
        return super().gather_moments()
"""
LINES = SOURCE.splitlines()
RAISED = 1 + next(number for number, line in enumerate(LINES) if "raise LookupError" in line)
PROMPT = 15.0  # seconds: 3 in which others are left to speak first, 5 in which they may end, and a busy machine


SMALL = {
    "strategy": "broken_strategy:Broken",
    "max_steps": 4,
    "save_steps": 2,
    "num_samples": 0,
    "log_to": "none",
    "gradient_accumulation_steps": 1,
}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """The module on the path of the run, to break where `FAULT` says."""
    (tmp_path / "broken_strategy.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FAULT_FILE", str(tmp_path / "raised"))
    return tmp_path / "broken_strategy.py"


def ended(place, fault, ranks, monkeypatch, **settings):
    """(exit code, standard error, seconds from the fault to the end) of a run with it; all its processes are gone."""
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("FAULT_RANKS", ranks)
    with Launched(place / "out", **{**SMALL, **settings}) as run:
        members = {}
        while run.process.poll() is None:
            members |= {child.pid: child for child in run.process_group()}
            time.sleep(0.05)
        seconds = time.time() - float((place / "raised").read_text())
        assert not any(child.is_running() for child in members.values()), "processes are left behind"
        assert members or settings.get("world_size") == 1
        return run.process.returncode, run.said(), seconds


def run_directory(place):
    return place / "out" / "run"


PLACES = ["import", "__post_init__", "__init__", "setup", "prepare", "accumulate", "step"]
QUICK = {("step", "1")}  # 15 seconds each
EARLY = {"import": UsageError, "__post_init__": UsageError}  # before the processes have begun to work


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("fault", "ranks"),
    [
        pytest.param(place, ranks, id=f"{place}-{ranks}", marks=[] if (place, ranks) in QUICK else pytest.mark.slow)
        for ranks in ("1", "0", "0,1")
        for place in PLACES
    ],
)
def test_a_plugin_that_raises_before_the_first_step_is_over(fault, ranks, broken, tmp_path, monkeypatch):
    """On two processes: its line, no traceback of ours, and no run directory, whoever of the two it is."""
    code, said, seconds = ended(tmp_path, fault, ranks, monkeypatch)
    assert code == EARLY.get(fault, RunError).exit_code != PeerLost.exit_code, said
    assert f"{broken}:{RAISED}" in said and f"LookupError: broken in {fault}" in said, said
    assert "strategy" in said and "broken_strategy:Broken" in said and "  cure: " in said
    assert "Traceback" not in said, said
    assert seconds < PROMPT, f"the others took {seconds:.0f} s to end"
    assert not run_directory(tmp_path).exists(), sorted(run_directory(tmp_path).rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "0"])
def test_what_was_trained_before_a_plugin_raises_is_whole_and_goes_on(ranks, broken, tmp_path, monkeypatch):
    """In the step after a checkpoint; the reference of the bytes is a run that nothing has broken."""
    code, said, seconds = ended(tmp_path, "step 3", ranks, monkeypatch)
    assert code == RunError.exit_code and f"{broken}:{RAISED}" in said and "Traceback" not in said, said
    assert seconds < PROMPT
    directory = run_directory(tmp_path)
    left = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert "result.json" not in left and not (directory / "adapter").exists()
    assert not [name for name in left if "tmp" in name or "staging" in name or "partial" in name], left
    for name in left:
        if name.endswith(".json"):
            json.loads((directory / name).read_bytes())
    kept = Checkpoints(directory / "checkpoints")
    found, rejected = kept.newest_good(None)
    assert kept.steps() == [2] and found is not None and found.step == 2 and not rejected
    monkeypatch.delenv("FAULT")
    with Launched(tmp_path / "out", **SMALL) as run:
        assert run.end() == 0, run.said()
    with Launched(tmp_path / "whole", **SMALL) as run:
        assert run.end() == 0, run.said()
    ours, whole = (tmp_path / place / "run" / "adapter" / "adapter_model.safetensors" for place in ("out", "whole"))
    assert ours.read_bytes() == whole.read_bytes()


@pytest.mark.distributed
def test_a_plugin_that_raises_alone_is_named_too(broken, tmp_path, monkeypatch):
    """One process, whose strategy works on a group of one."""
    code, said, _ = ended(tmp_path, "prepare", "0,none", monkeypatch, world_size=1)
    assert code == RunError.exit_code and f"{broken}:{RAISED}" in said and "Traceback" not in said, said
    assert not run_directory(tmp_path).exists()


@pytest.mark.distributed
def test_a_plugin_that_cannot_be_imported_at_all_is_refused_before_processes_start(broken, tmp_path, monkeypatch):
    monkeypatch.setenv("FAULT_RANKS", "none")
    for fault in ("import", "__post_init__"):
        monkeypatch.setenv("FAULT", fault)
        with Launched(tmp_path / fault, strategy="broken_strategy:Broken") as run:
            assert run.end() == UsageError.exit_code
            assert f"{broken}:{RAISED}" in run.said() and "Traceback" not in run.said()
            assert not (tmp_path / fault / "run").exists()


ROWS = """
from anyqlora.extend import AdapterInfo, QuantizerInfo
from anyqlora.on_torch.adapters.lora import Lora
from anyqlora.on_torch.quantizers.none import Unquantized


class Quantizer(Unquantized):
    def quantize_into(self, module, weight):
        return {}["a key"]


class Adapter(Lora):
    def init_weights(self, name, module):
        return {}["a key"]


QUANTIZER = QuantizerInfo("broken", bits=16, torch="broken_rows:Quantizer", strategies=("single",))
ADAPTER = AdapterInfo("broken", torch="broken_rows:Adapter")
"""
KEY_ERRORS = [number for number, line in enumerate(ROWS.splitlines(), 1) if "a key" in line]


@pytest.mark.parametrize(
    ("kind", "line"), [("quantizer", KEY_ERRORS[0]), ("adapter", KEY_ERRORS[1])], ids=["quantizer", "adapter"]
)
def test_a_quantizer_or_an_adapter_that_raises_is_named_too(kind, line, tmp_path, monkeypatch):
    (tmp_path / "broken_rows.py").write_text(ROWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_rows", raising=False)
    axes = {"quantizer": "none", "adapter": "lora", kind: f"broken_rows:{kind.upper()}"}
    with pytest.raises(RunError, match="raises KeyError: 'a key'") as raised:
        runs.run(tmp_path, model_name="demo", dataset="demo", eval_dataset="", max_steps=1, log_to="none", **axes)
    assert raised.value.where == f"{tmp_path / 'broken_rows.py'}:{line}" and raised.value.exit_code == 1
    assert f"{kind} 'broken_rows:{kind.upper()}'" in raised.value.message
