"""Where settings come from: command line or code, environment, file, default, in this order, each with its source."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from anyqlora.config import deepspeed_file, other_tools, strategy_options
from anyqlora.config.accelerate_environment import from_accelerates_environment
from anyqlora.config.facets import SECTIONS
from anyqlora.config.schema import (
    ALIASES,
    AUTO,
    SETTINGS,
    SPLIT_ALIASES,
    TrainConfig,
    canonical_name,
    canonical_settings,
    is_switch,
    parse_value,
    settings_with,
    value_types,
)
from anyqlora.config.settings_file import Layer, from_file
from anyqlora.config.validate import overridden, validate
from anyqlora.core.errors import UsageError

__all__ = [
    "ALIASES",
    "AUTO",
    "SETTINGS",
    "TrainConfig",
    "canonical_name",
    "validate",
    "configs_directory",
    "add_flags",
    "from_environment",
    "from_file",
    "parse_value",
    "print_help",
    "resolve",
    "canonical_argv",
]

ENV_PREFIX, BACKEND_VARIABLE = "ANYQLORA_", "FSDP_BACKEND"
OF_THE_MACHINE = ("ANYQLORA_CPU_FEATURES", "ANYQLORA_KERNEL_CFLAGS")  # variables that are no settings of a run
FIRST_RUN = "first.yaml"


def canonical_argv(argv: list[str]) -> list[str]:
    """The same arguments with every flag in its hyphenated canonical form, for fastcore.

    Raises UsageError for an unknown or abbreviated flag, for a flag given twice, and for a flag without a value.
    """
    layer, position = Layer(), 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not word.startswith("--"):
            raise UsageError(
                f"unexpected argument {word!r}", where="command line", cure="settings are given as --name value"
            )
        flag, equals, value = word[2:].partition("=")
        where = f"command line: --{flag}"
        if not equals and (position == len(argv) or argv[position].startswith("--")):
            if not is_switch(flag):
                shown = other_tools.find(flag.replace("-", "_")) is None and canonical_settings(flag, "", where)
                about = "" if not shown else f": {SETTINGS[next(iter(shown))].metadata['help']}"
                raise UsageError(f"--{flag} needs a value", where="command line", cure=f"--{flag} VALUE{about}")
            value = "true"
        elif not equals:
            value = argv[position]
            position += 1
        for name, stated in canonical_settings(flag, value, where).items():
            layer.state(name, stated, where, flag)
    return [f"--{name.replace('_', '-')}={_as_text(value)}" for name, (value, _) in layer.items()]


def add_flags(function: Callable) -> Callable:
    """Give `function` one optional text flag for each setting, for fastcore; a flag that is not given is None."""
    flag = inspect.Parameter("flag", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=str)
    function.__signature__ = inspect.Signature([flag.replace(name=name) for name in SETTINGS])
    return function


def print_help(program: str) -> None:
    """Every setting as a flag: section by section, with its kind of value, default, choices and other names."""
    parser = argparse.ArgumentParser(
        program,
        usage=f"{program} [--name value ...]",
        description="Fine-tune a language model with QLoRA on the machine it finds; "
        "without flags, the embedded first job.",
        add_help=False,
    )
    for section, (title, about) in SECTIONS.items():
        group = parser.add_argument_group(title, about)
        for name in settings_with("section", section):
            group.add_argument(f"--{name}", metavar=flag_type(name), help=flag_help(name).replace("%", "%%"))
    parser.print_help()


def flag_help(name: str) -> str:
    """What a setting does [its choices] (its default; its other names)."""
    default, about = SETTINGS[name].default, SETTINGS[name].metadata
    choices = "|".join(map(_as_text, about["choices"]))
    notes = [f"default: {_as_text(default)}"] * (default != "") + [f"also {', '.join(about['aliases'])}"] * bool(
        about["aliases"]
    )
    return about["help"] + f" [{choices}]" * bool(choices) + f" ({'; '.join(notes)})" * bool(notes)


def _as_text(value: object) -> str:
    """A value as flags and YAML spell it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def flag_type(name: str) -> str:
    """What kind of value a setting has, as --help shows it: int, float|auto, true|false, text."""
    kinds = value_types(name)
    shown_types = [shown for kind, shown in ((bool, "true|false"), (int, "int"), (float, "float")) if kind in kinds]
    return "|".join([*shown_types, "auto" if shown_types else "text"] if str in kinds else shown_types)


