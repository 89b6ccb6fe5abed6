"""What there is to say of a setting: nowhere else in the package stands a list of settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Any

AUTO = "auto"
SWITCH = (AUTO, True, False)  # the choices of what the plan turns on where it helps

SECTIONS = {  # section of a setting -> (its title, what is in it), in the order of --help: everyday settings first
    "data": ("Model and data", "the base model, the rows that it learns from, and how they are written"),
    "training": (
        "What is trained",
        "train_type is a preset over quantizer, the form of the frozen weights, and adapter, what is learned",
    ),
    "schedule": (
        "Batch, length of the run, learning rate",
        "how many rows to a step, how many steps, and how long each",
    ),
    "evaluation": ("Evaluation", "on rows that are not trained on; needs eval_dataset or eval_fraction"),
    "checkpoints": ("Checkpoints", "the same command continues a run that was stopped"),
    "output": ("Output and trackers", "where the run lies, what is shown, and who is told"),
    "where": ("Where it runs", "backend, processes and machines"),
    "memory": ("Memory", "what the plan does where a model does not fit"),
    "optimizer": ("Optimizer", "the update rule, and what guards it"),
    "precision": ("Precision and repeatability", "the arithmetic"),
    "expert": ("For experts", "fast paths, which the plan chooses by itself, and settings that have one value"),
    "profiling": ("Profiling", "where time and memory go"),
}
ON_RESUME = {  # what the value of a setting means to a run that goes on
    "identity": "another value is another run, which only --resume force goes on with",
    "stated": "as identity, where it is not the default: runs from before the setting was there have none",
    "content": "what it names or decides is compared, not the value: files by their content",
    "planned": "what the plan chose when the run began stays in effect where nobody states a value; else as recorded",
    "recorded": "it stands in checkpoints and env.json: another value is told, since the bytes may be others",
    "free": "any value",
}


def setting(
    default: Any,
    help: str,
    *,
    section: str,
    on_resume: str,
    choices: Iterable = (),
    aliases: tuple[str, ...] = (),
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    cli_only: bool = False,
    needs: tuple[str, ...] = (),
    supersedes: tuple[str, ...] = (),
    decided_with: str = "",
    only: tuple[tuple, str] | None = None,
    per_backend: bool = False,
    several: bool = False,
    each_process: bool = False,
    trackers: tuple[str, ...] = (),
) -> Any:
    """One setting: its field, whose metadata are these facets.

    help: what it does, first. section: a key of SECTIONS. on_resume: a key of ON_RESUME. choices, or low to high, or
    more than `above`: the values it may have. aliases: its names in other tools and in earlier versions. cli_only:
    neither a file nor the environment may state it.

    needs: keys of validate.NEEDS; without them it does nothing, and is refused. supersedes: settings that no longer
    count in lower layers (file, environment) where this one is stated. decided_with: the setting that it is one
    decision with. only: (the values that can be had, none where it cannot be stated; why). per_backend: a way of
    computing the same, which another backend has of its own: auto there. several: says how several processes work
    together. each_process: need not be equal on all processes. trackers: those that read it.
    """
    metadata = {
        "help": help,
        "section": section,
        "on_resume": on_resume,
        "choices": tuple(choices),
        "aliases": aliases,
        "low": low,
        "above": above,
        "high": high,
        "cli_only": cli_only,
        "needs": needs,
        "supersedes": supersedes,
        "decided_with": decided_with,
        "only": only,
        "per_backend": per_backend,
        "several": several,
        "each_process": each_process,
        "trackers": trackers,
    }
    return field(default=default, metadata=metadata)
