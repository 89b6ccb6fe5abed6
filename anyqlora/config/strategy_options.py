"""The options of strategies: a frozen dataclass each, filled from code, environment, file and defaults, in this
order.
"""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NoReturn

from anyqlora.config import deepspeed_file
from anyqlora.config.schema import known_value, parse_value
from anyqlora.core import registry
from anyqlora.core.entry_points import entry_point_targets
from anyqlora.core.errors import UsageError

REFINED = ("deepspeed_zero_stage", "use_cpu_offload")  # settings that a file of options gives way to
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def option(default, help: str, *, choices=(), low=None, setting: str = ""):
    """One option: its default, its help, the values it may have, and the setting of train.py that says the same."""
    return field(default=default, metadata={"help": help, "choices": tuple(choices), "low": low, "setting": setting})


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The options of one strategy: subclass it, give each field by `option`.

    Raises UsageError for a value that a field cannot have.
    """

    def __post_init__(self):
        for f in fields(self):
            object.__setattr__(
                self,
                f.name,
                parse_option(f, getattr(self, f.name), type(self).__name__, typing.get_type_hints(type(self))[f.name]),
            )

    def to_dict(self) -> dict:
        """JSON-able; `from_dict` makes the same again."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping, where: str = "") -> StrategyOptions:
        """Raises UsageError for a name that is no option."""
        for name in values:
            cls.known(name, where)
        return cls(**values)

    @classmethod
    def known(cls, name: str, where: str = "") -> None:
        names = [f.name for f in fields(cls)]
        if name not in names:
            raise UsageError(
                f"unknown option {name!r} of {cls.__name__}{registry.nearest(name, names)}",
                where=where,
                cure=f"one of: {', '.join(names) or 'none, it has no options'}",
            )

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
        for name, (_, where) in values.items():
            cls.known(name, where)
        return {name: value for name, (value, _) in values.items()}


def parse_option(f, raw: object, where: str, kind: type) -> object:
    """`raw` (text, or a value) as the type of field `f`. Raises UsageError saying what fits."""
    metadata = f.metadata
    text = str(raw).lower() if isinstance(raw, bool) else str(raw).strip()  # a file's true is true in any case

    def refuse(expected: str) -> NoReturn:
        raise UsageError(
            f"{f.name}: {raw!r} is not {expected}", where=where, cure=f"{f.name} is: {metadata.get('help', kind)}"
        )

    if kind is bool:
        value = _BOOLEANS.get(text.lower())
        if value is None:
            refuse("true or false")
    elif kind in (int, float):
        try:
            value = float(text) if not isinstance(raw, bool) else math.nan
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or (kind is int and value != int(value)):
            refuse("a whole number" if kind is int else "a number")
        value = kind(value)
        if metadata.get("low") is not None and value < metadata["low"]:
            refuse(f"at least {metadata['low']}")
    elif kind is dict:
        if raw is not None and not isinstance(raw, Mapping):
            refuse("a map, which only a file can state")
        value = dict(raw or {})
    else:
        value = known_value(metadata["setting"], text) if metadata.get("setting") else text
        value = next((choice for choice in metadata.get("choices", ()) if choice == value.lower()), value)
    if metadata.get("choices") and value not in metadata["choices"]:
        refuse(
            "one of " + ", ".join(map(str, metadata["choices"])) + registry.nearest(text, map(str, metadata["choices"]))
        )
    return value


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


def options_class(strategy: str) -> type[StrategyOptions] | None:
    """The dataclass of a strategy's options; None: it has none.

    A third party's is asked of its class, which imports it.
    """
    if strategy not in registry.STRATEGIES:
        return getattr(registry.strategy_class(strategy), "plugin_cls", None)
    options = registry.STRATEGIES[strategy].options
    return registry.load(options) if options else None


def strategy_of(options: str) -> str | None:
    """The first of our strategies that has an option of "name=value,..."; None where none has."""
    for name in (name for name in parse_pairs(options) if "." not in name):
        for strategy, row in registry.STRATEGIES.items():
            if row.options and name in registry.load(row.options).__dataclass_fields__:
                return strategy
    return None


def strategy_options(config, strategy: str | None = None) -> StrategyOptions | None:
    """The options of the configuration's strategy.

    Raises UsageError for one that it does not have, and for a bad value.
    """
    name = strategy or config.strategy
    cls = options_class(name)
    where = {key: config.sources.get(key, "") for key in ("strategy_opt", "strategy_config")}
    stated = parse_pairs(config.strategy_opt, where["strategy_opt"])
    if cls is None:
        for key in ("strategy_opt", "strategy_config"):
            if getattr(config, key) and any(
                "." not in option for option in (stated if key == "strategy_opt" else ["file"])
            ):
                raise UsageError(f"{key}: strategy {name} has no options", where=where[key], cure=f"leave out {key}")
        return None
    values = cls.from_file(options_from_file(config.strategy_config), config) if config.strategy_config else {}
    qualified = {key.partition(".")[2]: value for key, value in stated.items() if key.startswith(f"{name}.")}
    plain = {key: value for key, value in stated.items() if "." not in key}
    implied = {
        f.name: getattr(config, f.metadata["setting"])
        for f in fields(cls)
        if f.metadata.get("setting") and config.asked(f.metadata["setting"])
    }
    implied = {key: value for key, value in implied.items() if value != "auto"}
    for key in plain.keys() & implied.keys():
        if str(plain[key]).lower() != str(implied[key]).lower():
            raise UsageError(
                f"strategy_opt {key}={plain[key]} contradicts {cls.__dataclass_fields__[key].metadata['setting']} "
                f"{implied[key]}",
                where=where["strategy_opt"],
                cure="one of them",
            )
    layers = {**values, **qualified, **implied, **plain}
    try:
        return cls.from_dict(layers)
    except UsageError as error:
        raise UsageError(
            f"strategy {name}: {error.message}",
            where=where["strategy_opt"] if stated else where["strategy_config"],
            cure=error.cure,
        ) from None


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


def options_from_environment(environ: Mapping[str, str], prefix: str, settings: Mapping) -> dict[str, str]:
    """{"strategy.option": value} of ANYQLORA_<STRATEGY>_<OPTION>; what is a setting of train.py is left to it."""
    names = sorted([*registry.STRATEGIES, *entry_point_targets("strategies")], key=len, reverse=True)
    options = {}
    for variable, value in sorted(environ.items()):
        rest = variable.removeprefix(prefix).lower()
        strategy = next((name for name in names if rest.startswith(f"{name.lower().replace('-', '_')}_")), None)
        if variable.startswith(prefix) and strategy and rest not in settings:
            options[variable] = f"{strategy}.{rest[len(strategy) + 1 :]}={value}"
    return options


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
