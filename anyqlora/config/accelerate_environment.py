"""What `accelerate launch` hands on in variables to the processes that it starts, as settings."""

from __future__ import annotations

from collections.abc import Mapping

from anyqlora.config import other_tools
from anyqlora.config.schema import ALIASES, SETTINGS, canonical_settings
from anyqlora.config.settings_file import Layer

PREFIX, FSDP_PREFIX = "ACCELERATE_", "FSDP_"
OURS = ("FSDP_BACKEND",)  # a variable of this program's own
RENAMED = {  # variable, without its prefix and in lower case -> the name that `accelerate config` has for it
    "cpu_affinity": "enable_cpu_affinity",
    "debug_mode": "debug",
    "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "deepspeed_offload_optimizer_device": "offload_optimizer_device",
    "deepspeed_offload_param_device": "offload_param_device",
    "deepspeed_zero3_init": "zero3_init_flag",
    "deepspeed_zero3_save_16bit_model": "zero3_save_16bit_model",
}
# fields that it had to leave out of a DeepSpeed configuration; what counts under FSDP_AUTO_WRAP_POLICY SIZE_BASED_WRAP
# alone, which is refused
ALWAYS_SET = ("config_ds_fields", "fsdp_min_num_params")
UNSTATED = ("", "none", "auto")
DEFAULTS = {  # that it states where nobody has
    ("mixed_precision", "no"),
    ("fsdp_activation_checkpointing", "false"),
    ("fsdp_offload_params", "false"),
}


def from_accelerates_environment(environ: Mapping[str, str], notes: list[str]) -> Layer:
    """{setting: (value, variable)} of Accelerate's variables (accelerate 1.15, utils/launch.py).

    What changes nothing here goes to `notes`. FSDP_* counts where ACCELERATE_USE_FSDP is true, since only then it is
    Accelerate's. Raises UsageError for what is not offered.
    """
    has_fsdp = environ.get(f"{PREFIX}USE_FSDP", "").lower() in ("true", "1", "yes", "on")
    layer = Layer()
    # both are always there, and each counts under its own version
    other_version = "fsdp_sharding_strategy" if environ.get("FSDP_VERSION") == "2" else "fsdp_reshard_after_forward"
    for variable, value in sorted(environ.items()):
        is_fsdps = has_fsdp and variable.startswith(FSDP_PREFIX) and variable not in OURS
        if not variable.startswith(PREFIX) and not is_fsdps:
            continue
        name = variable.removeprefix(PREFIX).lower()
        name = RENAMED.get(name, name)
        if value.lower() in UNSTATED or name in (*ALWAYS_SET, other_version) or (name, value.lower()) in DEFAULTS:
            continue
        if name not in SETTINGS and name not in ALIASES and other_tools.find(name) is None:
            notes.append(f"{variable} {value} changes nothing here: it is no setting")
            continue
        for setting, stated in canonical_settings(name, value, variable, notes).items():
            layer.state(setting, stated, variable, name)
    return layer
