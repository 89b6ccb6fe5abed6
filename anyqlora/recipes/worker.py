"""One process of a run that train.py started: python -m anyqlora.recipes.worker FOLDER PARENT."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from anyqlora.core.errors import explained

PR_SET_PDEATHSIG = 1  # of Linux's prctl.h


def end_with_parent(parent: int) -> None:
    """Be killed when the process `parent` ends, however it ends: a run is never left without the one who watches it
    (Linux).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we asked
            sys.exit(1)


def main(folder: Path) -> None:
    with explained("train.py"):
        from anyqlora.config.schema import TrainConfig
        from anyqlora.core.files import json_safe
        from anyqlora.recipes.sft import train  # in here, where signals that come while it is imported are answered

        payload = json.loads((folder / "config.json").read_bytes())
        config = TrainConfig(**payload["settings"], sources=payload["sources"], notes=tuple(payload["notes"]))
        result = train(config, payload["name"])
        if result:  # the first process has it
            (folder / "result.json").write_text(json.dumps(json_safe(result)))


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    main(Path(sys.argv[1]))
