"""The options of strategies: a frozen dataclass each, filled from code, environment, file and defaults, in this
order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from anyqlora.config import deepspeed_file
from anyqlora.config.option_values import hints_of, option_fields, parse_option
from anyqlora.config.options_class import check_known, check_options_class, options_from_dict, options_to_dict
from anyqlora.config.schema import parse_value
from anyqlora.core import registry
from anyqlora.core.entry_points import entry_point_targets
from anyqlora.core.errors import UsageError

REFINED = ("deepspeed_zero_stage", "use_cpu_offload")  # settings that a file of options gives way to
ANY = "*"  # before an option: of whatever strategy there is
PREFIX = "ANYQLORA_"


def option(default, help: str, *, choices=(), low=None, setting: str = ""):
    """One option: its default, its help, the values it may have, and the setting of train.py that says the same."""
    return field(default=default, metadata={"help": help, "choices": tuple(choices), "low": low, "setting": setting})


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The options of one strategy: subclass it, give each field by `option`.

    Raises UsageError for a value that a field cannot have.
    """

    def __post_init__(self):
        hints = hints_of(type(self))
        for f in fields(self):
            value = parse_option(f, getattr(self, f.name), type(self).__name__, hints[f.name])
            object.__setattr__(self, f.name, value)

    def to_dict(self) -> dict:
        """JSON-able; `from_dict` makes the same again."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping, where: str = "") -> StrategyOptions:
        """Raises UsageError for a name that is no option."""
        return options_from_dict(cls, values, where)

    @classmethod
    def from_file(cls, values: Mapping[str, tuple[object, str]], config) -> dict:
        """{option: value} of what an options file states, as {key: (value, "file:line")}.

        Raises UsageError for what does not fit `config`.
        """
        if deepspeed_file.is_deepspeeds(values):
            raise UsageError(
                f"a DeepSpeed configuration is for strategy deepspeed, and strategy is {config.strategy}",
                where=next(iter(values.values()))[1],
                cure="--strategy deepspeed, or leave out strategy",
            )
        return stated_in_file(cls, values)


def stated_in_file(cls: type, values: Mapping[str, tuple[object, str]]) -> dict:
    """{option: value} of what a file states. Raises UsageError for a name that is no option."""
    for name, (_, where) in values.items():
        check_known(cls, name, where)
    return {name: value for name, (value, _) in values.items()}


# ---------------------------------------------------------------------------------------------------- the built-in ones


@dataclass(frozen=True, kw_only=True)
class DdpOptions(StrategyOptions):
    find_unused_parameters: bool = option(
        False, "look for parameters that got no gradient", setting="find_unused_parameters"
    )
    overlap: str = option(
        "auto",
        "communicate during the last backward of a step; auto: above 100 million trained numbers",
        choices=("auto", "true", "false"),
    )
    bucket_cap_mb: int = option(25, "MiB of gradients that are sent together", low=1)


@dataclass(frozen=True, kw_only=True)
class FsdpOptions(StrategyOptions):
    sharding_strategy: str = option(
        "full_shard",
        "what is sharded, and until when",
        choices=[name for name in registry.SHARDING_STRATEGIES if name != "ddp"],
        setting="sharding_strategy",
    )
    cpu_offload: bool = option(False, "shards wait in host memory", setting="use_cpu_offload")
    hybrid_shard_size: int = option(
        0, "processes that one model is sharded over by the hybrid ones; 0: those of one machine", low=0
    )


@dataclass(frozen=True, kw_only=True)
class DeepSpeedOptions(StrategyOptions):
    zero_stage: int = option(
        2,
        "0: replicas, 1: the optimizer state is sharded, 2: gradients too, 3: weights too",
        choices=(0, 1, 2, 3),
        setting="deepspeed_zero_stage",
    )
    offload_optimizer: bool = option(False, "optimizer state and the update in host memory (stage 1 and above)")
    offload_param: bool = option(False, "shards of weights in host memory (stage 3)", setting="use_cpu_offload")
    zero_options: dict = option(None, "further entries of zero_optimization, from a file")

    def __post_init__(self):
        super().__post_init__()
        if self.offload_param and self.zero_stage != 3:
            raise UsageError(
                f"offload_param at ZeRO stage {self.zero_stage}: only stage 3 shards weights",
                cure="--deepspeed_zero_stage 3",
            )
        if self.offload_optimizer and self.zero_stage == 0:
            raise UsageError(
                "offload_optimizer at ZeRO stage 0: nothing is sharded", cure="--deepspeed_zero_stage 1, 2 or 3"
            )

    @classmethod
    def from_file(cls, values: Mapping[str, tuple[object, str]], config) -> dict:
        """Our own options, or a DeepSpeed configuration as it is: what DeepSpeed decides is taken, what we decide must
        agree.
        """
        if not deepspeed_file.is_deepspeeds(values):  # our own options
            return super().from_file(values, config)
        keys = {setting: key for key, setting in deepspeed_file.NUMBERS.items()}
        for name, (value, where) in deepspeed_file.settings(values).items():
            ours = config.clip_norm or 0 if name == "max_grad_norm" else getattr(config, name)
            is_its_own = config.sources.get(name) in (where, "plan") or name in REFINED
            if not is_its_own and ours != "auto" and ours != parse_value(name, value, where):
                key = keys.get(name, name)
                raise UsageError(
                    f"{key} {value} contradicts {name} {ours}",
                    where=where,
                    cure=f'"{key}": "auto", or --{name} {value}',
                )
        deepspeed_file.check_rows(values, config.world_size)
        return deepspeed_file.zero(values)


@dataclass(frozen=True, kw_only=True)
class AccelerateOptions(DdpOptions):
    """What Accelerate's data parallelism takes; its other engines are strategies of their own here."""


