"""bitsandbytes' 4-bit and 8-bit weights, quantized a block of rows at a time."""

from __future__ import annotations

import copy

import bitsandbytes as bnb
import torch
from bitsandbytes import functional as F
from torch import nn

from anyqlora.config.schema import TrainConfig
from anyqlora.on_torch._compat import keep_weights_as_packed
from anyqlora.on_torch.kernels.cpu.nf4_quantize import BLOCK, quantize_4bit
from anyqlora.on_torch.quantizers.dequant_matmul import dequant_matmul

# Tokens from which bitsandbytes 0.50 unpacks the whole weight on CUDA; for fewer it has kernels that multiply by the
# codes
MANY = 1537
CHUNK = 1 << 22  # weights quantized at a time: bitsandbytes takes 3-4 times their float32 size while it works


def unpacked_linear(codes: torch.Tensor, state: F.QuantState) -> torch.Tensor:
    """The weight, of the shape that was packed, in the state's dtype."""
    if state.shape[-1] % BLOCK == 0:
        return F.dequantize_4bit(codes, state)
    flat = copy.copy(state)  # its tensors are shared
    flat.shape = torch.Size([state.shape.numel()])
    return F.dequantize_4bit(codes, flat).view(state.shape)


class _AskedForItsWeight(nn.Module):
    """A layer that gives PEFT its weight when DoRA asks for it.

    What peft 0.21.2 does of itself fails or is wrong for bitsandbytes' layers on a CPU: it reads rows that end inside a
    block with the AVX-512 kernel (see UnalignedLinear4bit), and puts another parameter in the weight's place, which
    loses int8's scales and which DeepSpeed's stage 3 knows nothing of.
    Can go when tests/on_torch/test_compat.py::test_peft_still_replaces_the_weight_it_dequantizes fails.
    """

    @property
    def W_q(self) -> torch.Tensor:
        """By this name of HQQ's PEFT knows a layer whose `dequantize()` it has to ask for the weight."""
        return self.weight


class PackedLinear4bit(_AskedForItsWeight, bnb.nn.Linear4bit):
    """bitsandbytes' layer, whose `unpack` is set when it is made."""

    def dequantize(self) -> torch.Tensor:
        """[out, in]."""
        return self.unpack(self.weight.data, self.quant_state)


class _FourBit:
    bits = 4
    group = 1  # scales know no rows
    module_type = bnb.nn.Linear4bit
    kind: str
    unpack = staticmethod(unpacked_linear)
    layer = PackedLinear4bit  # where rows end where blocks end
    is_native = False  # whether codes are computed in C

    def __init__(self, config: TrainConfig, compute_dtype: torch.dtype):
        self.compute_dtype, self.double_quant = compute_dtype, config.double_quant

    def empty_layer(self, linear: nn.Linear) -> bnb.nn.Linear4bit:
        kind = self.layer if linear.in_features % BLOCK == 0 else UnalignedLinear4bit
        with torch.device("meta"):
            module = kind(
                linear.in_features,
                linear.out_features,
                linear.bias is not None,
                self.compute_dtype,
                compress_statistics=self.double_quant,
                quant_type=self.kind,
            )
        module.unpack = self.unpack
        return keep_weights_as_packed(module)

    def set_kernels(self, kernels: str, device: torch.device) -> list[str]:
        """Quantize and unpack by these kernels (settings.kernels) from here on.

        Returns a line where they unpack something else on this device.
        """
        self.is_native = kernels == "native"
        if kernels in ("portable", "native"):
            return []
        from anyqlora.on_torch.kernels.gpu.dequantize import dequantize

        sample = self.quantize(torch.linspace(-1, 1, 96 * 192, device=device).view(96, 192))
        if not torch.equal(dequantize(*sample), unpacked_linear(*sample)):
            return ["bitsandbytes unpacks the weights: the kernel for it gives something else on this device"]
        self.unpack, self.layer = dequantize, _Unpacking
        return []

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, F.QuantState]:
        """Codes (uint8 [n / 2, 1]) and state of `weight` (any shape), equal to F.quantize_4bit of the whole in float32.

        Chunks end on block borders, so that codes and scales are those of one call; only then are the scales quantized.
        """
        flat = weight.detach().reshape(-1)
        codes, absmax = [], []
        for piece in flat.split(CHUNK):
            code, scales = quantize_4bit(piece, self.kind, self.is_native)
            codes.append(code)
            absmax.append(scales)
        codes, absmax, offset, nested = torch.cat(codes), torch.cat(absmax), None, None
        if self.double_quant:
            offset = absmax.mean()
            absmax, nested = F.quantize_blockwise(absmax - offset, blocksize=256)
        return codes, F.QuantState(
            absmax=absmax,
            shape=weight.shape,
            dtype=self.compute_dtype,
            blocksize=BLOCK,
            code=F.get_4bit_type(self.kind, device=codes.device),
            quant_type=self.kind,
            offset=offset,
            state2=nested,
        )

    pack = quantize

    def quantize_into(self, module: bnb.nn.Linear4bit, weight: torch.Tensor) -> bnb.nn.Params4bit:
        return self.parameter(module, *self.quantize(weight))

    def parameter(self, module: bnb.nn.Linear4bit, codes: torch.Tensor, state: F.QuantState) -> bnb.nn.Params4bit:
        """The module's weight, of codes and state."""
        module.quant_state = state  # sharding takes it off the parameter
        return bnb.nn.Params4bit(
            codes,
            requires_grad=False,
            quant_state=state,
            blocksize=BLOCK,
            compress_statistics=self.double_quant,
            quant_type=self.kind,
            module=module,
            bnb_quantized=True,
        )

    @staticmethod
    def quant_state(module: bnb.nn.Linear4bit) -> F.QuantState:
        return module.quant_state

    @staticmethod
    def state_tensors(state: F.QuantState) -> dict[str, torch.Tensor]:
        """A state as tensors alone, from which `state_from` makes it again."""
        return state.as_dict(packed=True)

    @staticmethod
    def state_from(tensors: dict[str, torch.Tensor]) -> F.QuantState:
        return F.QuantState.from_dict(dict(tensors), device=tensors["absmax"].device)

    def dequantize(self, module: bnb.nn.Linear4bit) -> torch.Tensor:
        return self.unpack(module.weight.data, module.quant_state)

    def codes(self, module: bnb.nn.Linear4bit) -> torch.Tensor:
        return module.weight.data

    def tensors(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """{tensor of a file: value} of the weight `name`, as transformers and bitsandbytes read it."""
        codes, state = self.quantize(weight)
        return {name: codes, **{f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}}

    def hf_config(self) -> dict:
        """What config.json says of such files, in transformers' words."""
        return {
            "quantization_config": {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "load_in_8bit": False,
                "bnb_4bit_quant_type": self.kind,
                "bnb_4bit_use_double_quant": self.double_quant,
                "bnb_4bit_compute_dtype": "float32",
                "bnb_4bit_quant_storage": "uint8",
            }
        }


class _Unpacking(PackedLinear4bit):
    """A Linear4bit that unpacks its weight by `unpack` where there is work enough for the whole of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x) if x.numel() >= MANY * x.shape[-1] else super().forward(x)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return dequant_matmul(
            x.to(self.compute_dtype), lambda: self.unpack(self.weight.data, self.quant_state), bias=bias
        ).to(x.dtype)


class UnalignedLinear4bit(_Unpacking):
    """A Linear4bit whose rows do not end where blocks end.

    bitsandbytes' AVX-512 kernel gives such weights wrong values (25 % off at 96 inputs): it counts blocks from each
    row's start, and quantization counts them from the tensor's. Seen in 0.50.2, where in_features is a multiple of 16
    and not of 64 (its pull request 1828 works around the same at large blocks).
    Can go when tests/on_torch/test_compat.py::test_bitsandbytes_still_miscounts_blocks fails.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x)


