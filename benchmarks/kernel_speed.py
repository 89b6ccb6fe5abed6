#!/usr/bin/env python3
"""How fast is each kernel, against its definition, against the library whose place it takes, and against the machine's
own rates?

    python benchmarks/kernel_speed.py            an NVIDIA GPU: Triton's kernels, at Llama-3-8B's shapes and 8192 tokens
    python benchmarks/kernel_speed.py --cut 32   a CPU: portable kernels, on a 32nd of the shapes' rows, and those in C

The limit is the time that the kernel's inputs and outputs take to be read and written once, at the rate of a plain copy
in the same run; of attention and of the head, the time of their products at the rate of large ones.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import harness
import torch

from anyqlora.on_torch.kernels import cross_entropy, dropout, frozen_matmul, reference
from anyqlora.on_torch.kernels.cpu import bindings, nf4_quantize
from anyqlora.on_torch.quantizers.bnb import Fp4, Nf4, unpacked_linear
from anyqlora.planning.backends import BackendManager

LINEARS = {
    "q": (4096, 4096),
    "k": (1024, 4096),
    "gate": (14336, 4096),
    "down": (4096, 14336),
    "odd": (1001, 4160),
}  # out, in


@dataclass
class Case:
    """One kernel at one shape.

    `ways`: implementation -> what is timed; all give the same, the definition's, within rounding.
    """

    kernel: str
    shape: str
    bytes: int
    ways: dict[str, Callable] = field(default_factory=dict)
    flops: float = 0


def triton_kernels(device: str) -> dict:
    """Our kernels that run compiled on this device."""
    if device != "cuda":
        return {}
    from anyqlora.on_torch.kernels.gpu import dequantize, dropout_lora, rms_norm, rope, swiglu

    return {"dequantize": dequantize, "dropout": dropout_lora, "rms_norm": rms_norm, "rope": rope, "swiglu": swiglu}


def dequantizations(ours: dict, device: str, dtype: torch.dtype, cut: int) -> Iterator[Case]:
    for kind, nested in ((Nf4, True), (Nf4, False), (Fp4, True)):
        for name, (rows, columns) in LINEARS.items():
            codes, state = kind(dtype, nested).quantize(drawn(device, dtype, -(-rows // cut), columns))
            n = state.shape.numel()
            case = Case(
                f"dequantize {kind.kind}{', scales quantized' * nested}",
                f"{name} {tuple(state.shape)}",
                n // 2 + state.absmax.nbytes + n * dtype.itemsize,
                {"bitsandbytes": lambda c=codes, s=state: unpacked_linear(c, s)},
            )
            if ours:
                out = torch.empty(state.shape, dtype=dtype, device=device)
                case.ways["ours"] = lambda c=codes, s=state, o=out: ours["dequantize"].dequantize(c, s, o)
            yield case


def quantizations(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Codes and scales of a whole weight, which both sides give to the bit; bitsandbytes takes float32."""
    if device != "cpu":
        return
    for kind in ("nf4", "fp4"):
        for name in ("q", "k", "gate", "odd"):
            weight = drawn(device, dtype, *LINEARS[name])
            flat = weight.flatten()
            case = Case(
                f"quantize {kind}",
                f"{name} {tuple(weight.shape)}",
                weight.nbytes + weight.numel() // 2 + weight.numel() // 16,
                {
                    "bitsandbytes": lambda flat=flat, kind=kind: nf4_quantize.reference(flat, kind),
                    "ours, portable": lambda flat=flat, kind=kind: nf4_quantize.quantize_4bit(flat, kind),
                },
            )
            if bindings.available("quantize_4bit"):
                case.ways["ours, in C"] = lambda flat=flat, kind=kind: nf4_quantize.quantize_4bit(
                    flat, kind, is_native=True
                )
            yield case


