"""Which linear layers tensor parallelism splits, and how: transformers' plan for an architecture, or a file."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import NotSupported
from anyqlora.models.architectures import COLUMNS, ROWS, WHOLE, LinearShape
from anyqlora.models.hub import base_directory
from anyqlora.on_torch.linears import linear_inputs, linears
from anyqlora.on_torch.parallel.tp_layers import Split
from anyqlora.planning.mesh import DEFAULT, LayoutError, RegexMap, check_heads, check_split, from_file

STYLES = {  # transformers' words in a configuration's base_model_tp_plan; `_rep` are those of versions before 5.20
    "colwise": Split(COLUMNS, alone=False),
    "colwise_gather_output": Split(COLUMNS, alone=True),
    "colwise_rep": Split(COLUMNS, alone=True),
    "rowwise": Split(ROWS, alone=False),
    "rowwise_split_input": Split(ROWS, alone=True),
    "rowwise_rep": Split(ROWS, alone=True),
}
WHOLE_STYLES = {
    "replicated_with_grad_allreduce",
    "replicate",
}  # norms between split layers: frozen here, so nothing has to be summed


def planned_splits(config: TrainConfig, ways: int) -> dict[str, Split]:
    """{name of a linear layer: how it is split} by the plan's layout, found on the model without its weights.

    Raises LayoutError for a key that matches nothing and for a layer that cannot be split so, NotBuilt for an
    architecture without a default layout or with parts that would stay whole.
    """
    model_config = AutoConfig.from_pretrained(base_directory(config), trust_remote_code=config.trust_remote_code)
    if getattr(model_config, "quantization_config", None):
        raise NotSupported(
            "strategy tp with weights that are quantized in the files: they are sliced before they are quantized",
            where=config.model_name,
            cure="--model_name with the unquantized checkpoint, or --strategy fsdp",
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
    splits = select_layout(linears(model), default_layout(model_config, config), config, ways)
    text = model_config.get_text_config()
    if any(
        not style.alone and name.rpartition(".")[0].endswith(("attn", "attention")) for name, style in splits.items()
    ):
        heads = text.num_attention_heads
        check_heads(heads, getattr(text, "num_key_value_heads", None) or heads, ways, config.sources.get("mesh", ""))
    return splits


def own_splits(model: nn.Module, config: TrainConfig, ways: int) -> dict[str, Split]:
    """The same for a model of somebody's own, whose layout only a file can say; every layer is joined by itself."""
    if config.tensor_layout == DEFAULT:
        raise LayoutError(
            f"strategy tp does not know how a {type(model).__name__} is split",
            where=config.sources.get("strategy", ""),
            cure="--tensor_layout FILE",
        )
    return select_layout(
        {name: module for name, module in model.named_modules() if type(module) is nn.Linear}, RegexMap(), config, ways
    )


def select_layout(layers: dict[str, nn.Module], default: RegexMap, config: TrainConfig, ways: int) -> dict[str, Split]:
    """{name: Split} of those of `layers` that the plan's layout splits."""
    stated = from_file(config.tensor_layout) if config.tensor_layout != DEFAULT else None
    splits: dict[str, Split] = {}
    for name, layer in layers.items():
        style, where = default[f"{name}.weight"], config.sources.get("mesh", "")
        if stated is not None:
            style = check_agreement(name, stated, default, layers)
            where = stated[f"{name}.weight"].where if style else ""
        if style is not None:
            check_split(
                LinearShape(name, getattr(layer, "out_features", 0), linear_inputs(layer)),
                style.along,
                ways,
                config,
                where,
            )
            splits[name] = style
    for key, placement in (stated or {}).items():
        if not any(stated.key_of(f"{name}.weight") == key for name in layers):
            raise LayoutError(
                f"{key} matches no linear layer's weight",
                where=placement.where,
                cure=f"names such as {next(iter(layers), 'up_proj')}.weight",
            )
    if not splits:
        raise LayoutError(
            "the layout splits no layer",
            where=config.tensor_layout if stated else config.sources.get("tensor_layout", ""),
            cure="--tensor_layout default",
        )
    return splits


def default_layout(model_config, config: TrainConfig) -> RegexMap:
    """{regex of a weight's name: Split, or None for whole} of the architecture's base_model_tp_plan.

    Raises NotBuilt.
    """
    base_plan = getattr(model_config.get_text_config(), "base_model_tp_plan", None)
    where = config.sources.get("tensor_layout", "") or config.sources.get("mesh", "")
    if not base_plan:
        raise NotSupported(
            f"transformers has no tensor parallel plan for {model_config.model_type} models, so there is no default "
            f"layout",
            where=where,
            cure="--strategy fsdp",
        )
    unknown = sorted({style for style in base_plan.values() if style not in STYLES and style not in WHOLE_STYLES})
    if unknown:
        raise NotSupported(
            f"strategy tp with {model_config.model_type} models: their plan has parts that are split as "
            f"{', '.join(unknown)}, which is not "
            "built",
            where=where,
            cure="--strategy fsdp",
        )
    return RegexMap(
        {
            rf"(?:.+\.)?{re.escape(name)}\.weight".replace(r"\*", r"\d+"): STYLES.get(style)
            for name, style in base_plan.items()
        }
    )


def check_agreement(name: str, stated: RegexMap, default: RegexMap, layers: Iterable[str]) -> Split | None:
    """How a file's layout splits a layer.

    Where it splits all that the default splits beside this layer, and alike, they hand slices to one another as there;
    else each is joined, so that any layout is correct.
    """
    placement = stated[f"{name}.weight"]
    if placement is None or placement.split == WHOLE:
        return None
    parent = name.rpartition(".")[0]
    beside = {
        f"{other}.weight" for other in layers if other.rpartition(".")[0] == parent and default[f"{other}.weight"]
    }
    alike = f"{name}.weight" in beside and all(
        stated[other] and stated[other].split == default[other].along for other in beside
    )
    return default[f"{name}.weight"] if alike else Split(placement.split, alone=True)
