"""mlx-lm's model of a directory, its weights still lazy: nothing is in memory before it is used."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from anyqlora.core.errors import UsageError
from anyqlora.core.terminal import printable
from anyqlora.models import nf4
from anyqlora.models.architectures import read_config
from anyqlora.on_mlx._compat import model_classes
from anyqlora.on_mlx.mlx_lm_bridge.config_translation import refuse_mixtures, translate_config
from anyqlora.on_mlx.nn.layers import replace
from anyqlora.on_mlx.nn.quantizers import Nf4Linear

NF4_STATE = ".quant_state.bitsandbytes__nf4"


def load_model(directory: Path, longest: int, trust_remote_code: bool = False) -> nn.Module:
    """The causal LM of a directory of Hugging Face's or mlx-lm's form, for rows of up to `longest` tokens.

    Raises NotBuilt for an architecture that mlx-lm does not have, UsageError for files that are not this model's.
    """
    from mlx_lm.utils import load_model

    model_config = read_config(directory)
    refuse_mixtures(model_config, directory)
    if model_config.get("model_file") and not trust_remote_code:
        raise UsageError(
            "the model comes with Python code of its own, which is not run unasked",
            where=f"{directory}/config.json",
            cure=f"read {printable(str(model_config['model_file']))}, then --trust_remote_code true",
        )
    added = translate_config(model_config, directory, longest)
    try:
        model, _ = load_model(
            directory,
            lazy=True,
            model_config=added,
            get_model_classes=_reading_nf4,
            trust_remote_code=trust_remote_code,
        )
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        raise UsageError(
            f"not read by mlx-lm: {str(error).strip().splitlines()[0]}",
            where=str(directory),
            cure="a config.json and weights that belong together; or another --backend, where mlx-lm's model is not of "
            "this shape",
        ) from None
    return model


def _reading_nf4(config: dict):
    """mlx-lm's classes, the model one able to take weights that bitsandbytes has packed: mlx-lm knows no NF4."""
    model_class, args_class = model_classes(config)

    class Model(model_class):
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            names = [key.removesuffix(NF4_STATE) for key in weights if key.endswith(NF4_STATE)]
            packed = {name: nf4.from_files(lambda key: np.array(weights[key]), name) for name in names}
            weights = {
                key: value
                for key, value in weights.items()
                if not any(key == name or key.startswith(f"{name}.") for name in names)
            }
            for name, held in packed.items():
                owner = name.removesuffix(".weight")
                replace(self, owner, Nf4Linear(held, weights.get(f"{owner}.bias")))
            return super().sanitize(weights) if hasattr(model_class, "sanitize") else weights

    Model.__name__ = model_class.__name__
    return Model, args_class
