"""Everything a user can ask for: one frozen dataclass, from which flags, YAML keys, environment and docs all come."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal

from anyqlora.core import registry
from anyqlora.core.errors import UsageError

AUTO = "auto"


def setting(default, help: str, *, choices=(), also=(), low=None, above=None, high=None, cli_only=False):
    """One setting: its default, its help, the values it may have (from `low`, or greater than `above`, to `high`), and the other
    names it goes by (`also`)."""
    about = {
        "help": help,
        "choices": tuple(choices),
        "also": tuple(also),
        "low": low,
        "above": above,
        "high": high,
        "cli_only": cli_only,
    }
    return field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What was asked. `sources[name]` says where each value came from.

    A value of "auto" is one that the plan chooses. Raises UsageError from `checked()` when settings contradict.
    """

    # What is trained
    train_type: str = setting("qlora", "preset over quantizer and adapter", choices=registry.TRAIN_TYPES)
    quantizer: str = setting(
        AUTO, "how frozen weights are kept; auto: as train_type says", choices=(AUTO, *registry.QUANTIZERS)
    )
    adapter: str = setting(AUTO, "what is learned; auto: as train_type says", choices=(AUTO, *registry.ADAPTERS))
    bits: int | str = setting(AUTO, "4 or 8: qlora's nf4 or int8; auto: as quantizer says", also=("n_bits",))
    double_quant: bool = setting(True, "quantize the 4-bit scales too", also=("bnb_4bit_use_double_quant",))
    affine_group_size: int = setting(
        64, "weights of a row that share a scale and a bias of an affine quantizer", choices=(32, 64, 128)
    )
    hqq_group_size: int = setting(64, "HQQ's group size", low=1)
    llama_pro_path: str = setting("", "directory of a block-expanded model")
    lora_rank: int = setting(16, "rank of the adapters", also=("lora_r", "r"), low=1)
    lora_alpha: float = setting(32.0, "scale of the adapters, times rank", above=0)
    lora_dropout: float = setting(0.1, "dropout on the adapters' input", low=0, high=0.999)
    lora_target_modules: str = setting(
        "all",
        "all: every linear layer; default: PEFT's choice; a comma-separated list; or a regex of module names",
        also=("target_modules",),
    )
    init_adapter: str = setting(
        "",
        "adapter to start from, whose rank, alpha, targets, dropout and chat template are taken: directory of a run or of an adapter, or hub id of one that has been downloaded",
        also=("adapter_name_or_path", "lora_model_dir"),
    )

    # Model and data
    model_name: str = setting("", "directory or hub id of the base model", also=("model", "model_name_or_path"))
    revision: str = setting("main", "branch, tag or commit of a hub model", also=("model_revision",))
    trust_remote_code: bool = setting(
        False, "run Python code that comes with the model; on the command line only", cli_only=True
    )
    dataset: str = setting(
        "",
        "file, directory, hub id or built-in name; several: a.jsonl=2,b.jsonl=0.5 (how often a row is seen per epoch)",
        also=("dataset_name", "train_file"),
    )
    dataset_samples: int = setting(512, "rows of alpaca_sample and dummy", low=1)
    prompt_format: str = setting(
        AUTO,
        "auto: messages through the chat template, Alpaca rows through Alpaca's text, the rest as it stands",
        choices=(AUTO, "chat", "alpaca", "plain"),
    )
    chat_template: str = setting(
        "",
        "how conversations are written, in place of the tokenizer's own template: zephyr (for any base model), chatml, llama3, or a Jinja file",
        also=("chat_template_path",),
    )
    context_length: int = setting(
        512, "tokens per row at most", also=("max_seq_length", "max_length", "cutoff_len"), low=2
    )
    packing: str | bool = setting(
        AUTO, "put several rows into one sequence, without cross-talk", choices=(AUTO, True, False)
    )
    on_bad_row: str = setting(
        "error", "a row that cannot be used: stop, or skip and list it", choices=("error", "skip")
    )
    on_long_row: str = setting(
        "truncate",
        "a row over context_length: cut it (no end token is trained), skip it, or stop",
        choices=("truncate", "skip", "error"),
    )
    dataset_format: str = setting(
        AUTO,
        "format of the rows; auto: from their keys",
        choices=(AUTO, "alpaca", "prompt_completion", "question_answer", "messages", "sharegpt", "text"),
    )
    eval_dataset: str = setting("", "held-out rows, as for dataset", also=("eval_file", "validation_file"))
    eval_fraction: float = setting(
        0.0,
        "part of the rows that is held out when no eval_dataset is given",
        also=("val_set_size", "test_size"),
        low=0,
        high=0.9,
    )

    # The run
    batch_size: int | str = setting(
        AUTO, "rows per micro-batch and process", also=("per_device_train_batch_size", "micro_batch_size"), low=1
    )
    gradient_accumulation_steps: int = setting(1, "micro-batches per optimizer step", low=1)
    num_epochs: int = setting(
        1, "whole passes over the rows; --max_steps N ends within one", also=("num_train_epochs", "epochs"), low=1
    )
    max_steps: int = setting(-1, "optimizer steps of the whole run; -1: as many as num_epochs needs")
    lr: float = setting(2e-4, "peak learning rate", also=("learning_rate",), low=0)
    lr_scheduler: str = setting(
        "cosine", "shape of the learning rate", choices=registry.SCHEDULES, also=("lr_scheduler_type",)
    )
    warmup_steps: int = setting(-1, "steps of linear warm-up; -1: by warmup_ratio")
    warmup_ratio: float = setting(0.03, "warm-up as a part of all steps", low=0, high=1)
    cosine_min_lr_ratio: float = setting(
        0.0, "the schedule's floor as a part of lr", also=("min_lr_ratio", "min_lr_rate"), low=0, high=1
    )
    lr_cycles: int = setting(1, "restarts of cosine_with_restarts", also=("num_cycles",), low=1)
    lr_power: float = setting(1.0, "exponent of the polynomial schedule", low=0)
    lr_decay: float = setting(0.1, "the exponential schedule's end as a part of lr", low=0, high=1)
    optimizer: str = setting("adamw", "update rule", choices=registry.OPTIMIZERS, also=("optim",))
    adam_beta1: float = setting(0.9, "AdamW's first decay", low=0, high=0.999999)
    adam_beta2: float = setting(0.999, "AdamW's second decay", low=0, high=0.999999)
    adam_eps: float = setting(1e-8, "AdamW's denominator floor", also=("adam_epsilon",), low=0)
    weight_decay: float = setting(0.1, "weight decay", also=("wd",), low=0)
    apply_gradient_clipping: bool = setting(True, "clip the gradient norm")
    max_grad_norm: float = setting(1.0, "largest gradient norm; 0 clips nothing", also=("grad_norm",), low=0)
    precision: str = setting(
        AUTO,
        "arithmetic: auto is bf16 where the device has it",
        choices=(AUTO, *registry.PRECISIONS),
        also=("mixed_precision",),
    )
    initial_loss_scale: float = setting(
        65536.0, "fp16: what the loss is first multiplied by", also=("init_scale",), low=1
    )
    loss_scale_growth_interval: int = setting(
        2000, "fp16: steps without overflow after which the loss scale doubles", also=("growth_interval",), low=1
    )
    use_gradient_checkpointing: bool | str = setting(
        AUTO, "recompute activations in backward", choices=(AUTO, True, False), also=("gradient_checkpointing",)
    )
    checkpointed_layers: int | str = setting(
        AUTO,
        "layers that recompute, the first ones; auto: with gradient checkpointing all, or as few as make the run fit where the plan chose it",
        also=("recomputed_layers",),
        low=0,
    )
    kernels: str = setting(
        AUTO,
        "portable: the framework's own; exact: our Triton ones that give the same bits; triton: all of them; native: our C ones for bf16 on a CPU; auto: exact on NVIDIA GPUs, native on CPUs with AVX512-BF16 and a C compiler",
        choices=(AUTO, *registry.KERNELS),
    )
    reentrant_checkpointing: bool = setting(False, "the older, reentrant form of checkpointing")
    fused_lora: bool | str = setting(
        AUTO,
        "LoRA in one function with its frozen weight; auto: wherever that is the same",
        choices=(AUTO, True, False),
        also=("fused",),
    )
    fused_linear_cross_entropy: bool | str = setting(
        AUTO,
        "output head and loss in one, whose logits are never in memory; auto: in bf16 on a CPU with AVX512-BF16 and VNNI and without AMX",
        choices=(AUTO, True, False),
        also=("fused_head",),
    )
    frozen_matmul: str = setting(
        "full",
        "products with frozen weights: full (as precision says), or of numbers rounded to int8 (CPUs with VNNI or AMX; int8_backward: in the backward pass alone) or fp8 (NVIDIA GPUs from 8.9 on), where a row shows that they are near: less time, slightly other numbers",
        choices=registry.FROZEN_PRODUCTS,
        also=("frozen_products",),
    )
    dequantized_layers: int | str = setting(
        AUTO,
        "layers whose dequantized weights stay in memory; auto: as many as there is plenty of room for",
        also=("weight_cache",),
        low=0,
    )
    cpu_threads: int | str = setting(
        AUTO,
        "processor threads of the arithmetic; auto: OMP_NUM_THREADS, or each core where layers are wide",
        also=("threads",),
        low=1,
    )
    padding_free: bool | str = setting(
        AUTO,
        "rows one after another without padding, attention by document; auto: on a CPU",
        choices=(AUTO, True, False),
        also=("flat",),
    )
    logits_chunk_tokens: int | str = setting(
        AUTO,
        "trained tokens whose logits are made at a time; 0: those of a whole micro-batch",
        also=("loss_rows",),
        low=0,
    )
    use_cpu_offload: bool | str = setting(AUTO, "keep frozen weights in host memory", choices=(AUTO, True, False))
    use_activation_cpu_offload: bool = setting(False, "keep saved activations in host memory")
    low_memory: bool = setting(
        True,
        "stream the weights: never hold the full-precision model",
        also=("cpu_ram_efficient_loading", "fsdp_cpu_ram_efficient_loading"),
    )
    quantized_cache: bool | str = setting(
        AUTO,
        "keep quantized weights for the next start: true (in ~/.cache/anyqlora/quantized), false, or a directory; auto: from 100 million on",
    )
    quantized_cache_limit: float = setting(
        50.0, "GiB that kept weights take in all; those not used for longest go first", above=0
    )
    loading_workers: int = setting(-1, "tensors loaded and quantized at a time; -1: one")
    spike_guard: float = setting(
        0.0, "skip a step whose loss is so many deviations above the recent ones; 0: never", low=0
    )
    seed: int = setting(42, "seed of data order, adapter start and dropout", low=0, high=2**63 - 1)
    deterministic: bool = setting(True, "deterministic algorithms only")

    # Where it runs
    backend: str = setting(AUTO, "cuda, rocm, xpu, mps, mlx, cpu, or a plugin's name")
    strategy: str = setting(AUTO, "how processes share the work", also=("distributed_type",))
    strategy_config: str = setting("", "file of the strategy's options", also=("deepspeed", "fsdp_config"))
    strategy_opt: str = setting("", "options of the strategy: name=value,name=value")
    mesh: str = setting("", "device mesh: batch=2,model=2")
    tensor_layout: str = setting("", "tensor layout: default or a file", also=("layout",))
    sharding_strategy: str = setting(
        "full_shard", "what FSDP shards", choices=registry.SHARDING_STRATEGIES, also=("fsdp_sharding_strategy",)
    )
    deepspeed_zero_stage: int = setting(-1, "DeepSpeed's ZeRO stage; -1: not asked for", also=("zero_stage",))
    find_unused_parameters: bool = setting(
        False, "DDP: look for parameters that got no gradient", also=("ddp_find_unused_parameters",)
    )
    world_size: int = setting(-1, "processes; -1: one for each device", also=("num_processes",))
    master_addr: str = setting("localhost", "address of the first process", also=("main_process_ip",))
    master_port: str = setting("12355", "port of the first process", also=("main_process_port",))
    dist_timeout: float = setting(
        600.0, "seconds that processes wait for one another before the run ends", also=("ddp_timeout",), above=0
    )
    max_restarts: int = setting(
        0, "times that the processes started here are started again, from the last checkpoint, when one is lost", low=0
    )
    no_sync: bool = setting(False, "communicate gradients at step boundaries only (always so here)")
    strict: bool = setting(False, "any adjustment of the plan is an error")
    offline: bool = setting(False, "open no connection: use what is on disk")

    # Evaluation, checkpoints, output
    eval_steps: int = setting(0, "optimizer steps between evaluations; 0: at the end only", low=0)
    eval_batch_size: int = setting(8, "rows per batch of an evaluation", also=("per_device_eval_batch_size",), low=1)
    max_new_tokens: int = setting(64, "tokens generated per answer in evaluation and samples", low=1)
    early_stopping_patience: int = setting(
        0, "evaluations without improvement before the run ends; 0: never", also=("early_stopping",), low=0
    )
    num_samples: int = setting(0, "held-out prompts answered and shown at each evaluation", also=("samples",), low=0)
    exact_match: bool | str = setting(
        AUTO,
        "evaluate by generated answers too; auto: when the held-out answers are short",
        choices=(AUTO, True, False),
    )
    save_steps: int = setting(100, "optimizer steps between checkpoints; 0: at the end only", low=0)
    save_total_limit: int = setting(
        2, "newest checkpoints that stay; one alone would be the one that a damaged disk hits", low=2
    )
    load_best_model_at_end: bool = setting(
        False, "end with the weights of the best evaluation, whose checkpoint stays too"
    )
    resume: str = setting(
        AUTO,
        "auto: continue what can be continued; never: start anew; force: other settings too",
        choices=(AUTO, "never", "force"),
    )
    on_disk_full: str = setting(
        "continue", "a checkpoint that does not fit: go on without it, or stop", choices=("continue", "stop")
    )
    save_model: bool = setting(True, "write the adapter at the end")
    output_dir: str = setting("runs", "directory of the runs")
    run_name: str = setting("", "directory of this run inside output_dir")
    log_to: str = setting(
        AUTO,
        "auto (panel on a terminal, else lines), stdout, tqdm, none, and wandb, tensorboard, trackio; comma-separated",
        also=("report_to",),
    )
    log_every_n_steps: int = setting(1, "optimizer steps between logged lines", also=("logging_steps",), low=1)
    project_name: str = setting("anyqlora", "tracker's project", also=("wandb_project",))
    tracker_name: str = setting("", "tracker's name for the run", also=("name",))
    tracker_group: str = setting("", "tracker's group", also=("group",))
    tracker_entity: str = setting("", "wandb's entity", also=("entity",))
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
    timeline: str = setting(
        "", "write the first steps' phases and collectives as a Chrome trace: a file name inside the run directory"
    )
    profile_wait: int = setting(0, "profiler: steps waited in a cycle", also=("wait_steps",), low=0)
    profiler_warmup_steps: int = setting(0, "profiler: warm-up steps in a cycle", low=0)
    profile_active: int = setting(2, "profiler: recorded steps in a cycle", also=("active_steps",), low=1)
    profile_repeat: int = setting(0, "profiler: cycles; 0: to the end", also=("repeat",), low=0)
    profiling_frequency: int = setting(10, "steps between profiler cycles", low=1)

    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_demo(self) -> bool:
        return self.model_name == "demo"

    def asked(self, name: str) -> bool:
        """Whether somebody stated this setting, rather than its default."""
        return self.sources.get(name, "default") not in ("default", "preset", "plan")

    @property
    def clip_norm(self) -> float | None:
        """The norm that gradients are cut to; None where they are not."""
        return self.max_grad_norm or None if self.apply_gradient_clipping else None

    def with_(self, **changes) -> TrainConfig:
        return dataclasses.replace(self, **changes)

    def settings(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in SETTINGS.values()}