def from_environment(environ: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    """{setting: (value, where)} of FSDP_BACKEND and ANYQLORA_<SETTING>."""
    settings = Layer()
    if environ.get(BACKEND_VARIABLE):
        settings["backend"] = (environ[BACKEND_VARIABLE], BACKEND_VARIABLE)
    names = {**SETTINGS, **ALIASES, **SPLIT_ALIASES, **other_tools.NAMES}
    strategy_settings = strategy_options.options_from_environment(environ, ENV_PREFIX, names)
    for variable, raw in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable in (*strategy_settings, *OF_THE_MACHINE):
            continue
        for name, value in canonical_settings(variable.removeprefix(ENV_PREFIX).lower(), raw, variable).items():
            if SETTINGS[name].metadata["cli_only"] and name != "config":
                raise UsageError(
                    f"{name} can only be given on the command line", where=variable, cure=f"--{name} {raw}"
                )
            if settings.get(name, ("", ""))[1] == BACKEND_VARIABLE:  # which gives way
                del settings[name]
            settings.state(name, value, variable, variable.removeprefix(ENV_PREFIX).lower())
    if strategy_settings:
        own, where = settings.get("strategy_opt", ("", ""))
        settings["strategy_opt"] = (
            ",".join(filter(None, [str(own), *strategy_settings.values()])),
            ", ".join(filter(None, [where, *strategy_settings])),
        )
    return settings


def configs_directory() -> Path:
    """Where the example configurations stand: in the source tree, or beside the installed package."""
    package = Path(__file__).resolve().parents[1]
    beside = package.parent / "configs"
    return beside if (beside / FIRST_RUN).exists() else package / "configs"


def _given(stated: Mapping[str, object], origin: str) -> dict[str, tuple[object, str]]:
    """{setting: (value, where)} of flags or code. Raises UsageError for one that is unknown or stated by two names."""
    settings = Layer()
    for key, raw in stated.items():
        for name, value in canonical_settings(key, raw, origin).items() if raw is not None else ():
            settings.state(name, value, f"{origin}: --{key}" if origin == "command line" else origin, key)
    return settings


def _with_strategy_file(layers: list[dict], notes: list[str]) -> list[dict]:
    """The layers, and below that which names Accelerate's file or a DeepSpeed configuration as strategy_config, what
    that file says.
    """
    for number, layer in enumerate(layers):
        path, where = layer.get("strategy_config", ("", ""))
        if not path:
            continue
        stated = strategy_options.options_from_file(str(path))
        keys = {key: isinstance(value, Mapping) for key, (value, _) in stated.items()}
        if deepspeed_file.is_deepspeeds(keys):
            named = {"strategy": ("deepspeed", where), **deepspeed_file.settings(stated, notes)}
            return [*layers[: number + 1], named, *layers[number + 1 :]]
        if other_tools.is_accelerates(keys):
            others = {name: value for name, value in layer.items() if name != "strategy_config"}
            rest = [from_file(str(path), notes), *layers[number + 1 :]]
            return [*layers[:number], others, *_with_strategy_file(rest, notes)]
        break
    return layers


def resolve(
    given: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None, *, origin: str = "command line"
) -> TrainConfig:
    """The configuration that flags or code (`given`), environment, files and defaults make, checked.

    None in `given` means not given. With neither a model nor a dataset the embedded job is the lowest file layer.
    """
    given = _given(given or {}, origin)
    environment = from_environment(os.environ if environ is None else environ)
    config_file, notes = (given.get("config") or environment.get("config") or ("", ""))[0], []
    file = from_file(str(config_file), notes) if config_file else {}
    launched = from_accelerates_environment(os.environ if environ is None else environ, notes)
    layers = _with_strategy_file([given, environment, launched, file], notes)
    if not any(name in layer for layer in layers for name in ("model_name", "dataset")):
        layers.append(from_file(configs_directory() / FIRST_RUN))
    layers, option_sources = strategy_options.merge_options(layers)
    values, sources = {}, {}
    for layer in reversed(layers):
        stated = {name: parse_value(name, raw, where) for name, (raw, where) in layer.items()}
        for name in overridden(stated):
            values.pop(name, None)
        values |= stated
        sources |= {name: where for name, (_, where) in layer.items()}
    if "dataset" not in values and "model_name" in values:
        values["dataset"], sources["dataset"] = "alpaca_sample", "default"
    stated = {name: sources[name] if name in values else "default" for name in SETTINGS}
    config = TrainConfig(**values, sources=stated | option_sources, notes=tuple(notes))
    if config.init_adapter:
        from anyqlora.config.init_adapter import apply_init_adapter

        config = apply_init_adapter(config)
    if config.dataset.startswith("-"):
        from anyqlora.config.standard_input import from_standard_input

        config = config.with_(dataset=from_standard_input(config.dataset))
    return validate(config)
