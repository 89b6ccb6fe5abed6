"""The bytes a run needs, part by part, from shapes alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from anyqlora.config.resolve import TrainConfig
from anyqlora.core.registry import AFFINE, BITS, FUSED_ADAPTERS, FUSED_QUANTIZERS, FUSED_STRATEGIES
from anyqlora.models.architectures import Linear, Shapes, source_of

FULL = 4  # bytes of float32: adapters, gradients and moments in every precision
STORED = {
    "fp32": 4,
    "bf16": 2,
    "fp16_autocast": 4,
    "bf16_autocast": 4,
    "bf16_buffers_autocast": 2,
}  # of an unquantized frozen weight
MOMENTS = {
    "adamw": 8,
    "fused_adamw": 8,
    "adam": 8,
    "paged_adamw": 8,
    "adadelta": 8,
    "sgd": 0,  # bytes per trained parameter
    "adamw_8bit": 2 + 2 * 4 / 256,
    "paged_adamw_8bit": 2 + 2 * 4 / 256,
}  # 8-bit: one float32 scale per 256 values
GROUPS = {"mxfp4": 32, "nvfp4": 16}  # weights per scale, where it is not for choice
BLOCK, SCALES_BLOCK = 64, 256  # weights per 4-bit scale; scales per scale of double quantization
LOSS_BYTES, LOSS_BYTES_ON_MLX, LOSS_BYTES_ON_GPU, UNKNOWN_VOCABULARY = (
    64 << 20,
    256 << 20,
    512 << 20,
    128_000,
)  # of the logits that are made at a time
HEAD_ROWS, HEAD_PARTS, HEAD_WORDS, HEAD_COLUMNS = (
    512,
    8,
    128,
    32,
)  # kernels/head.c: tokens that share packed weights, parts of the words, words and columns at a time
LIBRARIES, HOLES = (
    24 << 20,
    0.10,
)  # in host memory: what oneDNN and MKL keep for themselves, and holes that heap.py lets be
SCORES_ON_MLX = 128 << 20  # of the pairs of tokens of the heads that attention looks at together
COMPILED, OF_PRODUCT = (
    128,
    600 << 10,
)  # products in 16 bits that oneDNN may keep (heap.py), two or three lengths with 40 or 50 shapes each; bytes
TAKE_ATTENTION = (
    "o_proj",
    "dense",
    "out_proj",
)  # the linear that attention's output goes into, as architectures name it
ROWS = 512  # tokens whose sums in int32 are there at a time: they stay in a processor's caches
FUSED_DROPOUT = ("cuda", "rocm", "xpu")  # there dropout keeps a byte per value, elsewhere a float32


@dataclass(frozen=True)
class Estimate:
    """Predicted bytes at each moment of a run when memory may peak: {moment: {part: bytes}}."""

    moments: Mapping[str, Mapping[str, int]]
    products: int = COMPILED  # that oneDNN may keep

    @property
    def peak(self) -> str:
        """The moment that needs most."""
        return max(self.moments, key=self.needed)

    @property
    def parts(self) -> Mapping[str, int]:
        return self.moments[self.peak]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def needed(self, moment: str) -> int:
        """Bytes at one moment; 0 when the run does not come to it."""
        return sum(self.moments.get(moment, {}).values())

    def to_dict(self) -> dict:
        return {
            "total": self.total,
            "peak": self.peak,
            "moments": {moment: dict(parts) for moment, parts in self.moments.items()},
        }


@dataclass(frozen=True)
class Widths:
    """Bytes per value, by precision. Full fine-tuning keeps float32 weights, and any other precision is autocast then."""

    stored: int  # unquantized frozen weights, and the residual stream, which starts as an embedding
    computed: int  # what matrix products and attention see
    inner: int  # between the linears of an MLP: 4-bit linears give back the dtype they were given
    autocast: bool

    @classmethod
    def of(cls, config: TrainConfig) -> Widths:
        is_full = config.adapter == "full"
        stored = FULL if is_full else stored_bytes(config)
        computed = FULL if config.precision == "fp32" else 2
        autocast = config.precision.endswith("autocast") or (is_full and computed == 2)
        return cls(stored, computed, stored if config.quantizer in ("nf4", "fp4") else computed, autocast)

    @property
    def copied(self) -> int:
        """What an adapter computes in: float32, unless autocast turns its input into 16 bits."""
        return self.computed if self.autocast else FULL


def stored_bytes(config: TrainConfig) -> int:
    """Of an unquantized frozen weight. MLX has no autocast: it keeps in 16 bits what it computes in 16 bits."""
    return 2 if config.backend == "mlx" and config.precision != "fp32" else STORED[config.precision]


def group_size(config: TrainConfig) -> int:
    """Weights of a row that share a scale; 0 where scales know no rows."""
    return config.affine_group_size if config.quantizer in AFFINE else GROUPS.get(config.quantizer, 0)


def shown(count: float) -> str:
    """Bytes with a unit: 4.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@dataclass(frozen=True)
