"""The contract of strategies, on every built-in one."""

import pytest

from anyqlora.testing import StrategyContract
from tests.support.paths import SUPPORT


class TestDdp(StrategyContract):
    strategy = "ddp"


@pytest.mark.slow
class TestOverlappingDdp(StrategyContract):
    strategy, options = "ddp", {"overlap": "true", "find_unused_parameters": True}


class TestFsdp(StrategyContract):
    strategy = "fsdp"


@pytest.mark.slow
class TestDeepSpeed0(StrategyContract):
    strategy, options = "deepspeed", {"zero_stage": 0}


@pytest.mark.slow
class TestDeepSpeed1(StrategyContract):
    strategy, options = "deepspeed", {"zero_stage": 1}


class TestDeepSpeed2(StrategyContract):
    strategy, options = "deepspeed", {"zero_stage": 2}


class TestDeepSpeed3(StrategyContract):
    strategy, options = "deepspeed", {"zero_stage": 3}


@pytest.mark.slow
class TestAccelerate(StrategyContract):
    strategy, works_alone = "accelerate", False


class TestTensorParallel(StrategyContract):
    """Over a model of somebody's own, whose frozen layers a layout file splits; all processes are along the model
    axis.
    """

    strategy = "tp"
    settings = {"train_type": "lora", "tensor_layout": str(SUPPORT / "contract_layout.yaml")}
