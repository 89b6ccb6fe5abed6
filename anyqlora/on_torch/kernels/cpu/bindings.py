"""native.c, attention.c, products.c and head.c, compiled by the machine's own compiler when first needed: a bf16 step on a CPU."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from anyqlora.core.hashing import cache_directory
from anyqlora.on_torch.kernels import reference
from anyqlora.planning.machine import AMX, compiler, cpu_features, cpu_flags
from anyqlora.planning.memory.weights import HEAD_COLUMNS, HEAD_WORDS

SOURCES = [
    Path(__file__).parent / "csrc" / name
    for name in ("elementwise.c", "attention.c", "matmul.c", "lm_head.c", "panels.h", "bf16.h")
]
# Numbers that are not finite keep their meaning, so no -ffast-math. OpenMP's functions are those of the library that torch has loaded: a
# second one would have threads of its own.
OPTIONS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-nostdlib",
    *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
)
WITHOUT = {  # what the compiler leaves out where the processor has it and ANYQLORA_CPU_FEATURES does not name it
    "avx2": "-mno-avx2",
    "avx512f": "-mno-avx512f",
    "avx512_bf16": "-mno-avx512bf16",
    "avx512_vnni": "-mno-avx512vnni",
}
PRODUCTS = {"head", "head_room", "linears", "linears_backward", "narrow_product", "outer_product", "product"}
POINTER, LONG, FLOAT, INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
SIGNATURES = {
    "attention": (*6 * (POINTER,), *7 * (LONG,), FLOAT),
    "attention_backward": (*10 * (POINTER,), *7 * (LONG,), FLOAT),
    "head": (*10 * (POINTER,), *3 * (LONG,), FLOAT),
    "head_room": (*3 * (LONG,), INT),
    "int8_out": (POINTER, POINTER, POINTER, POINTER, LONG, LONG, INT, INT),
    "int8_rows": (*4 * (POINTER,), *3 * (LONG,), INT),
    "linears": (POINTER, POINTER, ctypes.c_char_p, POINTER, *3 * (LONG,)),
    "linears_backward": (POINTER, ctypes.c_char_p, *4 * (POINTER,), *4 * (LONG,)),
    "narrow_product": (*4 * (POINTER,), *5 * (LONG,), INT),
    "outer_product": (*3 * (POINTER,), *4 * (LONG,), INT),
    "cross_entropy": (POINTER, POINTER, POINTER, LONG, LONG, FLOAT),
    "product": (*8 * (POINTER,), *6 * (LONG,), *4 * (INT,)),
    "quantize_4bit": (POINTER, POINTER, POINTER, LONG, POINTER, POINTER, INT, INT),
    "rms_norm": (POINTER, POINTER, POINTER, POINTER, LONG, LONG, FLOAT, FLOAT, INT),
    "rms_norm_backward": (POINTER, POINTER, POINTER, POINTER, POINTER, LONG, LONG, FLOAT, INT),
    "rotate": (POINTER, POINTER, POINTER, POINTER, LONG, LONG, LONG, LONG, INT, INT),
    "swiglu": (POINTER, POINTER, POINTER, LONG),
    "swiglu_backward": (POINTER, POINTER, POINTER, POINTER, POINTER, LONG),
}
LAYER = struct.Struct("@7Pd3l")  # products.c's Layer
LANES = 16  # a head is a multiple of it wide


@functools.cache
def library() -> ctypes.CDLL:
    """Their functions, without those for which the processor has no instructions. Raises OSError or subprocess.SubprocessError where none can be had."""
    loaded = ctypes.CDLL(
        str(build_library()), mode=os.RTLD_NOW
    )  # later, a name that is not found would end the process
    for name, kinds in SIGNATURES.items():
        if hasattr(loaded, name):
            function = getattr(loaded, name)
            function.argtypes, function.restype = kinds, LONG if name.endswith("_room") else None
    return loaded


@functools.cache
def available(name: str) -> bool:
    """Whether a function can be had here: there is a compiler, and the processor has the instructions."""
    try:
        return hasattr(library(), name)
    except (OSError, subprocess.SubprocessError):
        return False


@functools.cache
def preferred(name: str) -> bool:
    """Whether a function is available and to be taken: by AMX the framework's own products are several times as fast."""
    return available(name) and not (name in PRODUCTS and AMX & set(cpu_features()))


