"""The gate of an MLP, silu(gate) * up, forward and backward in one pass each (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`defined` with its gradients; what is saved is gate and up alone. float32 inside; rounds where the definition does."""
    return _SwiGlu.apply(gate, up)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _forward[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), BLOCK=BLOCK, enable_fp_fusion=False)
        return out

    @staticmethod
    def backward(ctx, of_out):
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        _backward[(triton.cdiv(gate.numel(), BLOCK),)](
            of_out.contiguous(), gate, up, of_gate, of_up, gate.numel(), BLOCK=BLOCK, enable_fp_fusion=False
        )
        return of_gate, of_up


@triton.jit
def _forward(gate, up, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g, u = tl.load(gate + at, at < n, other=0.0), tl.load(up + at, at < n, other=0.0)
    exact = g.to(tl.float32)
    opened = (exact / (1 + tl.exp(-exact))).to(g.dtype)
    tl.store(out + at, (opened.to(tl.float32) * u.to(tl.float32)).to(out.dtype.element_ty), at < n)


@triton.jit
def _backward(of_out, gate, up, of_gate, of_up, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g, u = tl.load(gate + at, at < n, other=0.0), tl.load(up + at, at < n, other=0.0)
    outer, exact = tl.load(of_out + at, at < n, other=0.0).to(tl.float32), g.to(tl.float32)
    share = 1 / (1 + tl.exp(-exact))
    opened = (exact * share).to(g.dtype).to(tl.float32)
    tl.store(of_up + at, (outer * opened).to(of_up.dtype.element_ty), at < n)
    inner = (outer * u.to(tl.float32)).to(g.dtype).to(tl.float32)
    tl.store(of_gate + at, (inner * share * (1 + exact * (1 - share))).to(of_gate.dtype.element_ty), at < n)
