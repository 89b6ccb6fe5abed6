"""The names that settings had at 9268e7a keep working: in flags, files, the environment and code."""

import pytest

from anyqlora.config.resolve import canonical_argv, resolve
from anyqlora.config.schema import ALIASES, SETTINGS
from anyqlora.core.errors import UsageError
from anyqlora.runs.directory import run_identity

DEMO = {"model_name": "demo", "dataset": "demo"}
EVALUATED = {**DEMO, "eval_fraction": 0.1, "eval_steps": 5}
RENAMED = {  # old name: (new name, value, and what it needs beside it)
    "flat": ("padding_free", False, {}),
    "fused": ("fused_lora", False, {}),
    "fused_head": ("fused_linear_cross_entropy", False, {}),
    "loss_rows": ("logits_chunk_tokens", 16, {}),
    "frozen_products": ("frozen_matmul", "int8_backward", {}),
    "weight_cache": ("dequantized_layers", 2, {}),
    "recomputed_layers": ("checkpointed_layers", 1, {}),
    "samples": ("num_samples", 3, {"eval_fraction": 0.1}),
    "early_stopping": ("early_stopping_patience", 2, {"eval_fraction": 0.1, "eval_steps": 5}),
    "wd": ("weight_decay", 0.5, {}),
    "grad_norm": ("max_grad_norm", 0.3, {}),
    "n_bits": ("bits", 8, {}),
    "name": ("tracker_name", "x", {}),
    "group": ("tracker_group", "x", {}),
    "entity": ("tracker_entity", "x", {}),
    "repeat": ("profile_repeat", 1, {"profile": True}),
    "wait_steps": ("profile_wait", 1, {"profile": True}),
    "active_steps": ("profile_active", 1, {"profile": True}),
    "layout": ("tensor_layout", "default", {}),
    "threads": ("cpu_threads", 3, {}),
    "learning_rate": ("lr", 0.5, {}),
}
KEPT = [("2", 2, False), ("7", 7, False), ("best", 2, True)]  # keep, and what it says now


def four_ways(name: str, value: object, others: dict, place):
    """The configuration, with `name` stated by a flag, in code, in a file, in the environment."""
    flags = canonical_argv([f"--{key.replace('_', '-')}={stated}" for key, stated in {**others, name: value}.items()])
    yield resolve(dict(flag.removeprefix("--").split("=", 1) for flag in flags), environ={})
    yield resolve({**others, name: value}, environ={}, origin="code")
    file = place / "run.yaml"
    file.write_text("".join(f"{key}: {stated}\n" for key, stated in {**others, name: value}.items()))
    yield resolve({"config": str(file)}, environ={}).with_(config="")
    yield resolve(others, environ={f"ANYQLORA_{name.upper()}": str(value)})


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_the_new_one(old, tmp_path):
    """The reference is the same under its new name."""
    new, value, needs = RENAMED[old]
    assert ALIASES[old] == new and SETTINGS[new].default != value
    wanted = resolve({**DEMO, **needs, new: value}, environ={})
    assert getattr(wanted, new) == value
    for config in four_ways(old, value, {**DEMO, **needs}, tmp_path):
        assert config == wanted and config.asked(new)


@pytest.mark.parametrize("keep, limit, best", KEPT)
def test_keep_says_two_settings(keep, limit, best, tmp_path):
    wanted = resolve({**EVALUATED, "save_total_limit": limit, "load_best_model_at_end": best}, environ={})
    for config in four_ways("keep", keep, EVALUATED, tmp_path):
        assert config == wanted and config.asked("save_total_limit") and config.asked("load_best_model_at_end")


def test_keep_of_a_higher_layer_counts_whole(tmp_path):
    """As one setting did: `--keep 3` takes back `keep: best` of a file."""
    file = tmp_path / "run.yaml"
    file.write_text("model_name: demo\ndataset: demo\neval_fraction: 0.1\neval_steps: 5\nkeep: best\n")
    config = resolve({"config": str(file), "keep": "3"}, environ={})
    assert (config.save_total_limit, config.load_best_model_at_end) == (3, False)
    assert config.sources["load_best_model_at_end"] == "command line: --keep"
    config = resolve({"config": str(file), "save_total_limit": "3"}, environ={})
    assert (config.save_total_limit, config.load_best_model_at_end) == (3, True)


@pytest.mark.parametrize("keep, message", [("1", "at least 2"), ("some", "not a whole number"), ("", "not a whole")])
def test_what_keep_cannot_say_is_refused_where_it_stands(keep, message):
    with pytest.raises(UsageError, match=f"save_total_limit: .*{message}") as refused:
        resolve({**DEMO, "keep": keep}, environ={})
    assert refused.value.where == "command line: --keep"


@pytest.mark.parametrize(
    "state",
    [
        lambda place: canonical_argv(["--keep", "3", "--save_total_limit", "4"]),
        lambda place: canonical_argv(["--wd", "0", "--weight-decay", "0"]),
        lambda place: resolve({**DEMO, "wd": 0, "weight_decay": 0}, environ={}, origin="code"),
        lambda place: resolve({**EVALUATED, "keep": "best", "load_best_model_at_end": True}, environ={}, origin="code"),
        lambda place: resolve(DEMO, environ={"ANYQLORA_WD": "0", "ANYQLORA_WEIGHT_DECAY": "0"}),
        lambda place: resolve({"config": str(place)}, environ={}),
    ],
    ids=["keep", "flags", "code", "keep in code", "environment", "file"],
)
def test_a_setting_under_two_names_is_refused(state, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model_name: demo\nkeep: 3\nsave_total_limit: 4\n")
    with pytest.raises(UsageError, match="already|twice"):
        state(file)


def test_the_identity_of_a_run_does_not_depend_on_the_names():
    old = {**EVALUATED, "wd": 0.5, "grad_norm": 0.3, "early_stopping": 2, "n_bits": 8}
    new = {**EVALUATED, "weight_decay": 0.5, "max_grad_norm": 0.3, "early_stopping_patience": 2, "bits": 8}
    identity = run_identity(resolve(old, environ={}))
    assert identity == run_identity(resolve(new, environ={})) and identity["weight_decay"] == 0.5
    assert identity != run_identity(resolve({**new, "weight_decay": 0.4}, environ={}))


def test_hugging_faces_norm_of_0_clips_nothing():
    assert resolve({**DEMO, "max_grad_norm": 0}, environ={}).clip_norm is None
    assert resolve({**DEMO, "grad_norm": 0.5}, environ={}).clip_norm == 0.5
    assert resolve({**DEMO, "apply_gradient_clipping": False}, environ={}).clip_norm is None
