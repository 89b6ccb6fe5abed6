"""What a model is made of, by architecture: its linear layers, how each splits, its block - from config.json alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import UsageError

DEMO_BASE = Path(__file__).resolve().parents[1] / "demo" / "base"
COLUMNS, ROWS, WHOLE = (
    "columns",
    "rows",
    "whole",
)  # split along outputs, along inputs (outputs are summed), or not at all


@dataclass(frozen=True)
class LinearShape:
    """One linear layer, by its name in the block: `weight [outputs, inputs]`, and `count` of them (experts)."""

    name: str
    outputs: int
    inputs: int
    split: str = WHOLE
    bias: bool = False
    count: int = 1

    @property
    def parameters(self) -> int:
        return self.count * self.outputs * self.inputs


SHARING = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
)  # last parts of the names of linears that read one tensor


def source_of(name: str) -> tuple[str, ...]:
    """Which linears of a layer read the tensor that the one called `name` reads: q, k and v; gate and up; else itself
    alone.
    """
    last = name.rpartition(".")[2]
    return next((group for group in SHARING if last in group), (last,))


def shared_input_groups(names: Iterable[str]) -> list[list[str]]:
    """The names of a model's linear layers in groups that read one tensor."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in names:
        groups.setdefault((name.rpartition(".")[0], source_of(name)), []).append(name)
    return list(groups.values())


@dataclass(frozen=True)
class ModelShape:
    """The shapes of one causal LM. Every number counts elements unless it says otherwise."""

    model_type: str
    block: str  # class of one layer, the unit that is sharded and checkpointed
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # width of one MLP or expert
    linears: tuple[LinearShape, ...]  # of one layer
    path: str = "model.layers"  # where the layers stand in the model
    dense_layers: tuple[int, ...] = ()  # of a mixture: those that have one MLP in the place of experts
    dense_linears: tuple[LinearShape, ...] = ()  # of such a layer
    tied: bool = False  # head and embedding are one tensor
    norms: int = 2  # normalizations over `hidden` in a layer
    norm_bias: bool = False  # LayerNorm with a bias, not RMSNorm
    qk_norm: str = ""  # queries and keys are normalized too: over each "head", or "all" of them
    gated: bool = True  # act(gate) * up, not act(up)
    silu_gate: bool = False  # silu(gate) * up of two linears
    fused_qkv: bool = False  # one linear makes queries, keys and values
    post_norm: bool = False  # linears come before norms, so that the first layer has none that needs no gradient
    parallel: bool = False  # attention and MLP read the same residual
    eager_attention: bool = False  # soft-capped scores: [heads, T, T] is materialized
    capped_logits: bool = False  # soft-capped by tanh
    experts: int = 0
    experts_per_token: int = 0
    shared_intermediate: int = 0  # width of the expert that every token visits

    def adaptable_linears(self, layer: int) -> dict[str, LinearShape]:
        """{whole name: shape} of the linear modules of one layer. Experts are parameters, which no adapter goes on."""
        linears = self.dense_linears if layer in self.dense_layers else self.linears
        return {f"{self.path}.{layer}.{linear.name}": linear for linear in linears if linear.count == 1}

    @property
    def adaptable_names(self) -> list[str]:
        """The whole names of all linear modules."""
        return [name for layer in range(self.layers) for name in self.adaptable_linears(layer)]

    @property
    def linear_parameters(self) -> int:
        return self.layers * sum(linear.parameters for linear in self.linears)

    @property
    def other_parameters(self) -> int:
        """Embedding, head, norms, biases and routers: what no quantizer touches."""
        norm = self.hidden * (2 if self.norm_bias else 1)
        qk_norm = {"": 0, "head": 2 * self.head_dim, "all": (self.heads + self.kv_heads) * self.head_dim}[self.qk_norm]
        biases = sum(linear.count * linear.outputs for linear in self.linears if linear.bias)
        per_layer = self.norms * norm + qk_norm + biases + self.experts * self.hidden
        return (1 if self.tied else 2) * self.vocab * self.hidden + self.layers * per_layer + norm

    @property
    def parameters(self) -> int:
        return self.linear_parameters + self.other_parameters


@dataclass(frozen=True)
class Architecture:
    """How an architecture differs from Llama."""

    block: str
    style: str = "llama"  # llama | fused (qkv_proj, gate_up_proj) | neox | starcoder | experts
    norms: int = 2
    qk_norm: str = ""
    post_norm: bool = False
    qkv_bias: bool = False
    tied: bool = False  # config.json's default when it does not say