# ----------------------------------------------------------------------------------------------------------- where from


def options_class(strategy: str) -> type | None:
    """The dataclass of a strategy's options; None: it has none.

    A third party's is asked of its class, which imports it. Raises UsageError where that is no dataclass.
    """
    if strategy in registry.STRATEGIES:
        options = registry.STRATEGIES[strategy].options
        return registry.load(options) if options else None
    cls = getattr(registry.strategy_class(strategy), "plugin_cls", None)
    if cls is not None:
        check_options_class(cls, strategy)
    return cls


def strategy_options(config, strategy: str | None = None) -> Any:
    """The options of the configuration's strategy, of its options class; None where it has none.

    Raises UsageError for one that it does not have, and for a bad value, with the flag, variable or file that states
    it.
    """
    name = strategy or config.strategy
    cls = options_class(name)
    where = {key: config.sources.get(key, "") for key in ("strategy_opt", "strategy_config")}
    stated = parse_pairs(config.strategy_opt, where["strategy_opt"])
    if cls is None:
        for key in ("strategy_opt", "strategy_config"):
            if getattr(config, key) and any(
                option.rpartition(".")[0] in ("", ANY) for option in (stated if key == "strategy_opt" else ["file"])
            ):
                raise UsageError(f"{key}: strategy {name} has no options", where=where[key], cure=f"leave out {key}")
        return None
    try:
        layers = _layers(cls, name, config, stated)
        values = {option: value for option, (value, _) in layers.items()}
        return options_from_dict(cls, values, {option: where for option, (_, where) in layers.items()})
    except UsageError as error:
        raise UsageError(f"strategy {name}: {error.message}", where=error.where, cure=error.cure) from error


