"""The contract of quantizers, on every built-in one."""

import pytest
import torch

from anyqlora.config.schema import TrainConfig
from anyqlora.core import registry
from anyqlora.extend import BroadcastQuantizer, ExpertQuantizer, FileQuantizer, KernelQuantizer
from anyqlora.testing import QuantizerContract

BUILT = registry.offered(registry.QUANTIZERS, "torch")


class TestNf4(QuantizerContract):
    quantizer, tolerance, shapes = "nf4", 0.1, [(64, 64), (96, 40), (257, 128)]  # rows end inside a block, too


class TestFp4(QuantizerContract):
    quantizer, tolerance, shapes = "fp4", 0.13, [(64, 64), (96, 40), (257, 128)]


class TestInt8(QuantizerContract):
    quantizer, tolerance, product = "int8", 0.01, 0.02  # activations are rounded, too


class TestAffine4(QuantizerContract):
    quantizer, settings = "affine4", {"affine_group_size": 32}  # of which rows of 96 are whole


class TestUnquantized(QuantizerContract):
    quantizer, tolerance, product = "none", 0.0, 1e-6


def test_every_built_in_one_is_here():
    contracts = [
        value for value in globals().values() if isinstance(value, type) and issubclass(value, QuantizerContract)
    ]
    assert sorted(c.quantizer for c in contracts if c.quantizer) == sorted(BUILT)


@pytest.mark.parametrize(
    ("name", "protocols"),
    [
        ("nf4", {ExpertQuantizer, BroadcastQuantizer, FileQuantizer, KernelQuantizer}),
        ("fp4", {ExpertQuantizer, BroadcastQuantizer, FileQuantizer, KernelQuantizer}),
        ("int8", {ExpertQuantizer, BroadcastQuantizer}),
        ("affine4", {ExpertQuantizer, BroadcastQuantizer, FileQuantizer}),
        ("none", set()),
    ],
)
def test_what_more_each_can_do(name, protocols):
    """So that no part of the contract passes because a member has got another name."""
    made = registry.quantizer(name).load()(TrainConfig(), torch.float32)
    every = {ExpertQuantizer, BroadcastQuantizer, FileQuantizer, KernelQuantizer}
    assert {protocol for protocol in every if isinstance(made, protocol)} == protocols