SETTINGS = {f.name: f for f in fields(TrainConfig) if f.metadata}
ALIASES = {alias: f.name for f in SETTINGS.values() for alias in f.metadata["also"]}
_HINTS = typing.get_type_hints(TrainConfig)
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_VALUE_ALIASES = {  # what others call it
    "precision": {
        "fp16": "fp16_autocast",
        "float32": "fp32",
        "no": "fp32",
        "bfloat16": "bf16",
        "float16": "fp16_autocast",
    },
    "optimizer": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "fused_adamw",
        "adamw_bnb_8bit": "adamw_8bit",
        "adamw_hf": "adamw",
        "paged_adamw_32bit": "paged_adamw",
    },
    "lr_scheduler": {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"},
}


# ------------------------------------------------------------------------------------------------ values and names


def _from_keep(value: object) -> dict[str, object]:
    """What `keep` says, which was one setting: a number of checkpoints, or best (the two newest, and the best)."""
    if value == "best":
        return {"save_total_limit": 2, "load_best_model_at_end": True}
    return {"save_total_limit": value, "load_best_model_at_end": False}


SPLIT_ALIASES = {"keep": _from_keep}  # a name that says two settings -> {setting: value} of its value


def canonical_name(name: str, where: str) -> str:
    """The setting that `name` (either spelling, or an alias) stands for. Raises UsageError with a suggestion."""
    plain = name.replace("-", "_")
    plain = ALIASES.get(plain, plain)
    if plain not in SETTINGS:
        raise UsageError(
            f"unknown setting {name!r}{registry.nearest(plain, [*SETTINGS, *ALIASES])}",
            where=where,
            cure="python train.py --help lists the settings",
        )
    return plain


