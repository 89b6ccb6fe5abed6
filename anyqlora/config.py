"""Everything a user can ask for: one frozen dataclass, from which flags, YAML keys, environment and docs all come."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path

from . import tables
from .errors import NotBuilt, UsageError

AUTO = "auto"
ENV_PREFIX = "ANYQLORA_"
FIRST_RUN = "first.yaml"


def setting(default, help: str, *, choices=(), also=(), low=None, above=None, high=None, cli_only=False):
    """One setting: its default, its help, the values it may have (from `low`, or greater than `above`, to `high`), and the other
    names it goes by (`also`)."""
    about = {"help": help, "choices": tuple(choices), "also": tuple(also), "low": low, "above": above, "high": high, "cli_only": cli_only}
    return field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What was asked. `sources[name]` says where each value came from.

    A value of "auto" is one that the plan chooses. Raises UsageError from `checked()` when settings contradict.
    """

    # What is trained
    train_type: str = setting("qlora", "preset over quantizer and adapter", choices=tables.TRAIN_TYPES)
    quantizer: str = setting(AUTO, "how frozen weights are kept; auto: as train_type says", choices=(AUTO, *tables.QUANTIZERS))
    adapter: str = setting(AUTO, "what is learned; auto: as train_type says", choices=(AUTO, *tables.ADAPTERS))
    n_bits: int | str = setting(AUTO, "4 or 8: qlora's nf4 or int8; auto: as quantizer says", also=("bits",))
    double_quant: bool = setting(True, "quantize the 4-bit scales too", also=("bnb_4bit_use_double_quant",))
    hqq_group_size: int = setting(64, "HQQ's group size", low=1)
    llama_pro_path: str = setting("", "directory of a block-expanded model")
    lora_rank: int = setting(16, "rank of the adapters", also=("lora_r", "r"), low=1)
    lora_alpha: float = setting(32.0, "scale of the adapters, times rank", above=0)
    lora_dropout: float = setting(0.1, "dropout on the adapters' input", low=0, high=0.999)
    lora_target_modules: str = setting("all", "all: every linear layer; default: PEFT's choice; a comma-separated list; or a regex of module names", also=("target_modules",))

    # Model and data
    model_name: str = setting("", "directory or hub id of the base model", also=("model", "model_name_or_path"))
    revision: str = setting("main", "branch, tag or commit of a hub model", also=("model_revision",))
    trust_remote_code: bool = setting(False, "run Python code that comes with the model; on the command line only", cli_only=True)
    dataset: str = setting("", "file, directory, hub id or built-in name; several: a.jsonl=2,b.jsonl=0.5 (how often a row is seen per epoch)", also=("dataset_name", "train_file"))
    dataset_samples: int = setting(512, "rows of alpaca_sample and dummy", low=1)
    prompt_format: str = setting(AUTO, "auto: messages through the chat template, Alpaca rows through Alpaca's text, the rest as it stands", choices=(AUTO, "chat", "alpaca", "plain"))
    context_length: int = setting(512, "tokens per row at most", also=("max_seq_length", "max_length", "cutoff_len"), low=2)
    packing: str | bool = setting(AUTO, "put several rows into one sequence, without cross-talk", choices=(AUTO, True, False))
    on_bad_row: str = setting("error", "a row that cannot be used: stop, or skip and list it", choices=("error", "skip"))
    on_long_row: str = setting("truncate", "a row over context_length: cut it (no end token is trained), skip it, or stop", choices=("truncate", "skip", "error"))
    dataset_format: str = setting(AUTO, "format of the rows; auto: from their keys", choices=(AUTO, "alpaca", "prompt_completion", "question_answer", "messages", "sharegpt", "text"))
    eval_dataset: str = setting("", "held-out rows, as for dataset", also=("eval_file", "validation_file"))
    eval_fraction: float = setting(0.0, "part of the rows that is held out when no eval_dataset is given", also=("val_set_size", "test_size"), low=0, high=0.9)

    # The run
    batch_size: int | str = setting(AUTO, "rows per micro-batch and process", also=("per_device_train_batch_size", "micro_batch_size"), low=1)
    gradient_accumulation_steps: int = setting(1, "micro-batches per optimizer step", low=1)
    num_epochs: int = setting(1, "passes over the rows", also=("num_train_epochs", "epochs"), low=1)
    max_steps: int = setting(-1, "optimizer steps of the whole run; -1: as many as num_epochs needs")
    lr: float = setting(2e-4, "peak learning rate", also=("learning_rate",), low=0)
    lr_scheduler: str = setting("cosine", "shape of the learning rate", choices=tables.SCHEDULES, also=("lr_scheduler_type",))
    warmup_steps: int = setting(-1, "steps of linear warm-up; -1: by warmup_ratio")
    warmup_ratio: float = setting(0.03, "warm-up as a part of all steps", low=0, high=1)
    cosine_min_lr_ratio: float = setting(0.0, "the schedule's floor as a part of lr", also=("min_lr_ratio", "min_lr_rate"), low=0, high=1)
    lr_cycles: int = setting(1, "restarts of cosine_with_restarts", also=("num_cycles",), low=1)
    lr_power: float = setting(1.0, "exponent of the polynomial schedule", low=0)
    lr_decay: float = setting(0.1, "the exponential schedule's end as a part of lr", low=0, high=1)
    optimizer: str = setting("adamw", "update rule", choices=tables.OPTIMIZERS, also=("optim",))
    adam_beta1: float = setting(0.9, "AdamW's first decay", low=0, high=0.999999)
    adam_beta2: float = setting(0.999, "AdamW's second decay", low=0, high=0.999999)
    adam_eps: float = setting(1e-8, "AdamW's denominator floor", also=("adam_epsilon",), low=0)
    wd: float = setting(0.1, "weight decay", also=("weight_decay",), low=0)
    apply_gradient_clipping: bool = setting(True, "clip the gradient norm")
    grad_norm: float = setting(1.0, "largest gradient norm", also=("max_grad_norm",), low=0)
    precision: str = setting(AUTO, "arithmetic: auto is bf16 where the device has it", choices=(AUTO, *tables.PRECISIONS), also=("mixed_precision",))
    use_gradient_checkpointing: bool | str = setting(AUTO, "recompute activations in backward", choices=(AUTO, True, False), also=("gradient_checkpointing",))
    reentrant_checkpointing: bool = setting(False, "the older, reentrant form of checkpointing")
    use_cpu_offload: bool | str = setting(AUTO, "keep frozen weights in host memory", choices=(AUTO, True, False))
    use_activation_cpu_offload: bool = setting(False, "keep saved activations in host memory")
    low_memory: bool = setting(True, "stream the weights: never hold the full-precision model", also=("cpu_ram_efficient_loading", "fsdp_cpu_ram_efficient_loading"))
    loading_workers: int = setting(-1, "tensors loaded and quantized at a time; -1: one")
    spike_guard: float = setting(0.0, "skip a step whose loss is so many deviations above the recent ones; 0: never", low=0)
    seed: int = setting(42, "seed of data order, adapter start and dropout", low=0, high=2**63 - 1)
    deterministic: bool = setting(True, "deterministic algorithms only")

    # Where it runs
    backend: str = setting(AUTO, "cuda, rocm, xpu, mps, mlx, cpu, or a plugin's name")
    strategy: str = setting(AUTO, "how processes share the work", also=("distributed_type",))
    strategy_config: str = setting("", "file of the strategy's options", also=("deepspeed", "fsdp_config"))
    strategy_opt: str = setting("", "options of the strategy: name=value,name=value")
    mesh: str = setting("", "device mesh: batch=2,model=2")
    layout: str = setting("", "tensor layout: default or a file")
    sharding_strategy: str = setting("full_shard", "what FSDP shards", choices=tables.SHARDING_STRATEGIES, also=("fsdp_sharding_strategy",))
    deepspeed_zero_stage: int = setting(-1, "DeepSpeed's ZeRO stage; -1: not asked for", also=("zero_stage",))
    find_unused_parameters: bool = setting(False, "DDP: look for parameters that got no gradient", also=("ddp_find_unused_parameters",))
    world_size: int = setting(-1, "processes; -1: one for each device", also=("num_processes",))
    master_addr: str = setting("localhost", "address of the first process", also=("main_process_ip",))
    master_port: str = setting("12355", "port of the first process", also=("main_process_port",))
    no_sync: bool = setting(False, "communicate gradients at step boundaries only (always so here)")
    strict: bool = setting(False, "any adjustment of the plan is an error")
    offline: bool = setting(False, "open no connection: use what is on disk")

    # Evaluation, checkpoints, output
    eval_steps: int = setting(0, "optimizer steps between evaluations; 0: at the end only", low=0)
    eval_batch_size: int = setting(8, "rows per batch of an evaluation", also=("per_device_eval_batch_size",), low=1)
    max_new_tokens: int = setting(64, "tokens generated per answer in evaluation and samples", low=1)
    early_stopping: int = setting(0, "evaluations without improvement before the run ends; 0: never", also=("early_stopping_patience",), low=0)
    samples: int = setting(0, "held-out prompts answered and shown at each evaluation", low=0)
    exact_match: bool | str = setting(AUTO, "evaluate by generated answers too; auto: when the held-out answers are short", choices=(AUTO, True, False))
    save_steps: int = setting(100, "optimizer steps between checkpoints; 0: at the end only", low=0)
    keep: str = setting("2", "checkpoints kept: a number >= 2, or best (the two newest and the best)", also=("save_total_limit",))
    resume: str = setting(AUTO, "auto: continue what can be continued; never: start anew; force: other settings too", choices=(AUTO, "never", "force"))
    on_disk_full: str = setting("continue", "a checkpoint that does not fit: go on without it, or stop", choices=("continue", "stop"))
    save_model: bool = setting(True, "write the adapter at the end")
    output_dir: str = setting("runs", "directory of the runs")
    run_name: str = setting("", "directory of this run inside output_dir")
    log_to: str = setting(AUTO, "auto (panel on a terminal, else lines), stdout, tqdm, none, and wandb, tensorboard, trackio; comma-separated", also=("report_to",))
    log_every_n_steps: int = setting(1, "optimizer steps between logged lines", also=("logging_steps",), low=1)
    project_name: str = setting("anyqlora", "tracker's project", also=("wandb_project",))
    name: str = setting("", "tracker's name for the run")
    group: str = setting("", "tracker's group")
    entity: str = setting("", "wandb's entity")
    verbose: bool = setting(False, "say more while preparing")
    config: str = setting("", "YAML file of settings", cli_only=True)

    # Profiling
    profile_memory: bool = setting(False, "write memory.json: bytes after each phase of each step")
    profile: bool = setting(False, "profile with torch.profiler")
    profiling_output: str = setting("profiles", "directory of the profiles inside the run directory")
    overwrite_profiling_output: bool = setting(True, "profile again where profiles already are")
    with_stack: bool = setting(False, "record Python stacks")
    with_shapes: bool = setting(False, "record tensor shapes")
    export_trace: bool = setting(True, "write a Chrome trace")
    export_memory_timeline: bool = setting(False, "write a memory timeline")
    wait_steps: int = setting(0, "profiler: steps waited in a cycle", low=0)
    profiler_warmup_steps: int = setting(0, "profiler: warm-up steps in a cycle", low=0)
    active_steps: int = setting(2, "profiler: recorded steps in a cycle", low=1)
    repeat: int = setting(0, "profiler: cycles; 0: to the end", low=0)
    profiling_frequency: int = setting(10, "steps between profiler cycles", low=1)

    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_demo(self) -> bool:
        return self.model_name == "demo"

    def asked(self, name: str) -> bool:
        """Whether somebody stated this setting, rather than its default."""
        return self.sources.get(name, "default") not in ("default", "preset")

    def with_(self, **changes) -> TrainConfig:
        return dataclasses.replace(self, **changes)

    def settings(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in SETTINGS.values()}


