"""What every quantizer passes: its layer is a linear layer on what it dequantizes to, and what else it can do agrees
with that.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from anyqlora.config.schema import TrainConfig
from anyqlora.core import registry
from anyqlora.extend import BroadcastQuantizer, ExpertQuantizer, FileQuantizer, KernelQuantizer, Quantizer

SHAPES = [(64, 64), (40, 96), (257, 192)]  # [out, in]


class QuantizerContract:
    """Subclass it in a test module.

    quantizer: a name, or the module:Object of a row. settings: that it is made with. shapes: [out, in] of layers that
    it takes. tolerance: |dequantized - weight| / |weight| of normally distributed weights, at most, 2-norm. product:
    how far the layer's output and input gradient may be from those of a linear layer on the dequantized weight, as a
    part of their norms, in float32.
    """

    quantizer = ""
    settings: dict[str, Any] = {}
    tolerance = 0.15
    product = 1e-5
    shapes = SHAPES

    def make(self, compute_dtype: torch.dtype = torch.float32) -> Quantizer:
        """A new one, as a run makes it."""
        return registry.quantizer(self.quantizer).load()(TrainConfig(**self.settings), compute_dtype)

    def layer(
        self, shape: tuple[int, int] = (40, 96), dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> tuple[Quantizer, nn.Module, torch.Tensor]:
        """(quantizer, layer with a weight in it, that weight [out, in] in float32), as the loader makes it."""
        generator = torch.Generator().manual_seed(seed)
        weight, bias = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
        with torch.device("meta"):
            linear = nn.Linear(shape[1], shape[0], dtype=dtype)
        quantizer = self.make(dtype)
        layer = quantizer.empty_layer(linear)
        layer.weight = quantizer.quantize_into(layer, weight.clone())
        layer.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        return quantizer, layer.train(), weight

    @staticmethod
    def far(a: torch.Tensor, b: torch.Tensor) -> float:
        """|a - b| / |b|, 2-norm."""
        a, b = a.detach().float(), b.detach().float()
        return float((a - b).norm() / b.norm())

    def test_it_has_what_a_quantizer_has(self) -> None:
        quantizer = self.make()
        assert isinstance(quantizer, Quantizer)
        assert 1 <= quantizer.bits <= 16 and quantizer.compute_dtype == torch.float32
        assert issubclass(quantizer.module_type, nn.Module)
        assert quantizer.bits < 16 or quantizer.module_type is nn.Linear, (
            "16 bits are weights as they are, in plain linear layers: that is what plan and fast paths take them for"
        )

    def test_an_empty_layer_takes_no_memory(self) -> None:
        quantizer = self.make()
        with torch.device("meta"):
            linear = nn.Linear(96, 40)
        layer = quantizer.empty_layer(linear)
        assert isinstance(layer, quantizer.module_type)
        assert all(p.is_meta for p in layer.parameters()) and layer.bias is not None
        assert not list(layer.buffers()), (
            "transformers fills buffers itself when it has read a model: take plain attributes"
        )

    @pytest.mark.parametrize("number", range(len(SHAPES)))
    def test_the_weight_is_kept_in_its_bits_and_comes_back(self, number: int) -> None:
        if number >= len(self.shapes):
            return
        quantizer, layer, weight = self.layer(self.shapes[number])
        codes, values = quantizer.codes(layer), quantizer.dequantize(layer)
        stored = min(quantizer.bits, 8 * torch.float32.itemsize) if quantizer.bits < 16 else 8 * torch.float32.itemsize
        assert codes.numel() * codes.element_size() * 8 == weight.numel() * stored
        assert isinstance(layer.weight, nn.Parameter) and not layer.weight.requires_grad
        assert values.shape == weight.shape and values.dtype == torch.float32
        assert self.far(values, weight) <= self.tolerance
        assert torch.equal(quantizer.dequantize(layer), values)

    def test_it_takes_the_bytes_that_its_row_says(self) -> None:
        """Within 2 %: tables that a library keeps with each layer are in no row."""
        row, shape = registry.quantizer(self.quantizer), (512, 512)
        quantizer, layer, _ = self.layer(shape)
        assert row.bits == quantizer.bits
        if not row.is_quantized:
            return
        held = [
            *layer.parameters(),
            *layer.buffers(),
            *(v for v in vars(layer).values() if isinstance(v, torch.Tensor)),
        ]
        if isinstance(quantizer, BroadcastQuantizer):
            held += quantizer.state_tensors(quantizer.quant_state(layer)).values()
        taken = sum({id(v): v.numel() * v.element_size() for v in held if v is not layer.bias}.values())
        assert taken == pytest.approx(row.weight_bytes(*shape, TrainConfig(**self.settings), "torch"), rel=0.02)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_the_layer_is_a_linear_layer_on_the_dequantized_weight(self, dtype: torch.dtype) -> None:
        quantizer, layer, _ = self.layer(dtype=dtype)
        weight = quantizer.dequantize(layer)
        assert weight.dtype == dtype
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 7, 96, generator=generator).to(dtype).requires_grad_()
        y = x.detach().clone().requires_grad_()
        out, expected = layer(x), nn.functional.linear(y, weight, cast(torch.Tensor, layer.bias))
        near = self.product if dtype == torch.float32 else max(self.product, 2e-2)
        assert out.dtype == dtype and self.far(out, expected) <= near
        gradient = torch.randn(out.shape, generator=generator).to(dtype)
        out.backward(gradient)
        expected.backward(gradient)
        assert x.grad is not None and y.grad is not None and self.far(x.grad, y.grad) <= near
        assert torch.equal(quantizer.dequantize(layer), weight), "computing changes what the layer holds"

    def test_peft_reads_the_weight(self) -> None:
        """DoRA's norms are of it: PEFT asks bitsandbytes' layers, and others by HQQ's `W_q` and `dequantize()`."""
        from peft.utils.integrations import dequantize_module_weight

        quantizer, layer, _ = self.layer((64, 64))
        assert self.far(dequantize_module_weight(layer), quantizer.dequantize(layer)) <= self.product

    def test_codes_do_not_depend_on_the_precision(self) -> None:
        shape = (40, 96)
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
        if self.make().bits == 16:
            return
        all_codes = []
        for compute, given in (
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
        ):
            quantizer = self.make(compute)
            with torch.device("meta"):
                layer = quantizer.empty_layer(nn.Linear(shape[1], shape[0], dtype=compute))
            layer.weight = quantizer.quantize_into(layer, weight.to(given))
            all_codes.append(quantizer.codes(layer).clone())
        assert all(torch.equal(codes, all_codes[0]) for codes in all_codes)

    def test_experts_are_packed_as_layers_are(self) -> None:
        quantizer, layer, weight = self.layer()
        if not isinstance(quantizer, ExpertQuantizer):
            return
        codes, state = quantizer.pack(weight.clone())
        assert torch.equal(codes.flatten(), quantizer.codes(layer).flatten())
        assert torch.equal(quantizer.unpack(codes, state), quantizer.dequantize(layer))

    def test_what_one_process_hands_on_is_the_same_weight(self) -> None:
        quantizer, layer, _ = self.layer()
        if not isinstance(quantizer, BroadcastQuantizer):
            return
        with torch.device("meta"):
            other = quantizer.empty_layer(nn.Linear(96, 40))
        tensors = {name: value.clone() for name, value in quantizer.state_tensors(quantizer.quant_state(layer)).items()}
        assert all(isinstance(value, torch.Tensor) for value in tensors.values())
        other.weight = quantizer.parameter(other, quantizer.codes(layer).clone(), quantizer.state_from(tensors))
        other.bias = layer.bias
        assert torch.equal(quantizer.dequantize(other), quantizer.dequantize(layer))
        x = torch.randn(3, 96, generator=torch.Generator().manual_seed(3))
        assert torch.equal(other(x), layer(x))

    def test_files_are_named_after_the_weight_and_described(self) -> None:
        quantizer, layer, weight = self.layer()
        if not isinstance(quantizer, FileQuantizer):
            return
        files = quantizer.tensors("layer.weight", weight.clone())
        assert "layer.weight" in files and all(name.startswith("layer.") for name in files)
        assert files["layer.weight"].numel() * files["layer.weight"].element_size() == (
            quantizer.codes(layer).numel() * quantizer.codes(layer).element_size()
        )
        described: dict[str, Any] = quantizer.hf_config()
        assert described and all(isinstance(key, str) for key in described)

    def test_kernels_give_the_same_weight(self) -> None:
        quantizer, layer, weight = self.layer()
        if not isinstance(quantizer, KernelQuantizer):
            return
        other = self.make()
        assert isinstance(other, KernelQuantizer)
        assert other.set_kernels("portable", torch.device("cpu")) == []
        with torch.device("meta"):
            again = other.empty_layer(nn.Linear(96, 40))
        again.weight = other.quantize_into(again, weight.clone())
        assert torch.equal(other.dequantize(again), quantizer.dequantize(layer))
