"""Directories of tiny random models, one for each architecture, with what makes it different switched on; and one step
on them.

Written by transformers' own `save_pretrained`, with the embedded base's tokenizer, so that every way of reading them
works.
"""

import contextlib
import functools
import io
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from anyqlora.config.resolve import resolve
from anyqlora.models.architectures import DEMO_BASE
from anyqlora.on_torch.assembly.checks import check_gradients
from anyqlora.on_torch.engine import TorchEngine
from anyqlora.on_torch.generate import evaluating
from anyqlora.on_torch.quantizers.experts import PackedExperts
from anyqlora.recipes import sft
from tests.support.paths import ROOT

TASK = ROOT / "anyqlora" / "demo" / "task" / "train.jsonl"
WINDOW = 12  # of the models with a sliding window: shorter than every row of the embedded task

# What stands beside the common shape (rows that end inside a block of 64, few key heads): what the architecture is
# known for.
ARCHITECTURES = {
    "llama": {
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"sliding_window": WINDOW, "tie_word_embeddings": False, "head_dim": 24},
    "qwen2": {
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": {"tie_word_embeddings": True, "head_dim": 32},
    "gemma2": {
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 10,
        "head_dim": 16,
    },
    "gemma3_text": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "head_dim": 16, "query_pre_attn_scalar": 10},
    "phi3": {"tie_word_embeddings": False, "sliding_window": WINDOW, "partial_rotary_factor": 0.5, "pad_token_id": 0},
    "olmo2": {"tie_word_embeddings": False},
    "granite": {
        "tie_word_embeddings": True,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
    "smollm3": {"tie_word_embeddings": True, "no_rope_layers": [1, 0], "pad_token_id": 0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "tie_word_embeddings": False,
    },
    "olmoe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "sliding_window": WINDOW,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    },
    "granitemoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "residual_multiplier": 0.4,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {"tie_word_embeddings": False, "use_parallel_residual": True, "rotary_pct": 0.5},
    "starcoder2": {
        "tie_word_embeddings": True,
        "sliding_window": WINDOW,
        "use_bias": True,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
    },
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
MIXTURES = ("mixtral", "qwen2_moe", "olmoe", "gpt_oss", "granitemoe")


@functools.cache
def words():
    """The embedded base's tokenizer."""
    return AutoTokenizer.from_pretrained(DEMO_BASE)


def config_of(architecture="llama", **changes):
    """The configuration of the tiny model of `architecture`, with `changes`."""
    shape = {} if architecture == "gpt2" else SHAPE
    return AutoConfig.for_model(
        architecture, **{**shape, "vocab_size": len(words()), **ARCHITECTURES.get(architecture, {}), **changes}
    )


def make(directory, architecture="llama", *, seed=0, dtype=torch.float32, max_shard_size="50GB", **changes) -> Path:
    """Write a random model of `architecture` and its tokenizer to `directory`; `changes` go into its configuration."""
    config = config_of(architecture, **changes)
    model = randomise(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    words().save_pretrained(directory)
    return Path(directory)


@torch.no_grad()
def randomise(model, seed):
    """Weights of a size at which every part matters: matrices keep variance, vectors (norms, biases, sinks) move by
    0.2.
    """
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_(0.2 * noise)
    return model


def opened(config):
    """The session that a run hands to its loop."""
    sessions, loop = [], sft.train_loop
    sft.train_loop = lambda session, make_engine: sessions.append(session) or {}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            sft.train(config)
    finally:
        sft.train_loop = loop
    return sessions[0]


def few_rows(directory) -> str:
    """The first rows of the embedded task as a file of its own."""
    path = Path(directory) / "rows.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(Path(TASK).read_text(encoding="utf-8").splitlines(keepends=True)[:24]), encoding="utf-8")
    return str(path)


class Started:
    """What train.py's torch loop has before its first step, from a real plan, data, run directory and build."""

    def __init__(self, output, model, **settings):
        lora = {} if settings.get("train_type") == "full" else {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0}
        config = resolve(
            {
                "output_dir": str(output),
                "run_name": "run",
                "backend": "cpu",
                "model_name": str(model),
                "dataset": few_rows(output),
                "precision": "fp32",
                "batch_size": 4,
                "lr": 1e-2,
                "warmup_steps": 0,
                "save_steps": 0,
                "log_to": "none",
                **lora,
                **settings,
            },
            environ={},
            origin="test",
        )
        self.run = opened(config)
        self.plan, self.tokenizer = self.run.plan, self.run.tokenizer
        self.engine = TorchEngine(self.run)
        self.engine.load(())
        self.runtime, self.built, self.model = self.engine.runtime, self.engine.built, self.engine.model

    def loss(self, batch) -> torch.Tensor:
        """The sum over trained tokens, as train.py computes it."""
        with self.runtime.autocast():
            return self.built.loss(self.model, batch, self.runtime.device)

    def step(self, number=0) -> float:
        """One optimizer step on the run's own batch; the loss per trained token before it."""
        (batch,) = self.run.stream[number]
        loss = self.loss(batch) / batch.trained
        self.runtime.backward(loss)
        if number == 0:
            check_gradients(self.runtime.strategy)
        self.runtime.step(self.plan.config.lr, 1.0)
        return loss.item()

    def finish(self) -> Path:
        """The directory of the finished adapter or model."""
        final = self.engine.final_files(self.tokenizer, self.run.outputs.pretrained_files)
        self.run.outputs.write_final(final, lambda: "")
        return self.run.directory / final.folder

    @torch.no_grad()
    def logits(self, ids, training=False) -> torch.Tensor:
        with evaluating(self.model), self.runtime.autocast():
            self.model.train(training)
            return self.model(input_ids=ids, use_cache=False).logits.float()

    def held(self) -> dict[str, torch.Tensor]:
        """{parameter of the plain model: value} of every packed weight, dequantized."""
        found = {}
        for name, module in self.built.model.named_modules():
            name = name.removeprefix("base_model.model.").removesuffix(".base_layer")
            if isinstance(module, PackedExperts):
                found[name] = torch.stack([module.dequantize(expert) for expert in range(len(module.states))])
            elif isinstance(module, self.built.quantizer.module_type) and "lora_" not in name:
                found[f"{name}.weight"] = self.built.quantizer.dequantize(module)
        return found


def plain(directory, held=None, adapter=None, **options):
    """transformers' own model of a directory in float32, with the weights `held` put into it and PEFT's own reading of
    `adapter`.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
    for name, value in (held or {}).items():
        parameter = model.get_parameter(name)
        parameter.data = (
            (value if value.shape == parameter.shape and not is_transposed(model, name) else value.T).float().clone()
        )
    return (PeftModel.from_pretrained(model, adapter) if adapter else model).eval()


def is_transposed(model, name):
    return isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D)