SETTINGS = {f.name: f for f in fields(TrainConfig) if f.metadata}
ALIASES = {alias: f.name for f in SETTINGS.values() for alias in f.metadata["also"]}
_HINTS = typing.get_type_hints(TrainConfig)
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_PRECISION_ALIASES = {"fp16": "fp16_autocast", "float32": "fp32", "no": "fp32", "bfloat16": "bf16", "float16": "fp16_autocast"}


# ------------------------------------------------------------------------------------------------ values and names


def canonical(name: str, where: str) -> str:
    """The setting that `name` (either spelling, or an alias) stands for. Raises UsageError with a suggestion."""
    plain = name.replace("-", "_")
    plain = ALIASES.get(plain, plain)
    if plain not in SETTINGS:
        raise UsageError(f"unknown setting {name!r}{tables.nearest(plain, [*SETTINGS, *ALIASES])}", where=where,
                         cure="python train.py --help lists the settings")
    return plain


def parsed(name: str, raw: object, where: str) -> object:
    """`raw` (text, or a YAML or Python value) as the type of setting `name`. Raises UsageError saying what fits."""
    about, hint = SETTINGS[name].metadata, _HINTS[name]
    kinds = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    text = ",".join(map(str, raw)) if isinstance(raw, (list, tuple)) else str(raw).strip()
    choices = about["choices"]

    def refuse(expected):
        raise UsageError(f"{name}: {raw!r} is not {expected}", where=where)

    if raw is None:
        refuse("a value")
    if bool in kinds and text.lower() in _BOOLEANS and not (str in kinds and text in choices):
        value = _BOOLEANS[text.lower()]
    elif kinds & {int, float} and not (str in kinds and text == AUTO):
        try:
            number = float(text) if not isinstance(raw, bool) else math.nan
        except ValueError:
            number = math.nan
        whole = float not in kinds
        if not math.isfinite(number) or (whole and number != int(number)):
            refuse(("a whole number" if whole else "a number") + (" or auto" if str in kinds else ""))
        value = int(Decimal(text)) if whole else number  # a float has no room for the last digits of a seed
        if wanted := _out_of_range(value, about):
            refuse(wanted)
    elif str in kinds:
        value = _PRECISION_ALIASES.get(text.lower(), text) if name == "precision" else text
    else:
        refuse("true or false")
    if choices and value not in choices:
        shown = [str(c).lower() if isinstance(c, bool) else c for c in choices]
        raise UsageError(f"{name}: unknown value {text!r}{tables.nearest(text, map(str, shown))}", where=where,
                         cure="one of: " + ", ".join(shown))
    return value