def build_library() -> Path:
    """The library's file in the user's cache, made unless it is there. Its name tells source, compiler and processor apart."""
    flags, allowed = cpu_flags(), cpu_features()
    without = (option for name, option in WITHOUT.items() if name in flags and name not in allowed)
    command = (compiler(), *OPTIONS, *without)
    told = {"capture_output": True, "check": True, "text": True}
    about = subprocess.run(
        [command[0], "-march=native", "-E", "-v", "-x", "c", os.devnull], **told
    ).stderr  # names the processor
    marks = hashlib.sha256(
        "\0".join([*(source.read_text() for source in SOURCES), *command, about]).encode()
    ).hexdigest()[:16]
    made = cache_directory() / f"native-{marks}.so"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=made.parent
        ) as directory:  # two processes may be at it: the last one's stands, whole
            staged = Path(directory) / made.name
            subprocess.run(
                [*command, "-o", str(staged), *(str(source) for source in SOURCES if source.suffix == ".c"), "-lm"],
                **told,
            )
            staged.chmod(0o700)
            os.replace(staged, made)
    about = made.stat()
    if about.st_uid not in (0, os.getuid()) or about.st_mode & 0o022:
        raise PermissionError(f"{made} may be written by somebody else, and would be run")
    return made


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
    return "" if is_same else "they give other numbers than they are defined to"


def _call(name: str, *arguments) -> None:
    """Tensors go by their addresses; they are contiguous."""
    getattr(library(), name)(*(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments))


def is_for(*tensors: torch.Tensor) -> bool:
    return all(x.dtype == torch.bfloat16 and x.device.type == "cpu" for x in tensors)


# ------------------------------------------------------------------------------------------------------------ attention


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor, longest: int, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v within documents [B, T, H, D], zero elsewhere, and the logarithms of the softmax's denominators, float32 [B, T, H].

    q [B, T, H, D], k and v [B, T, K, D], contiguous; documents int64 [N, 3]: row, first token, end; `longest` tokens in one of them.
    """
    (rows, length, heads, width), shared = q.shape, k.shape[2]
    out, log_sums = torch.zeros_like(q), torch.empty(rows, length, heads)
    _call(
        "attention",
        q,
        k,
        v,
        out,
        log_sums,
        documents,
        len(documents),
        longest,
        length,
        heads,
        shared,
        width,
        window,
        scale,
    )
    return out, log_sums


def attention_backward(
    of_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    documents: torch.Tensor,
    longest: int,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v, from what `attention` was given and gave."""
    made = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    _call(
        "attention_backward",
        of_out,
        q,
        k,
        v,
        out,
        log_sums,
        *made,
        documents,
        len(documents),
        longest,
        *q.shape[1:3],
        *k.shape[2:],
        window,
        scale,
    )
    return made


# ------------------------------------------------------------------------------------------------------------- the loss


