"""Where things are that tests read."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
MACHINES = SUPPORT / "machines"  # descriptions of real machines, as planning/machine.py reads them
MODELS = SUPPORT / "models"  # config.json of real models, without weights
PACKAGES = SUPPORT / "packages"