FAMILIES = {  # model_type -> family; an unknown one has unknown memory, never a guess
    "llama": Architecture("LlamaDecoderLayer"),
    "mistral": Architecture("MistralDecoderLayer"),
    "ministral3": Architecture("Ministral3DecoderLayer"),
    "qwen2": Architecture("Qwen2DecoderLayer", qkv_bias=True),
    "qwen3": Architecture("Qwen3DecoderLayer", qk_norm="head"),
    "gemma": Architecture("GemmaDecoderLayer", tied=True),
    "gemma2": Architecture("Gemma2DecoderLayer", norms=4, tied=True),
    "gemma3_text": Architecture("Gemma3DecoderLayer", norms=4, qk_norm="head", tied=True),
    "phi3": Architecture("Phi3DecoderLayer", style="fused"),
    "olmo2": Architecture("Olmo2DecoderLayer", qk_norm="all", post_norm=True),
    "olmo3": Architecture("Olmo3DecoderLayer", qk_norm="all", post_norm=True),
    "ernie4_5": Architecture("Ernie4_5DecoderLayer", tied=True),
    "granite": Architecture("GraniteDecoderLayer"),
    "smollm3": Architecture("SmolLM3DecoderLayer", tied=True),
    "starcoder2": Architecture("Starcoder2DecoderLayer", style="starcoder", tied=True),
    "gpt_neox": Architecture("GPTNeoXLayer", style="neox"),
    "mixtral": Architecture("MixtralDecoderLayer", style="experts"),
    "qwen2_moe": Architecture("Qwen2MoeDecoderLayer", style="experts", qkv_bias=True),
    "qwen3_moe": Architecture("Qwen3MoeDecoderLayer", style="experts", qk_norm="head"),
    "olmoe": Architecture("OlmoeDecoderLayer", style="experts", qk_norm="all"),
}


