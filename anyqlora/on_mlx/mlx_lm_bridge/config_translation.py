"""A config.json in the words that mlx-lm's model of it reads. mlx-lm passes over keys that it does not know, so
whatever changes the arithmetic and would be passed over is refused here.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.on_mlx._compat import model_classes


def translate_config(model_config: dict, directory: Path, longest: int) -> dict:
    """What to add to a parsed config.json for mlx-lm. `longest` is how many tokens a row may have.

    Raises NotBuilt for an architecture that mlx-lm lacks, or has without what makes this model different.
    """
    where, kind = f"{directory}/config.json", model_config.get("model_type")
    if not isinstance(kind, str):
        raise UsageError("it names no model_type", where=where, cure="download it again")
    try:
        known = set(inspect.signature(model_classes(model_config)[1]).parameters)
    except (ValueError, KeyError) as error:
        raise NotSupported(
            f"mlx-lm has no model of type {kind!r}: {error}", where=where, cure="another --backend"
        ) from None
    added = _positions(model_config, known) | _pattern(model_config, known)
    whole = {**model_config, **added}
    if "layer_types" not in model_config:  # what has windows reads there which layers they are for
        known.discard("sliding_window" if "layer_types" in known else "")
    lost = [
        f"{key} = {model_config[key]}"
        for key, harmless in PASSED_OVER.items()
        if key in model_config and key not in known and not harmless(whole, longest)
    ]
    if lost:
        raise NotSupported(
            f"mlx-lm's {kind} passes over {', '.join(lost)}: it would compute another model",
            where=where,
            cure="another --backend",
        )
    return added


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def refuse_mixtures(model_config: dict, directory: Path) -> None:
    """Raises NotBuilt for a mixture of experts."""
    experts = next((key for key in EXPERTS if model_config.get(key)), None)
    if experts:
        raise NotSupported(
            f"mixture-of-experts models ({experts} = {model_config[experts]}) are not trained on MLX",
            where=f"{directory}/config.json",
            cure="another --backend",
        )


def _positions(model_config: dict, known: set[str]) -> dict:
    """transformers 5 states rotary embeddings in `rope_parameters`, for each kind of layer where they differ; mlx-lm
    mostly reads the older keys.
    """
    stated = model_config.get("rope_parameters")
    if not stated or "rope_parameters" in known:
        return {}
    kinds = {key: value for key, value in stated.items() if isinstance(value, dict)}
    main = kinds.get("full_attention", stated) if kinds else stated
    positions = {
        "rope_theta": main.get("rope_theta"),
        "rotary_emb_base": main.get("rope_theta"),
        "partial_rotary_factor": main.get("partial_rotary_factor"),
        "rotary_pct": main.get("partial_rotary_factor"),
        "original_max_position_embeddings": main.get("original_max_position_embeddings"),
        "rope_local_base_freq": kinds.get("sliding_attention", {}).get("rope_theta"),
    }
    if main.get("rope_type", "default") != "default":
        positions["rope_scaling"] = main
    return {
        key: value
        for key, value in positions.items()
        if value is not None and key in known | {"rope_scaling"} and key not in model_config
    }


def _pattern(model_config: dict, known: set[str]) -> dict:
    """transformers 5 lists the kind of each layer; older models of mlx-lm count to the next one that sees
    everything.
    """
    layers = model_config.get("layer_types")
    if not layers or "layer_types" in known or "sliding_window_pattern" not in known or "full_attention" not in layers:
        return {}
    every = layers.index("full_attention") + 1
    regular = [
        ("full_attention" if (number + 1) % every == 0 else "sliding_attention") for number in range(len(layers))
    ]
    return {"sliding_window_pattern": every} if layers == regular else {}


def _window(config: dict, longest: int) -> bool:
    window = config.get("sliding_window")
    return not window or config.get("use_sliding_window") is False or window >= longest


def _layers(config: dict, longest: int) -> bool:
    return (
        _window(config, longest)
        or "sliding_attention" not in config["layer_types"]
        or "sliding_window_pattern" in config
    )


def _rotary(config: dict, longest: int) -> bool:
    kinds = [value for value in config["rope_parameters"].values() if isinstance(value, dict)] or [
        config["rope_parameters"]
    ]
    scaled = [value for value in kinds if value.get("rope_type", "default") != "default"]
    return not scaled or "rope_scaling" in config


PASSED_OVER = {  # key -> whether it changes nothing when mlx-lm does not read it: f(config, longest row)
    "sliding_window": _window,
    "layer_types": _layers,
    "rope_parameters": _rotary,
    "rope_scaling": lambda c, _: not c["rope_scaling"],
    "rope_theta": lambda c, _: c["rope_theta"] == 10000.0,
    "attn_logit_softcapping": lambda c, _: not c["attn_logit_softcapping"],
    "final_logit_softcapping": lambda c, _: not c["final_logit_softcapping"],
    "partial_rotary_factor": lambda c, _: c["partial_rotary_factor"] in (None, 1.0) or "rotary_pct" in c,
    "no_rope_layers": lambda c, _: not c["no_rope_layers"] or all(c["no_rope_layers"]),
    "attention_multiplier": lambda c, _: c["attention_multiplier"] in (None, 1.0),
    "residual_multiplier": lambda c, _: c["residual_multiplier"] in (None, 1.0),
    "embedding_multiplier": lambda c, _: c["embedding_multiplier"] in (None, 1.0),
    "logits_scaling": lambda c, _: c["logits_scaling"] in (None, 1.0),
    "hidden_act": lambda c, _: c["hidden_act"] in ACTIVATIONS.get(c["model_type"], (c["hidden_act"],)),
    "use_parallel_residual": lambda c, _: c["use_parallel_residual"],
    "scale_embedding": lambda c, _: not c["scale_embedding"],
}
ACTIVATIONS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "olmo2", "granite", "phi3", "smollm3"), ("silu", "swish")),
    "starcoder2": ("gelu",),
}  # model_type -> what mlx-lm computes whatever config.json says
