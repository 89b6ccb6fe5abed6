"""What these tests share is found by its name, in the processes of worlds too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