def model_shape(config: dict) -> ModelShape | None:
    """The shapes that a parsed config.json describes; None for an architecture that is not in FAMILIES."""
    whole, config = config, _text_config(config)
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        return None
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    intermediate = config.get("moe_intermediate_size") if experts else None
    base = ModelShape(
        model_type=whole["model_type"],
        block=family.block,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        vocab=config["vocab_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate or config["intermediate_size"],
        linears=(),
        path=_path(whole, family),
        tied=config.get("tie_word_embeddings", family.tied),
        norms=family.norms,
        norm_bias=family.style in ("neox", "starcoder"),
        qk_norm=family.qk_norm,
        post_norm=family.post_norm,
        gated=family.style not in ("neox", "starcoder"),
        silu_gate=family.style == "llama"
        and (config.get("hidden_act") or config.get("hidden_activation")) in (None, "silu", "swish"),
        fused_qkv=family.style in ("fused", "neox"),
        parallel=family.style == "neox" and config.get("use_parallel_residual", True),
        eager_attention=bool(config.get("attn_logit_softcapping")),
        capped_logits=bool(config.get("final_logit_softcapping")),
        experts=experts,
        experts_per_token=config.get("num_experts_per_tok") or 0,
        shared_intermediate=config.get("shared_expert_intermediate_size") or 0 if experts else 0,
    )
    has_bias = config.get("attention_bias", False) or config.get("use_bias", False) or family.qkv_bias
    base = replace(base, linears=_LINEARS[family.style](base, has_bias, config))
    if not (experts and (dense := _dense_layers(config))):
        return base
    wide = replace(base, intermediate=config["intermediate_size"])
    return replace(base, dense_layers=dense, dense_linears=_llama(wide, has_bias, config))


def _path(config: dict, family: Architecture) -> str:
    """Where a model that a parsed config.json describes has its layers."""
    if config.get("text_config"):
        return "model.language_model.layers"
    return "gpt_neox.layers" if family.style == "neox" else "model.layers"


def _dense_layers(config: dict) -> tuple[int, ...]:
    """Layers of a mixture (Qwen's) without experts: those that are listed, and all but each `decoder_sparse_step`th."""
    listed, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    return tuple(n for n in range(config["num_hidden_layers"]) if n in listed or (n + 1) % step)


# RoBERTa and its kin: the first token's position is the one after the padding token's number.
COUNTED_FROM_PAD = {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "roberta-prelayernorm"}
# Architectures in which a position is a row of a table, learned or computed once: one beyond the last is an error.
POSITION_TABLES = {
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gptj",
    "codegen",
    "opt",
    "openai-gpt",
    "biogpt",
    "ctrl",
    "mpt",
    "bart",
    "mbart",
    "marian",
    "pegasus",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "plbart",
    "mvp",
    "trocr",
    "xlm",
    "bert",
    "bert-generation",
    "big_bird",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roformer",
} | COUNTED_FROM_PAD
ENCODERS = {"bert", "bert-generation", "big_bird", "electra", "ernie", "megatron-bert", "rembert", "roformer"}


def max_positions(config: dict) -> int | None:
    """How many positions a parsed config.json says that the model has; None where it does not say."""
    config = _text_config(config)
    positions = config.get("max_position_embeddings") or config.get("n_positions") or config.get("max_seq_len")
    if not isinstance(positions, int):
        return None
    return (
        positions - (config.get("pad_token_id") or 0) - 1 if config.get("model_type") in COUNTED_FROM_PAD else positions
    )


def position_table(config: dict) -> int | None:
    """How many positions the model has a table for; None where it computes them, and one beyond the last is only
    unfamiliar to it.
    """
    return max_positions(config) if _text_config(config).get("model_type") in POSITION_TABLES else None


def is_bidirectional(config: dict) -> bool:
    """Whether it is a model of BERT's kind that reads a text from both ends: trained on next tokens it would copy
    them.
    """
    config = _text_config(config)
    return config.get("model_type") in ENCODERS | COUNTED_FROM_PAD and not config.get("is_decoder")


def vocabulary(config: dict) -> int | None:
    """How many rows a parsed config.json says that the embedding has; None where it does not say."""
    size = _text_config(config).get("vocab_size")
    return size if isinstance(size, int) else None


def _text_config(config: dict) -> dict:
    """The language model of a model of several kinds of input, or of one."""
    return {**config, **(config.get("text_config") or {})}


def _attention(s: ModelShape, has_bias: bool, out_bias: bool) -> tuple[LinearShape, ...]:
    queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
    return (
        LinearShape("self_attn.q_proj", queries, s.hidden, COLUMNS, has_bias),
        LinearShape("self_attn.k_proj", keys, s.hidden, COLUMNS, has_bias),
        LinearShape("self_attn.v_proj", keys, s.hidden, COLUMNS, has_bias),
        LinearShape("self_attn.o_proj", s.hidden, queries, ROWS, out_bias),
    )


def _gated_mlp(s: ModelShape, width: int, prefix: str = "mlp.") -> tuple[LinearShape, ...]:
    return (
        LinearShape(prefix + "gate_proj", width, s.hidden, COLUMNS),
        LinearShape(prefix + "up_proj", width, s.hidden, COLUMNS),
        LinearShape(prefix + "down_proj", s.hidden, width, ROWS),
    )


def _llama(s, has_bias, config):
    return _attention(s, has_bias, config.get("attention_bias", False)) + _gated_mlp(s, s.intermediate)


def _fused(s, has_bias, config):
    queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
    # a slice of a fused output is not a slice of each part, so such outputs are gathered
    return (
        LinearShape("self_attn.qkv_proj", queries + 2 * keys, s.hidden, COLUMNS),
        LinearShape("self_attn.o_proj", s.hidden, queries, ROWS),
        LinearShape("mlp.gate_up_proj", 2 * s.intermediate, s.hidden, COLUMNS),
        LinearShape("mlp.down_proj", s.hidden, s.intermediate, ROWS),
    )


def _neox(s, has_bias, config):
    return (
        LinearShape("attention.query_key_value", 3 * s.hidden, s.hidden, COLUMNS, True),
        LinearShape("attention.dense", s.hidden, s.hidden, ROWS, True),
        LinearShape("mlp.dense_h_to_4h", s.intermediate, s.hidden, COLUMNS, True),
        LinearShape("mlp.dense_4h_to_h", s.hidden, s.intermediate, ROWS, True),
    )


def _starcoder(s, has_bias, config):
    has_bias = config.get("use_bias", True)
    return _attention(s, has_bias, has_bias) + (
        LinearShape("mlp.c_fc", s.intermediate, s.hidden, COLUMNS, has_bias),
        LinearShape("mlp.c_proj", s.hidden, s.intermediate, ROWS, has_bias),
    )


def _experts(s, has_bias, config):
    """Transformers 5 keeps all experts of a layer in two three-dimensional parameters."""
    experts = (
        LinearShape("mlp.experts.gate_up_proj", 2 * s.intermediate, s.hidden, count=s.experts),
        LinearShape("mlp.experts.down_proj", s.hidden, s.intermediate, ROWS, count=s.experts),
    )
    width = s.shared_intermediate
    shared = (
        _gated_mlp(s, width, "mlp.shared_expert.") + (LinearShape("mlp.shared_expert_gate", 1, s.hidden),)
        if width
        else ()
    )
    return _attention(s, has_bias, config.get("attention_bias", False)) + experts + shared


_LINEARS = {"llama": _llama, "fused": _fused, "neox": _neox, "starcoder": _starcoder, "experts": _experts}


def llama_of(billions: float) -> ModelShape:
    """A Llama of about so many billion parameters: 128 units of width per layer, MLP 3.5 x as wide, a vocabulary of
    128k.
    """
    vocab, ratio = 128_256, 128
    per_cube = (
        1 + 1 + 0.25 + 0.25 + 3 * 3.5
    ) / ratio  # linear parameters / hidden^3 (layers = hidden / 128), kv_heads = heads / 4
    low, high = 1.0, 1e6
    for _ in range(60):  # hidden where the linears, embedding and head together have that many
        middle = (low + high) / 2
        low, high = (middle, high) if per_cube * middle**3 + 2 * vocab * middle < billions * 1e9 else (low, middle)
    hidden = 4 * max(1, int(low / 4))
    # four wide heads in place of many: the same parameters, and every shape grows with `billions`
    shape = model_shape(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": max(1, round(low / ratio)),
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "intermediate_size": 7 * hidden // 2,
            "vocab_size": vocab,
        }
    )
    assert shape, "FAMILIES has Llama"
    return shape