def elementwise(ours: dict, device: str, dtype: torch.dtype, tokens: int) -> Iterator[Case]:
    """Norm, gate, rotation, forward and backward alone, and dropout's products.

    The definitions stand beside Triton's kernels.
    """
    if not ours:
        return
    size = dtype.itemsize
    x, weight = drawn(device, dtype, tokens, 4096), drawn(device, dtype, 4096)
    yield from both("rms_norm", ours["rms_norm"].rms_norm, reference.rms_norm, (x, weight, 1e-5), x.nbytes, 2, 3)
    gate, up = drawn(device, dtype, tokens, 14336), drawn(device, dtype, tokens, 14336)
    yield from both("swiglu", ours["swiglu"].swiglu, reference.swiglu, (gate, up), gate.nbytes, 3, 5)
    q, turns = drawn(device, dtype, 1, tokens, 32, 128), drawn(device, dtype, 2, 1, tokens, 128)
    yield from both("rope", ours["rope"].rotate, reference.rotate, (q, turns[0], turns[1]), q.nbytes, 2, 2)
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (tokens,), device=device)
    drop, a = ours["dropout"].Dropout(keys, dropout.threshold(0.1)), drawn(device, dtype, 48, 4096)
    yield Case(
        "dropout's mask",
        f"({tokens}, 4096)",
        x.nbytes // size,
        {
            "torch": lambda: torch.nn.functional.dropout(torch.ones_like(x), 0.1) != 0,
            "portable": lambda: dropout.token_mask(keys, 4096, 0.1),
            "ours": lambda: dropout.token_mask(keys, 4096, 0.1, kernels="triton"),
        },
    )
    yield Case(
        "dropout(x) A^T, rank 48",
        f"({tokens}, 4096)",
        x.nbytes + tokens * 48 * size,
        {"torch": lambda: torch.nn.functional.dropout(x, 0.1) @ a.T, "ours": lambda: drop.lora_down(x, a)},
    )
    middle = drawn(device, dtype, tokens, 48)
    yield Case(
        "y += dropout(m A), rank 48",
        f"({tokens}, 4096)",
        2 * x.nbytes + middle.nbytes,
        {
            "torch": lambda: x.add_(torch.nn.functional.dropout(middle @ a, 0.1)),
            "ours": lambda: drop.add_lora_input_grad(x, middle, a),
        },
    )


