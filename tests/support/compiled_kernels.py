"""Every Triton kernel compiled for a GPU that need not be there: python tests/compiled_kernels.py 90 prints what was
made of each.

The interpreter runs what a compiler may refuse. Run without TRITON_INTERPRET.
"""

import itertools
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from anyqlora.on_torch.kernels.gpu import dequantize, dropout_lora, float8, rms_norm, rope, swiglu, token_mask

INT, FLOAT, KEYS = "i32", "fp32", "*i64"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ALIGNED = [
    ["tt.divisibility", 16]
]  # as at run time pointers and widths are, so that loads are made ahead, in shared memory


def kernels(dtype: str, capability: int):
    """(name, kernel, types of its arguments in order, its constants) at Llama-3-8B's widths."""
    x = f"*{dtype}"
    for nested in (True, False):
        codes = "*u8" if nested else "*fp32"
        yield (
            f"dequantize {nested=}",
            dequantize._dequantize,
            ["*u8", "*fp32", codes, "*fp32", "*fp32", "*fp32", x, INT, INT],
            {"NESTED": nested, "BLOCK": 64, "SCALES": 256, "TILE": dequantize.TILE},
            {"enable_fp_fusion": False},
        )
    for late in (True, False):
        yield (
            f"norm {late=}",
            rms_norm._forward,
            [x, x, x, "*fp32", INT, FLOAT, FLOAT],
            {"LATE": late, "WIDTH": 4096},
            {"num_warps": 16, "enable_fp_fusion": False},
        )
        for learns in (True, False):
            yield (
                f"norm's backward {late=} {learns=}",
                rms_norm._backward,
                [x, x, x, "*fp32", x, "*fp32", INT, INT, FLOAT],
                {"LATE": late, "LEARNS": learns, "WIDTH": 4096},
                {"num_warps": 16, "enable_fp_fusion": False},
            )
    for back, angles in itertools.product((True, False), {x, "*fp32"}):
        yield (
            f"rotate {back=} {angles=}",
            rope._rotate,
            [x, x, angles, angles, INT, INT, INT],
            {"BACKWARD": back, "HEADS": 32, "HALF": 64},
            {"enable_fp_fusion": False},
        )
    yield "gate", swiglu._forward, [x, x, x, INT], {"BLOCK": swiglu.BLOCK}, {"enable_fp_fusion": False}
    yield (
        "gate's backward",
        swiglu._backward,
        [x, x, x, x, x, INT],
        {"BLOCK": swiglu.BLOCK},
        {"enable_fp_fusion": False},
    )
    for columns in (True, False) if capability >= 89 else ():  # the first with float8
        yield (
            f"float8 {columns=}",
            float8._quantize_rows,
            [x, "*fp32", "*fp8e4nv", "*fp32", INT],
            {"MAX": float8.MAX, "HAS_COLUMN_SCALES": columns, "BLOCK": float8.BLOCK},
            {"enable_fp_fusion": False},
        )
    tiles = {
        "RANK": dropout_lora._tile(1024, DTYPES[dtype]),
        "ROWS": token_mask.ROWS,
        "COLUMNS": token_mask.COLUMNS,
    }  # the greatest that there is
    sizes = {name: tiles[name] for name in ("ROWS", "COLUMNS")}
    yield "dropout mask", token_mask._token_mask, [KEYS, "*u8", *[INT] * 4], sizes, {}
    yield (
        "dropout lora_down",
        dropout_lora._lora_down,
        [x, x, x, INT, INT, INT, KEYS, INT],
        tiles,
        {"enable_fp_fusion": True},
    )
    yield (
        "dropout lora_weight_grad",
        dropout_lora._lora_weight_grad,
        [x, x, "*fp32", INT, INT, INT, KEYS, INT, INT],
        tiles,
        {"enable_fp_fusion": True},
    )
    yield (
        "dropout add_lora_input_grad",
        dropout_lora._add_lora_input_grad,
        [x, x, x, INT, INT, INT, KEYS, INT],
        tiles,
        {"enable_fp_fusion": True},
    )


def fused_in(ptx: str) -> int:
    """How many products and sums are rounded together.

    GPUs before sm_90 have neither a product nor a sum of bf16 alone: one is a b + -0 there, the other a 1 + b or a -1 +
    b.
    """
    words = [line.replace(",", " ").rstrip(";").split() for line in ptx.splitlines() if line.strip()]
    alone = {
        line[1] for line in words if line[0] == "mov.b16" and line[2] in ("0x8000", "0x3F80", "0xBF80")
    }  # -0, 1 and -1
    return sum(line[0].startswith("fma.") and not alone & set(line[2:]) for line in words)


def main(capability: int, dtypes: list[str]) -> None:
    for dtype in dtypes:
        for name, kernel, types, constants, options in kernels(dtype, capability):
            names = [n for n in kernel.arg_names if n not in constants]
            source = ASTSource(
                kernel,
                dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr"),
                constexprs=constants,
                attrs={(number,): ALIGNED for number, kind in enumerate(types) if kind[0] == "*" or kind == INT}
                if name.startswith("dropout")
                else None,
            )
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            ptx = made.asm["ptx"]
            fused = fused_in(ptx)
            print(
                f"{dtype} {name}: {made.metadata.shared} bytes shared, {fused} fused multiply-adds, "
                f"{sum('mma' in line for line in ptx.splitlines())} matrix instructions"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] or ["bf16", "fp16", "fp32"])
