"""Which linear layers an adapter goes on, and how PEFT's files name them: strings, the same on every framework."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from anyqlora.core.errors import UsageError

PREFIX = "base_model.model."  # what PEFT puts before every name
ALL = ("all", "all-linear")

# What PEFT takes by default, by model_type: last parts of names, or a regex. Data, as a plan imports no PEFT; tests
# compare it with the installed PEFT's own table (TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING).
PEFT_DEFAULTS = {
    **dict.fromkeys(("bart", "gpt_neo", "gptj", "opt", "stablelm"), "q_proj,v_proj"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "llama", "llama4", "mistral", "mixtral"), "q_proj,v_proj"),
    **dict.fromkeys(("qwen2", "qwen3"), "q_proj,v_proj"),
    **dict.fromkeys(("RefinedWeb", "RefinedWebModel", "bloom", "chatglm", "falcon", "gpt_neox"), "query_key_value"),
    **dict.fromkeys(("bert", "electra", "layoutlm", "roberta", "xlm-roberta"), "query,value"),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), "c_attn"),
    **dict.fromkeys(("mt5", "t5"), "q,v"),
    "blip-2": "q,v,q_proj,v_proj",
    "btlm": "c_proj,c_attn",
    "codegen": "qkv_proj",
    "deberta": "in_proj",
    "deberta-v2": "query_proj,value_proj",
    "gemma4": r".*language_model\..*\.(q_proj|v_proj)",
    "mpt": "Wqkv",
    "nemotron_h": "q_proj,k_proj,v_proj,o_proj",
    "phi": "q_proj,v_proj,fc1,fc2",
    "rwkv": "key,value,receptance,output",
    "rwkv7": "r_proj,k_proj,v_proj,o_proj,key,value",
}
# Last parts of names that PEFT takes, under transformers 5, for transformers 4's experts and routers of these mixtures
# whenever it reads adapter_config.json: an adapter on such a layer, say `gate_proj` of a dense layer of Qwen3-MoE,
# could not be loaded again (huggingface/peft#3711). Each name can go when
# tests/on_torch/test_compat.py::test_layers_that_peft_cannot_load_an_adapter_on says so.
_QWEN_MOE = (
    "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum",
    "olmoe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "solar_open",
)  # fmt: skip
NOT_LOADABLE = {
    **dict.fromkeys(_QWEN_MOE, {"gate", "gate_proj", "up_proj", "down_proj"}),
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral"), {"gate", "w1", "w2", "w3"}),
    # Mamba's fused kernels take the weight past its module, and PEFT refuses it.
    **dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), {"conv1d", "out_proj"}),
}


def select_targets(stated: str, model_type: str, layer_names: Iterable[str], where: str = "") -> set[str]:
    """The names of the linear layers that get an adapter, among `layer_names`: all that a `model_type` model has.

    `stated`, at `where`, is `lora_target_modules`: all of them, PEFT's default for the architecture, a comma-separated
    list of names or ends of names, or a regex of whole names. Raises UsageError where it names none, one that is not
    there, or one that PEFT could not load an adapter on.
    """
    layers, selector = set(layer_names), parse_targets(stated, model_type, where)
    not_loadable = {name for name in layers if last(name) in NOT_LOADABLE.get(model_type, ())}

    def refuse(what: str, cure: str) -> None:
        names = ", ".join(sorted(set(map(last, layers - not_loadable))))
        raise UsageError(f"lora_target_modules: {what}", where=where, cure=f"{cure}: {names}")

    if selector is None:
        chosen = layers - not_loadable
    elif isinstance(selector, re.Pattern):
        chosen = {name for name in layers if selector.fullmatch(name)}
    else:
        ends = {end: {name for name in layers if name == end or name.endswith(f".{end}")} for end in selector}
        if stated == "default":  # PEFT's table names layers that not every model of the architecture has
            ends = {end: names for end, names in ends.items() if names}
        if missing := [end for end, names in ends.items() if not names]:
            refuse(f"no linear layer is called {', '.join(missing)}", "names among")
        chosen = set().union(*ends.values())
    if wrong := chosen & not_loadable:
        refuse(
            f"PEFT cannot load an adapter on {min(wrong)} of a {model_type} model: it takes the name for one of the "
            "experts, or its kernel passes the module by",
            "among",
        )
    if not chosen:
        refuse(f"{stated!r} matches no linear layer of this {model_type} model", "all, or some of")
    return chosen


def parse_targets(stated: str, model_type: str, where: str = "") -> re.Pattern | list[str] | None:
    """What `lora_target_modules` says of a `model_type` model, whatever layers it has: None for all, a regex of whole
    names, or names and ends of names. Raises UsageError for what is no regex, and where PEFT has no default."""
    if stated in ALL:
        return None
    names = stated
    if stated == "default" and not (names := PEFT_DEFAULTS.get(model_type, "")):
        raise UsageError(
            f"lora_target_modules: PEFT has no default for {model_type} models",
            where=where,
            cure="--lora_target_modules all",
        )
    if not re.search(r"[\\^$*+?(){}\[\]|]", names):
        return [name.strip() for name in names.split(",") if name.strip()]
    try:
        return re.compile(names)
    except re.error as error:
        raise UsageError(
            f"lora_target_modules: {stated!r} is not a regex: {error}",
            where=where,
            cure="all, default, a comma-separated list, or a regex",
        ) from None


def shortest(taken: set[str], modules: Iterable[str]) -> list[str]:
    """What adapter_config.json says of the `taken` among all `modules`: last parts of names where those say it, else
    whole names."""
    others = {last(name) for name in modules if name not in taken}
    return sorted({name if last(name) in others else last(name) for name in taken})


def last(name: str) -> str:
    return name.rpartition(".")[2]


def as_whole_number(number: float) -> float | int:
    """32 for 32.0: readers of adapter_config.json expect a whole alpha."""
    return int(number) if number == int(number) else number


def as_plain_json(value: Any) -> Any:
    """`value` as JSON with sets sorted, so that PYTHONHASHSEED does not show."""
    if isinstance(value, dict):
        return {str(k): as_plain_json(v) for k, v in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, (set, frozenset)):
        return sorted(as_plain_json(v) for v in value)
    if isinstance(value, (list, tuple)):
        return [as_plain_json(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(getattr(value, "value", value))
