"""One measurement of TRL's SFTTrainer (transformers + PEFT + bitsandbytes). Prints one JSON line last.

It gets our rows, in our order, as tokens and labels, our adapter start, and the same optimizer settings.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from pathlib import Path

here = Path(__file__).resolve().parent
sys.path = [p for p in sys.path if Path(p or ".").resolve() != here]  # this file's own name is that of the package
ROOT = here.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from peers.peak import Peak  # noqa: E402


def main(settings: dict, warmup: int, options: dict) -> dict:
    import psutil
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from anyqlora import data
    from anyqlora.config import resolve
    from anyqlora.schedule import uniform_start

    config = resolve(settings, environ={})
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    accumulation = config.gradient_accumulation_steps
    stream = data.Stream(data.prepare(config, tokenizer).train, batch_size=config.batch_size, gradient_accumulation_steps=accumulation,
                         num_epochs=1, max_steps=config.max_steps, seed=config.seed, packing=False, context_length=config.context_length, pad_id=0)
    chosen = [e for step in range(config.max_steps) for batch in stream[step] for e in by_name(stream, batch)]
    rows = Dataset.from_list([{"input_ids": e.ids.tolist(), "labels": [int(t) if k else -100 for t, k in zip(e.ids, e.trained, strict=True)]}
                              for e in chosen])
    peak = Peak()
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    quantization = None
    if config.quantizer in ("nf4", "fp4"):
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=config.quantizer, bnb_4bit_compute_dtype=dtype,
                                          bnb_4bit_use_double_quant=config.double_quant)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(config.model_name, dtype=dtype, quantization_config=quantization, device_map={"": device})
    class Clock(TrainerCallback):
        steps: list[float] = []

        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__):
            if device != "cpu":
                torch.cuda.synchronize()
            self.steps.append(time.perf_counter() - self.began)
            self.first = getattr(self, "first", None) or time.time() - psutil.Process().create_time()

    clock = Clock()
    with tempfile.TemporaryDirectory() as output:
        arguments = SFTConfig(
            output, max_steps=config.max_steps, per_device_train_batch_size=config.batch_size, gradient_accumulation_steps=accumulation,
            learning_rate=config.lr, lr_scheduler_type="constant", warmup_steps=0, weight_decay=config.wd, max_grad_norm=config.grad_norm,
            logging_steps=1, report_to=[], save_strategy="no", use_cpu=device == "cpu", bf16=False, fp16=False, seed=config.seed,
            gradient_checkpointing=config.use_gradient_checkpointing is True, max_length=config.context_length, packing=False,
            train_sampling_strategy="sequential", dataset_kwargs={"skip_prepare_dataset": True}, optim="adamw_torch", disable_tqdm=True,
            dataloader_pin_memory=False, **options)
        trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=arguments, callbacks=[clock],
                             peft_config=LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout,
                                                    target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, p in trainer.model.named_parameters():
            if "lora_" in name:
                p.data = p.data.float()  # as ours: adapters and moments in float32
            if "lora_A" in name:
                p.data.copy_(torch.from_numpy(uniform_start(name.split(".lora_A")[0], tuple(p.shape), 1 / math.sqrt(p.shape[1]), config.seed)))
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    per_step = config.batch_size * accumulation
    tokens = [sum(len(e.ids) for e in chosen[i * per_step : (i + 1) * per_step]) for i in range(config.max_steps)]
    trained = [sum(int(e.trained[1:].sum()) for e in chosen[i * per_step : (i + 1) * per_step]) for i in range(config.max_steps)]
    seconds = sum(clock.steps[warmup:])
    return {"losses": [entry["loss"] for entry in history], "grad_norms": [entry["grad_norm"] for entry in history],
            "tokens_per_second": sum(tokens[warmup:]) / seconds, "trained_tokens_per_second": sum(trained[warmup:]) / seconds,
            "peak_rise_bytes": peak.rise(), "time_to_first_step_s": clock.first}


def by_name(stream, batch):
    index = {e.where: e for sequence in stream.sequences for e in sequence}
    return [index[name] for name in batch.rows]


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))))
