"""The model card that goes with a finished adapter or model."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from anyqlora.core import registry
from anyqlora.core.redaction import redacted
from anyqlora.core.terminal import printable
from anyqlora.data.end_tokens import learned_ends
from anyqlora.models.architectures import model_config
from anyqlora.models.prequantized import is_mlx_packed, loadable

CARD = """---
{front}
---

# {title}

{what} of `{base}` on `{dataset}`, trained with AnyQLoRA.

| | |
|---|---|
| quantizer, adapter | {quantizer}, {adapter} |
| rank, alpha, dropout, targets | {lora} |{started}
| optimizer steps, rows per step | {steps}, {rows} |
| learning rate, schedule, optimizer | {lr:g}, {schedule}, {optimizer} |
| precision, backend | {precision}, {backend} |
| trained tokens | {tokens} |
| an answer ends with | {ends} |

{evaluation}

{usage}
"""
PEFT = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

adapter = "PATH/TO/adapter"  # the directory of this file
base = AutoModelForCausalLM.from_pretrained({base})
model = PeftModel.from_pretrained(base, adapter)
model.generation_config = GenerationConfig.from_pretrained(adapter)  # it names the tokens at which an answer ends
tokenizer = AutoTokenizer.from_pretrained(adapter)
```"""
WHOLE = """```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("PATH/TO/model")  # the directory of this file
```"""


def model_card(run) -> str:
    """Markdown from what the run knows; the same run gives the same text.

    It is made to be published: local paths give their last part only, and nothing that looks like a key is in it.
    """
    config, plan = run.config, run.plan
    full = registry.adapter(plan.adapter).trains_base
    origin = loadable(config)
    base = "anyqlora/demo/base" if config.is_demo else public_name(origin)
    place = base if is_hub_id(origin) else f"PATH/TO/{base}"
    front = {"library_name": "transformers" if full else "peft", "tags": ["anyqlora", plan.adapter, plan.quantizer]}
    if is_hub_id(origin):
        front = {"base_model": base, **front}
    return CARD.format(
        front="\n".join(f"{name}: {json.dumps(value)}" for name, value in front.items()),
        title=config.run_name or ("Model" if full else "Adapter"),
        what="Full fine-tune" if full else "Adapter",
        base=base,
        dataset=", ".join(map(public_name, config.dataset.split(","))),
        quantizer=plan.quantizer,
        adapter=plan.adapter,
        steps=run.written_state.step,
        rows=plan.global_batch,
        lr=config.lr,
        lora="none"
        if full
        else f"{config.lora_rank}, {config.lora_alpha:g}, {config.lora_dropout:g}, "
        f"{html.escape(public_name(config.lora_target_modules))}",
        started=f"\n| started from | `{public_name(config.init_adapter)}` |" if config.init_adapter else "",
        schedule=config.lr_scheduler,
        optimizer=config.optimizer,
        precision=plan.precision,
        backend=plan.backend,
        tokens=run.written_state.tokens_trained,
        ends=", ".join(f"`{name}`" for name in learned_ends(run.data.report)) or "no token of its own",
        evaluation=evaluation(run.state.before, run.evaluations.final),
        usage=WHOLE if full else packed_note(config, base) + PEFT.format(base=json.dumps(place)),
    )


def packed_note(config, base: str) -> str:
    """What a reader has to know of a base whose files plain transformers does not read; nothing of any other."""
    if not is_mlx_packed(model_config(config)):
        return ""
    packed = (
        f"It was trained on `{public_name(config.model_name)}`, whose weights are packed as MLX's libraries and "
        f"AnyQLoRA read them; plain transformers does not."
    )
    return packed + (
        f" Below it loads `{base}`, from which those were made.\n\n"
        if loadable(config) != config.model_name
        else " Give it the model from which those were made.\n\n"
    )


def evaluation(before: dict | None, after: dict | None) -> str:
    """A table of what both evaluations measured."""
    if not before or not after:
        return "No rows were held out."
    lines = [
        f"| {name.replace('_', ' ')} | {before[name]:.4f} | {after[name]:.4f} |"
        for name in ("loss", "perplexity", "exact_match")
        if name in after and name in before
    ]
    return "\n".join(["| evaluation rows | before | after |", "|---|---|---|", *lines])


def is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def public_name(name: str) -> str:
    """A model, file or pattern as a stranger may read it, inside a table and between backticks."""
    name = redacted(name)
    shown = name if is_hub_id(name) or "://" in name else name.rstrip("/").rpartition("/")[2]
    return printable(shown).replace("\n", " ").replace("`", "'").replace("|", "\\|")
