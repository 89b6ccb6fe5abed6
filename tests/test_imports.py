"""Garbage and imports: collected as before, but not what modules consist of."""

import gc
import sys
import weakref

import pytest

from anyqlora.imports import uncollected


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()


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
    frozen = gc.get_freeze_count()
    if not collects:
        gc.disable()
    try:
        with uncollected("sys" if collects else "a package that is not there yet"):
            assert gc.isenabled() == collects
        assert gc.isenabled() == collects
    finally:
        gc.enable()
    assert gc.get_freeze_count() == frozen


def test_it_collects_again_after_an_import_that_fails():
    with pytest.raises(ImportError), uncollected("a package that is not there yet"):
        raise ImportError
    assert gc.isenabled() and "a package that is not there yet" not in sys.modules