def _out_of_range(value: float, about: Mapping) -> str:
    """What the value of a setting would have to be and is not; "" where it is."""
    low, above, high = about["low"], about["above"], about["high"]
    if above is not None and value <= above:
        return f"greater than {above}"
    if (low is None or value >= low) and (high is None or value <= high):
        return ""
    return f"at least {low}" if high is None else f"between {low} and {high}"


# ------------------------------------------------------------------------------------------------- the four layers


def spelled(argv: list[str]) -> list[str]:
    """The same arguments with every flag in its hyphenated canonical form, for fastcore.

    Raises UsageError for an unknown or abbreviated flag, for a flag given twice, and for a flag without a value.
    """
    out, seen, position = [], {}, 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if word in ("-h", "--help"):
            out.append(word)
            continue
        if not word.startswith("--"):
            raise UsageError(f"unexpected argument {word!r}", where="command line", cure="settings are given as --name value")
        flag, equals, value = word[2:].partition("=")
        name = canonical(flag, f"command line: --{flag}")
        if name in seen:
            raise UsageError(f"--{flag}: {name} was already given as --{seen[name]}", where="command line")
        seen[name] = flag
        if not equals:
            if position == len(argv) or argv[position].startswith("--"):
                if bool not in _kinds(name):
                    raise UsageError(f"--{flag} needs a value", where="command line")
                value = "true"
            else:
                value = argv[position]
                position += 1
        out.append(f"--{name.replace('_', '-')}={value}")
    return out


