"""Everything that needs torch."""

from anyqlora.core.lazy_imports import uncollected

with uncollected("peft"):
    from anyqlora.on_torch._compat import quiet_bitsandbytes, without_compiling

    quiet_bitsandbytes()
    with without_compiling():
        import peft  # noqa: F401 - and with it transformers and, where it is installed, bitsandbytes
