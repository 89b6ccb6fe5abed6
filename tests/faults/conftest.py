"""The job, the run that is never disturbed, and runs that were stopped on the way: made once, copied by those who
damage them.
"""

import signal

import pytest

from tests.support import faults, trials


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    return trials.job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="session")
def whole(job, tmp_path_factory):
    """The run that is never stopped."""
    trial = trials.run(tmp_path_factory.mktemp("whole"), job)
    assert trial.code == 0, trial.said
    return trial.directory


@pytest.fixture(scope="session")
def stopped(job, tmp_path_factory):
    """`stopped(step)`: a run directory that SIGTERM left after that step."""
    made = {}

    def at(step):
        if step not in made:
            trial = trials.run(
                tmp_path_factory.mktemp(f"stopped-{step}"), job, faults.signal_at, step - 1, signal.SIGTERM
            )
            assert trial.code == 75, trial.said
            made[step] = trial.directory
        return made[step]

    return at