def losses_(logits: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
    """The cross-entropy of each row of scale * logits [N, V], float32 [N]; the logits become the gradient of their sum."""
    losses = torch.empty(len(logits))
    _call("cross_entropy", logits, targets.contiguous(), losses, *logits.shape, scale)
    return losses


def head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    scale: float,
    rows: int,
    of_hidden: torch.Tensor | None,
    rounded: Rounded | None = None,
) -> torch.Tensor:
    """The cross-entropy of each row of scale * (hidden [N, H] weight [V, H]^T + bias [V]), float32 [N]; of_hidden, contiguous, becomes the gradient of their sum.

    All are bf16, and H is even. `rows` share a weight that is packed. Their logits are float32 and never in memory; probabilities are bf16, and the
    gradient is rounded once. `rounded`, of `rounded_head`: it is of those weights, and of probabilities in 8 bits.
    """
    hidden, weight, bias, targets = (
        hidden.contiguous(),
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        targets.contiguous(),
    )
    losses, (words, depth) = torch.empty(len(hidden)), weight.shape
    room = torch.empty(
        library().head_room(min(rows, len(hidden)), depth, words, of_hidden is not None), dtype=torch.uint8
    )
    for some in map(slice, range(0, len(hidden), rows), range(rows, len(hidden) + rows, rows)):
        of_some = None if of_hidden is None else of_hidden[some]
        _call(
            "head",
            hidden[some],
            weight,
            bias,
            *(rounded or 3 * (None,)),
            targets[some],
            losses[some],
            of_some,
            room,
            len(hidden[some]),
            depth,
            words,
            scale,
        )
    return losses


Rounded = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor
]  # of a head's weights without their mean: packed codes, and a scale for each word [V]; and that mean over the words [H]
WORDS = 4096  # that are looked at together: their weights are float32 meanwhile
FOUR = 4  # words whose weights an instruction reads


