"""What Hugging Face Accelerate takes and does not do: still so, and refused by ours."""

import os

import pytest
import torch

from anyqlora.on_torch.runtime import Runtime
from anyqlora.testing import WorldFailed, world


def made(environ):
    os.environ.update(environ)
    runtime = Runtime.of(strategy="accelerate", backend="cpu", precision="fp32")
    model = runtime.prepare(torch.nn.Linear(2, 2))
    return type(model).__name__, runtime.strategy.accelerator.num_processes


@pytest.mark.slow
def test_the_model_is_wrapped_by_accelerate():
    assert world(2, made, {}) == [("DistributedDataParallel", 2)] * 2


@pytest.mark.parametrize(
    "size, environ, why",
    [
        pytest.param(
            2,
            {"ACCELERATE_USE_FSDP": "true"},
            "ACCELERATE_USE_FSDP is set: strategy accelerate is data parallel",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2, {"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED is set", marks=pytest.mark.slow
        ),
        (1, {}, "Accelerate wraps nothing there"),
    ],
)
def test_what_accelerate_would_drop_is_refused(size, environ, why):
    with pytest.raises(WorldFailed, match=why):
        world(size, made, environ)


def with_fsdp_asked_for():
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    return type(accelerator.prepare(torch.nn.Linear(2, 2))).__name__


def test_accelerate_still_makes_plain_data_parallelism_of_fsdp_on_a_cpu():
    assert world(2, with_fsdp_asked_for) == ["DistributedDataParallel"] * 2
