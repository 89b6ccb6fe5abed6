"""The C kernels of csrc/ as functions of tensors: a bf16 step on a CPU. Shapes stand here, what is computed there."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from anyqlora.on_torch.kernels import reference
from anyqlora.on_torch.kernels.cpu import header
from anyqlora.on_torch.kernels.cpu.library import available, build_library, call, library, preferred
from anyqlora.planning.memory.weights import HEAD_VOCAB_BLOCK, PANEL_COLUMNS
from anyqlora.planning.native_kernels import HEADER

__all__ = ["available", "build_library", "library", "preferred"]  # of library.py, beside what is defined here

LAYOUT = header.layout(header.members(HEADER.read_text(encoding="utf-8"), "LoraLinear"))
LANES = 16  # a head is a multiple of it wide


def self_check() -> str:
    """Why a model cannot run on them here; "" where it can."""
    try:
        if not hasattr(library(), "attention"):
            return "the processor has no AVX512-BF16"
    except subprocess.CalledProcessError as error:
        return f"the C compiler refuses them: {(error.stderr or 'no word').strip().splitlines()[-1]}"
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    x = torch.linspace(-1, 1, 96).bfloat16().view(1, 3, 2, 16)
    cos, sin = x[:, :, 0] * 0.7, x[:, :, 1] * 0.3
    exact = cos.float(), sin.float()
    off = (rotate(x, *exact) - reference.promoted(x.float(), *exact)).abs().max()
    is_same = torch.equal(rotate(x, cos, sin), reference.rotate(x, cos, sin)) and off < 2**-8
    return "" if is_same else "they give other numbers than their references"


def is_for(*tensors: torch.Tensor) -> bool:
    """Whether these are bf16 on a CPU."""
    return all(x.dtype == torch.bfloat16 and x.device.type == "cpu" for x in tensors)


# ------------------------------------------------------------------------------------------------------------ attention


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor, longest: int, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v within documents [B, T, H, D], zero elsewhere, and the logarithms of the softmax's
    denominators, float32 [B, T, H].

    q [B, T, H, D], k and v [B, T, K, D], contiguous; documents int64 [N, 3]: row, first token, end; `longest` tokens in
    one of them.
    """
    (rows, length, heads, width), kv_heads = q.shape, k.shape[2]
    out, logsumexp = torch.zeros_like(q), torch.empty(rows, length, heads)
    sizes = len(documents), longest, length, heads, kv_heads, width, window, scale
    call("attention", q, k, v, out, logsumexp, documents, *sizes)
    return out, logsumexp


def attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    documents: torch.Tensor,
    longest: int,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v, from what `attention` was given and returned."""
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    sizes = len(documents), longest, *q.shape[1:3], *k.shape[2:], window, scale
    call("attention_backward", grad_out, q, k, v, out, logsumexp, *grads, documents, *sizes)
    return grads


# ------------------------------------------------------------------------------------------------------------- the loss


def cross_entropy_(logits: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
    """The cross-entropy of each row of scale * logits [N, V], float32 [N]; the logits become the
    gradient of their sum.
    """
    losses = torch.empty(len(logits))
    call("cross_entropy", logits, targets.contiguous(), losses, *logits.shape, scale)
    return losses


class QuantizedHead(NamedTuple):
    """A head's weights [V, H] without their mean over the vocabulary, in 8 bits."""

    codes: (
        torch.Tensor
    )  # packed: int8 [V / HEAD_VOCAB_BLOCK, H / PANEL_COLUMNS, HEAD_VOCAB_BLOCK / 4, PANEL_COLUMNS, 4]
    scales: torch.Tensor  # float32 [V]
    mean: torch.Tensor  # float32 [H]


