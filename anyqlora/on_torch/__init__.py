"""Everything that needs torch."""

import logging

from anyqlora.core.lazy_imports import uncollected

# On CPUs with AVX512-BF16 bitsandbytes 0.50 looks for a kernel that it would download from the hub, and reports that it found
# none whenever it is imported. Ours never come to it: see _compat.keep_weights_as_packed.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

with uncollected("peft"):
    from anyqlora.on_torch._compat import compiled_when_called

    with compiled_when_called():
        import peft  # noqa: F401 - and with it transformers and, where it is installed, bitsandbytes
