"""The gate of an MLP, silu(gate) * up, forward and backward in one pass each (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`reference.swiglu` with its gradients; gate and up alone are saved. float32 inside; rounds where the reference
    does.
    """
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
    def backward(ctx, grad_out):
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        _backward[(triton.cdiv(gate.numel(), BLOCK),)](
            grad_out.contiguous(), gate, up, grad_gate, grad_up, gate.numel(), BLOCK=BLOCK, enable_fp_fusion=False
        )
        return grad_gate, grad_up


@triton.jit
def _forward(gate, up, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g, u = tl.load(gate + at, at < n, other=0.0), tl.load(up + at, at < n, other=0.0)
    exact = g.to(tl.float32)
    gated = (exact / (1 + tl.exp(-exact))).to(g.dtype)
    tl.store(out + at, (gated.to(tl.float32) * u.to(tl.float32)).to(out.dtype.element_ty), at < n)


@triton.jit
def _backward(grad_out, gate, up, grad_gate, grad_up, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g, u = tl.load(gate + at, at < n, other=0.0), tl.load(up + at, at < n, other=0.0)
    grad, exact = tl.load(grad_out + at, at < n, other=0.0).to(tl.float32), g.to(tl.float32)
    share = 1 / (1 + tl.exp(-exact))
    gated = (exact * share).to(g.dtype).to(tl.float32)
    tl.store(grad_up + at, (grad * gated).to(grad_up.dtype.element_ty), at < n)
    grad_gated = (grad * u.to(tl.float32)).to(g.dtype).to(tl.float32)
    tl.store(grad_gate + at, (grad_gated * share * (1 + exact * (1 - share))).to(grad_gate.dtype.element_ty), at < n)