def _kinds(name: str) -> set:
    hint = _HINTS[name]
    return set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}


def flags_of(function):
    """Give `function` one optional text flag for each setting; a flag that is not given is None."""
    def flag(f):
        shown = str(f.default).lower() if isinstance(f.default, bool) else f.default
        choices = f.metadata["choices"]
        options = " [" + "|".join(str(c).lower() if isinstance(c, bool) else c for c in choices) + "]" if choices else ""
        default = f" (default: {shown})" if shown != "" else ""
        text = (f.metadata["help"] + options + default).replace("%", "%%")
        return inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=typing.Annotated[str, text])

    function.__signature__ = inspect.Signature([flag(f) for f in SETTINGS.values()])
    return function


def from_environment(environ: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    """{setting: (value, where)} of FSDP_BACKEND and ANYQLORA_<SETTING>."""
    found = {}
    if environ.get("FSDP_BACKEND"):
        found["backend"] = (environ["FSDP_BACKEND"], "FSDP_BACKEND")
    for variable, raw in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX):
            continue
        name = canonical(variable.removeprefix(ENV_PREFIX).lower(), variable)
        if SETTINGS[name].metadata["cli_only"]:
            raise UsageError(f"{name} can only be given on the command line", where=variable)
        found[name] = (raw, variable)
    return found


