"""How often each promise was tried and held: asserted always, written to benchmarks/results when all of it was
tried.
"""

import json
import os

import pytest

from tests.support.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
quick_and_full = pytest.mark.parametrize(
    "full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "full"]
)


def hold(row, full: bool, trial: str, number: int, failures: list[list[str]], **more) -> None:
    """Assert that none of `number` trials failed; `failures` has a list of reasons for each that may have."""
    failed = [reasons for reasons in failures if reasons]
    if full:
        RESULTS.mkdir(exist_ok=True)
        found = {
            "row": str(row),
            "trial": trial,
            "trials": number,
            "held": number - len(failed),
            **more,
            "cores": os.cpu_count(),
        }
        (RESULTS / f"faults-{row}.json").write_text(json.dumps(found, indent=2) + "\n")
    assert not failed, "\n".join(reason for reasons in failed for reason in reasons)
