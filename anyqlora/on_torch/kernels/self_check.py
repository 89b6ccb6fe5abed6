"""Whether our kernels run on a device, and give what their references give."""

from __future__ import annotations

import torch

from anyqlora.on_torch.kernels.cpu import bindings
from anyqlora.on_torch.kernels.dropout import token_mask


def failure_of_masks(device: torch.device) -> str:
    """Why a GPU cannot draw dropout's masks by a kernel; "" where it can."""
    keys = torch.arange(-3, 4, device=device) * 0x9E3779B97F4A7C1
    try:
        is_same = torch.equal(token_mask(keys, 70, 0.3, kernels="triton"), token_mask(keys, 70, 0.3))
    except Exception as error:  # as below
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return "" if is_same else "the kernel for them gives others"


def failure(kernels: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why `kernels` (settings.kernels) cannot be used on `device`; "" where they can. A small one is compiled and run,
    and compared with its reference.
    """
    if kernels == "native":
        return bindings.self_check()
    x = torch.linspace(-1, 1, 2 * 3 * 2 * 8, device=device, dtype=dtype).view(2, 3, 2, 8)
    cos, sin = x[:1, :, 0] * 0.7, x[:1, :, 1] * 0.3
    try:
        from anyqlora.on_torch.kernels.gpu import rope

        angles = ((cos, sin), (cos.float(), sin.float()))  # each its own kernel
        is_same = all(torch.equal(rope.rotate(x, *each), rope.reference(x, *each)) for each in angles)
    except Exception as error:
        # A missing compiler, an old driver, a new device: each fails in its own way, and each is the finding.
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return "" if is_same else "they give other numbers than their references"