class Shards:
    """Into how many parts a strategy splits what a process would else hold whole."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1

    @classmethod
    def of(cls, config: TrainConfig) -> Shards:
        n = max(config.world_size, 1)
        if config.strategy == "fsdp":
            return cls(1 if config.sharding_strategy.endswith("shard_grad_op") else n, n, n)
        if config.strategy == "deepspeed":
            stage = config.deepspeed_zero_stage if config.deepspeed_zero_stage >= 0 else 2
            return cls(n if stage == 3 else 1, n if stage >= 2 else 1, n if stage >= 1 else 1)
        return cls()


def together_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """What a sharded model holds whole while it works: two layers, as the next one is fetched meanwhile, and what is in no layer."""
    whole = weight_bytes(shapes, config)
    outside = shapes.other_parameters * (FULL if config.adapter == "full" else STORED[config.precision])
    return outside + 2 * max(sum(whole.values()) - outside, 0) // shapes.layers


def estimate(shapes: Shapes, config: TrainConfig) -> Estimate:
    """Predicted bytes on the device for a config whose every auto is resolved. Rows are taken to be context_length long.

    Gradients are made in backward and cleared after the update, so they are there during the loss only when accumulating.
    """
    shards = Shards.of(config)
    weights = {part: -(-count // shards.weights) for part, count in weight_bytes(shapes, config).items()}
    trained = trained_parameters(shapes, config)
    optimizer = {"optimizer": round(trained * MOMENTS[config.optimizer] / shards.optimizer)}
    gradients = {"gradients": trained * FULL // shards.gradients}
    if shards.weights > 1:
        weights["layers put together"] = together_bytes(shapes, config)
    kept = {"activations": activation_bytes(shapes, config)}
    moments = {
        "loading": weights | {"tensor being read": largest_tensor(shapes) * FULL},
        "loss": weights
        | optimizer
        | (gradients if config.gradient_accumulation_steps > 1 else {})
        | kept
        | {"logits and loss": logit_bytes(shapes, config)},
        "backward": weights | optimizer | gradients | kept | {"layer at work": work_bytes(shapes, config)},
        **(
            {
                "recomputation": weights
                | optimizer
                | gradients
                | {
                    "activations": recomputing_bytes(shapes, config),
                    "layer at work": work_bytes(shapes, config) + layer_bytes(shapes, config),
                }
            }
            if recomputed(shapes, config)
            else {}
        ),
        "update": weights | optimizer | gradients | {"update": update_bytes(shapes, config)},
    }
    if config.eval_dataset or config.eval_fraction:
        moments["evaluation"] = weights | optimizer | {"logits and loss": evaluation_bytes(shapes, config)}
    if config.backend == "cpu":
        is_in_c = (
            config.fused_head is True
            and config.fused
            and not shapes.experts  # then oneDNN has nothing to compile
            and len(targets(shapes, config)) == len(shapes.linears)
            and config.lora_rank % 2 == 0
        )
        libraries = LIBRARIES if config.precision == "fp32" or is_in_c else products(shapes) * OF_PRODUCT
        for parts in moments.values():
            parts["heap and libraries"] = libraries + round(HOLES * sum(parts.values()))
    return Estimate(moments, products(shapes))


def products(shapes: Shapes) -> int:
    """How many compiled products oneDNN may keep: more for a mixture, since each expert has tokens of its own number."""
    return COMPILED * (4 if shapes.experts else 1)


# ------------------------------------------------------------------------------------------------------------ weights


def weight_bytes(shapes: Shapes, config: TrainConfig) -> dict[str, int]:
    """What stays: the frozen weights and the adapter, or all weights in float32."""
    if config.adapter == "full":
        return {"weights": shapes.parameters * FULL}
    linears = shapes.layers * sum(linear.count * quantized_bytes(linear, config) for linear in shapes.linears)
    cache = cache_bytes(shapes, config)
    return {
        "linear weights": linears,
        **({"dequantized weights": cache} if cache else {}),
        "embedding, head, norms": shapes.other_parameters * stored_bytes(config) + rounded_head_bytes(shapes, config),
        "adapter": adapter_parameters(shapes, config) * FULL,
    }


def cache_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """The weights of so many layers as they are multiplied, beside their codes: float8 once for each direction, and int8_backward beside the
    dequantized ones, which without a quantizer are the model's own."""
    layers = 0 if config.weight_cache == "auto" else min(config.weight_cache, shapes.layers)
    whole = Widths.of(config).computed
    width = {"int8": 1, "int8_backward": 1 + (0 if config.quantizer == "none" else whole), "fp8": 2}.get(
        config.frozen_products, whole
    )
    return layers * sum(linear.parameters for linear in targets(shapes, config)) * width