def canonical_settings(name: str, value: object, where: str) -> dict[str, object]:
    """{setting: value} of what is stated as `name`: one, or those of a name in SPLIT_ALIASES. Raises UsageError."""
    split = SPLIT_ALIASES.get(name.replace("-", "_"))
    return split(value) if split else {canonical_name(name, where): value}


def current_names(stored: Mapping[str, object]) -> dict[str, object]:
    """What a run wrote down about itself (identity.json, a checkpoint's manifest), by the names that settings have now."""
    return {ALIASES.get(name, name): value for name, value in stored.items()}


def parse_value(name: str, raw: object, where: str) -> object:
    """`raw` (text, or a YAML or Python value) as the type of setting `name`. Raises UsageError saying what fits."""
    about = SETTINGS[name].metadata
    kinds = value_types(name)
    text = ",".join(map(str, raw)) if isinstance(raw, (list, tuple)) else str(raw).strip()
    choices = about["choices"]

    def refuse(expected):
        raise UsageError(f"{name}: {raw!r} is not {expected}", where=where, cure=f"{name} is: {about['help']}")

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
        value = _VALUE_ALIASES.get(name, {}).get(text.lower(), text)
    else:
        refuse("true or false")
    if choices and value not in choices:
        shown = [str(c).lower() if isinstance(c, bool) else str(c) for c in choices]
        raise UsageError(
            f"{name}: unknown value {text!r}{registry.nearest(text, shown)}",
            where=where,
            cure="one of: " + ", ".join(shown),
        )
    return value


def _out_of_range(value: float, about: Mapping) -> str:
    """What the value of a setting would have to be and is not; "" where it is."""
    low, above, high = about["low"], about["above"], about["high"]
    if above is not None and value <= above:
        return f"greater than {above}"
    if (low is None or value >= low) and (high is None or value <= high):
        return ""
    return f"at least {low}" if high is None else f"between {low} and {high}"


def value_types(name: str) -> set:
    hint = _HINTS[name]
    return set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