def rounded_head(weight: torch.Tensor) -> Rounded | None:
    """A head's weights [V, H] as `head` has them for a gradient in 8 bits; None where it cannot.

    Codes are packed once: [V / HEAD_WORDS, H / HEAD_COLUMNS, HEAD_WORDS / FOUR, HEAD_COLUMNS, FOUR], zeros after the last word and column.
    """
    if not (available("head") and is_for(weight)) or weight.shape[1] % 2:
        return None
    mean = torch.stack([some.float().sum(0) for some in weight.split(WORDS)]).sum(0) / len(weight)
    blocks, panels = -(-len(weight) // HEAD_WORDS), -(-weight.shape[1] // HEAD_COLUMNS)
    codes, scales = (
        torch.empty(blocks, panels, HEAD_WORDS // FOUR, HEAD_COLUMNS, FOUR, dtype=torch.int8),
        torch.empty(len(weight)),
    )
    for some, of_codes, of_scales in zip(
        weight.split(WORDS), codes.split(WORDS // HEAD_WORDS), scales.split(WORDS), strict=True
    ):
        made, of_some = int8_rows((some - mean).to(some.dtype), is_spread=True)
        whole = nn.functional.pad(made, (0, -made.shape[1] % HEAD_COLUMNS, 0, -len(made) % HEAD_WORDS))
        of_codes.copy_(whole.view(len(of_codes), HEAD_WORDS // FOUR, FOUR, panels, HEAD_COLUMNS).permute(0, 3, 1, 4, 2))
        of_scales.copy_(of_some)
    return codes, scales, mean


# ------------------------------------------------------------------------------------------------------------- products


def product(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    *,
    is_turned: bool = False,
    is_added: bool = False,
    of_rows: torch.Tensor | None = None,
    of_columns: torch.Tensor | None = None,
    is_spread: bool = False,
    bias: torch.Tensor | None = None,
    narrow: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """out [M, N] = left [M, K] right^T + m f^T + bias [N], right [N, K], f [N, R]; is_turned: right is [K, N] and f [R, N]; is_added: the products more.

    narrow: m [M, R], bf16, and f, float32. left and right are bf16, or int8 codes: then the product's rows and columns are multiplied by float32 of_rows [M] and
    of_columns [N], and `products.spread` is_spread. All but m contiguous, K a multiple of 2, or of 4 in int8, and R of 2.
    """
    m, f = narrow or (None, None)
    rank, apart = (m.shape[1], m.stride(0)) if narrow else (0, 0)
    _call(
        "product",
        left,
        right,
        of_rows,
        of_columns,
        bias,
        m,
        f,
        out,
        len(left),
        left.shape[1],
        out.shape[1],
        rank,
        left.shape[1],
        apart,
        left.element_size(),
        is_turned,
        is_added,
        is_spread,
    )


def narrow_product(
    left: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor, is_turned: bool = False
) -> torch.Tensor:
    """scales [R] * left [M, K] factor^T, bf16 [M, R], of a bf16 left with an even K and a float32 factor [R, K], is_turned: [K, R]."""
    made = left.new_empty(len(left), len(scales))
    _call(
        "narrow_product",
        left.contiguous(),
        factor.contiguous(),
        scales,
        made,
        left.shape[1],
        len(scales),
        *left.shape,
        len(scales),
        is_turned,
    )
    return made


def outer_product(narrow: torch.Tensor, wide: torch.Tensor, is_turned: bool = False) -> torch.Tensor:
    """narrow [M, R]^T wide [M, N], float32 [R, N], is_turned: [N, R], of bf16; the rows of narrow may lie apart."""
    rank, columns = narrow.shape[1], wide.shape[1]
    made = torch.empty(*((columns, rank) if is_turned else (rank, columns)))
    _call("outer_product", narrow, wide.contiguous(), made, len(wide), rank, columns, narrow.stride(0), is_turned)
    return made


class Layer(NamedTuple):
    """One of several layers that read one x: y = x W^T + bias + m b^T, with m = scale x a^T of an x of which some may be dropped. bf16 W [out, in] and bias [out], float32 a [R, in] and b [out, R].

    W may be `products.Int8`'s: codes int8, and float32 scales [out].
    """

    weight: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    bias: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    first: int  # of its R columns among all layers' m

    def packed(self, y: torch.Tensor, of_b: torch.Tensor | None = None) -> bytes:
        weight = self.weight if isinstance(self.weight, tuple) else (self.weight, None)
        tensors = *weight, self.bias, self.a, self.b, y, of_b
        return LAYER.pack(*(0 if x is None else x.data_ptr() for x in tensors), self.scale, *self.b.shape, self.first)


def linears(
    x: torch.Tensor, dropped: torch.Tensor, layers: Sequence[Layer], shape: Sequence[int]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each layer's y [*shape, out], and their m side by side [M, the sum of their R], which are of `dropped`. All is contiguous; in, out and R are even."""
    made, middles = (
        [x.new_empty(*shape, layer.b.shape[0]) for layer in layers],
        x.new_empty(x.shape[0], sum(layer.b.shape[1] for layer in layers)),
    )
    listed = b"".join(layer.packed(y) for layer, y in zip(layers, made, strict=True))
    _call("linears", x, dropped, listed, middles, len(layers), *x.shape)
    return made, middles


def linears_backward(
    dropped: torch.Tensor,
    layers: Sequence[Layer],
    middles: torch.Tensor,
    of_outputs: Sequence[torch.Tensor],
    needs_x: bool,
    is_dropped: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, list[torch.Tensor]]:
    """From the gradients of these layers' y [M, out], contiguous, those of x, where it needs one; of `dropped`, is_dropped, without which x's is not whole;
    of their a, one below the other; and of each b."""
    of_x = dropped.new_empty(dropped.shape) if needs_x else None
    of_dropped = dropped.new_empty(dropped.shape) if needs_x and is_dropped else None
    of_a, of_b = (
        torch.empty(sum(layer.b.shape[1] for layer in layers), dropped.shape[1]),
        [torch.empty(layer.b.shape) for layer in layers],
    )
    listed = b"".join(layer.packed(*gradients) for layer, *gradients in zip(layers, of_outputs, of_b, strict=True))
    _call(
        "linears_backward",
        dropped,
        listed,
        middles,
        of_a,
        of_x,
        of_dropped,
        len(layers),
        *dropped.shape,
        middles.shape[1],
    )
    return of_x, of_dropped, of_a, of_b


# -------------------------------------------------------------------------------------------------------------- weights


def quantize_4bit(
    weight: torch.Tensor, borders: torch.Tensor, steps: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [n / 2], scales float32 [n / 64]) of a flat weight [n] of whole blocks, float32 or bf16: `first` is the lowest value's code,
    borders float32 [15] lie between one value and the next, and steps int32 [15] lead from the code of one to the next's. A block in which a
    weight is not finite has a scale that is not."""
    codes, scales = torch.empty(len(weight) // 2, dtype=torch.uint8), torch.empty(len(weight) // 64)
    _call(
        "quantize_4bit",
        weight.contiguous(),
        codes,
        scales,
        len(scales),
        borders,
        steps,
        first,
        weight.dtype == torch.bfloat16,
    )
    return codes, scales


# ---------------------------------------------------------------------------------------------------- products of int8


def int8_rows(
    x: torch.Tensor, columns: torch.Tensor | None = None, is_spread: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`products.coded` of bf16 x [M, K] as int8."""
    codes, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x))
    _call("int8_rows", x.contiguous(), columns, codes, scales, x.shape[1], *x.shape, is_spread)
    return codes, scales


def int8_out(
    sums: torch.Tensor,
    of_rows: torch.Tensor,
    of_columns: torch.Tensor | None,
    out: torch.Tensor,
    *,
    is_added: bool,
    is_spread: bool = False,
) -> None:
    """out [M, N] = sums * of_rows [M] * of_columns [N], `products.spread` is_spread, or that much more; sums int32, out bf16, both contiguous."""
    _call("int8_out", sums, of_rows, of_columns, out, *sums.shape, is_added, is_spread)


# ------------------------------------------------------------------------------------------------------------- modules


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0, is_late: bool = False
) -> torch.Tensor:
    """`defined.rms_norm` with the gradient of x [..., H]; where it is not for bf16, or the weight learns, the definition itself."""
    if not is_for(x, weight) or weight.requires_grad:
        return reference.rms_norm(x, weight, eps, offset, is_late)
    return _RmsNorm.apply(x, weight, eps, offset, is_late)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, is_late):
        x = x.contiguous()
        y, scales = torch.empty_like(x), torch.empty(x.numel() // x.shape[-1])
        _call("rms_norm", x, weight, y, scales, len(scales), x.shape[-1], eps, offset, is_late)
        ctx.save_for_backward(x, weight, scales)
        ctx.form = offset, is_late
        return y

    @staticmethod
    def backward(ctx, of_y):
        x, weight, scales = ctx.saved_tensors
        of_x = torch.empty_like(x)
        _call("rms_norm_backward", of_y.contiguous(), x, weight, scales, of_x, len(scales), x.shape[-1], *ctx.form)
        return of_x, None, None, None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`defined.rotate` of x [B, T, H, D] with its gradient: bit for bit by angles in x's dtype, to float32's rounding by float32 ones."""
    return (
        reference.Rotation.apply(x, cos, sin, _turned)
        if is_for(x) and reference.are_read(x, cos, sin)
        else reference.rotate(x, cos, sin)
    )


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_back: bool) -> torch.Tensor:
    x = x.contiguous()
    out, (batch, length, heads, width) = torch.empty_like(x), x.shape
    _call(
        "rotate",
        x,
        cos,
        sin,
        out,
        batch * length,
        heads,
        width // 2,
        len(cos) * length,
        is_back,
        cos.dtype == torch.float32,
    )
    return out


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`defined.swiglu` with its gradients; what is kept is gate and up alone."""
    return _SwiGlu.apply(gate, up) if is_for(gate, up) else reference.swiglu(gate, up)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _call("swiglu", gate, up, out, gate.numel())
        return out

    @staticmethod
    def backward(ctx, of_out):
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        _call("swiglu_backward", of_out.contiguous(), gate, up, of_gate, of_up, gate.numel())
        return of_gate, of_up