def lm_head_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    scale: float,
    rows: int,
    grad_hidden: torch.Tensor | None,
    quantized: QuantizedHead | None = None,
) -> torch.Tensor:
    """The cross-entropy of each row of scale * (hidden [N, H] weight [V, H]^T + bias [V]), float32 [N]; grad_hidden,
    contiguous, becomes the gradient of their sum.

    All are bf16, and H is even. `rows` share a weight that is packed. Their logits are float32 and never in memory;
    probabilities are bf16, and the gradient is rounded once. `quantized`, of `quantize_lm_head`: it is of those
    weights, and of probabilities in 8 bits.
    """
    hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.contiguous()
    bias = None if bias is None else bias.contiguous()
    losses, (vocab, depth) = torch.empty(len(hidden)), weight.shape
    size = call("lm_head_workspace", min(rows, len(hidden)), depth, vocab, grad_hidden is not None)
    workspace = torch.empty(size, dtype=torch.uint8)
    for chunk in map(slice, range(0, len(hidden), rows), range(rows, len(hidden) + rows, rows)):
        grad = None if grad_hidden is None else grad_hidden[chunk]
        head = weight, bias, *(quantized or 3 * (None,))
        sizes = len(hidden[chunk]), depth, vocab, scale
        call("lm_head_cross_entropy", hidden[chunk], *head, targets[chunk], losses[chunk], grad, workspace, *sizes)
    return losses


VOCAB_CHUNK = 4096  # rows of a head's weights that are quantized together: they are float32 meanwhile
PER_WORD = 4  # codes in a word of 32 bits, that an instruction reads