def from_file(path: str | Path) -> dict[str, tuple[object, str]]:
    """{setting: (value, "file:line")} of a YAML file. Raises UsageError for what is not a flat map of known settings."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise UsageError(f"not YAML: {getattr(error, 'problem', None) or error}", where=where) from None
    if tree is None:
        return {}
    if not isinstance(tree, yaml.MappingNode) or tree.tag != "tag:yaml.org,2002:map":
        raise UsageError("not a map of settings", where=f"{path}:1", cure="write one `name: value` per line")
    found = {}
    for key, node in tree.value:
        where = f"{path}:{key.start_mark.line + 1}"
        name = canonical(str(key.value), where)
        if name in found:
            raise UsageError(f"{name} is stated twice; first at {found[name][1]}", where=where)
        if SETTINGS[name].metadata["cli_only"]:
            raise UsageError(f"{name} can only be given on the command line", where=where)
        if isinstance(node, yaml.MappingNode):
            raise UsageError(f"{name} is not a map", where=where)
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        standard = all(part.tag.startswith("tag:yaml.org,2002:") and "python" not in part.tag for part in [node, *items])
        if not standard or not all(isinstance(item, yaml.ScalarNode) for item in items):
            raise UsageError(f"{name}: plain values only", where=where)
        values = [None if item.tag.endswith(":null") else item.value for item in items]
        found[name] = (values if isinstance(node, yaml.SequenceNode) else values[0], where)
    return found


def configs_directory() -> Path:
    """Where the example configurations stand: in the source tree, or beside the installed package."""
    package = Path(__file__).resolve().parent
    beside = package.parent / "configs"
    return beside if (beside / FIRST_RUN).exists() else package / "configs"


def resolve(given: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None, *, said: str = "command line") -> TrainConfig:
    """The configuration that flags or code (`given`), environment, files and defaults make, checked.

    None in `given` means not given. With neither a model nor a dataset the embedded job is the lowest file layer.
    """
    given = {canonical(k, said): (v, f"{said}: --{k}" if said == "command line" else said)
             for k, v in (given or {}).items() if v is not None}
    environment = from_environment(os.environ if environ is None else environ)
    config_file = given.get("config", ("", ""))[0]
    file = from_file(config_file) if config_file else {}
    layers = [given, environment, file]
    if not any(name in layer for layer in layers for name in ("model_name", "dataset")):
        layers.append(from_file(configs_directory() / FIRST_RUN))
    values, sources = {}, {}
    for layer in reversed(layers):
        for name, (raw, where) in layer.items():
            values[name], sources[name] = parsed(name, raw, where), where
    if "dataset" not in values and "model_name" in values:
        values["dataset"], sources["dataset"] = "alpaca_sample", "default"
    return checked(TrainConfig(**values, sources={name: sources.get(name, "default") for name in SETTINGS}))


# ------------------------------------------------------------------------------------------------------ the checks


def checked(config: TrainConfig) -> TrainConfig:
    """The configuration with its preset resolved. Raises UsageError for a contradiction, NotBuilt for what is refused."""
    def where(name):
        return config.sources.get(name, "")

    def contradiction(one, other, why, cure=""):
        raise UsageError(f"{one} = {getattr(config, one)} contradicts {other} = {getattr(config, other)}: {why}",
                         where=where(one), cure=cure or f"leave out {one} or {other}")

    if not config.model_name:
        raise UsageError("no model", where=where("dataset"), cure="--model_name DIRECTORY_OR_HUB_ID")
    config = _preset(config, contradiction)
    for name in ("optimizer",):
        tables.choose(name, getattr(config, name), getattr(tables, name.upper() + "S"), where(name))
    if config.strategy != AUTO:
        tables.choose("strategy", config.strategy, {**tables.STRATEGIES, **tables.plugins("strategies")}, where("strategy"))
    for name, reason in _REFUSED.items():
        if getattr(config, name) != SETTINGS[name].default:
            raise NotBuilt(f"{name}: {reason}", where=where(name))
    if config.adapter == "full":
        for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules"):
            if config.asked(name) and not config.is_demo:
                contradiction(name, "adapter", "full fine-tuning has no adapter")
        if config.quantizer != "none":
            contradiction("quantizer", "adapter", "quantized weights cannot be trained", "--quantizer none, or --adapter lora")
    if config.adapter == "loftq" and config.quantizer == "none":
        contradiction("adapter", "quantizer", "LoftQ starts from what quantization lost, and nothing is quantized", "--adapter pissa, or --quantizer nf4")
    if config.reentrant_checkpointing and config.use_gradient_checkpointing is False:
        contradiction("reentrant_checkpointing", "use_gradient_checkpointing", "there is nothing to recompute")
    if config.warmup_steps >= 0 and config.asked("warmup_ratio") and _layer(where("warmup_ratio")) == _layer(where("warmup_steps")):
        contradiction("warmup_steps", "warmup_ratio", "both state the warm-up")
    if config.max_steps == 0 or config.max_steps < -1:
        raise UsageError(f"max_steps: {config.max_steps} is neither -1 nor at least 1", where=where("max_steps"))
    if config.eval_dataset and config.eval_fraction:
        contradiction("eval_fraction", "eval_dataset", "both say what is held out")
    held_out = config.eval_dataset or config.eval_fraction
    for name in ("eval_steps", "early_stopping", "samples"):
        if getattr(config, name) and not held_out:
            raise UsageError(f"{name} needs held-out rows", where=where(name), cure="--eval_dataset FILE or --eval_fraction 0.05")
    if config.early_stopping and not config.eval_steps:
        raise UsageError("early_stopping needs eval_steps", where=where("early_stopping"), cure="--eval_steps 50")
    if config.keep == "best" and not (held_out and config.eval_steps):
        raise UsageError("keep best needs evaluations", where=where("keep"), cure="--eval_dataset FILE --eval_steps 50")
    if config.keep != "best" and (not config.keep.isdigit() or int(config.keep) < 2):
        raise UsageError(f"keep: {config.keep!r} is neither a number of at least 2 nor best", where=where("keep"))
    _seen(config, where)
    _confined("run_name", config.run_name, where("run_name"))
    _confined("profiling_output", config.profiling_output, where("profiling_output"))
    return config


def _seen(config: TrainConfig, where) -> None:
    """What is shown, told and profiled. Raises UsageError."""
    places = [name.strip() for name in config.log_to.split(",")]
    for name in places:
        tables.choose("log_to", name, tables.VIEWS | tables.TRACKERS, where("log_to"))
    views = [name for name in places if name in tables.VIEWS]
    if len(views) > 1:
        raise UsageError(f"log_to: {' and '.join(views)} contradict each other", where=where("log_to"), cure="one of them, and any trackers")
    if config.profile and config.wait_steps + config.profiler_warmup_steps + config.active_steps > config.profiling_frequency:
        raise UsageError("a profiler cycle (wait, warm-up, active) is longer than profiling_frequency", where=where("profiling_frequency"))
    for name in _OF_PROFILE:
        if not config.profile and getattr(config, name) != SETTINGS[name].default:
            raise UsageError(f"{name} needs profile", where=where(name), cure="--profile true")


_OF_PROFILE = ("profiling_output", "overwrite_profiling_output", "with_stack", "with_shapes", "export_trace", "export_memory_timeline",
               "wait_steps", "profiler_warmup_steps", "active_steps", "repeat", "profiling_frequency")
_REFUSED = {
    "llama_pro_path": "block expansion (llama_pro) is not built yet",
    "hqq_group_size": "HQQ quantization is not built yet",
    "strategy_config": "strategy single has no options file",
    "strategy_opt": "strategy single has no options",
    "mesh": "device meshes are not built yet; one process only",
    "layout": "tensor layouts are not built yet; one process only",
    "sharding_strategy": "FSDP is not built yet; one process only",
    "deepspeed_zero_stage": "DeepSpeed is not built yet; one process only",
    "find_unused_parameters": "DDP is not built yet; one process only",
    "master_addr": "one process only, so there is nobody to meet",
    "master_port": "one process only, so there is nobody to meet",
    "no_sync": "one process only, so there are no gradients to synchronise",
    "low_memory": "weights are always streamed; there is no other way of loading",
    "loading_workers": "weights are streamed one tensor at a time, so that memory stays small",
}


def _preset(config: TrainConfig, contradiction) -> TrainConfig:
    """Resolve train_type into quantizer and adapter. What is stated beside it refines it (qlora with fp4, qlora with dora);
    within one layer (both on the command line, both in the file), quantized against not or full against an adapter is an error."""
    quantizer, adapter = tables.choose("train_type", config.train_type, tables.TRAIN_TYPES, config.sources.get("train_type", ""))
    sources = dict(config.sources)
    bits = config.n_bits
    if bits != AUTO and config.quantizer == AUTO and quantizer != "none":
        by_bits = {4: quantizer, 8: "int8"}
        if bits not in by_bits:
            raise NotBuilt(f"n_bits: {bits}-bit weights are not built; 4 and 8 are", where=sources.get("n_bits", ""))
        quantizer = by_bits[bits]
    for name, preset, pole in (("quantizer", quantizer, "none"), ("adapter", adapter, "full")):
        value = getattr(config, name)
        if value == AUTO:
            config = config.with_(**{name: preset})
            sources[name] = "preset"
        elif (value == pole) != (preset == pole) and config.asked("train_type") and _layer(sources[name]) == _layer(sources["train_type"]):
            contradiction(name, "train_type", f"{config.train_type} means {name} {preset}")
    tables.choose("quantizer", config.quantizer, tables.QUANTIZERS, sources.get("quantizer", ""))
    tables.choose("adapter", config.adapter, tables.ADAPTERS, sources.get("adapter", ""))
    if bits != AUTO and tables.BITS[config.quantizer] != bits:
        contradiction("n_bits", "quantizer", f"{config.quantizer} has {tables.BITS[config.quantizer]} bits")
    return config.with_(n_bits=tables.BITS[config.quantizer], sources=sources)


def _layer(source: str) -> str:
    return "file" if re.search(r":\d+$", source) else source.split(":")[0].partition("_")[0]


def _confined(name: str, value: str, where: str) -> None:
    if value and (Path(value).name != value or value in (".", "..") or not re.fullmatch(r"[\w.+ -]+", value)):
        raise UsageError(f"{name}: {value!r} is not a plain name", where=where, cure="letters, digits, '.', '_', '-'; no '/'")