def in_c(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The C kernels at SmolLM2-135M's shape and four rows of 512 tokens; attention at those of two Llamas, too."""
    from anyqlora.on_torch.kernels import attention

    if device != "cpu" or dtype != torch.bfloat16 or bindings.self_check():
        return
    tokens = 4 * 511
    x, weight = drawn(device, dtype, tokens, 576), drawn(device, dtype, 576)
    yield from both("rms_norm", bindings.rms_norm, reference.rms_norm, (x, weight, 1e-5), x.nbytes, 2, 3)
    gate, up = drawn(device, dtype, tokens, 1536), drawn(device, dtype, tokens, 1536)
    yield from both("swiglu", bindings.swiglu, reference.swiglu, (gate, up), gate.nbytes, 3, 5)
    q, turns = drawn(device, dtype, 1, tokens, 9, 64), drawn(device, dtype, 2, 1, tokens, 64)
    yield from both("rope", bindings.rotate, reference.rotate, (q, turns[0], turns[1]), q.nbytes, 2, 2)
    for heads, shared, width in ((9, 3, 64), (32, 8, 64), (32, 8, 128)):
        inputs = [drawn(device, dtype, 4, count, 511, width).requires_grad_() for count in (heads, shared, shared)]
        outer = drawn(device, dtype, 4, 511, heads, width)

        def step(function, inputs=inputs, outer=outer, **options):
            return torch.autograd.grad(function(*inputs, scale=inputs[0].shape[3] ** -0.5, **options), inputs, outer)

        yield Case(
            "attention, with backward",
            f"4 of 511, {heads} of {width}",
            0,
            {
                "torch": lambda step=step: step(library_attention),
                "portable": lambda step=step: step(attention.attention),
                "ours": lambda step=step: step(attention.attention, is_native=True),
            },
            flops=7 * 2 * width * heads * 4 * 511**2 / 2,
        )
    hidden, head, targets = (
        drawn(device, dtype, 512, 576).requires_grad_(),
        drawn(device, dtype, 49152, 576),
        torch.randint(49152, (512,)),
    )
    yield Case(
        "head and loss, with backward",
        "(512, 49152)",
        0,
        {
            "portable": lambda: torch.autograd.grad(
                cross_entropy.cross_entropy(hidden, head, None, targets, rows=128), hidden
            ),
            "ours": lambda: torch.autograd.grad(
                cross_entropy.cross_entropy(
                    hidden,
                    head,
                    None,
                    targets,
                    rows=512,
                    is_native=True,
                    is_fused=bindings.available("lm_head_cross_entropy"),
                ),
                hidden,
            ),
        },
        flops=2 * 2 * 512 * 576 * 49152,
    )


def frozen(device: str, dtype: torch.dtype, tokens: int, cut: int) -> Iterator[Case]:
    """Products with Llama-3-8B's frozen weights, forward and back, in 16 bits and in 8."""
    wanted = {"cpu": ("int8",), "cuda": ("fp8",)}[device]
    found = [kind for kind in BackendManager(device).report.products if kind in wanted]
    ways = {
        "whole": frozen_matmul.FullMatmul(),
        **{
            kind: (frozen_matmul.Int8Matmul() if bindings.self_check() else frozen_matmul.CpuInt8Matmul())
            if kind == "int8"
            else frozen_matmul.Fp8Matmul(True)
            for kind in found
        },
    }
    if device == "cpu" and bindings.available("frozen_matmul"):
        ways["whole, in C"] = frozen_matmul.CpuFullMatmul()
    for outputs, inputs in ((14336, 4096), (4096, 14336), (4096, 4096)) if dtype == torch.bfloat16 else ():
        w, x, g = (
            drawn(device, dtype, outputs // cut // 16 * 16, inputs),
            drawn(device, dtype, tokens, inputs),
            drawn(device, dtype, tokens, outputs // cut // 16 * 16),
        )
        yield Case(
            "frozen product, with backward",
            str((tokens, *w.shape)),
            0,
            {
                name: lambda way=way, made=way.prepare_weight(w), x=x, g=g: (
                    way.forward(way.prepare_input(x), made, None),
                    way.backward(g, made, None),
                )
                for name, way in ways.items()
            },
            flops=4 * tokens * w.numel(),
        )


def narrow(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """LoRA's own products at SmolLM2's widths, of factors in float32: into the rank, back into it, and a factor's
    gradient.
    """
    if device != "cpu" or dtype != torch.bfloat16 or not bindings.available("lora_matmul"):
        return
    ways = {"whole": frozen_matmul.FullMatmul(), "whole, in C": frozen_matmul.CpuFullMatmul()}
    for tokens, width, rank in itertools.product((2044, 720, 32), (576, 1536), (16, 48)):
        x, m, a = (
            drawn(device, dtype, tokens, width),
            drawn(device, dtype, tokens, rank),
            drawn(device, torch.float32, rank, width),
        )
        b, shape, flops = a.T.contiguous(), str((tokens, width, rank)), 2 * tokens * width * rank
        for kernel, made in (
            ("x A^T", lambda way, x=x, a=a: way.lora_down(x, [a], [2.0])),
            ("g B", lambda way, x=x, b=b: way.lora_hidden_grad(x, b, 2.0)),
            ("gradient of A", lambda way, x=x, m=m: way.lora_weight_grad(m, x).float()),
            ("gradient of B", lambda way, x=x, m=m: way.lora_weight_grad(m, x, True).float()),
        ):
            yield Case(
                f"LoRA, {kernel}",
                shape,
                0,
                {name: functools.partial(made, way) for name, way in ways.items()},
                flops=flops,
            )


def library_attention(q, k, v, scale):
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    ).transpose(1, 2)


def both(name, fast, slow, inputs, nbytes, forward: int, backward: int) -> Iterator[Case]:
    """Forward and backward, which move `forward` and `backward` times `nbytes`."""
    shape = str(tuple(inputs[0].shape))
    yield Case(name, shape, forward * nbytes, {"definition": lambda: slow(*inputs), "ours": lambda: fast(*inputs)})
    case, g = Case(f"{name}, backward", shape, backward * nbytes), torch.randn_like(slow(*inputs))
    for way, function in (("definition", slow), ("ours", fast)):
        learned = inputs[0].detach().requires_grad_()
        wanted = [learned] + ([inputs[1].detach().requires_grad_()] if name == "swiglu" else [])
        y = function(*wanted, *inputs[len(wanted) :])
        case.ways[way] = lambda y=y, wanted=wanted: torch.autograd.grad(y, wanted, g, retain_graph=True)
    yield case


def heads(device: str, dtype: torch.dtype, tokens: int, cut: int) -> Iterator[Case]:
    """Llama-3-8B's output head and its loss, forward and backward."""
    hidden, weight = drawn(device, dtype, tokens, 4096).requires_grad_(), drawn(device, dtype, 128256 // cut, 4096)
    targets = torch.randint(len(weight), (tokens,), device=device)

    def gradient(loss):
        return torch.autograd.grad(loss, hidden)

    yield Case(
        "head and loss, with backward",
        f"({tokens}, {len(weight)})",
        0,
        {
            "definition": lambda: gradient(cross_entropy.reference(hidden, weight, None, targets)),
            "ours": lambda: gradient(
                cross_entropy.cross_entropy(hidden, weight, None, targets, rows=min(1024, tokens))
            ),
        },
    )


def drawn(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, device=device) * 0.1).to(dtype)


def milliseconds(function: Callable, device: str) -> float:
    """The median, after a warm-up."""
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(function, warmup=20, rep=60, return_mode="median")
    function()
    taken = []
    while len(taken) < 3 or (sum(taken) < 0.3 and len(taken) < 50):
        began = time.perf_counter()
        function()
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)


def copy_rate(device: str) -> float:
    """Bytes per millisecond, read and written."""
    block = torch.empty(1 << (30 if device == "cuda" else 27), dtype=torch.uint8, device=device).random_()
    other = block.clone()
    return 2 * block.nbytes / milliseconds(lambda: other.copy_(block), device)


def difference(one, other) -> float:
    """|a - b| / |b| of what two implementations give, the largest over their outputs."""
    pairs = zip(*([out] if isinstance(out, torch.Tensor) else out for out in (one, other)), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    p.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    p.add_argument("--tokens", type=int, default=0, help="0: 8192 on a GPU, 512 on a CPU")
    p.add_argument("--cut", type=int, default=1, help="weights have this part of their rows")
    p.add_argument("--name", default="")
    a = p.parse_args()
    device, dtype, tokens = a.device, getattr(torch, a.dtype), a.tokens or (8192 if a.device == "cuda" else 512)
    torch.manual_seed(0)
    ours = triton_kernels(device)
    rate, products = copy_rate(device), harness.product_rate([(4096, 4096)], 2048, a.dtype, device) / 1e3
    print(f"a copy reads and writes {rate / 1e6:.0f} GB/s; large products run at {products / 1e9:.2f} TFLOP/s")
    found = []
    cases = (
        *dequantizations(ours, device, dtype, a.cut),
        *quantizations(device, dtype),
        *elementwise(ours, device, dtype, tokens),
        *heads(device, dtype, tokens, a.cut),
        *in_c(device, dtype),
        *narrow(device, dtype),
        *frozen(device, dtype, tokens, a.cut),
    )
    for case in cases:
        first, least = None, case.bytes / rate or case.flops / products  # milliseconds
        for way, function in case.ways.items():
            out = None if "+=" in case.kernel else function()  # what writes over its input differs each time
            first = out if first is None else first
            row = {
                "kernel": case.kernel,
                "shape": case.shape,
                "way": way,
                "milliseconds": milliseconds(function, device),
                "limit_milliseconds": least or None,
                "difference": None if out is first or "dropout" in case.kernel else difference(out, first),
            }
            found.append(row)
            limit = f"{least:9.3f} ms {least / row['milliseconds']:5.0%}" if least else " " * 18
            same = "" if row["difference"] is None else f"   differs by {row['difference']:.1e}"
            print(
                f"{case.kernel:34} {case.shape:24} {way:14} {row['milliseconds']:9.3f} ms   limit {limit}{same}",
                flush=True,
            )
    harness.write(
        a.name or f"kernels-{device}-{a.dtype}",
        {
            "question": __doc__.splitlines()[0],
            "copy_bytes_per_second": 1e3 * rate,
            "product_flops_per_second": 1e3 * products,
            "threads": torch.get_num_threads(),
            "tokens": tokens,
            "cut": a.cut,
            "results": found,
        },
    )


if __name__ == "__main__":
    main()
