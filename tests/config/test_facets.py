"""What is known of a setting stands in its metadata, and nowhere else."""

import ast
import dataclasses

import pytest

from anyqlora.config import validate
from anyqlora.config.facets import AUTO, ON_RESUME, SECTIONS, setting
from anyqlora.config.schema import SETTINGS, TrainConfig, settings_with
from anyqlora.core import registry
from tests.support.paths import ROOT

LISTS = {  # what looks like a list of settings, and is none: file -> why
    "cli/": "the settings that a verb takes, or states for what it starts",
    "config/": "reads files of others, or checks what several settings say together",
    "core/registry.py": "the tables that other packages add rows to",
    "planning/capabilities.py": "what a backend passes by, each with its reason",
    "planning/cells.py": "the axes of a matrix, each with the table that it is made of",
    "planning/mesh.py": "the three ways to ask for tensor parallelism, the first one that is stated",
    "planning/planner.py": "fields of the plan; and the three by which weights in 16 bits are asked for",
    "data/token_cache.py": "what the tokens of a row depend on",
    "on_torch/loading/quantized_cache.py": "what the bytes of packed weights depend on",
    "on_mlx/logits_check.py": "states values",
    "testing/": "states the values of a contract's job",
}


def test_every_setting_states_its_section_and_what_it_means_to_a_run_that_goes_on():
    assert {f.name for f in dataclasses.fields(TrainConfig)} - {"sources", "notes"} == {*SETTINGS}
    for name, f in SETTINGS.items():
        about = f.metadata
        assert about["section"] in SECTIONS and about["on_resume"] in ON_RESUME, name
        assert about["help"] and not about["help"].endswith("."), f"{name}: a phrase that says what it does first"
        assert {*about["needs"]} <= {*validate.NEEDS, "evaluation_set", "profile"}, name
        assert {*about["supersedes"], *filter(None, [about["decided_with"]])} <= {*SETTINGS} - {name}, name
        assert {*about["trackers"]} <= {*registry.TRACKERS}, name
    with pytest.raises(TypeError, match="section"):
        setting(1, "does something", on_resume="free")
    with pytest.raises(TypeError, match="on_resume"):
        setting(1, "does something", section="expert")


def test_facets_agree_with_each_other():
    for name, f in SETTINGS.items():
        about = f.metadata
        assert not about["per_backend"] or f.default == AUTO, f"{name}: is auto on another backend"
        assert not about["each_process"] or about["on_resume"] == "free", name
        assert about["on_resume"] != "planned" or f.default == AUTO, f"{name}: is there a choice for the plan?"
        if about["decided_with"]:
            assert about["on_resume"] == SETTINGS[about["decided_with"]].metadata["on_resume"] == "planned", name
    sections = [f.metadata["section"] for f in SETTINGS.values()]
    assert [*dict.fromkeys(sections)] == [*SECTIONS], "fields stand in the order of the sections"
    assert sections == sorted(sections, key=[*SECTIONS].index), "each section in one piece"


def test_settings_are_asked_for_by_their_facets():
    """By hand, as the lists had them that stood in eight files."""
    assert settings_with("several") == (
        *("strategy_opt", "strategy_config", "sharding_strategy", "deepspeed_zero_stage", "find_unused_parameters"),
        *("mesh", "tensor_layout", "use_cpu_offload"),
    )
    assert settings_with("each_process") == ("output_dir", "run_name", "log_to", "verbose")
    assert settings_with("needs", "adapter") == ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")
    assert len(settings_with("needs", "profile")) == 11
    assert {*settings_with("per_backend")} == {
        *("fused_lora", "fused_linear_cross_entropy", "padding_free", "kernels", "logits_chunk_tokens", "cpu_threads"),
        *("dequantized_layers", "quantized_cache"),
    }
    assert {*settings_with("on_resume", "planned")} == {
        *("fused_lora", "fused_linear_cross_entropy", "padding_free", "logits_chunk_tokens", "cpu_threads"),
        *("dequantized_layers", "use_gradient_checkpointing", "checkpointed_layers", "dropout_masks"),
    }


def test_the_identity_of_a_run_has_the_settings_that_it_had():
    """By hand: a setting that is left out goes on with another run's state, one that is added stops all runs that are
    there.
    """
    assert {*settings_with("on_resume", "identity")} == {
        *("quantizer", "adapter", "double_quant", "affine_group_size", "lora_rank", "lora_alpha", "lora_dropout"),
        *("lora_target_modules", "context_length", "packing", "prompt_format", "dataset_format", "dataset_samples"),
        *("on_bad_row", "on_long_row", "eval_fraction", "seed", "num_epochs", "max_steps", "lr", "lr_scheduler"),
        *("warmup_steps", "warmup_ratio", "cosine_min_lr_ratio", "lr_cycles", "lr_power", "lr_decay", "optimizer"),
        *("adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "apply_gradient_clipping", "max_grad_norm"),
        *("spike_guard", "early_stopping_patience"),
    }


def lists_of_settings(path) -> list[str]:
    """Where a file has a tuple, list, set or dictionary of three or more, all of them names of settings."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else getattr(node, "keys", None)
        if not isinstance(names, list) or len(names) < 3:
            continue
        if all(isinstance(name, ast.Constant) and name.value in SETTINGS for name in names):
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {', '.join(name.value for name in names)}")
    return found


def test_no_other_list_of_settings_stands_in_the_package(tmp_path):
    package = ROOT / "anyqlora"
    for path in sorted(package.rglob("*.py")):
        if not str(path.relative_to(package)).startswith(tuple(LISTS)):
            assert not lists_of_settings(path), "say it as a facet of the setting, in config/schema.py"


def test_lists_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    file = tmp_path / "file.py"
    file.write_text('A = ("lr", "seed")\nB = ("lr", "seed", "mesh")\nC = {"lr": 1, "seed": 2, "keep": 3}\n')
    assert [line.split(":")[1] for line in lists_of_settings(file)] == ["2"]
