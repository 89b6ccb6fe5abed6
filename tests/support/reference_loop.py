"""A plain float32 fine-tuning loop over transformers and PEFT, with nothing of ours in its arithmetic: the
reference.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from anyqlora.training.schedule import uniform_start


def peft_model(directory, *, rank, alpha, seed, weights=None):
    """The base in float32 (its linear weights replaced by `weights`) with LoRA on every linear layer, from our
    start.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, value in (weights or {}).items():
        model.get_submodule(name).weight.data = value.clone()
    model = get_peft_model(
        model,
        LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    for name, p in model.named_parameters():
        if "lora_A" in name:
            module = name.split(".lora_A")[0]
            p.data = torch.from_numpy(uniform_start(module, tuple(p.shape), 1 / math.sqrt(p.shape[1]), seed))
    return model.train()


def train(model, steps_of_rows, *, lr, total_steps, warmup, clip, weight_decay):
    """One optimizer step for each list of (ids, trained) rows, every row by itself.

    Returns ([loss], [gradient norm]).
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay)
    losses, norms = [], []
    for step, rows in enumerate(steps_of_rows):
        tokens = sum(int(trained[1:].sum()) for _, trained in rows)
        total = 0.0
        for ids, trained in rows:
            logits = model(input_ids=torch.from_numpy(np.asarray(ids)).long()[None]).logits[0, :-1].float()
            labels = torch.from_numpy(np.where(trained[1:], ids[1:], -100)).long()
            loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
        rate = (
            lr * (step + 1) / warmup
            if step < warmup
            else lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total_steps - warmup)))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        norms.append(norm.item())
    return losses, norms


def adapter(model):
    """{file name: tensor} of a PEFT model's trained tensors."""
    return {name.replace(".default", ""): p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