def quantize_lm_head(weight: torch.Tensor) -> QuantizedHead | None:
    """A head's weights [V, H] as `lm_head_cross_entropy` has them for a gradient in 8 bits; None where it cannot.

    Codes are packed once, with zeros after the last row and column.
    """
    if not (available("lm_head_cross_entropy") and is_for(weight)) or weight.shape[1] % 2:
        return None
    mean = torch.stack([chunk.float().sum(0) for chunk in weight.split(VOCAB_CHUNK)]).sum(0) / len(weight)
    blocks, panels = -(-len(weight) // HEAD_VOCAB_BLOCK), -(-weight.shape[1] // PANEL_COLUMNS)
    lines = HEAD_VOCAB_BLOCK // PER_WORD
    codes = torch.empty(blocks, panels, lines, PANEL_COLUMNS, PER_WORD, dtype=torch.int8)
    scales = torch.empty(len(weight))
    chunks = weight.split(VOCAB_CHUNK), codes.split(VOCAB_CHUNK // HEAD_VOCAB_BLOCK), scales.split(VOCAB_CHUNK)
    for chunk, chunk_codes, chunk_scales in zip(*chunks, strict=True):
        rows, row_scales = quantize_int8_rows((chunk - mean).to(chunk.dtype), hadamard=True)
        padded = nn.functional.pad(rows, (0, -rows.shape[1] % PANEL_COLUMNS, 0, -len(rows) % HEAD_VOCAB_BLOCK))
        shape = len(chunk_codes), lines, PER_WORD, panels, PANEL_COLUMNS
        chunk_codes.copy_(padded.view(shape).permute(0, 3, 1, 4, 2))
        chunk_scales.copy_(row_scales)
    return QuantizedHead(codes, scales, mean)


# ------------------------------------------------------------------------------------------------------ matrix products


def frozen_matmul(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    *,
    transposed: bool = False,
    accumulate: bool = False,
    row_scales: torch.Tensor | None = None,
    column_scales: torch.Tensor | None = None,
    hadamard: bool = False,
    bias: torch.Tensor | None = None,
    lora: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """out [M, N] = left [M, K] right^T + hidden factor^T + bias [N], with right [N, K] and factor [N, R].

    transposed: right is [K, N] and factor [R, N]; accumulate: out + both products. lora: hidden [M, R], bf16, whose
    rows may lie apart, and factor, float32. left and right are bf16, or int8 codes: then the frozen product's rows and
    columns are multiplied by float32 row_scales [M] and column_scales [N], and with `hadamard` rotated
    (frozen_matmul.rotated). All but hidden are contiguous; K is a multiple of 2, or of 4 in int8, and R of 2.
    """
    hidden, factor = lora or (None, None)
    rank, stride = (hidden.shape[1], hidden.stride(0)) if lora else (0, 0)
    sizes = len(left), left.shape[1], out.shape[1], rank, left.shape[1], stride, left.element_size()
    matrices = left, right, row_scales, column_scales, bias, hidden, factor, out
    call("frozen_matmul", *matrices, *sizes, transposed, accumulate, hadamard)


def lora_matmul(
    left: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor, transposed: bool = False
) -> torch.Tensor:
    """scales [R] * left [M, K] factor^T, bf16 [M, R], of a bf16 left with an even K and a float32 factor [R, K];
    transposed: [K, R].
    """
    out = left.new_empty(len(left), len(scales))
    sizes = left.shape[1], len(scales), *left.shape, len(scales)
    call("lora_matmul", left.contiguous(), factor.contiguous(), scales, out, *sizes, transposed)
    return out


def lora_weight_grad(hidden: torch.Tensor, wide: torch.Tensor, transposed: bool = False) -> torch.Tensor:
    """hidden [M, R]^T wide [M, N], float32 [R, N], transposed: [N, R], of bf16; the rows of hidden may lie apart."""
    rank, columns = hidden.shape[1], wide.shape[1]
    out = torch.empty(*((columns, rank) if transposed else (rank, columns)))
    call("lora_weight_grad", hidden, wide.contiguous(), out, len(wide), rank, columns, hidden.stride(0), transposed)
    return out


class LoraLinear(NamedTuple):
    """One of several layers that read one x: y = x W^T + bias + hidden b^T, with hidden = scale x a^T of an x of which
    dropout may have taken a part. bf16 W [out, in] and bias [out], float32 a [R, in] and b [out, R].

    W may be frozen_matmul.Int8Matmul's: codes int8, and float32 scales [out].
    """

    weight: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    bias: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    first: int  # of its R columns among all layers' hidden ones

    def packed(self, y: torch.Tensor, grad_b: torch.Tensor | None = None) -> bytes:
        """As the C struct of this name."""
        weight = self.weight if isinstance(self.weight, tuple) else (self.weight, None)
        tensors = *weight, self.bias, self.a, self.b, y, grad_b
        return LAYOUT.pack(*(0 if x is None else x.data_ptr() for x in tensors), self.scale, *self.b.shape, self.first)


def lora_linears(
    x: torch.Tensor, dropped: torch.Tensor, layers: Sequence[LoraLinear], shape: Sequence[int]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each layer's y [*shape, out], and their hidden of `dropped` side by side [M, the sum of their R]. All is
    contiguous; in, out and R are even.
    """
    outputs = [x.new_empty(*shape, layer.b.shape[0]) for layer in layers]
    hidden = x.new_empty(x.shape[0], sum(layer.b.shape[1] for layer in layers))
    structs = b"".join(layer.packed(y) for layer, y in zip(layers, outputs, strict=True))
    call("lora_linears", x, dropped, structs, hidden, len(layers), *x.shape)
    return outputs, hidden


def lora_linears_backward(
    dropped: torch.Tensor,
    layers: Sequence[LoraLinear],
    hidden: torch.Tensor,
    grad_outputs: Sequence[torch.Tensor],
    needs_x: bool,
    is_dropped: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, list[torch.Tensor]]:
    """From the gradients of these layers' y [M, out], contiguous: those of x, where it needs one; of `dropped`,
    is_dropped, without which x's is not whole; of their a, one below the other; and of each b.
    """
    grad_x = dropped.new_empty(dropped.shape) if needs_x else None
    grad_dropped = dropped.new_empty(dropped.shape) if needs_x and is_dropped else None
    grad_a = torch.empty(sum(layer.b.shape[1] for layer in layers), dropped.shape[1])
    grad_b = [torch.empty(layer.b.shape) for layer in layers]
    structs = b"".join(layer.packed(*grads) for layer, *grads in zip(layers, grad_outputs, grad_b, strict=True))
    sizes = len(layers), *dropped.shape, hidden.shape[1]
    call("lora_linears_backward", dropped, structs, hidden, grad_a, grad_x, grad_dropped, *sizes)
    return grad_x, grad_dropped, grad_a, grad_b


# -------------------------------------------------------------------------------------------------------------- weights


def quantize_4bit(
    weight: torch.Tensor, borders: torch.Tensor, steps: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [n / 2], scales float32 [n / 64]) of a flat weight [n] of whole blocks, float32 or bf16: `first` is
    the lowest value's code, borders float32 [15] lie between one value and the next, and steps int32 [15] lead from the
    code of one to the next's. A block in which a weight is not finite has a scale that is not.
    """
    codes, scales = torch.empty(len(weight) // 2, dtype=torch.uint8), torch.empty(len(weight) // 64)
    is_bf16 = weight.dtype == torch.bfloat16
    call("quantize_4bit", weight.contiguous(), codes, scales, len(scales), borders, steps, first, is_bf16)
    return codes, scales


# -------------------------------------------------------------------------------------------------------------- dropout


def token_mask(keys: torch.Tensor, width: int, threshold: int, begin: int = 0) -> torch.Tensor:
    """`dropout.token_mask` of keys int64 [M], by its threshold."""
    mask = torch.empty(len(keys), width, dtype=torch.uint8)
    call("token_mask", keys.contiguous(), mask, *mask.shape, begin, threshold)
    return mask


# ----------------------------------------------------------------------------------------------------------- int8 codes


def quantize_int8_rows(
    x: torch.Tensor, column_scales: torch.Tensor | None = None, hadamard: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`frozen_matmul.quantize_rows` of bf16 x [M, K] as int8."""
    codes, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x))
    call("quantize_int8_rows", x.contiguous(), column_scales, codes, scales, x.shape[1], *x.shape, hadamard)
    return codes, scales


def dequantize_int8(
    sums: torch.Tensor,
    row_scales: torch.Tensor,
    column_scales: torch.Tensor | None,
    out: torch.Tensor,
    *,
    accumulate: bool,
    hadamard: bool = False,
) -> None:
    """out [M, N] = sums * row_scales [M] * column_scales [N], with `hadamard` rotated (frozen_matmul.rotated);
    accumulate: out + that. sums int32, out bf16, both contiguous.
    """
    call("dequantize_int8", sums, row_scales, column_scales, out, *sums.shape, accumulate, hadamard)


# -------------------------------------------------------------------------------------------------------------- modules


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0, is_late: bool = False
) -> torch.Tensor:
    """`reference.rms_norm` with the gradient of x [..., H]; where it is not for bf16, or the weight learns, the
    reference itself.
    """
    if not is_for(x, weight) or weight.requires_grad:
        return reference.rms_norm(x, weight, eps, offset, is_late)
    return _RmsNorm.apply(x, weight, eps, offset, is_late)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, is_late):
        x = x.contiguous()
        y, rstd = torch.empty_like(x), torch.empty(x.numel() // x.shape[-1])
        call("rms_norm", x, weight, y, rstd, len(rstd), x.shape[-1], eps, offset, is_late)
        ctx.save_for_backward(x, weight, rstd)
        ctx.form = offset, is_late
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, weight, rstd = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        call("rms_norm_backward", grad_y.contiguous(), x, weight, rstd, grad_x, len(rstd), x.shape[-1], *ctx.form)
        return grad_x, None, None, None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`reference.rotate` of x [B, T, H, D] with its gradient: bit for bit by angles in x's dtype, to float32's rounding
    by float32 ones.
    """
    if is_for(x) and reference.is_rotatable(x, cos, sin):
        return reference.Rotation.apply(x, cos, sin, _rotate)
    return reference.rotate(x, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_backward: bool) -> torch.Tensor:
    x = x.contiguous()
    out, (batch, length, heads, width) = torch.empty_like(x), x.shape
    sizes = batch * length, heads, width // 2, len(cos) * length
    call("rotate", x, cos, sin, out, *sizes, is_backward, cos.dtype == torch.float32)
    return out


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`reference.swiglu` with its gradients; gate and up alone are saved."""
    return _SwiGlu.apply(gate, up) if is_for(gate, up) else reference.swiglu(gate, up)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        call("swiglu", gate, up, out, gate.numel())
        return out

    @staticmethod
    def backward(ctx, grad_out):
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        call("swiglu_backward", grad_out.contiguous(), gate, up, grad_gate, grad_up, gate.numel())
        return grad_gate, grad_up
