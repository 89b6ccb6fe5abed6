"""The worlds' module is found by its name, as those of tests/ are."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
