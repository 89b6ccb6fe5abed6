"""What DeepSpeed does that anyqlora/on_torch/_compat.py steps round, still there; and its engine under our settings."""

import importlib
import inspect
import json

import pytest
import torch

from anyqlora.on_torch._compat import link_moments, without_shared_memory_operation
from anyqlora.on_torch.runtime import Runtime
from anyqlora.testing import world

pytest.importorskip("deepspeed")


def test_deepspeed_still_has_no_switch_for_its_operation():
    source = inspect.getsource(importlib.import_module("deepspeed.comm.torch").build_shm_op)
    assert "__compatible_ops__" in source and "environ" not in source and "config" not in source


def loading_before_the_first_step(linked):
    from deepspeed.utils import safe_set_full_optimizer_state

    runtime = Runtime.of(strategy="deepspeed", strategy_opt="zero_stage=1", backend="cpu", precision="fp32")
    model = torch.nn.Linear(4, 4, bias=False)
    runtime.prepare(model, torch.optim.Adam(model.parameters()))
    strategy = runtime.strategy
    flat = strategy._flat(model.weight)
    strategy.optimizer.state[flat] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.zeros_like(flat),
        "exp_avg_sq": torch.zeros_like(flat),
    }
    if linked:
        link_moments(strategy.zero)
    try:
        safe_set_full_optimizer_state(model.weight, torch.ones(4, 4), "exp_avg")
    except (TypeError, AttributeError, ValueError) as error:
        return type(error).__name__
    return strategy.gather_moments()["weight|exp_avg"].sum().item()


def test_deepspeed_still_links_moments_in_its_step_only():
    assert world(1, loading_before_the_first_step, False)[0] in ("TypeError", "AttributeError", "ValueError")
    assert world(1, loading_before_the_first_step, True)[0] == 16


def test_the_operation_is_off():
    import deepspeed.ops

    before = deepspeed.ops.__compatible_ops__.get("deepspeed_shm_comm")
    try:
        without_shared_memory_operation()
        assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False
    finally:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = before


class Reading(torch.nn.Module):
    """Reads the weight of a layer that it does not call."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return x @ self.layer.weight.T if self.layer.weight.numel() else None


def evaluated(as_deepspeed_does):
    runtime = Runtime.of(strategy="deepspeed", strategy_opt="zero_stage=3", backend="cpu", precision="fp32")
    torch.manual_seed(0)
    model = Reading()
    runtime.prepare(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for handle in runtime.strategy.reading if as_deepspeed_does else ():
        handle.remove()
    with torch.no_grad():
        found = [runtime.strategy.unwrap()(torch.ones(1, 4)) for _ in range(2)]
    return [None if value is None else value.numpy() for value in found]


def test_deepspeed_still_gathers_what_is_read_in_its_own_forward_only():
    torch.manual_seed(0)
    expected = torch.ones(1, 4) @ torch.nn.Linear(4, 4, bias=False).weight.detach().T
    assert world(2, evaluated, True) == [[None, None]] * 2
    for values in world(2, evaluated, False):
        for value in values:
            torch.testing.assert_close(torch.from_numpy(value), expected)


def engine_of(options):
    runtime = Runtime.of(strategy="deepspeed", strategy_opt=options, backend="cpu", precision="fp32")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    runtime.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    strategy = runtime.strategy
    return (
        strategy.engine.zero_optimization_stage(),
        type(strategy.engine.optimizer).__name__,
        hasattr(model[0].weight, "ds_tensor"),
    )


@pytest.mark.parametrize(
    "stage, optimizer, sharded",
    [
        (0, "SGD", False),
        (1, "DeepSpeedZeroOptimizer", False),
        (2, "DeepSpeedZeroOptimizer", False),
        (3, "DeepSpeedZeroOptimizer_Stage3", True),
    ],
)
def test_the_engine_has_the_stage_that_was_asked_for(stage, optimizer, sharded):
    assert world(2, engine_of, f"zero_stage={stage}") == [(stage, optimizer, sharded)] * 2


def trained_of(stage, options):
    """15 trained numbers, or so many that the bucket that a file states is smaller: one step of SGD."""
    runtime = Runtime.of(
        strategy="deepspeed", strategy_opt=f"zero_stage={stage}", backend="cpu", precision="fp32", **options
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3, bias=False)
    optimizer, prepared = runtime.prepare(torch.optim.SGD(model.parameters(), lr=0.1), model)
    runtime.backward(prepared(torch.ones(2, 5)).mean())
    runtime.optimizer_step_and_zero_grad(optimizer, prepared)
    return {name: value.numpy().copy() for name, value in runtime.strategy.gather_trainable().items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("stated", [None, 7])
def test_odd_numbers_of_trained_elements(stage, stated, tmp_path):
    """The update by hand: the gradient of the mean over 3 outputs is a third everywhere. Stages 1 and 2 take a bucket
    of an even size only, our own or that of a configuration file.
    """
    options = {}
    if stated:
        file = tmp_path / "ds.json"
        file.write_text(json.dumps({"zero_optimization": {"stage": stage, "allgather_bucket_size": stated}}))
        options = {"strategy_config": str(file)}
    torch.manual_seed(0)
    expected = torch.nn.Linear(5, 3, bias=False).weight.detach() - 0.1 / 3
    first, other = world(2, trained_of, stage, options)
    torch.testing.assert_close(torch.from_numpy(first["weight"]), expected)
    assert not other
