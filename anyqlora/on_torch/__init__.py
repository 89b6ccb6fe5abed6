"""Everything that needs torch."""

import logging

# On CPUs with AVX512-BF16 bitsandbytes 0.50 looks for a kernel that it would download from the hub, and reports that it found
# none whenever it is imported. Ours never come to it: see _compat.keep_weights_as_packed.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
