"""What the peers that train with TRL's SFTTrainer share: our rows in our order, our adapter start, a clock, and what is
counted.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from itertools import islice

from harness import versions
from peers.peak import Peak

from anyqlora.data.stream import BatchStream


def measure(settings: dict, warmup: int, options: dict, load: Callable) -> dict:
    """`load(config, dtype, device)` gives the model, and the LoraConfig where the trainer is to make the adapters.

    `options` goes to SFTConfig, but for "adapters": the dtype that they are given, or "own" for the library's choice.
    """
    import psutil
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from anyqlora.config.resolve import resolve
    from anyqlora.data import dataset
    from anyqlora.training.schedule import uniform_start

    imported = time.time() - psutil.Process().create_time()
    config = resolve(settings, environ={})
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    stream = BatchStream(
        dataset.load_data(config, tokenizer).train,
        batch_size=config.batch_size,
        max_steps=config.max_steps,
        num_epochs=1,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        seed=config.seed,
        packing=False,
        context_length=config.context_length,
        pad_id=0,
    )
    index = {e.where: e for sequence in stream.sequences for e in sequence}
    chosen = [index[where] for step in range(stream.total_steps) for where in stream.rows(step)]
    rows = Dataset.from_list(
        [
            {
                "input_ids": e.ids.tolist(),
                "labels": [int(t) if k else -100 for t, k in zip(e.ids, e.trained, strict=True)],
            }
            for e in chosen
        ]
    )
    peak = Peak()
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    model, adapters = load(config, dtype, device)

    class Clock(TrainerCallback):
        steps: list[float] = []

        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__):
            if device != "cpu":
                torch.cuda.synchronize()
            self.steps.append(time.perf_counter() - self.began)
            self.first = getattr(self, "first", None) or time.time() - psutil.Process().create_time()

    clock, batches = Clock(), []
    options = dict(options)
    kind = options.pop("adapters", "float32")
    with tempfile.TemporaryDirectory() as output:
        arguments = SFTConfig(
            **{
                "output_dir": output,
                "max_steps": config.max_steps,
                "num_train_epochs": 1,
                "per_device_train_batch_size": config.batch_size,
                "gradient_accumulation_steps": config.gradient_accumulation_steps,
                "learning_rate": config.lr,
                "lr_scheduler_type": "constant",
                "warmup_steps": 0,
                "weight_decay": config.weight_decay,
                "max_grad_norm": config.max_grad_norm,
                "logging_steps": 1,
                "report_to": [],
                "save_strategy": "no",
                "use_cpu": device == "cpu",
                "bf16": False,
                "fp16": False,
                "seed": config.seed,
                "max_length": config.context_length,
                "gradient_checkpointing": config.use_gradient_checkpointing is True,
                "train_sampling_strategy": "sequential",
                "dataset_kwargs": {"skip_prepare_dataset": not options.get("packing")},
                "optim": "adamw_torch",
                "disable_tqdm": True,
                "dataloader_pin_memory": False,
                **options,
            }
        )
        trainer = SFTTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=rows,
            args=arguments,
            callbacks=[clock],
            peft_config=adapters,
        )
        for name, p in trainer.model.named_parameters():
            if "lora_" in name and kind != "own":
                p.data = p.data.to(getattr(torch, kind))
            if "lora_A" in name:
                p.data.copy_(
                    torch.from_numpy(
                        uniform_start(name.split(".lora_A")[0], tuple(p.shape), 1 / math.sqrt(p.shape[1]), config.seed)
                    )
                )
        collate = trainer.data_collator

        def counted(examples: list[dict]) -> dict:
            batch = collate(examples)
            batches.append((sum(len(e["input_ids"]) for e in examples), int((batch["labels"][:, 1:] != -100).sum())))
            return batch

        trainer.data_collator = counted
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    queue = iter(batches)  # in the order of training, whatever was fetched ahead
    per_step = [
        tuple(map(sum, zip(*islice(queue, arguments.gradient_accumulation_steps), strict=True))) for _ in clock.steps
    ]
    seconds = sum(clock.steps[warmup:])
    return {
        "losses": [entry["loss"] for entry in history],
        "grad_norms": [entry["grad_norm"] for entry in history],
        "tokens_per_second": sum(tokens for tokens, _ in per_step[warmup:]) / seconds,
        "trained_tokens_per_second": sum(trained for _, trained in per_step[warmup:]) / seconds,
        "peak_rise_bytes": peak.rise(),
        "imports_s": imported,
        "time_to_first_step_s": clock.first,
        "versions": versions(),
    }