# ------------------------------------------------------------------------------------------------ where a model is


def model_directory(config: TrainConfig) -> Path | None:
    """Where model_name is on this machine: `demo`, a directory, or the local Hugging Face cache's copy of a hub id.

    None for a hub id that is not in the cache. Raises UsageError for a path without a model.
    """
    name, where = config.model_name, config.sources.get("model_name", "")
    if config.is_demo:
        return DEMO_BASE
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise _no_model_error(path, where)
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UsageError(
            f"no such model directory: {name}", where=where, cure="a directory that is there, or a hub id (owner/name)"
        )
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json", revision=config.revision)
    except HFValidationError:
        raise UsageError(
            f"model_name {name!r} is neither a directory nor a hub id",
            where=where,
            cure="a directory that is there, or a hub id (owner/name)",
        ) from None
    return Path(cached).parent if isinstance(cached, str) else None


def _no_model_error(path: Path, where: str) -> UsageError:
    """What a directory without config.json is instead, where it is something of a run's."""
    run = path if (path / "adapter").is_dir() or (path / "model").is_dir() else path.parent
    adapter = path if path != run else path / "adapter"
    if (path / "model" / "config.json").is_file():
        return UsageError(
            f"{path} is a run directory, not a model directory",
            where=where,
            cure=f"--model_name {path / 'model'}, the model that it trained",
        )
    if not (adapter / "adapter_config.json").is_file():
        return UsageError(
            f"{path} has no config.json: not a model directory",
            where=where,
            cure="a directory with config.json, weights and tokenizer",
        )
    base = (
        read_config(adapter, "adapter_config.json").get("base_model_name_or_path") or "the model that it was trained on"
    )
    further = (
        f"; to train it further, the command of its run with --run_name {run.name} --resume force and more --max_steps"
    )
    return UsageError(
        f"{path} is {'an adapter' if path == adapter else 'a run directory with an adapter'}, not a model directory",
        where=where,
        cure=f"--model_name {base}, its base, starts a new adapter, and one that starts from this with --init_adapter "
        f"{adapter}" + further * (run / "config.resolved.yaml").is_file(),
    )


def model_config(config: TrainConfig) -> dict:
    """The parsed config.json of the model; empty where it is not on this machine or is none: whoever loads the model
    says why.
    """
    try:
        directory = model_directory(config)
        return read_config(directory) if directory else {}
    except UsageError:
        return {}


def read_config(directory: Path, name: str = "config.json") -> dict:
    """config.json of a model directory, or another such file. Raises UsageError when it is no JSON object."""
    path = directory / name
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path), cure="download it again") from None
    return config
