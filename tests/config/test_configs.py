"""Every configuration in configs/ is planned on every machine that tests/machines describes, and on the two cards that
configs name.
"""

import json
import re
from dataclasses import replace

import pytest

from anyqlora.config.resolve import configs_directory, resolve
from anyqlora.core.errors import UsageError
from anyqlora.planning.backends import BackendManager
from anyqlora.planning.fitting import GLOBAL_BATCH, HEADROOM
from anyqlora.planning.machine import Machine
from tests.support import paths
from tests.support.paths import MACHINES

CONFIGS = {path.stem: path for path in sorted(configs_directory().glob("*.yaml"))}
MODELS = {  # hub id -> config.json alone, written by hand
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.2-1B-Instruct": "llama-3.2-1b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3.3-70b",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
}
RECORDED = {
    path.stem: Machine.from_dict(json.loads(path.read_text())["machine"]) for path in sorted(MACHINES.glob("*.json"))
}


def with_card(name, total, free):
    """The A100 machine with another card; bytes as the driver of such a card reports them on a machine without a
    screen.
    """
    machine = RECORDED["a100"]
    return replace(machine, cuda=(replace(machine.cuda[0], name=name, memory_total=total, memory_free=free),))


MACHINES = {
    **RECORDED,
    "rtx4090": with_card("NVIDIA GeForce RTX 4090", 25_393_692_672, 24_960_000_000),
    "a100_80gb": with_card("NVIDIA A100-SXM4-80GB", 84_974_239_744, 84_400_000_000),
}
NO_BITSANDBYTES = {"m1_macos13", "nothing"}
GPUS = {"a100", "a100_80gb", "arc", "h200", "rtx4090", "rx7900", "t4"}
FITS = {  # configuration -> the machines on which it is predicted to fit
    "first": MACHINES.keys() - NO_BITSANDBYTES,
    "cpu": MACHINES.keys() - NO_BITSANDBYTES,
    "mac": MACHINES.keys() - NO_BITSANDBYTES,
    "one_24gb_card": MACHINES.keys() - NO_BITSANDBYTES,
    "70b": {"a100_80gb", "h200"},
    "two_cards": GPUS,
}
WARNED = {
    "70b": GPUS - {"a100_80gb", "h200"},
    "two_cards": {"linux_mlx"},
}  # planned, with a warning that says how much is needed and how much is there


def asked(name, **settings):
    config = resolve(
        {"config": str(CONFIGS[name]), **({} if name == "first" else {"dataset": "alpaca_sample"}), **settings},
        environ={},
    )
    return config if config.is_demo else config.with_(model_name=str(paths.MODELS / MODELS[config.model_name]))


def planned(name, machine):
    """The plan of a configuration; None where it is refused, in words, with a cure where there is one."""
    try:
        config = asked(name)
        return BackendManager(config.backend, machine=MACHINES[machine]).plan(config)
    except UsageError as refused:
        assert refused.message and (refused.cure or "not built yet" in refused.message), refused
        return None


def test_every_configuration_is_expected_here():
    assert FITS.keys() == CONFIGS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_fits_or_says_why_not(name):
    for machine in MACHINES:
        plan = planned(name, machine)
        if machine not in FITS[name] | WARNED.get(name, set()):
            assert plan is None, machine
            continue
        fits = plan.memory.total <= HEADROOM * plan.memory_free
        warned = any("expect to run out of memory" in warning for warning in plan.warnings)
        assert (fits, warned) == (machine in FITS[name], machine not in FITS[name]), (machine, plan.explain())
        assert all(adjustment.why and adjustment.field for adjustment in plan.adjustments)
        stated = plan.config.num_epochs and asked(name)
        rows = GLOBAL_BATCH if stated.batch_size == "auto" else stated.batch_size * stated.gradient_accumulation_steps
        rows *= 1 if stated.batch_size == "auto" else plan.world_size
        assert plan.global_batch == rows, (machine, plan.explain())  # a step is the same step on every machine


@pytest.mark.parametrize(
    "name", [name for name in CONFIGS if re.search(r"weights take \d+ GB", CONFIGS[name].read_text())]
)
def test_the_memory_that_a_configuration_states_is_what_the_plan_counts(name):
    stated = int(re.search(r"weights take (\d+) GB", CONFIGS[name].read_text())[1])
    parts = planned(name, "h200").memory.parts
    assert parts["linear weights"] + parts["embedding, head, norms"] == pytest.approx(stated * 1e9, rel=0.1)


def test_on_a_24_gb_card_nothing_is_recomputed_but_on_16_gb_and_on_80_gb_70b_leaves_room():
    assert (
        not planned("one_24gb_card", "rtx4090").use_gradient_checkpointing
        and planned("one_24gb_card", "t4").use_gradient_checkpointing
    )
    assert planned("70b", "a100_80gb").memory.total < 60e9


@pytest.mark.parametrize("name", CONFIGS)
def test_each_file_begins_with_its_question_and_its_command(name):
    question, *lines = CONFIGS[name].read_text().splitlines()
    assert question.startswith("# ") and len(question) > 30
    commands = [line.removeprefix("#   ") for line in lines if line.startswith("#   python ")]
    assert commands == ([] if name == "first" else [f"python train.py --config configs/{name}.yaml --dataset my.jsonl"])
