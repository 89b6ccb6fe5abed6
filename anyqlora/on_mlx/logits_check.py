"""An exported adapter under plain mlx-lm, against the run's own model: both in float32 on the base as it is in its
files.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from anyqlora.models.architectures import read_config, vocabulary
from anyqlora.models.hub import base_directory
from anyqlora.models.prequantized import quantized_as
from anyqlora.on_mlx.inference import load_finetuned
from anyqlora.on_mlx.mlx_lm_bridge.config_translation import translate_config
from anyqlora.runs.finished import FinishedRun, plan_here

LENGTH = 32


def against_mlx_lm(run: FinishedRun, adapter: Path, changed: dict) -> tuple[float, float, str]:
    """(largest difference of two logits, largest logit, what else is to be said). Raises as opening a run does."""
    from mlx_lm.utils import load_adapters, load_model

    base = base_directory(run.config.with_(**changed))
    packed = quantized_as(read_config(base))
    quantizer = {"quantizer": packed, "bits": 4} if packed else {"quantizer": "none", "bits": 16, "train_type": "lora"}
    ours = load_finetuned(run, plan_here(run, {**changed, **quantizer, "backend": "mlx", "precision": "fp32"}))
    model_config = read_config(base)
    added = translate_config(model_config, base, run.config.context_length)
    theirs, _ = load_model(base)
    theirs.set_dtype(mx.float32)
    theirs = load_adapters(theirs, str(adapter))
    theirs.eval()
    ours.built.model.eval()
    ids = (mx.arange(2 * LENGTH).reshape(2, LENGTH) * 7 + 3) % (vocabulary(model_config) or 256)
    one, other = ours.built.model(ids).astype(mx.float32), theirs(ids).astype(mx.float32)
    lost = [key for key in added if key != "sliding_window_pattern"]
    note = (
        f"plain mlx-lm passes over {', '.join(lost)} of this base, as transformers 5 writes it: convert --to mlx "
        f"writes it in its words"
        if lost
        else ""
    )
    return float(mx.abs(one - other).max()), float(mx.abs(one).max()), note