def _layers(cls: type, name: str, config, stated: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    """{option: (value, where)}: the file of options, then variables, then settings that say the same, then options that
    are given.
    """
    read = options_from_file(config.strategy_config) if config.strategy_config else {}
    from_file = getattr(cls, "from_file", None)  # which a plain dataclass has not
    values = (from_file(read, config) if from_file else stated_in_file(cls, read)) if read else {}
    by_file = config.sources.get("strategy_config", "")
    spelled = {option.lower(): option for option in option_fields(cls)}  # variables know no case

    def given(qualifier: str) -> dict[str, tuple[object, str]]:
        keys = {key: key.rpartition(".")[2] for key in stated if key.rpartition(".")[0] == qualifier}
        return {
            spelled.get(option.lower(), option) if qualifier else option: (stated[key], _source(config, key))
            for key, option in keys.items()
        }

    settings = {option: f.metadata.get("setting", "") for option, f in option_fields(cls).items()}
    implied = {
        option: (getattr(config, setting), config.sources.get(setting, ""))
        for option, setting in settings.items()
        if setting and config.asked(setting) and getattr(config, setting) != "auto"
    }
    plain = given("")
    for option in plain.keys() & implied.keys():
        (value, where), (other, _) = plain[option], implied[option]
        if str(value).lower() != str(other).lower():
            raise UsageError(
                f"strategy_opt {option}={value} contradicts {settings[option]} {other}", where=where, cure="one of them"
            )
    file = {option: (value, read[option][1] if option in read else by_file) for option, value in values.items()}
    return {**file, **given(ANY), **given(name), **implied, **plain}


def _source(config, key: str) -> str:
    """Where an option of strategy_opt is stated."""
    return config.sources.get(f"strategy_opt.{key}") or config.sources.get("strategy_opt", "")


def parse_pairs(text: str, where: str = "") -> dict[str, str]:
    """{name: value} of "name=value,name=value". Raises UsageError."""
    pairs: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise UsageError(
                f"strategy_opt: {part!r} is not name=value", where=where, cure="--strategy_opt name=value,name=value"
            )
        if name.strip() in pairs:
            raise UsageError(f"strategy_opt: {name.strip()} is given twice", where=where, cure="give it once")
        pairs[name.strip()] = value.strip()
    return pairs


def variable_of(strategy: str, option: str) -> str:
    """The environment variable of an option: that of a registered strategy bears its name. One that is given as
    module:Class has no name for a variable, and shares one with all: ANYQLORA_STRATEGY_OPT_<OPTION>.
    """
    of = "strategy_opt" if ":" in strategy or strategy == ANY else strategy
    return f"{PREFIX}{re.sub(r'[^A-Za-z0-9]', '_', of)}_{option}".upper()


def options_from_environment(environ: Mapping[str, str], prefix: str, settings: Mapping) -> dict[str, str]:
    """{variable: "strategy.option=value"} of ANYQLORA_<STRATEGY>_<OPTION>, and "*.option=value" of
    ANYQLORA_STRATEGY_OPT_<OPTION>, which is that of any strategy; what is a setting of train.py is left to it.
    """
    names = sorted([*registry.STRATEGIES, *entry_point_targets("strategies")], key=len, reverse=True)
    options = {}
    for variable, value in sorted(environ.items()):
        starts = ((name, variable_of(name, "")) for name in [ANY, *names])
        strategy, start = next(((name, start) for name, start in starts if variable.startswith(start)), ("", ""))
        if strategy and variable.removeprefix(prefix).lower() not in settings:
            options[variable] = f"{strategy}.{variable.removeprefix(start).lower()}={value}"
    return options


Layer = dict[str, tuple[object, str]]  # {setting: (value, where)}


def merge_options(layers: Sequence[Layer]) -> tuple[list[Layer], dict[str, str]]:
    """The same layers, the highest first, with the options of all in the first that has some: a lower layer's option
    stays where no higher one states it. And {"strategy_opt.OPTION": where it is stated}.
    """
    merged: dict[str, str] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        raw, where = layer.get("strategy_opt", ("", ""))
        above = set(merged)
        for key, value in _pairs(raw, where).items():
            qualifier, _, option = key.rpartition(".")
            if above & {option, f"{ANY}.{option}", key}:
                continue
            if not qualifier and any(other.endswith(f".{option}") for other in above):
                key = f"{ANY}.{option}"  # below a variable of one strategy, and above nothing
            merged[key] = value
            sources[f"strategy_opt.{key}"] = _variable_in(where, qualifier, option)
    first = next((number for number, layer in enumerate(layers) if "strategy_opt" in layer), None)
    if first is None:
        return list(layers), {}
    text = ",".join(f"{key}={value}" for key, value in merged.items())
    where = ", ".join(dict.fromkeys(sources.values())) or layers[first]["strategy_opt"][1]
    rest = [{name: value for name, value in layer.items() if name != "strategy_opt"} for layer in layers]
    rest[first]["strategy_opt"] = (text, where)
    return rest, sources


def _pairs(raw: object, where: str) -> dict[str, str]:
    """{name: value} of what is stated as strategy_opt: text, a map, or an object of the options class itself."""
    if raw is None or isinstance(raw, str):
        return parse_pairs(raw or "", where)
    if isinstance(raw, (list, tuple)):
        return parse_pairs(",".join(map(str, raw)), where)
    if is_dataclass(raw) and not isinstance(raw, type):
        raw = {name: value for name, value in options_to_dict(raw).items() if value is not None}
    if not isinstance(raw, Mapping):
        return parse_pairs(str(raw), where)
    values = {str(name): str(value).lower() if isinstance(value, bool) else str(value) for name, value in raw.items()}
    for name, value in values.items():
        if "," in value or isinstance(raw[name], (Mapping, list, tuple, set)):
            raise UsageError(
                f"strategy_opt {name}: {value!r} is no single value without a comma",
                where=where,
                cure="state it in a file: strategy_config",
            )
    return values


def _variable_in(where: str, qualifier: str, option: str) -> str:
    """Of the variables that `where` names, that of the option; else `where` itself."""
    variable = variable_of(qualifier or ANY, option)
    return variable if variable in where.split(", ") else where


def options_from_file(path: str) -> dict[str, tuple[object, str]]:
    """{key: (value, "file:line")} of an options file, YAML or JSON. Raises UsageError for what is not a map."""
    import yaml

    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot be read: {getattr(error, 'strerror', None) or error}", where=path, cure="--strategy_config FILE"
        ) from None
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        values = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"not JSON: {error.msg}", where=f"{path}:{error.lineno}:{error.colno}", cure="mend the file"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise UsageError(
            f"not YAML: {getattr(error, 'problem', None) or error}", where=place, cure="one `name: value` per line"
        ) from None
    if not isinstance(values, dict):
        raise UsageError("not a map of options", where=f"{path}:1", cure="one `name: value` per line")
    options: dict[str, tuple[object, str]] = {}
    for key, _ in tree.value:
        where = f"{path}:{key.start_mark.line + 1}"
        if key.value in options:
            raise UsageError(f"{key.value} is stated twice", where=where, cure="take one of them out")
        options[key.value] = values[key.value], where
    return options


def strategy_of(options: str) -> str | None:
    """The first of our strategies that has an option of "name=value,..."; None where none has."""
    for name in (name for name in parse_pairs(options) if "." not in name):
        for strategy, row in registry.STRATEGIES.items():
            if row.options and name in registry.load(row.options).__dataclass_fields__:
                return strategy
    return None
