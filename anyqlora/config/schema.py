"""Everything a user can ask for: one frozen dataclass, from which flags, YAML keys, environment and docs all come."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Any

from anyqlora.config import other_tools
from anyqlora.config.facets import AUTO, SWITCH, setting
from anyqlora.core import registry
from anyqlora.core.entry_points import entry_point_targets
from anyqlora.core.errors import NotSupported, UsageError


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What was asked. `sources[name]` says where each value came from.

    A value of "auto" is one that the plan chooses. Raises UsageError from `validate()` when settings contradict.
    """

    # ------------------------------------------------------------------------------------------------- model and data
    model_name: str = setting(
        "",
        "directory or hub id of the base model",
        section="data",
        on_resume="content",
        aliases=("model", "model_name_or_path"),
    )
    dataset: str = setting(
        "",
        "rows to train on: file, directory, hub id or built-in name; several: a.jsonl=2,b.jsonl=0.5 (how often a row "
        "is seen per epoch)",
        section="data",
        on_resume="content",
        aliases=("dataset_name", "train_file"),
    )
    eval_dataset: str = setting(
        "",
        "rows of the evaluation set, as for dataset",
        section="data",
        on_resume="content",
        aliases=("eval_file", "validation_file"),
        supersedes=("eval_fraction",),
    )
    eval_fraction: float = setting(
        0.0,
        "part of the rows that makes the evaluation set where no eval_dataset is given",
        section="data",
        on_resume="identity",
        aliases=("val_set_size", "test_size"),
        low=0,
        high=0.9,
        supersedes=("eval_dataset",),
    )
    context_length: int = setting(
        512,
        "tokens per row at most",
        section="data",
        on_resume="identity",
        aliases=("max_seq_length", "max_length", "cutoff_len"),
        low=2,
    )
    packing: str | bool = setting(
        AUTO,
        "put several rows into one sequence, without cross-talk",
        section="data",
        on_resume="identity",
        choices=SWITCH,
    )
    mix_strategy: str = setting(
        "concat",
        "several sources in an epoch: concat (each as often as its weight says), or in shares by their weights until "
        "the first (interleave_under) or the last of them (interleave_over) has no row left",
        section="data",
        on_resume="stated",
        choices=("concat", "interleave_under", "interleave_over"),
    )
    mix_temperature: float = setting(
        0.0,
        "shares of the sources are as their sizes to the power of 1 / this: 1 as their sizes, more evens them out; 0: "
        "as their weights alone",
        section="data",
        on_resume="stated",
        low=0,
        high=1000,
    )
    group_by_length: bool = setting(
        False,
        "rows of about one length share a step, so that less is padding",
        section="data",
        on_resume="stated",
    )
    dataset_format: str = setting(
        AUTO,
        "format of the rows; auto: from their keys",
        section="data",
        on_resume="identity",
        choices=(
            *(AUTO, "alpaca", "prompt_completion", "question_answer", "messages", "sharegpt", "segments", "tokens"),
            "text",
        ),
    )
    prompt_format: str = setting(
        AUTO,
        "how rows are written; auto: by the model's chat template where it has one, else, as with text, Alpaca rows in "
        "Alpaca's words and the rest as it stands",
        section="data",
        on_resume="identity",
        choices=(AUTO, "chat", "text", "alpaca", "plain"),
    )
    chat_template: str = setting(
        "",
        "how conversations are written, in place of the tokenizer's own template: zephyr (for any base model), chatml, "
        "llama3, or a Jinja file",
        section="data",
        on_resume="content",
        aliases=("chat_template_path",),
    )
    chat_template_kwargs: str = setting(
        "",
        'what the chat template is told of every row: {"enable_thinking": false}; a column of this name tells it of '
        "one row",
        section="data",
        on_resume="stated",
    )
    multi_turn: str = setting(
        AUTO,
        "which answers of a conversation are learned: all in one sequence (auto: as long as no thought of an earlier "
        "turn is to be left out), the last, or each as it is asked, in sequences of their own (split)",
        section="data",
        on_resume="stated",
        choices=(AUTO, "all", "last", "split"),
    )
    on_bad_row: str = setting(
        "error",
        "a row that cannot be used: stop, or skip and list it",
        section="data",
        on_resume="identity",
        choices=("error", "skip"),
    )
    on_long_row: str = setting(
        "truncate",
        "a row over context_length: cut it (no end token is trained), skip it, or stop",
        section="data",
        on_resume="identity",
        choices=("truncate", "skip", "error"),
    )
    columns: str = setting(
        "",
        "what the rows call a format's columns: prompt=question,completion=answers[0].text",
        section="data",
        on_resume="stated",
    )
    preference_data: str = setting(
        "error",
        "rows that say which of two answers is the better one, or whether an answer is good: stop, or train the chosen "
        "answers as any others",
        section="data",
        on_resume="stated",
        choices=("error", "chosen"),
        aliases=("use",),
    )
    ignore_columns: str = setting(
        "",
        "keys of rows and of messages that are passed over, whatever they mean: a,b",
        section="data",
        on_resume="stated",
    )
    token_cache: bool | str = setting(
        AUTO,
        "keep the tokens of files for the next start: true (in ~/.cache/anyqlora/tokens), false, or a directory; auto: "
        "of files from 8 MiB on",
        section="data",
        on_resume="free",
    )
    token_cache_limit: float = setting(
        50.0,
        "GiB that kept tokens take in all; those not used for longest go first",
        section="data",
        on_resume="free",
        above=0,
        needs=("token_cache",),
    )
    dataset_num_proc: int = setting(
        0,
        "processes that make tokens of the rows; 0: one for each core",
        section="data",
        on_resume="free",
        aliases=("preprocessing_num_workers",),
        low=0,
        high=256,
    )
    dataset_samples: int = setting(
        512, "rows of alpaca_sample and dummy", section="data", on_resume="identity", low=1, needs=("built_in_rows",)
    )
    revision: str = setting(
        "main", "branch, tag or commit of a hub model", section="data", on_resume="content", aliases=("model_revision",)
    )
    trust_remote_code: bool = setting(
        False,
        "run Python code that comes with the model; on the command line only",
        section="data",
        on_resume="free",
        cli_only=True,
    )

    # ------------------------------------------------------------------------------------------------ what is trained
    train_type: str = setting(
        "qlora",
        "preset over quantizer and adapter",
        section="training",
        on_resume="content",
        choices=registry.TRAIN_TYPES,
        supersedes=("quantizer", "adapter", "bits"),
    )
    quantizer: str = setting(
        AUTO,
        "form of the frozen weights; auto: as train_type says",
        section="training",
        on_resume="identity",
        choices=(AUTO, *registry.QUANTIZERS),
        supersedes=("bits",),
    )
    adapter: str = setting(
        AUTO,
        "what is learned; auto: as train_type says",
        section="training",
        on_resume="identity",
        choices=(AUTO, *registry.ADAPTERS),
    )
    lora_rank: int = setting(
        16,
        "rank of the adapters",
        section="training",
        on_resume="identity",
        aliases=("lora_r", "r"),
        low=1,
        needs=("adapter",),
    )
    lora_alpha: float = setting(
        32.0, "scale of the adapters, times rank", section="training", on_resume="identity", above=0, needs=("adapter",)
    )
    lora_dropout: float = setting(
        0.1,
        "dropout on the adapters' input",
        section="training",
        on_resume="identity",
        low=0,
        high=0.999,
        needs=("adapter",),
    )
    lora_target_modules: str = setting(
        "all",
        "linear layers that get an adapter: all; default (PEFT's choice); a comma-separated list; or a regex of module "
        "names",
        section="training",
        on_resume="identity",
        aliases=("target_modules",),
        needs=("adapter",),
    )
    init_adapter: str = setting(
        "",
        "adapter to start from, whose rank, alpha, targets, dropout and chat template are taken: directory of a run or "
        "of an adapter, or hub id of one that has been downloaded",
        section="training",
        on_resume="content",
        aliases=("adapter_name_or_path", "lora_model_dir"),
    )
    bits: int | str = setting(
        AUTO,
        "bits of qlora's frozen weights: 4 (nf4) or 8 (int8); auto: as quantizer says",
        section="training",
        on_resume="content",
        aliases=("n_bits",),
        supersedes=("quantizer",),
    )
    double_quant: bool = setting(
        True,
        "quantize the 4-bit scales too",
        section="training",
        on_resume="identity",
        aliases=("bnb_4bit_use_double_quant",),
        needs=("bnb_4bit",),
    )
    affine_group_size: int = setting(
        64,
        "weights of a row that share a scale and a bias of an affine quantizer",
        section="training",
        on_resume="identity",
        choices=(32, 64, 128),
        needs=("affine",),
    )

    # ------------------------------------------------------------------------ batch, length of the run, learning rate
    batch_size: int | str = setting(
        AUTO,
        "rows per micro-batch and process",
        section="schedule",
        on_resume="recorded",
        aliases=("per_device_train_batch_size", "micro_batch_size"),
        low=1,
    )
    gradient_accumulation_steps: int = setting(
        1, "micro-batches per optimizer step", section="schedule", on_resume="content", low=1
    )
    num_epochs: int = setting(
        1,
        "whole passes over the rows; --max_steps N ends within one",
        section="schedule",
        on_resume="identity",
        aliases=("num_train_epochs", "epochs"),
        low=1,
    )
    max_steps: int = setting(
        -1,
        "optimizer steps of the whole run; -1: as many as num_epochs needs",
        section="schedule",
        on_resume="identity",
    )
    lr: float = setting(
        2e-4, "peak learning rate", section="schedule", on_resume="identity", aliases=("learning_rate",), low=0
    )
    lr_scheduler: str = setting(
        "cosine",
        "shape of the learning rate",
        section="schedule",
        on_resume="identity",
        choices=registry.SCHEDULES,
        aliases=("lr_scheduler_type",),
    )
    warmup_ratio: float = setting(
        0.03,
        "warm-up as a part of all steps",
        section="schedule",
        on_resume="identity",
        low=0,
        high=1,
        supersedes=("warmup_steps",),
    )
    warmup_steps: int = setting(
        -1,
        "steps of linear warm-up; -1: by warmup_ratio",
        section="schedule",
        on_resume="identity",
        supersedes=("warmup_ratio",),
    )
    cosine_min_lr_ratio: float = setting(
        0.0,
        "the schedule's floor as a part of lr",
        section="schedule",
        on_resume="identity",
        aliases=("min_lr_ratio", "min_lr_rate"),
        low=0,
        high=1,
        needs=("lr_falls",),
    )
    lr_cycles: int = setting(
        1,
        "restarts of cosine_with_restarts",
        section="schedule",
        on_resume="identity",
        aliases=("num_cycles",),
        low=1,
        needs=("cosine_with_restarts",),
    )
    lr_power: float = setting(
        1.0,
        "exponent of the polynomial schedule",
        section="schedule",
        on_resume="identity",
        low=0,
        needs=("polynomial",),
    )
    lr_decay: float = setting(
        0.1,
        "the exponential schedule's end as a part of lr",
        section="schedule",
        on_resume="identity",
        low=0,
        high=1,
        needs=("exponential",),
    )
    seed: int = setting(
        42,
        "seed of data order, adapter start and dropout",
        section="schedule",
        on_resume="identity",
        low=0,
        high=2**63 - 1,
    )

    # ----------------------------------------------------------------------------------------------------- evaluation
    eval_steps: int = setting(
        0,
        "optimizer steps between evaluations; 0: at the end only",
        section="evaluation",
        on_resume="free",
        low=0,
        needs=("evaluation_set",),
    )
    num_samples: int = setting(
        0,
        "prompts of the evaluation set that are answered and shown at each evaluation",
        section="evaluation",
        on_resume="free",
        aliases=("samples",),
        low=0,
        needs=("evaluation_set",),
    )
    max_new_tokens: int = setting(
        64, "tokens generated per answer in evaluation and samples", section="evaluation", on_resume="free", low=1
    )
    exact_match: bool | str = setting(
        AUTO,
        "evaluate by generated answers too; auto: when the expected answers are short",
        section="evaluation",
        on_resume="free",
        choices=SWITCH,
    )
    early_stopping_patience: int = setting(
        0,
        "evaluations without improvement before the run ends; 0: never",
        section="evaluation",
        on_resume="identity",
        aliases=("early_stopping",),
        low=0,
        needs=("evaluation_set",),
    )
    eval_batch_size: int = setting(
        8,
        "rows per batch of an evaluation",
        section="evaluation",
        on_resume="free",
        aliases=("per_device_eval_batch_size",),
        low=1,
    )

    # ---------------------------------------------------------------------------------------------------- checkpoints
    save_steps: int = setting(
        100, "optimizer steps between checkpoints; 0: at the end only", section="checkpoints", on_resume="free", low=0
    )
    save_total_limit: int = setting(
        2,
        "newest checkpoints that stay; one alone would be the one that a damaged disk hits (keep N or keep best, of "
        "before, says this and load_best_model_at_end)",
        section="checkpoints",
        on_resume="free",
        low=2,
    )
    load_best_model_at_end: bool = setting(
        False,
        "end with the weights of the best evaluation, whose checkpoint stays beside the newest",
        section="checkpoints",
        on_resume="free",
    )
    resume: str = setting(
        AUTO,
        "auto: continue what can be continued; never: start anew; force: other settings too",
        section="checkpoints",
        on_resume="free",
        choices=(AUTO, "never", "force"),
    )
    save_model: bool = setting(True, "write the adapter at the end", section="checkpoints", on_resume="free")
    on_disk_full: str = setting(
        "continue",
        "a checkpoint that does not fit: go on without it, or stop",
        section="checkpoints",
        on_resume="free",
        choices=("continue", "stop"),
    )

    # -------------------------------------------------------------------------------------------- output and trackers
    output_dir: str = setting("runs", "directory of the runs", section="output", on_resume="free", each_process=True)
    run_name: str = setting(
        "", "directory of this run inside output_dir", section="output", on_resume="free", each_process=True
    )
    config: str = setting(
        "",
        "YAML file of settings; or Accelerate's own, or a DeepSpeed configuration",
        section="output",
        on_resume="free",
        aliases=("config_file",),
        cli_only=True,
    )
    log_to: str = setting(
        AUTO,
        "what is shown: auto (panel on a terminal, else lines), stdout, tqdm, none; and who is told: wandb, "
        "tensorboard, trackio; comma-separated",
        section="output",
        on_resume="free",
        aliases=("report_to",),
        each_process=True,
    )
    log_every_n_steps: int = setting(
        1, "optimizer steps between logged lines", section="output", on_resume="free", aliases=("logging_steps",), low=1
    )
    verbose: bool = setting(False, "say more while preparing", section="output", on_resume="free", each_process=True)
    project_name: str = setting(
        "anyqlora",
        "tracker's project",
        section="output",
        on_resume="free",
        aliases=("wandb_project",),
        trackers=("wandb", "trackio"),
    )
    tracker_name: str = setting(
        "",
        "tracker's name for the run",
        section="output",
        on_resume="free",
        aliases=("name",),
        trackers=("wandb", "trackio"),
    )
    tracker_group: str = setting(
        "", "tracker's group", section="output", on_resume="free", aliases=("group",), trackers=("wandb", "trackio")
    )
    tracker_entity: str = setting(
        "", "wandb's entity", section="output", on_resume="free", aliases=("entity",), trackers=("wandb",)
    )

    # -------------------------------------------------------------------------------------------------- where it runs
    backend: str = setting(
        AUTO, "cuda, rocm, xpu, mps, mlx, cpu, or a plugin's name", section="where", on_resume="recorded"
    )
    strategy: str = setting(AUTO, "how processes share the work", section="where", on_resume="recorded")
    world_size: int = setting(
        -1, "processes; -1: one for each device", section="where", on_resume="recorded", aliases=("num_processes",)
    )
    strategy_opt: str = setting(
        "", "options of the strategy: name=value,name=value", section="where", on_resume="free", several=True
    )
    strategy_config: str = setting(
        "",
        "file of the strategy's options: YAML or JSON, a DeepSpeed configuration, or Accelerate's file",
        section="where",
        on_resume="free",
        aliases=("deepspeed", "deepspeed_config", "deepspeed_config_file", "fsdp_config"),
        several=True,
    )
    sharding_strategy: str = setting(
        "full_shard",
        "what FSDP shards",
        section="where",
        on_resume="free",
        choices=registry.SHARDING_STRATEGIES,
        aliases=("fsdp_sharding_strategy",),
        needs=("fsdp",),
        several=True,
    )
    deepspeed_zero_stage: int = setting(
        -1,
        "DeepSpeed's ZeRO stage; -1: not asked for",
        section="where",
        on_resume="free",
        aliases=("zero_stage",),
        needs=("deepspeed",),
        several=True,
    )
    find_unused_parameters: bool = setting(
        False,
        "DDP: look for parameters that got no gradient",
        section="where",
        on_resume="free",
        aliases=("ddp_find_unused_parameters",),
        needs=("ddp",),
        several=True,
    )
    mesh: str = setting("", "device mesh: batch=2,model=2", section="where", on_resume="free", several=True)
    tensor_layout: str = setting(
        "",
        "how the model axis of the mesh splits the weights: default or a file",
        section="where",
        on_resume="free",
        aliases=("layout",),
        several=True,
    )
    master_addr: str = setting(
        "localhost",
        "address of the first process",
        section="where",
        on_resume="free",
        aliases=("main_process_ip",),
        needs=("processes",),
    )
    master_port: str = setting(
        "12355",
        "port of the first process",
        section="where",
        on_resume="free",
        aliases=("main_process_port",),
        needs=("processes",),
    )
    dist_timeout: float = setting(
        600.0,
        "seconds that processes wait for one another before the run ends",
        section="where",
        on_resume="free",
        aliases=("ddp_timeout",),
        above=0,
        needs=("processes",),
    )
    max_restarts: int = setting(
        0,
        "times that the processes started here are started again, from the last checkpoint, when one is lost",
        section="where",
        on_resume="free",
        low=0,
        needs=("processes",),
    )
    no_sync: bool = setting(
        False,
        "communicate gradients at step boundaries only (always so here)",
        section="where",
        on_resume="free",
        needs=("synchronization",),
    )
    strict: bool = setting(False, "make any adjustment of the plan an error", section="where", on_resume="free")
    offline: bool = setting(False, "open no connection: use what is on disk", section="where", on_resume="free")

    # --------------------------------------------------------------------------------------------------------- memory
    use_gradient_checkpointing: bool | str = setting(
        AUTO,
        "recompute activations in backward",
        section="memory",
        on_resume="planned",
        choices=SWITCH,
        aliases=("gradient_checkpointing", "activation_checkpointing", "fsdp_activation_checkpointing"),
    )
    use_cpu_offload: bool | str = setting(
        AUTO,
        "keep frozen weights in host memory",
        section="memory",
        on_resume="free",
        choices=SWITCH,
        aliases=("cpu_offload", "fsdp_offload_params"),
        several=True,
    )
    use_activation_cpu_offload: bool = setting(
        False,
        "keep saved activations in host memory",
        section="memory",
        on_resume="free",
        aliases=("fsdp_activation_checkpointing_offload",),
    )
    quantized_cache: bool | str = setting(
        AUTO,
        "keep quantized weights for the next start: true (in ~/.cache/anyqlora/quantized), false, or a directory; "
        "auto: from 100 million on",
        section="memory",
        on_resume="free",
        per_backend=True,
    )
    quantized_cache_limit: float = setting(
        50.0,
        "GiB that kept weights take in all; those not used for longest go first",
        section="memory",
        on_resume="free",
        above=0,
        needs=("quantized_cache",),
    )

    # ------------------------------------------------------------------------------------------------------ optimizer
    optimizer: str = setting(
        "adamw",
        "update rule",
        section="optimizer",
        on_resume="identity",
        choices=registry.OPTIMIZERS,
        aliases=("optim",),
    )
    weight_decay: float = setting(
        0.1, "weight decay", section="optimizer", on_resume="identity", aliases=("wd",), low=0
    )
    max_grad_norm: float = setting(
        1.0,
        "largest gradient norm; 0 clips nothing",
        section="optimizer",
        on_resume="identity",
        aliases=("grad_norm", "gradient_clipping"),
        low=0,
        needs=("clipping",),
    )
    apply_gradient_clipping: bool = setting(True, "clip the gradient norm", section="optimizer", on_resume="identity")
    adam_beta1: float = setting(
        0.9, "AdamW's first decay", section="optimizer", on_resume="identity", low=0, high=0.999999, needs=("adam",)
    )
    adam_beta2: float = setting(
        0.999, "AdamW's second decay", section="optimizer", on_resume="identity", low=0, high=0.999999, needs=("adam",)
    )
    adam_eps: float = setting(
        1e-8,
        "AdamW's denominator floor",
        section="optimizer",
        on_resume="identity",
        aliases=("adam_epsilon",),
        low=0,
        needs=("adam",),
    )
    spike_guard: float = setting(
        0.0,
        "skip a step whose loss is so many deviations above the recent ones; 0: never",
        section="optimizer",
        on_resume="identity",
        low=0,
    )

    # ------------------------------------------------------------------------------------ precision and repeatability
    precision: str = setting(
        AUTO,
        "arithmetic: auto is bf16 where the device has it",
        section="precision",
        on_resume="recorded",
        choices=(AUTO, *registry.PRECISIONS),
        aliases=("mixed_precision",),
    )
    initial_loss_scale: float = setting(
        65536.0,
        "fp16: what the loss is first multiplied by",
        section="precision",
        on_resume="free",
        aliases=("init_scale",),
        low=1,
        needs=("fp16",),
    )
    loss_scale_growth_interval: int = setting(
        2000,
        "fp16: steps without overflow after which the loss scale doubles",
        section="precision",
        on_resume="free",
        aliases=("growth_interval",),
        low=1,
        needs=("fp16",),
    )
    deterministic: bool = setting(True, "deterministic algorithms only", section="precision", on_resume="recorded")

    # ---------------------------------------------------------------------------------------------------- for experts
    kernels: str = setting(
        AUTO,
        "whose kernels compute. portable: the framework's own; exact: our Triton ones that give the same bits; triton: "
        "all of them; native: our C ones for bf16 on a CPU; auto: exact on NVIDIA GPUs, native on CPUs with "
        "AVX512-BF16 and a C compiler",
        section="expert",
        on_resume="recorded",
        choices=(AUTO, *registry.KERNELS),
        per_backend=True,
    )
    fused_lora: bool | str = setting(
        AUTO,
        "compute LoRA in one function with its frozen weight; auto: wherever that is the same",
        section="expert",
        on_resume="planned",
        choices=SWITCH,
        aliases=("fused",),
        per_backend=True,
    )
    dropout_masks: str = setting(
        AUTO,
        "what the masks of lora_dropout follow from. token: seed, step, row and place in it, so that any number of "
        "processes and any micro-batches drop the same; process: the framework's generator in each process, as in "
        "runs that began before there was a choice; auto: token",
        section="expert",
        on_resume="planned",
        choices=(AUTO, "token", "process"),
    )
    fused_linear_cross_entropy: bool | str = setting(
        AUTO,
        "compute output head and loss in one, whose logits are never in memory; auto: in bf16 on a CPU with "
        "AVX512-BF16 and VNNI and without AMX",
        section="expert",
        on_resume="planned",
        choices=SWITCH,
        aliases=("fused_head",),
        per_backend=True,
    )
    logits_chunk_tokens: int | str = setting(
        AUTO,
        "trained tokens whose logits are made at a time; 0: those of a whole micro-batch",
        section="expert",
        on_resume="planned",
        aliases=("loss_rows",),
        low=0,
        per_backend=True,
    )
    padding_free: bool | str = setting(
        AUTO,
        "put rows one after another without padding, attention by document; auto: on a CPU",
        section="expert",
        on_resume="planned",
        choices=SWITCH,
        aliases=("flat",),
        per_backend=True,
    )
    frozen_matmul: str = setting(
        "full",
        "how frozen weights are multiplied: full (as precision says), or with numbers rounded to int8 (CPUs with VNNI "
        "or AMX; int8_backward: in the backward pass alone) or fp8 (NVIDIA GPUs from 8.9 on), where a row shows that "
        "the products are near: less time, slightly other numbers",
        section="expert",
        on_resume="recorded",
        choices=registry.FROZEN_MATMULS,
        aliases=("frozen_products",),
        needs=("fused_lora", "fused_adapter", "fused_quantizer"),
    )
    dequantized_layers: int | str = setting(
        AUTO,
        "layers whose dequantized weights stay in memory; auto: as many as there is plenty of room for",
        section="expert",
        on_resume="planned",
        aliases=("weight_cache",),
        low=0,
        per_backend=True,
    )
    checkpointed_layers: int | str = setting(
        AUTO,
        "layers that recompute, the first ones; auto: with gradient checkpointing all, or as few as make the run fit "
        "where the plan chose it",
        section="expert",
        on_resume="planned",
        aliases=("recomputed_layers",),
        low=0,
        decided_with="use_gradient_checkpointing",
    )
    reentrant_checkpointing: bool = setting(
        False, "use the older, reentrant form of checkpointing", section="expert", on_resume="free"
    )
    cpu_threads: int | str = setting(
        AUTO,
        "processor threads of the arithmetic; auto: OMP_NUM_THREADS, or each core where layers are wide",
        section="expert",
        on_resume="planned",
        aliases=("threads", "num_cpu_threads_per_process"),
        low=1,
        per_backend=True,
    )
    low_memory: bool = setting(
        True,
        "stream the weights: never hold the full-precision model",
        section="expert",
        on_resume="free",
        aliases=("cpu_ram_efficient_loading", "fsdp_cpu_ram_efficient_loading"),
        only=((True,), "weights are always streamed; there is no other way of loading"),
    )
    loading_workers: int = setting(
        -1,
        "tensors loaded and quantized at a time; -1: one",
        section="expert",
        on_resume="free",
        only=((-1, 1), "weights are streamed one tensor at a time, so that memory stays small"),
    )
    hqq_group_size: int = setting(
        64,
        "HQQ's group size",
        section="expert",
        on_resume="free",
        low=1,
        only=((), "HQQ quantization is not built yet"),
    )
    llama_pro_path: str = setting(
        "",
        "directory of a block-expanded model",
        section="expert",
        on_resume="free",
        only=(("",), "block expansion (llama_pro) is not built yet"),
    )

    # ------------------------------------------------------------------------------------------------------ profiling
    profile: bool = setting(False, "profile with torch.profiler", section="profiling", on_resume="free")
    profile_memory: bool = setting(
        False, "write memory.json: bytes after each phase of each step", section="profiling", on_resume="free"
    )
    timeline: str = setting(
        "",
        "write the first steps' phases and collectives as a Chrome trace: a file name inside the run directory",
        section="profiling",
        on_resume="free",
    )
    profiling_output: str = setting(
        "profiles",
        "directory of the profiles inside the run directory",
        section="profiling",
        on_resume="free",
        needs=("profile",),
    )
    overwrite_profiling_output: bool = setting(
        True, "profile again where profiles already are", section="profiling", on_resume="free", needs=("profile",)
    )
    with_stack: bool = setting(False, "record Python stacks", section="profiling", on_resume="free", needs=("profile",))
    with_shapes: bool = setting(
        False, "record tensor shapes", section="profiling", on_resume="free", needs=("profile",)
    )
    export_trace: bool = setting(
        True, "write a Chrome trace", section="profiling", on_resume="free", needs=("profile",)
    )
    export_memory_timeline: bool = setting(
        False, "write a memory timeline", section="profiling", on_resume="free", needs=("profile",)
    )
    profiling_frequency: int = setting(
        10, "steps between profiler cycles", section="profiling", on_resume="free", low=1, needs=("profile",)
    )
    profile_wait: int = setting(
        0,
        "steps waited in a cycle of the profiler",
        section="profiling",
        on_resume="free",
        aliases=("wait_steps",),
        low=0,
        needs=("profile",),
    )
    profiler_warmup_steps: int = setting(
        0, "warm-up steps in a cycle of the profiler", section="profiling", on_resume="free", low=0, needs=("profile",)
    )
    profile_active: int = setting(
        2,
        "recorded steps in a cycle of the profiler",
        section="profiling",
        on_resume="free",
        aliases=("active_steps",),
        low=1,
        needs=("profile",),
    )
    profile_repeat: int = setting(
        0,
        "cycles of the profiler; 0: to the end",
        section="profiling",
        on_resume="free",
        aliases=("repeat",),
        low=0,
        needs=("profile",),
    )

    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)  # what a file says and changes nothing here

    @property
    def is_demo(self) -> bool:
        return self.model_name == "demo"

    @property
    def dataset_is_default(self) -> bool:
        """Whether nobody has named a data set."""
        return self.sources.get("dataset") == "default"

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
ALIASES = {alias: f.name for f in SETTINGS.values() for alias in f.metadata["aliases"]}
_HINTS = typing.get_type_hints(TrainConfig)
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_VALUE_ALIASES = {  # what others call it
    "precision": {
        "fp16": "fp16_autocast",
        "float32": "fp32",
        "no": "fp32",
        "bfloat16": "bf16",
        "float16": "fp16_autocast",
        "mp_fp16_autocast": "fp16_autocast",
        "mp_bf16_autocast": "bf16_autocast",
        "mp_bf16_buffers_autocast": "bf16_buffers_autocast",
    },
    "train_type": {"hf_qlora": "qlora"},
    "lora_target_modules": {"none": "default"},
    "sharding_strategy": {
        "1": "full_shard",
        "2": "shard_grad_op",
        "3": "ddp",
        "4": "hybrid_full_shard",
        "5": "hybrid_shard_grad_op",
        "no_shard": "ddp",
        "hybrid_shard": "hybrid_full_shard",
        "hybrid_shard_zero2": "hybrid_shard_grad_op",
        "_hybrid_shard_zero2": "hybrid_shard_grad_op",
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


@functools.cache
def settings_with(facet: str, *values: object) -> tuple[str, ...]:
    """The settings whose `facet`, a key of their metadata, is or has one of these values; any, where none is given:

    settings_with("on_resume", "identity"), settings_with("needs", "adapter"), settings_with("several").
    """

    def fits(stated: object) -> bool:
        own = stated if isinstance(stated, tuple) else (stated,)
        return any(value in own for value in values) if values else bool(stated)

    return tuple(name for name, f in SETTINGS.items() if fits(f.metadata[facet]))


def canonical_name(name: str, where: str) -> str:
    """The setting that `name` (either spelling, or an alias) stands for. Raises UsageError with a suggestion."""
    plain = name.replace("-", "_")
    plain = ALIASES.get(plain, plain)
    if plain not in SETTINGS:
        raise UsageError(
            f"unknown setting {name!r}{registry.nearest(plain, [*SETTINGS, *ALIASES, *other_tools.NAMES])}",
            where=where,
            cure=next(
                (cure for end, cure in _OF_ACCELERATES_GUIDE.items() if re.fullmatch(end, plain)),
                "python train.py --help lists the settings",
            ),
        )
    return plain


_OF_ACCELERATES_GUIDE = {  # what its guide to a custom backend adds for each: a strategy has no setting of its own here
    r"\w+_plugin": "strategy='module:Class', and its options as strategy_opt=plugin",
    r"use_\w+": "python train.py --help lists the settings; a strategy of your own is --strategy module:Class",
    r"\w+_config_file": "--strategy_config FILE, or --strategy_opt config_file=FILE where the strategy reads it itself",
}


def canonical_settings(name: str, value: object, where: str, notes: list[str] | None = None) -> dict[str, object]:
    """{setting: value} of what is stated as `name`: one, or those of a name in SPLIT_ALIASES or another tool's.

    `notes` are those of a file: see OtherName.settings. Raises UsageError.
    """
    plain = name.replace("-", "_")
    if plain in SPLIT_ALIASES:
        return SPLIT_ALIASES[plain](value)
    if plain not in SETTINGS and plain not in ALIASES and (other := other_tools.find(plain)):
        return other.settings(plain, value, where, notes)
    return {canonical_name(name, where): value}


def is_switch(name: str) -> bool:
    """Whether `name` alone, without a value, means true."""
    plain = name.replace("-", "_")
    plain = ALIASES.get(plain, plain)
    other = None if plain in SETTINGS else other_tools.find(plain)
    return other.is_switch if other else plain in SETTINGS and bool in value_types(plain)


def current_names(stored: Mapping[str, object]) -> dict[str, object]:
    """What a run wrote of itself (identity.json, the manifest of a checkpoint), by the names that settings have now."""
    return {ALIASES.get(name, name): value for name, value in stored.items()}


def parse_value(name: str, raw: object, where: str) -> Any:
    """`raw` (text, or a YAML or Python value) as the type of setting `name`. Raises UsageError saying what fits."""
    metadata = SETTINGS[name].metadata
    kinds = value_types(name)
    text = ",".join(map(str, raw)) if isinstance(raw, (list, tuple)) else str(raw).strip()
    choices = metadata["choices"]

    def refuse(expected):
        raise UsageError(f"{name}: {raw!r} is not {expected}", where=where, cure=f"{name} is: {metadata['help']}")

    if raw is None:
        refuse("a value")
    if bool in kinds and text.lower() in _BOOLEANS and not (str in kinds and text in choices):
        value = _BOOLEANS[text.lower()]
    elif kinds & {int, float} and not (str in kinds and text.lower() == AUTO):
        try:
            number = float(text) if not isinstance(raw, bool) else math.nan
        except ValueError:
            number = math.nan
        whole = float not in kinds
        if not math.isfinite(number) or (whole and number != int(number)):
            refuse(("a whole number" if whole else "a number") + (" or auto" if str in kinds else ""))
        value = int(Decimal(text)) if whole else number  # a float has no room for the last digits of a seed
        if wanted := _out_of_range(value, metadata):
            refuse(wanted)
    elif str in kinds:
        value = known_value(name, text)
    else:
        refuse("true or false")
    if why := other_tools.REFUSED_VALUES.get((name, text.lower())):
        raise NotSupported(f"{name} {text}: {why[0]}", where=where, cure=why[1])
    known = choices if value in choices else (*choices, *registry.installed(name))
    if choices and value not in known and not registry.is_module_object(name, value):
        shown = [str(c).lower() if isinstance(c, bool) else str(c) for c in known]
        raise UsageError(
            f"{name}: unknown value {text!r}{registry.nearest(text, shown)}",
            where=where,
            cure="one of: " + ", ".join(shown),
        )
    return value


def known_value(name: str, text: str) -> str:
    """The text of a setting as it is spelled here, which may be written in any case, or as other tools have it."""
    choices = [*SETTINGS[name].metadata["choices"]]
    if name == "strategy":
        choices = [AUTO, *registry.STRATEGIES, *registry.installed(name)]
    if name == "backend":
        choices = [*entry_point_targets("backends")]
    if text in choices:
        return text
    word = _VALUE_ALIASES.get(name, {}).get(text.lower(), text.lower())
    if name == "backend" or (not choices and word in _VALUE_ALIASES.get(name, {}).values()):
        choices.append(word)  # the built-in ones' names are in lower case
    if str in value_types(name) and SETTINGS[name].default == AUTO:
        choices.append(AUTO)
    return next((choice for choice in choices if isinstance(choice, str) and choice.lower() == word), text)


def _out_of_range(value: float, metadata: Mapping) -> str:
    """What the value of a setting would have to be and is not; "" where it is."""
    low, above, high = metadata["low"], metadata["above"], metadata["high"]
    if above is not None and value <= above:
        return f"greater than {above}"
    if (low is None or value >= low) and (high is None or value <= high):
        return ""
    return f"at least {low}" if high is None else f"between {low} and {high}"


def value_types(name: str) -> set:
    hint = _HINTS[name]
    return set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