def quantized_bytes(linear: Linear, config: TrainConfig) -> int:
    """One linear: nf4 and fp4 half a byte per weight and a scale per 64 (float32; with double quantization one byte, and float32
    per 256 scales); int8 one byte per weight and a float32 scale per output; affine a scale and a bias per group of a row; none the
    precision's own dtype."""
    n = linear.outputs * linear.inputs
    if config.quantizer == "none":
        return n * stored_bytes(config)
    if group := group_size(config):
        scale = (
            1
            if config.quantizer in GROUPS
            else 2 * (FULL if config.backend == "mlx" and config.precision == "fp32" else 2)
        )
        return n * BITS[config.quantizer] // 8 + scale * n // group
    if config.quantizer == "int8":
        return n + FULL * linear.outputs
    scales = -(-n // BLOCK)
    nested = config.double_quant and config.backend != "mlx"  # there the scales are unpacked when they are read
    scale_bytes = scales + FULL * -(-scales // SCALES_BLOCK) if nested else FULL * scales
    return -(-n // 2) + scale_bytes


def largest_tensor(shapes: Shapes) -> int:
    """Elements of the largest tensor in the files: it is in memory in float32 while it is quantized."""
    return max(shapes.vocab * shapes.hidden, *(linear.outputs * linear.inputs for linear in shapes.linears))


def targets(shapes: Shapes, config: TrainConfig) -> tuple[Linear, ...]:
    """The linears of one layer that get an adapter, as lora_target_modules says: all, PEFT's default, a list or a regex."""
    wanted = config.lora_target_modules
    linears = tuple(
        linear for linear in shapes.linears if linear.count == 1
    )  # experts are parameters, not linear modules
    if wanted in ("all", "all-linear"):
        return linears
    if wanted == "default":
        wanted = "q_proj,v_proj,qkv_proj,query_key_value"
    names = {name.strip() for name in wanted.split(",")}
    listed = tuple(linear for linear in linears if linear.name.rpartition(".")[2] in names)
    return listed or tuple(linear for linear in linears if _is_named(linear, wanted))


def _is_named(linear: Linear, pattern: str) -> bool:
    """Whether a regex of module names takes this linear in some layer."""
    try:
        return any(
            re.fullmatch(pattern, f"{root}.layers.{layer}.{linear.name}")
            for root in ("model", "gpt_neox")
            for layer in (0, 1, 10)
        )
    except re.error:
        return False


def adapter_parameters(shapes: Shapes, config: TrainConfig) -> int:
    """Rank x (inputs + outputs) per linear; DoRA adds one magnitude per output."""
    magnitude = 1 if config.adapter == "dora" else 0
    return shapes.layers * sum(
        config.lora_rank * (linear.inputs + linear.outputs) + magnitude * linear.outputs
        for linear in targets(shapes, config)
    )


def trained_parameters(shapes: Shapes, config: TrainConfig) -> int:
    return shapes.parameters if config.adapter == "full" else adapter_parameters(shapes, config)


def update_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """What the update of one tensor needs beside it (AdamW: the denominator); multi-tensor updates on a GPU do all at once."""
    if config.adapter != "full":
        return adapter_parameters(shapes, config) * FULL
    return (shapes.parameters if config.backend in FUSED_DROPOUT else largest_tensor(shapes)) * FULL


# -------------------------------------------------------------------------------------------------------- activations


def recomputed(shapes: Shapes, config: TrainConfig) -> int:
    """The first layers, which keep their input only: as many as are stated, else with checkpointing all of them."""
    if not config.use_gradient_checkpointing:
        return 0
    return shapes.layers if config.recomputed_layers == "auto" else min(config.recomputed_layers, shapes.layers)


def activation_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """What autograd keeps from forward to backward: all that layers need, or what enters those that are recomputed, and the last norm.

    Offloaded activations leave the device, except those of one layer on their way.
    """
    again = recomputed(shapes, config)
    if again == shapes.layers:
        return recomputing_bytes(shapes, config)
    kept = (1 if config.use_activation_cpu_offload else shapes.layers - again) * layer_bytes(shapes, config)
    if again:
        return kept + recomputing_bytes(shapes, config)
    # the last norm stands for the first layer's, which needs no gradient, unless that has none or learns itself
    hidden = config.batch_size * config.context_length * shapes.hidden
    return kept + hidden * FULL * (2 if config.adapter == "full" else shapes.post_norm) + head_bytes(shapes, config)


def recomputing_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """What is there when the first layer is recomputed that is: what enters each of them and the last norm. The others, which come after
    them, have had their turn in backward."""
    hidden, width = config.batch_size * config.context_length * shapes.hidden, Widths.of(config)
    layers = 1 if config.use_activation_cpu_offload else recomputed(shapes, config)
    return (
        layers * hidden * width.stored
        + hidden * (width.stored if config.kernels == "native" else FULL)
        + head_bytes(shapes, config)
    )


def layer_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """What one layer keeps for backward without checkpointing."""
    per_token = (
        norm_bytes(shapes, config)
        + attention_bytes(shapes, config)
        + mlp_bytes(shapes, config)
        + input_bytes(shapes, config)
    )
    return (
        config.batch_size * config.context_length * per_token
        + scores_bytes(shapes, config)
        + cast_bytes(shapes, config)
    )


def scores_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """What eager attention keeps of each pair of tokens, [B, heads, T, T]: capped, softmax, and in 16 bits its copy."""
    return config.batch_size * shapes.heads * config.context_length**2 * 2 * FULL if shapes.eager_attention else 0


def norm_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """Per token and layer: each norm's input in float32 (native, MLX: as it is), and the normalized values where the norm's own weight learns."""
    queries, keys = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    normed = (1 if shapes.parallel else shapes.norms) * shapes.hidden + (queries + keys if shapes.qk_norm else 0)
    as_it_is = shapes.norm_bias or config.kernels == "native" or config.backend == "mlx"
    return normed * (Widths.of(config).stored if as_it_is else FULL) * (2 if config.adapter == "full" else 1)


def attention_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """Per token and layer: q, k, v, and from torch's kernels and attention.c the output and one log-sum-exp per head; the eager form keeps
    k and v repeated for all heads.

    Where one linear makes q, k and v, v is a view that keeps all of them, unless autocast or attention.c copies it.
    """
    width = Widths.of(config)
    queries, keys = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    if shapes.eager_attention:
        return width.computed * 3 * queries
    is_view = shapes.fused_qkv and width.computed == width.stored and not in_c(shapes, config)
    output = 0 if in_blocks(shapes, config) else width.computed * queries + FULL * shapes.heads
    return width.computed * (queries + 2 * keys + (queries + keys if is_view else 0)) + output


def in_blocks(shapes: Shapes, config: TrainConfig) -> bool:
    """Whether attention is by blocks (kernels/attention.py), which keeps no output of its own: bf16 on a CPU, without padding."""
    is_ours = (
        config.flat is True
        and config.backend == "cpu"
        and config.precision.startswith("bf16")
        and not shapes.eager_attention
    )
    return is_ours and not in_c(shapes, config)


def in_c(shapes: Shapes, config: TrainConfig) -> bool:
    """Whether attention is by attention.c, which takes heads of whole registers."""
    return (
        config.flat is True and config.kernels == "native" and not shapes.eager_attention and shapes.head_dim % 16 == 0
    )


def mlp_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """Per token and layer: gate, act(gate) and up, or the one that act takes (their product is down_proj's input); native: gate and up;
    MLX, which makes act of several operations: silu's sigmoid, or three steps of gelu, too.

    Experts keep their outputs before and after weighting too; they are not linear modules, so autocast makes them 16 bits.
    """
    width, values = Widths.of(config), 3 if shapes.gated else 1
    if config.backend == "mlx":
        values += 1 if shapes.silu_gate or (shapes.fused_qkv and shapes.gated) else 3
    if not shapes.experts:
        return width.inner * (2 if config.kernels == "native" and shapes.silu_gate else values) * shapes.intermediate
    routed = (
        width.computed * shapes.experts_per_token * (values * shapes.intermediate + 2 * shapes.hidden)
        + FULL * shapes.hidden
    )
    return routed + width.inner * values * shapes.shared_intermediate


def input_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """Per token and layer: what linears keep because something in them learns: inputs, dropout's masks, the adapters' middles.

    Fused, or without dropout in the input's own dtype, linears of one input share it (and a mask), and o_proj's is attention's output,
    which is there already; otherwise each makes a copy of its own. DoRA keeps the frozen product and the adapter's: what learns scales both.
    """
    width = Widths.of(config)
    is_full, fused = config.adapter == "full", is_fused(config)
    narrow = fused or (
        config.backend == "mlx" and config.adapter in FUSED_ADAPTERS
    )  # the adapter is multiplied in its input's dtype
    drawn_again = fused and config.kernels == "triton"  # kernels/dropout.py keeps a seed
    mask = (
        0
        if is_full or not config.lora_dropout or drawn_again
        else 1
        if narrow or config.backend in FUSED_DROPOUT
        else FULL
    )
    copied = width.computed if narrow else width.copied
    is_shared = fused or ((narrow or config.precision == "fp32") and not mask)
    is_there = is_shared and (
        in_c(shapes, config) or not (shapes.eager_attention or shapes.fused_qkv or in_blocks(shapes, config))
    )
    kept, seen = 0, set()
    for linear in shapes.linears if is_full else targets(shapes, config):
        source = source_of(linear.name)
        if source not in seen:
            kept += linear.inputs * ((0 if is_there and source[0] in TAKE_ATTENTION else copied) + mask)
        if is_shared:
            seen.add(source)
        kept += 0 if is_full else config.lora_rank * copied
        kept += linear.outputs * (width.inner + width.copied) if config.adapter == "dora" else 0
    return kept


def is_fused(config: TrainConfig) -> bool:
    """Whether LoRA runs in one function with its frozen weight: as stated, else wherever it can."""
    fits = (
        config.adapter in FUSED_ADAPTERS
        and config.quantizer in FUSED_QUANTIZERS
        and config.strategy in ("auto", *FUSED_STRATEGIES)
    )
    return fits if config.fused == "auto" else config.fused


def cast_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """16-bit copies of a layer's float32 weights, which autocast makes for forward and autograd keeps for backward (fused: neither)."""
    width = Widths.of(config)
    if not width.autocast or is_fused(config):
        return 0
    adapters = 0 if config.adapter == "full" else adapter_parameters(shapes, config) // shapes.layers
    frozen = (
        sum(linear.parameters for linear in shapes.linears)
        if config.quantizer == "none" and width.stored == FULL
        else 0
    )
    return (adapters + frozen) * width.computed


def rounded_head_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """The head's weights as codes, by which its gradient is made (kernels/head.c), in whole blocks."""
    if config.fused_head is not True or config.frozen_products == "full":
        return 0
    return -(-shapes.vocab // HEAD_WORDS) * HEAD_WORDS * -(-shapes.hidden // HEAD_COLUMNS) * HEAD_COLUMNS


def head_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """What the loss leaves for backward: the gradient of the head's input; with whole logits the head's cast weight and, where it
    learns, its input."""
    width, hidden = Widths.of(config), config.batch_size * config.context_length * shapes.hidden
    if loss_rows(shapes, config):
        return hidden * (FULL if config.precision == "fp16_autocast" else width.computed)
    cast = shapes.vocab * shapes.hidden * width.computed if width.autocast and width.stored == FULL else 0
    return cast + (hidden * (width.computed + FULL) if config.adapter == "full" else 0)


# -------------------------------------------------------------------------------------------------------- at the peaks


def loss_rows(shapes: Shapes | None, config: TrainConfig) -> int:
    """Trained tokens whose logits are made at a time: as stated, else a power of two of which the logits stay near a cache's size on a
    CPU, and keep a GPU busy. 0: all of a micro-batch."""
    if config.loss_rows != "auto":
        return config.loss_rows
    if config.fused_head is True:
        return HEAD_ROWS
    budget = (
        LOSS_BYTES_ON_MLX
        if config.backend == "mlx"
        else LOSS_BYTES_ON_GPU
        if config.backend in FUSED_DROPOUT
        else LOSS_BYTES
    )
    rows = budget // (
        (shapes.vocab if shapes else UNKNOWN_VOCABULARY) * (2 if config.kernels == "native" else 2 * FULL)
    )
    return 1 << min(max(rows, 16), 4096).bit_length() - 1


def logit_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """Of the tokens that are looked at together, [N, V]: their logits, the float32 softmax and, in 16 bits, the gradient; all tokens'
    inputs of the head, its weight where that is cast, and the weight's gradient where it learns.

    With whole logits, of float32 [B * T, V]: the log-softmax that autograd keeps, and in backward its gradient and the gradient of
    the logits. Every token is taken to be trained.
    """
    width, tokens, rows = Widths.of(config), config.batch_size * config.context_length, loss_rows(shapes, config)
    if not rows:
        return tokens * shapes.vocab * (3 * FULL + (width.computed if shapes.capped_logits else 0))
    weight = (
        shapes.vocab
        * shapes.hidden
        * ((width.computed if width.computed != width.stored else 0) + (FULL if config.adapter == "full" else 0))
    )
    return (
        head_room(shapes, config, min(rows, tokens), is_learned=True) + tokens * shapes.hidden * width.computed + weight
    )


def head_room(shapes: Shapes, config: TrainConfig, rows: int, is_learned: bool) -> int:
    """Of so many tokens that are looked at together: their logits; by kernels/head.c a copy of the head's inputs, for some parts of the words
    float32 sums of its gradient, and each thread's packed weights."""
    if config.fused_head is not True:
        return rows * shapes.vocab * chunk_width(shapes, config)
    sums = 64 + FULL * shapes.hidden
    blocks = -(-shapes.vocab // HEAD_WORDS)
    parts = -(-blocks // -(-blocks // min(HEAD_PARTS, max(1, 2 * shapes.vocab // sums))))
    packed = (
        2 * (2 * HEAD_WORDS * shapes.hidden) * (1 if config.threads == "auto" else config.threads)
    )  # the words' weights, for both products
    return rows * (parts * (sums if is_learned else 64) + 2 * shapes.hidden) + packed


def chunk_width(shapes: Shapes, config: TrainConfig) -> int:
    """Bytes per logit of the tokens that are looked at together; native: the gradient takes the logit's place."""
    width = Widths.of(config)
    if config.kernels == "native" and not shapes.capped_logits:
        return width.computed
    return FULL + width.computed * (1 if width.computed == FULL else 2) + (2 * FULL if shapes.capped_logits else 0)


def work_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """Backward of one layer: its largest weight dequantized, the MLP's gradients; MLX, which has up to ten operations under way, of those
    four times as much, or where that is more, of the pairs of tokens the scores, their softmax and the gradients of both, or twice as much
    of those that attention looks at together (eager: of all)."""
    width, tokens = Widths.of(config), config.batch_size * config.context_length
    weight = (
        max(linear.outputs * linear.inputs for linear in shapes.linears) * width.computed
        if config.quantizer != "none"
        else 0
    )
    gradients = (
        2 * tokens * (shapes.intermediate * (shapes.experts_per_token or 1) + shapes.shared_intermediate) * width.inner
    )
    if config.backend == "mlx":
        one = config.context_length**2 * width.computed  # head
        pairs = min(4 * config.batch_size * shapes.heads * one, 8 * max(SCORES_ON_MLX, one))
        gradients = max(4 * gradients, 3 * scores_bytes(shapes, config) if shapes.eager_attention else pairs)
    return weight + gradients + rounding_bytes(shapes, config)


def rounding_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """Of a product in 8 bits: a token's codes, and on a CPU the int32 sums of so many tokens."""
    if config.frozen_products == "full":
        return 0
    widest, tokens = (
        max(max(linear.outputs, linear.inputs) for linear in shapes.linears),
        config.batch_size * config.context_length,
    )
    return widest * (tokens + (0 if config.frozen_products == "fp8" else FULL * min(ROWS, tokens)))


def evaluation_bytes(shapes: Shapes, config: TrainConfig) -> int:
    """Of eval_batch_size rows: one layer's MLP, and the logits of the tokens that are looked at together; with whole logits those of
    all trained tokens in float32, and their log-softmax."""
    width, tokens, rows = Widths.of(config), config.eval_batch_size * config.context_length, loss_rows(shapes, config)
    if not rows:
        return tokens * shapes.vocab * 2 * FULL
    layer = tokens * (3 * shapes.intermediate * width.inner + 2 * shapes.hidden * FULL)
    return layer + head_room(shapes, config, min(rows, tokens), is_learned=False)
