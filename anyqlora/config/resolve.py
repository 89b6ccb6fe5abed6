"""Where settings come from: command line or code, environment, file, default, in this order, each with its source."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from anyqlora.config import strategy_options
from anyqlora.config.facets import SECTIONS
from anyqlora.config.schema import (
    ALIASES,
    AUTO,
    SETTINGS,
    SPLIT_ALIASES,
    TrainConfig,
    canonical_name,
    canonical_settings,
    parse_value,
    settings_with,
    value_types,
)
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

ENV_PREFIX = "ANYQLORA_"
OF_THE_MACHINE = ("ANYQLORA_CPU_FEATURES", "ANYQLORA_KERNEL_CFLAGS")  # variables that are no settings of a run
FIRST_RUN = "first.yaml"


def canonical_argv(argv: list[str]) -> list[str]:
    """The same arguments with every flag in its hyphenated canonical form, for fastcore.

    Raises UsageError for an unknown or abbreviated flag, for a flag given twice, and for a flag without a value.
    """
    out, seen, position = [], {}, 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not word.startswith("--"):
            raise UsageError(
                f"unexpected argument {word!r}", where="command line", cure="settings are given as --name value"
            )
        flag, equals, value = word[2:].partition("=")
        names = canonical_settings(flag, "", f"command line: --{flag}")
        for name in names:
            if name in seen:
                raise UsageError(
                    f"--{flag}: {name} was already given as --{seen[name]}", where="command line", cure="give it once"
                )
            seen[name] = flag
        if not equals:
            if position == len(argv) or argv[position].startswith("--"):
                name = next(iter(names))
                if bool not in value_types(name):
                    raise UsageError(
                        f"--{flag} needs a value",
                        where="command line",
                        cure=f"--{flag} VALUE: {SETTINGS[name].metadata['help']}",
                    )
                value = "true"
            else:
                value = argv[position]
                position += 1
        for name, stated in canonical_settings(flag, value, f"command line: --{flag}").items():
            out.append(f"--{name.replace('_', '-')}={_as_text(stated)}")
    return out


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
    settings = {}
    if environ.get("FSDP_BACKEND"):
        settings["backend"] = (environ["FSDP_BACKEND"], "FSDP_BACKEND")
    names = {**SETTINGS, **ALIASES, **SPLIT_ALIASES}
    strategy_settings = strategy_options.options_from_environment(environ, ENV_PREFIX, names)
    for variable, raw in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable in (*strategy_settings, *OF_THE_MACHINE):
            continue
        for name, value in canonical_settings(variable.removeprefix(ENV_PREFIX).lower(), raw, variable).items():
            if SETTINGS[name].metadata["cli_only"] and name != "config":
                raise UsageError(
                    f"{name} can only be given on the command line", where=variable, cure=f"--{name} {raw}"
                )
            if name in settings and settings[name][1].startswith(ENV_PREFIX):  # FSDP_BACKEND gives way
                raise UsageError(f"{settings[name][1]} states {name} already", where=variable, cure="unset one of them")
            settings[name] = (value, variable)
    if strategy_settings:
        own, where = settings.get("strategy_opt", ("", ""))
        settings["strategy_opt"] = (
            ",".join(filter(None, [str(own), *strategy_settings.values()])),
            ", ".join(filter(None, [where, *strategy_settings])),
        )
    return settings


def from_file(path: str | Path) -> dict[str, tuple[object, str]]:
    """{setting: (value, "file:line")} of a YAML file. Raises UsageError for what is no flat map of known settings."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        line = Path(path).read_bytes()[: error.start].count(b"\n") + 1
        raise UsageError(f"not UTF-8: {error.reason}", where=f"{path}:{line}", cure="save it as UTF-8") from None
    except OSError as error:
        raise UsageError(
            f"cannot be read: {error.strerror or error}",
            where=str(path),
            cure="a YAML file of settings, such as those in configs/",
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise UsageError(
            f"not YAML: {getattr(error, 'problem', None) or error}",
            where=where,
            cure="write one `name: value` per line",
        ) from None
    if tree is None:
        return {}
    if not isinstance(tree, yaml.MappingNode) or tree.tag != "tag:yaml.org,2002:map":
        raise UsageError("not a map of settings", where=f"{path}:1", cure="write one `name: value` per line")
    settings = {}
    for key, node in tree.value:
        where = f"{path}:{key.start_mark.line + 1}"
        names = canonical_settings(str(key.value), None, where)
        for name in names:
            if name in settings:
                raise UsageError(
                    f"{name} is stated twice; first at {settings[name][1]}", where=where, cure="take one of them out"
                )
        name = next(iter(names))
        if SETTINGS[name].metadata["cli_only"]:
            raise UsageError(
                f"{name} can only be given on the command line",
                where=where,
                cure=f"take the line out; --{name} {node.value}",
            )
        if isinstance(node, yaml.MappingNode):
            raise UsageError(f"{name} is not a map", where=where, cure=f"{name} is: {SETTINGS[name].metadata['help']}")
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        standard = all(
            part.tag.startswith("tag:yaml.org,2002:") and "python" not in part.tag for part in [node, *items]
        )
        if not standard or not all(isinstance(item, yaml.ScalarNode) for item in items):
            raise UsageError(
                f"{name}: plain values only",
                where=where,
                cure="a number, a text, true or false, or a list of them, without tags",
            )
        values = [None if item.tag.endswith(":null") else item.value for item in items]
        stated = canonical_settings(str(key.value), values if isinstance(node, yaml.SequenceNode) else values[0], where)
        settings |= {name: (value, where) for name, value in stated.items()}
    return settings


def configs_directory() -> Path:
    """Where the example configurations stand: in the source tree, or beside the installed package."""
    package = Path(__file__).resolve().parents[1]
    beside = package.parent / "configs"
    return beside if (beside / FIRST_RUN).exists() else package / "configs"


def _given(stated: Mapping[str, object], origin: str) -> dict[str, tuple[object, str]]:
    """{setting: (value, where)} of flags or code. Raises UsageError for one that is unknown or stated by two names."""
    settings = {}
    for key, raw in stated.items():
        for name, value in canonical_settings(key, raw, origin).items() if raw is not None else ():
            if name in settings:
                raise UsageError(f"{key}: {name} is stated twice", where=origin, cure="give it once")
            settings[name] = (value, f"{origin}: --{key}" if origin == "command line" else origin)
    return settings


def resolve(
    given: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None, *, origin: str = "command line"
) -> TrainConfig:
    """The configuration that flags or code (`given`), environment, files and defaults make, checked.

    None in `given` means not given. With neither a model nor a dataset the embedded job is the lowest file layer.
    """
    given = _given(given or {}, origin)
    environment = from_environment(os.environ if environ is None else environ)
    config_file = (given.get("config") or environment.get("config") or ("", ""))[0]
    file = from_file(str(config_file)) if config_file else {}
    layers = [given, environment, file]
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
    config = TrainConfig(**values, sources=stated | option_sources)
    if config.init_adapter:
        from anyqlora.config.init_adapter import apply_init_adapter

        config = apply_init_adapter(config)
    return validate(config)
