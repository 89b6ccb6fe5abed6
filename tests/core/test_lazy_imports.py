"""How torch and others are imported: without looking for garbage, and with threads that wait as this machine can bear
it.
"""

import gc
import subprocess
import sys
import weakref

import pytest

from anyqlora.core.lazy_imports import uncollected
from anyqlora.planning import machine


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()
    gc.freeze()  # as it was


def test_what_is_imported_is_not_looked_through_again():
    stays = ["a module's"]
    with uncollected("a package that is not there yet"):
        assert not gc.isenabled()
        assert any(found is stays for found in gc.get_objects())
    assert gc.isenabled()
    assert not any(found is stays for found in gc.get_objects())  # frozen


def test_garbage_of_before_is_not_kept():
    class Model:
        pass

    model = Model()
    model.itself = model
    gone = weakref.ref(model)
    del model
    with uncollected("a package that is not there yet"):
        assert gone() is None


@pytest.mark.parametrize("collects", [True, False])
def test_a_second_time_and_whoever_collects_nothing_change_nothing(collects):
    """Nothing is frozen.

    How many frozen objects there are does not tell: those of earlier tests may die at any time.
    """
    stays = ["nobody's"]
    if not collects:
        gc.disable()
    try:
        with uncollected("sys" if collects else "a package that is not there yet"):
            assert gc.isenabled() == collects
        assert gc.isenabled() == collects
    finally:
        gc.enable()
    assert any(found is stays for found in gc.get_objects())


def test_it_collects_again_after_an_import_that_fails():
    with pytest.raises(ImportError), uncollected("a package that is not there yet"):
        raise ImportError
    assert gc.isenabled() and "a package that is not there yet" not in sys.modules


@pytest.fixture
def neighbours():
    """Processes that keep every core busy."""
    running = [
        subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
        for _ in range(machine.observe().cores)
    ]
    for process in running:
        process.stdout.readline()
    yield
    for process in running:
        process.kill()
        process.communicate()


def test_threads_sleep_while_they_wait_beside_a_busy_neighbour(neighbours):
    assert machine._cores_in_use() > 0.5
    assert machine._waiting({}) == {"OMP_WAIT_POLICY": "PASSIVE"}


def test_threads_stay_awake_for_a_while_where_nothing_else_runs(monkeypatch):
    monkeypatch.setattr(machine, "_cores_in_use", lambda: 0.1)
    assert machine._waiting({}) == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "5000"}


@pytest.mark.parametrize("stated", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_whoever_has_said_how_threads_wait_is_left_alone(stated):
    assert machine._waiting({stated: "1"}) == {}


def test_torch_is_imported_under_what_was_chosen():
    """In a process of its own, as the variables are there when OpenMP reads them: set before torch, not after it."""
    code = """
import os, sys
from anyqlora.planning import machine
imported = lambda: [name for name in sys.modules if name.startswith("torch")]
machine._waiting = lambda environ: {"GOMP_SPINCOUNT": str(len(imported()))}
machine.observe()
print(os.environ["GOMP_SPINCOUNT"], "torch" in sys.modules)
os.environ["GOMP_SPINCOUNT"] = "mine"
machine.observe()
print(os.environ["GOMP_SPINCOUNT"])
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["0", "True", "mine"]