class Nf4(_FourBit):
    kind = "nf4"


class Fp4(_FourBit):
    kind = "fp4"


class PackedLinear8bit(_AskedForItsWeight, bnb.nn.Linear8bitLt):
    """bitsandbytes' layer."""

    def dequantize(self) -> torch.Tensor:
        """float32 [out, in]."""
        return F.int8_vectorwise_dequant(self.weight.data, Int8.quant_state(self))


class Int8:
    """LLM.int8(): rows of weights in 8 bits with a scale each, outlying activations in the compute dtype."""

    bits = 8
    module_type = bnb.nn.Linear8bitLt

    def __init__(self, config: TrainConfig, compute_dtype: torch.dtype):
        self.compute_dtype = compute_dtype

    def empty_layer(self, linear: nn.Linear) -> bnb.nn.Linear8bitLt:
        with torch.device("meta"):
            return PackedLinear8bit(
                linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False, threshold=6.0
            )

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (int8 [out, in]) and the scale of each row (float32 [out]: its largest magnitude)."""
        rows = max(1, CHUNK // weight.shape[-1])
        pieces = [F.int8_vectorwise_quant(part.to(torch.float16))[:2] for part in weight.detach().split(rows)]
        return torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])

    def unpack(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return F.int8_vectorwise_dequant(codes, scales).to(self.compute_dtype)

    def quantize_into(self, module: bnb.nn.Linear8bitLt, weight: torch.Tensor) -> bnb.nn.Int8Params:
        return self.parameter(module, *self.pack(weight))

    def parameter(self, module: bnb.nn.Linear8bitLt, codes: torch.Tensor, scales: torch.Tensor) -> bnb.nn.Int8Params:
        return bnb.nn.Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)

    @staticmethod
    def quant_state(module: bnb.nn.Linear8bitLt) -> torch.Tensor:
        # bitsandbytes moves the scales from the parameter to the layer's state at the first forward.
        return module.weight.SCB if module.weight.SCB is not None else module.state.SCB

    @staticmethod
    def state_tensors(scales: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scales": scales}

    @staticmethod
    def state_from(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return tensors["scales"]

    def dequantize(self, module: bnb.nn.Linear8bitLt) -> torch.Tensor:
        return self.unpack(module.weight.data, self.quant_state(module))

    def codes(self, module: bnb.nn.Linear8bitLt) -> torch.Tensor:
        return module.weight.data
