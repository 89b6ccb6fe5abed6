"""TRL's SFTTrainer again, its layers' outputs rounded once: W x + s B A x in float32, then bf16.

Prints one JSON line last.

PEFT adds s B A x, rounded, to W x, rounded. While B is small, much of what it adds is less than half a step of bf16
there, and lost.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[0] = str(
    Path(__file__).resolve().parents[1]
)  # not this directory, in which this file has the package's own name

from peers import trl  # noqa: E402


def forward(self, x, *_, **__):
    """PEFT's Linear4bit.forward of one adapter, without dropout or a bias.

    Gradients of x are two that are rounded and added, as PEFT's are.
    """
    import torch.nn.functional as F
    from bitsandbytes.functional import dequantize_4bit

    packed, (name,) = self.base_layer.weight, self.active_adapters
    assert self.base_layer.bias is None and not getattr(self.lora_dropout[name], "p", 0)
    weight = dequantize_4bit(packed.data, packed.quant_state).to(x.dtype)
    learned = F.linear(F.linear(x.float(), self.lora_A[name].weight), self.lora_B[name].weight) * self.scaling[name]
    return (F.linear(x.float(), weight.float()) + learned).to(x.dtype)


def load(config, dtype, device):
    from peft.tuners.lora import bnb

    bnb.Linear4bit.forward = forward
    return trl.load(config, dtype, device)


if __name__ == "__main__":
    print("\n" + json.dumps(trl.sft.measure(json.loads(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), load)))
