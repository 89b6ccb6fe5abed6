"""What these tests share is found by its name, in the processes of worlds too."""

import os
import sys
from pathlib import Path

from anyqlora import testing

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("KERAS_BACKEND", "torch")
testing.PRELOADED[-1:-1] = ["keras", "steps_on_ranks", "equality"]  # ahead of warm, which freezes what is there
