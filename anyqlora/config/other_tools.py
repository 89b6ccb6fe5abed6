"""Names of other tools whose value decides what they mean here: Accelerate's, fsdp_qlora's.

A name that is one setting of ours whatever its value is an alias, in schema.py. The others are rows here, and what
cannot be done is refused by its name. docs/coming-from.md has them in tables, which are tested against these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anyqlora.core.errors import NotSupported

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(frozen=True, kw_only=True)
class OtherName:
    """What a name of another tool means: by its values first, else by the one of the fields below that is given."""

    values: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # value -> settings; {}: it is so anyway
    other: tuple[str, str] | None = None  # (setting, its value, in which {value} stands for theirs)
    note: str = ""  # why other values change nothing here: a file of theirs may state them, and the plan says so
    refused: str = ""  # why other values are not offered
    cure: str = ""  # what to write instead; {value} stands for theirs

    def settings(self, name: str, value: object, where: str, notes: list[str] | None = None) -> dict[str, object]:
        """{setting: value} of what is stated as `name`; {} where it says what is so anyway.

        What changes nothing here goes to `notes`, if there are any: they are a file's. Raises NotSupported.
        """
        text = str(value).strip()
        if (known := self._known(text)) is not None:
            return dict(known)
        if self.other:
            setting, template = self.other
            return {setting: template.format(value=text)}
        if self.note and notes is not None:
            notes.append(f"{where}: {name} {text} changes nothing here: {self.note}")
            return {}
        raise NotSupported(
            f"{name} {text}: {self.refused or self.note}",
            where=where,
            cure=self.cure.format(value=text) or f"leave out {name}",
        )

    @property
    def is_switch(self) -> bool:
        """Whether the name alone, without a value, means true."""
        return "true" in self.values or "false" in self.values

    def _known(self, text: str) -> Mapping[str, object] | None:
        """The settings of a value, in any case and any way of writing true and false."""
        word = text.lower()
        truth = "true" if word in _TRUE else "false" if word in _FALSE else word
        return self.values.get(word, self.values.get(truth))


def _either(**fields) -> OtherName:
    """A switch that changes nothing, whichever way it is set."""
    return OtherName(values={"true": {}, "false": {}}, **fields)


def _only(*values: str, refused: str, cure: str = "") -> OtherName:
    """A name of which these values are so anyway, and no other can be had."""
    return OtherName(values=dict.fromkeys(values, {}), refused=refused, cure=cure)


_CLUSTER = "torchrun --nnodes N --nproc_per_node P --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py ..."
_MACHINES = "each of several machines starts its own processes"
_BY_TORCHRUN = f"{_CLUSTER} on each of them, without num_machines, machine_rank and num_processes"
_FP8 = "fp8 arithmetic is not offered; frozen weights alone can be multiplied in fp8, on NVIDIA GPUs from 8.9 on"
_FP8_CURE = "--precision bf16 --frozen_matmul fp8, or --precision bf16"
_NO_TPU = "TPUs are not offered"
_TENSOR = OtherName(values={"1": {}}, other=("mesh", "model={value}"))
_RESHARD = OtherName(
    values={
        "true": {"sharding_strategy": "full_shard"},
        "false": {"sharding_strategy": "shard_grad_op"},
        "full_shard": {"sharding_strategy": "full_shard"},
        "shard_grad_op": {"sharding_strategy": "shard_grad_op"},
        "no_shard": {"sharding_strategy": "ddp"},
    },
    refused="weights are let go of after the forward pass, or kept until backward",
    cure="true, false, FULL_SHARD, SHARD_GRAD_OP or NO_SHARD",
)
_WRAP = _only(
    "transformer_based_wrap",
    refused="each block of the model is sharded by itself, and there is no other way",
    cure="TRANSFORMER_BASED_WRAP, or leave it out",
)
_ON_CPU = OtherName(values={"true": {"backend": "cpu"}, "false": {}}, refused="it is true or false")
_STRATEGIES = {  # Accelerate's distributed_type, in lower case -> settings
    "no": {"strategy": "single"},
    "multi_gpu": {"strategy": "ddp"},
    "multi_cpu": {"strategy": "ddp", "backend": "cpu"},
    "multi_xpu": {"strategy": "ddp", "backend": "xpu"},
    "megatron_lm": {"strategy": "megatron"},
    "xla": {"strategy": "tpu"},
    "tpu": {"strategy": "tpu"},
}


def _asks_for(strategy: str) -> OtherName:
    return OtherName(values={"true": {"strategy": strategy}, "false": {}}, refused="it is true or false")


ACCELERATE: dict[str, OtherName] = {
    # ------------------------------------------------------------------------------------------------ who runs, and how
    "compute_environment": _only(
        "local_machine", refused="only machines that you start yourself are offered", cure="LOCAL_MACHINE"
    ),
    "distributed_type": OtherName(values=_STRATEGIES, other=("strategy", "{value}")),
    "multi_gpu": _asks_for("ddp"),
    "use_fsdp": _asks_for("fsdp"),
    "use_deepspeed": _asks_for("deepspeed"),
    "use_megatron_lm": _asks_for("megatron"),
    "tpu": _asks_for("tpu"),
    "use_cpu": _ON_CPU,
    "cpu": _ON_CPU,
    "num_machines": _only("1", refused=_MACHINES, cure=_BY_TORCHRUN),
    "machine_rank": _only("0", refused=_MACHINES, cure=_BY_TORCHRUN),
    "gpu_ids": _only(
        "all",
        refused="which devices a run sees is said before it starts",
        cure="CUDA_VISIBLE_DEVICES={value} python train.py ..., without gpu_ids",
    ),
    "rdzv_backend": _only("static", "c10d", refused="train.py's own processes meet by a port", cure=_CLUSTER),
    "same_network": _either(),
    "main_training_function": OtherName(values={"main": {}}, note="train.py trains"),
    "debug": OtherName(values={"false": {}}, note="what processes send each other is checked by our own tests"),
    "enable_cpu_affinity": _only(
        "false", refused="processes are not bound to cores", cure="numactl before the command, or leave it out"
    ),
    "downcast_bf16": _only("false", refused=_NO_TPU),
    "dynamo_backend": _only("no", refused="torch.compile is not offered", cure="NO, or leave it out"),
    "dynamo_mode": _only("default", refused="torch.compile is not offered"),
    "mpirun_hostfile": _only(refused="mpirun is not offered", cure=_CLUSTER),
    "mpirun_ccl": _either(),
    # --------------------------------------------------------------------------------------------------------- its FSDP
    "fsdp_version": _only("1", "2", refused="FSDP2 is what runs, whichever of the two is named", cure="2"),
    "fsdp_reshard_after_forward": _RESHARD,
    "reshard_after_forward": _RESHARD,
    "fsdp_auto_wrap_policy": _WRAP,
    "auto_wrap_policy": _WRAP,
    "fsdp_transformer_layer_cls_to_wrap": OtherName(
        note="each block of the model is sharded by itself, whatever its class"
    ),
    "fsdp_min_num_params": _only("0", refused="each block of the model is sharded by itself, whatever its size"),
    "fsdp_backward_prefetch": _only(
        "backward_pre", refused="FSDP2 fetches the next block before a block's gradients", cure="BACKWARD_PRE"
    ),
    "fsdp_forward_prefetch": _only("false", refused="FSDP2 fetches blocks as they are come to"),
    "fsdp_state_dict_type": OtherName(
        values={"full_state_dict": {}},
        note="checkpoints hold whole tensors, which any number of processes goes on from",
    ),
    "fsdp_use_orig_params": OtherName(values={"true": {}}, note="FSDP2 has parameters as they are"),
    "fsdp_sync_module_states": OtherName(values={"true": {}}, note="the first process reads, and the others receive"),
    # ---------------------------------------------------------------------------------------------------- its DeepSpeed
    "offload_optimizer_device": OtherName(
        values={
            "none": {"strategy_opt": "deepspeed.offload_optimizer=false"},
            "cpu": {"strategy_opt": "offload_optimizer=true"},
        },
        refused="only host memory is offered",
        cure="cpu or none",
    ),
    "offload_param_device": OtherName(
        values={"none": {"use_cpu_offload": False}, "cpu": {"strategy": "deepspeed", "use_cpu_offload": True}},
        refused="only host memory is offered",
        cure="cpu or none",
    ),
    "offload_optimizer_nvme_path": _only("none", refused="only host memory is offered"),
    "offload_param_nvme_path": _only("none", refused="only host memory is offered"),
    "zero3_init_flag": OtherName(
        values={"true": {}}, note="a model is always made without weights, and filled as they are read"
    ),
    "zero3_save_16bit_model": _either(),
    "deepspeed_hostfile": _only("none", refused=_MACHINES, cure=_CLUSTER),
    "deepspeed_exclusion_filter": _only("none", refused=_MACHINES, cure=_CLUSTER),
    "deepspeed_inclusion_filter": _only("none", refused=_MACHINES, cure=_CLUSTER),
    "deepspeed_multinode_launcher": _only("standard", "none", refused=_MACHINES, cure=_CLUSTER),
    "deepspeed_moe_layer_cls_names": _only(
        "none", refused="DeepSpeed's experts are not offered", cure="--strategy ddp"
    ),
    # ------------------------------------------------------------------------------ its Megatron-LM, and its own meshes
    "tp_degree": _TENSOR,
    "tp_size": _TENSOR,
    "megatron_lm_tp_degree": _TENSOR,
    "parallelism_config_tp_size": _TENSOR,
    "use_parallelism_config": _either(),
    "parallelism_config_dp_shard_size": _only(
        "1", "-1", refused="the batch axis of the mesh is named with the model axis", cure="--strategy fsdp, or --mesh"
    ),
}
_NO_PIPELINE = _only("1", refused="pipeline parallelism is not offered", cure="1; tp or fsdp split a model, too")
_NO_SEQUENCE = _only("false", "1", refused="sequences are not split over processes", cure="leave it out")
ACCELERATE |= {
    "pp_degree": _NO_PIPELINE,
    "megatron_lm_pp_degree": _NO_PIPELINE,
    "sequence_parallelism": _NO_SEQUENCE,
    "megatron_lm_sequence_parallelism": _NO_SEQUENCE,
    "parallelism_config_cp_size": _NO_SEQUENCE,
    "parallelism_config_sp_size": _NO_SEQUENCE,
    "parallelism_config_dp_replicate_size": _only(
        "1", refused="copies of shards have a name of their own", cure="--sharding_strategy hybrid_full_shard"
    ),
    "num_micro_batches": OtherName(other=("gradient_accumulation_steps", "{value}")),
    "megatron_lm_num_micro_batches": OtherName(other=("gradient_accumulation_steps", "{value}")),
    "commands": _only("[]", refused=_NO_TPU),
    "command_file": _only(refused=_NO_TPU),
}

FSDP_QLORA: dict[str, OtherName] = {
    "wrapping_policy": _only("llamarecipes", refused=_WRAP.refused, cure="llamarecipes, or leave it out")
}

NAMES = {**ACCELERATE, **FSDP_QLORA}

FAMILIES = {  # what names begin with -> what is said of each that is not in NAMES
    "fp8_": _only(refused=_FP8, cure=_FP8_CURE),
    "megatron_lm_": _only(refused="Megatron-LM is not offered", cure="--strategy tp or fsdp"),
    "tpu_": _only("false", "[]", refused=_NO_TPU),
    "dynamo_use_": _only("false", refused="torch.compile is not offered"),
    "parallelism_config_": _only(refused="it is not offered", cure="--mesh batch=2,model=2"),
}

SECTIONS = {  # keys of Accelerate's file that are maps -> what the names in them begin with, where they leave it out
    "fsdp_config": "fsdp_",
    "deepspeed_config": "",
    "megatron_lm_config": "megatron_lm_",
    "parallelism_config": "parallelism_config_",
    "fp8_config": "fp8_",
    "dynamo_config": "dynamo_",
    "mpirun_config": "mpirun_",
}

REFUSED_VALUES = {("precision", "fp8"): (_FP8, _FP8_CURE)}  # (setting, value) -> (why it is not offered, cure)


def find(name: str) -> OtherName | None:
    """The row of another tool's name; None where it is no such name."""
    if name in NAMES:
        return NAMES[name]
    return next((row for begin, row in FAMILIES.items() if name.startswith(begin)), None)


def is_accelerates(is_map: Mapping[str, bool]) -> bool:
    """Whether a file with these keys, and whether each is a map, is what `accelerate config` writes: then a name of
    its own without a value states nothing.
    """
    return any(
        key == "compute_environment"
        or (key.startswith("fsdp_") and key != "fsdp_config")
        or (key in SECTIONS and has_more)
        for key, has_more in is_map.items()
    )
