"""What every adapter passes: it starts where it says, learns everywhere, leaves the base alone, and PEFT gives the same
from its files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import anyqlora
from anyqlora import TrainConfig
from anyqlora.core import registry
from anyqlora.extend import Adapter, ObservingAdapter
from anyqlora.models.architectures import DEMO_BASE
from anyqlora.on_torch.inference import TorchModel
from anyqlora.on_torch.linears import linears

IDS = torch.arange(5, 35).reshape(2, 15) * 7 % 500  # [2, 15] of the embedded base's vocabulary


def trained_by(config: TrainConfig) -> TorchModel:
    """The model of a run of `config`, opened again from its files."""
    model = anyqlora.load_finetuned(anyqlora.train(config)["directory"])
    assert isinstance(model, TorchModel)
    return model


class AdapterContract:
    """Subclass it in a test module. The embedded base is trained for a few steps in float32.

    adapter: a name, or what `settings` select. quantizer: of the frozen weights. settings: of the run, beside these
    two. peft: how far the logits of plain PEFT on the files may be from the run's own, as a part of their largest; None
    where PEFT does not load them.
    """

    adapter = ""
    quantizer = "none"
    settings: dict[str, Any] = {}
    peft: float | None = 1e-4

    def config(self, **more: Any) -> TrainConfig:
        """Of the embedded job with this adapter; `more` changes it."""
        rank = {} if self.adapter == "full" else {"lora_rank": 4}
        job = {
            "model_name": "demo",
            "dataset": "demo",
            "backend": "cpu",
            "precision": "fp32",
            "batch_size": 4,
            "max_steps": 2,
        }
        quiet = {"log_to": "none", "num_samples": 0, "quantized_cache": False, "warmup_steps": 0, "run_name": "run"}
        own = {"adapter": self.adapter, "quantizer": self.quantizer, **rank, **self.settings}
        return anyqlora.resolve({**job, **quiet, **own, **more}, environ={})

    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls, tmp_path_factory: pytest.TempPathFactory) -> TorchModel:
        """The model of one run, for all tests."""
        return trained_by(cls().config(output_dir=str(tmp_path_factory.mktemp("adapter"))))

    def make(self) -> Adapter:
        """A new one, as a run makes it."""
        return registry.adapter(self.adapter).load()(self.config(), torch.device("cpu"))

    def test_it_has_what_an_adapter_has(self) -> None:
        adapter = self.make()
        assert isinstance(adapter, Adapter)
        assert adapter.folder in ("adapter", "model")
        assert adapter.observes == isinstance(adapter, ObservingAdapter)

    def test_a_model_with_it_learns_in_float32_and_the_rest_is_frozen(self, trained: TorchModel) -> None:
        model = trained
        learned = {id(p) for p in model.runtime.strategy.trainable.values()}
        assert learned and all(p.dtype == torch.float32 for p in model.runtime.strategy.trainable.values())
        assert list(model.runtime.strategy.trainable) == sorted(model.runtime.strategy.trainable)
        assert {id(p) for p in model.model.parameters() if p.requires_grad} == learned

    def test_all_that_is_learned_has_moved(self, trained: TorchModel, tmp_path: Path) -> None:
        start = trained_by(self.config(lr=1e-12, max_steps=1, output_dir=str(tmp_path)))
        before, after = start.runtime.strategy.trainable, trained.runtime.strategy.trainable
        assert before.keys() == after.keys()
        still = [name for name, p in after.items() if torch.equal(p, before[name])]
        assert not still, f"{len(still)} of {len(after)} tensors are where they started, {still[0]} is the first"

    def test_its_file_holds_what_the_model_has(self, trained: TorchModel) -> None:
        model, folder = trained, trained.run.folder
        adapter = self.make()
        assert folder.name == adapter.folder
        if adapter.folder == "model":
            assert (folder / "model.safetensors").exists() and (folder / "config.json").exists()
            return
        tensors = load_file(folder / "adapter_model.safetensors")
        assert tensors.keys() == model.runtime.strategy.trainable.keys()
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["peft_type"] and config["inference_mode"] is True

    def test_plain_peft_gives_the_same_logits(self, trained: TorchModel) -> None:
        model = trained
        if self.peft is None:
            pytest.skip("PEFT does not load its files")
        theirs = self.theirs(model.run.directory, model)
        with torch.no_grad():
            ours = model.model.eval()(input_ids=IDS).logits
            expected = theirs.eval()(input_ids=IDS).logits
        assert float((ours - expected).abs().max()) <= self.peft * float(expected.abs().max())

    def theirs(self, directory: Path, model: TorchModel) -> nn.Module:
        """The model as transformers and PEFT load it from the run's files, without any of ours: on the base in full
        precision.
        """
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        if (directory / "model").exists():
            return AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
        base = AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
        row = registry.quantizer(self.quantizer)
        if row.is_quantized:
            quantizer = row.load()(model.run.config, torch.float32)
            for linear in linears(base).values():
                layer = quantizer.empty_layer(linear)
                weight = cast(nn.Parameter, linear.weight)
                layer.weight = quantizer.quantize_into(layer, weight.detach())
                weight.data = quantizer.dequantize(layer)
        return PeftModel.from_pretrained(base, directory / "adapter")
