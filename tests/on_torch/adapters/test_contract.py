"""The contract of adapters, on every built-in one."""

from anyqlora.core import registry
from anyqlora.testing import AdapterContract


class TestLora(AdapterContract):
    adapter = "lora"


class TestRankStabilisedLora(AdapterContract):
    adapter = "rslora"


class TestDora(AdapterContract):
    adapter = "dora"


class TestPissa(AdapterContract):
    adapter = "pissa"


class TestLoftq(AdapterContract):
    adapter, quantizer = "loftq", "nf4"


class TestFull(AdapterContract):
    adapter, settings = (
        "full",
        {"lr": 0.05},
    )  # the file is in the base's bf16, in which a norm near 1 moves by no less than 0.004


def test_every_built_in_one_is_here():
    built = registry.offered(registry.ADAPTERS, "torch")
    contracts = [
        value for value in globals().values() if isinstance(value, type) and issubclass(value, AdapterContract)
    ]
    assert sorted(c.adapter for c in contracts if c.adapter) == sorted(built)
