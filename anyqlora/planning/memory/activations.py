"""Bytes that a step keeps and needs on its way: activations, logits, work space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from anyqlora.config.schema import AUTO, TrainConfig
from anyqlora.core import registry
from anyqlora.core.descriptors import KernelInfo
from anyqlora.models.architectures import LinearShape, ModelShape, source_of
from anyqlora.planning.memory.weights import (
    HEAD_TOKENS,
    HEAD_VOCAB_BLOCK,
    HEAD_VOCAB_PARTS,
    adapter_parameters,
    targets,
    trains_base,
)
from anyqlora.planning.memory.widths import FULL, DtypeSizes, batch_tokens, is_fused, recomputed, traits_of

UNKNOWN_VOCABULARY = 128_000  # words of a model that is not here yet


SCORES_ON_MLX = 128 << 20  # of the pairs of tokens of the heads that attention looks at together


TAKE_ATTENTION = (
    "o_proj",
    "dense",
    "out_proj",
)  # the linear that attention's output goes into, as architectures name it


ROWS = 512  # tokens whose sums in int32 are there at a time: they stay in a processor's caches


def kernels_of(config: TrainConfig) -> KernelInfo:
    return registry.KERNELS["portable" if config.kernels == AUTO else config.kernels]


def activation_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """What autograd keeps from forward to backward: all that layers need, or what enters those that are recomputed, and
    the last norm.

    Offloaded activations leave the device, except those of one layer on their way.
    """
    again = recomputed(shapes, config)
    if again == shapes.layers:
        return recomputing_bytes(shapes, config)
    saved = (1 if config.use_activation_cpu_offload else shapes.layers - again) * layer_bytes(shapes, config)
    if again:
        return saved + recomputing_bytes(shapes, config)
    # the last norm stands for the first layer's, which needs no gradient, unless that has none or learns itself
    hidden = batch_tokens(config) * shapes.hidden
    return saved + hidden * FULL * (2 if trains_base(config) else shapes.post_norm) + head_bytes(shapes, config)


def recomputing_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """What is there when the first layer is recomputed that is: what enters each of them and the last norm.

    The others, which come after them, have had their turn in backward.
    """
    hidden, width = batch_tokens(config) * shapes.hidden, DtypeSizes.of(config)
    layers = 1 if config.use_activation_cpu_offload else recomputed(shapes, config)
    return (
        layers * hidden * width.stored
        + hidden * (width.stored if kernels_of(config).in_c else FULL)
        + head_bytes(shapes, config)
    )


def layer_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """What one layer keeps for backward without checkpointing."""
    per_token = (
        norm_bytes(shapes, config)
        + attention_bytes(shapes, config)
        + mlp_bytes(shapes, config)
        + input_bytes(shapes, config)
    )
    return batch_tokens(config) * per_token + scores_bytes(shapes, config) + cast_bytes(shapes, config)


def scores_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """What eager attention keeps of each pair of tokens, [B, heads, T, T]: capped, softmax, and in 16 bits its copy."""
    return int(config.batch_size) * shapes.heads * config.context_length**2 * 2 * FULL if shapes.eager_attention else 0


def norm_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """Per token and layer: each norm's input in float32 (native, MLX: as it is), and the normalized values where the
    norm's own weight learns.
    """
    queries, keys = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    normed = (1 if shapes.parallel else shapes.norms) * shapes.hidden + (queries + keys if shapes.qk_norm else 0)
    as_it_is = shapes.norm_bias or kernels_of(config).in_c or traits_of(config).keeps_norm_inputs
    return normed * (DtypeSizes.of(config).stored if as_it_is else FULL) * (2 if trains_base(config) else 1)


def attention_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """Per token and layer: q, k, v, and from torch's kernels and attention.c the output and one log-sum-exp per head;
    the eager form keeps k and v repeated for all heads.

    Where one linear makes q, k and v, v is a view that keeps all of them, unless autocast or attention.c copies it.
    """
    width = DtypeSizes.of(config)
    queries, keys = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    if shapes.eager_attention:
        return width.computed * 3 * queries
    is_view = shapes.fused_qkv and width.computed == width.stored and not in_c(shapes, config)
    output = 0 if in_blocks(shapes, config) else width.computed * queries + FULL * shapes.heads
    return width.computed * (queries + 2 * keys + (queries + keys if is_view else 0)) + output


def in_blocks(shapes: ModelShape, config: TrainConfig) -> bool:
    """Whether attention is by blocks (kernels/attention.py), which keeps no output of its own: bf16 on a CPU, without
    padding.
    """
    is_ours = (
        config.padding_free is True
        and traits_of(config).blocked_attention
        and config.precision.startswith("bf16")
        and not shapes.eager_attention
    )
    return is_ours and not in_c(shapes, config)


def in_c(shapes: ModelShape, config: TrainConfig) -> bool:
    """Whether attention is by attention.c, which takes heads of whole registers."""
    return (
        config.padding_free is True
        and kernels_of(config).in_c
        and not shapes.eager_attention
        and shapes.head_dim % 16 == 0
    )


def mlp_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """Per token and layer: gate, act(gate) and up, or the one that act takes (their product is down_proj's input);
    native: gate and up; MLX, which makes act of several operations: silu's sigmoid, or three steps of gelu, too.

    Experts keep their outputs before and after weighting too; they are not linear modules, so autocast makes them 16
    bits.
    """
    width, values = DtypeSizes.of(config), 3 if shapes.gated else 1
    if traits_of(config).composed_activation:
        values += 1 if shapes.silu_gate or (shapes.fused_qkv and shapes.gated) else 3
    if not shapes.experts:
        return width.inner * (2 if kernels_of(config).in_c and shapes.silu_gate else values) * shapes.intermediate
    routed = (
        width.computed * shapes.experts_per_token * (values * shapes.intermediate + 2 * shapes.hidden)
        + FULL * shapes.hidden
    )
    return routed + width.inner * values * shapes.shared_intermediate


def input_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """Per token and layer: what linears keep because something in them learns, on average where layers differ."""
    if trains_base(config):
        return _input_bytes(shapes.linears, shapes, config)
    layers = Counter(targets(shapes, config))
    return sum(count * _input_bytes(linears, shapes, config) for linears, count in layers.items()) // shapes.layers


def _input_bytes(linears: Iterable[LinearShape], shapes: ModelShape, config: TrainConfig) -> int:
    """Per token: what these `linears` of a layer keep: inputs, dropout's masks, the adapters' middles.

    Fused, or without dropout in the input's own dtype, linears of one input share it (and a mask), and o_proj's is
    attention's output, which is there already; otherwise each makes a copy of its own. DoRA keeps the frozen product
    and the adapter's: what learns scales both.
    """
    width = DtypeSizes.of(config)
    adapter, traits, fused = registry.adapter(config.adapter), traits_of(config), is_fused(config)
    is_full = adapter.trains_base
    narrow = fused or (traits.narrow_adapters and adapter.fusable)  # the adapter is multiplied in its input's dtype
    drawn_again = fused and kernels_of(config).redraws_dropout
    mask = 0 if is_full or not config.lora_dropout or drawn_again else 1 if narrow else traits.dropout_mask
    copied = width.computed if narrow else width.copied
    is_shared = fused or ((narrow or config.precision == "fp32") and not mask)
    is_there = is_shared and (
        in_c(shapes, config) or not (shapes.eager_attention or shapes.fused_qkv or in_blocks(shapes, config))
    )
    saved, seen = 0, set()
    for linear in linears:
        source = source_of(linear.name)
        if source not in seen:
            saved += linear.inputs * ((0 if is_there and source[0] in TAKE_ATTENTION else copied) + mask)
        if is_shared:
            seen.add(source)
        saved += 0 if is_full else config.lora_rank * copied
        saved += linear.outputs * (width.inner + width.copied) if adapter.keeps_outputs else 0
    return saved


def cast_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """16-bit copies of a layer's float32 weights, which autocast makes for forward and autograd keeps for backward
    (fused: neither).
    """
    width = DtypeSizes.of(config)
    if not width.autocast or is_fused(config):
        return 0
    adapters = 0 if trains_base(config) else adapter_parameters(shapes, config) // shapes.layers
    is_cast = not registry.quantizer(config.quantizer).is_quantized and width.stored == FULL
    frozen = sum(linear.parameters for linear in shapes.linears) if is_cast else 0
    return (adapters + frozen) * width.computed


def head_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """What the loss leaves for backward: the gradient of the head's input; with whole logits the head's cast weight
    and, where it learns, its input.
    """
    width, hidden = DtypeSizes.of(config), batch_tokens(config) * shapes.hidden
    if logits_chunk_tokens(shapes, config):
        return hidden * (FULL if config.precision == "fp16_autocast" else width.computed)
    cast = shapes.vocab * shapes.hidden * width.computed if width.autocast and width.stored == FULL else 0
    return cast + (hidden * (width.computed + FULL) if trains_base(config) else 0)


def logits_chunk_tokens(shapes: ModelShape | None, config: TrainConfig) -> int:
    """Trained tokens whose logits are made at a time: as stated, else a power of two of which the logits stay near a
    cache's size on a CPU, and keep a GPU busy. 0: all of a micro-batch.
    """
    if config.logits_chunk_tokens != "auto":
        return int(config.logits_chunk_tokens)
    if config.fused_linear_cross_entropy is True:
        return HEAD_TOKENS
    vocab, width = shapes.vocab if shapes else UNKNOWN_VOCABULARY, 2 if kernels_of(config).in_c else 2 * FULL
    rows = traits_of(config).logits_chunk // (vocab * width)
    return 1 << min(max(rows, 16), 4096).bit_length() - 1


def logit_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """Of the tokens that are looked at together, [N, V]: their logits, the float32 softmax and, in 16 bits, the
    gradient; all tokens' inputs of the head, its weight where that is cast, and the weight's gradient where it learns.

    With whole logits, of float32 [B * T, V]: the log-softmax that autograd keeps, and in backward its gradient and the
    gradient of the logits. Every token is taken to be trained.
    """
    width, tokens, rows = (
        DtypeSizes.of(config),
        batch_tokens(config),
        logits_chunk_tokens(shapes, config),
    )
    if not rows:
        return tokens * shapes.vocab * (3 * FULL + (width.computed if shapes.capped_logits else 0))
    weight = (
        shapes.vocab
        * shapes.hidden
        * ((width.computed if width.computed != width.stored else 0) + (FULL if trains_base(config) else 0))
    )
    return (
        head_room(shapes, config, min(rows, tokens), is_learned=True) + tokens * shapes.hidden * width.computed + weight
    )


def head_room(shapes: ModelShape, config: TrainConfig, rows: int, is_learned: bool) -> int:
    """Of so many tokens that are looked at together: their logits; by csrc/lm_head.c a copy of the head's inputs, for
    some parts of the words float32 sums of its gradient, and each thread's packed weights.
    """
    if config.fused_linear_cross_entropy is not True:
        return rows * shapes.vocab * chunk_width(shapes, config)
    sums = 64 + FULL * shapes.hidden
    blocks = -(-shapes.vocab // HEAD_VOCAB_BLOCK)
    parts = -(-blocks // -(-blocks // min(HEAD_VOCAB_PARTS, max(1, 2 * shapes.vocab // sums))))
    packed = (
        2 * (2 * HEAD_VOCAB_BLOCK * shapes.hidden) * (1 if config.cpu_threads == "auto" else int(config.cpu_threads))
    )  # the words' weights, for both products
    return rows * (parts * (sums if is_learned else 64) + 2 * shapes.hidden) + packed


def chunk_width(shapes: ModelShape, config: TrainConfig) -> int:
    """Bytes per logit of the tokens that are looked at together; native: the gradient takes the logit's place."""
    width = DtypeSizes.of(config)
    if kernels_of(config).in_c and not shapes.capped_logits:
        return width.computed
    return FULL + width.computed * (1 if width.computed == FULL else 2) + (2 * FULL if shapes.capped_logits else 0)


def work_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """Backward of one layer: its largest weight dequantized, the MLP's gradients; MLX, which has up to ten operations
    under way, of those four times as much, or where that is more, of the pairs of tokens the scores, their softmax and
    the gradients of both, or twice as much of those that attention looks at together (eager: of all).
    """
    width, tokens = DtypeSizes.of(config), batch_tokens(config)
    largest = max(linear.outputs * linear.inputs for linear in shapes.linears)
    weight = largest * width.computed if registry.quantizer(config.quantizer).is_quantized else 0
    gradients = (
        2 * tokens * (shapes.intermediate * (shapes.experts_per_token or 1) + shapes.shared_intermediate) * width.inner
    )
    if traits_of(config).overlaps:
        one = config.context_length**2 * width.computed  # head
        pairs = min(4 * int(config.batch_size) * shapes.heads * one, 8 * max(SCORES_ON_MLX, one))
        gradients = max(4 * gradients, 3 * scores_bytes(shapes, config) if shapes.eager_attention else pairs)
    return weight + gradients + rounding_bytes(shapes, config)


def rounding_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """Of a product in 8 bits: a token's codes, and on a CPU the int32 sums of so many tokens."""
    products = registry.FROZEN_MATMULS[config.frozen_matmul]
    if not products.is_rounded:
        return 0
    widest, tokens = (
        max(max(linear.outputs, linear.inputs) for linear in shapes.linears),
        batch_tokens(config),
    )
    return widest * (tokens + products.sum_bytes * min(ROWS, tokens))


def evaluation_bytes(shapes: ModelShape, config: TrainConfig) -> int:
    """Of eval_batch_size rows: one layer's MLP, and the logits of the tokens that are looked at together; with whole
    logits those of all trained tokens in float32, and their log-softmax.
    """
    width, tokens, rows = (
        DtypeSizes.of(config),
        config.eval_batch_size * config.context_length,
        logits_chunk_tokens(shapes, config),
    )
    if not rows:
        return tokens * shapes.vocab * 2 * FULL
    layer = tokens * (3 * shapes.intermediate * width.inner + 2 * shapes.hidden * FULL)
    return layer + head_room(shapes, config, min(rows, tokens), is_learned=False)
