"""Memory while weights are read: what stays resident and the largest tensor in float32, not the full-precision
model.
"""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support import tiny_models
from tests.support.paths import ROOT

ALLOWED = 1.25  # times (what stays resident + the largest tensor in float32)
LARGE = {  # more than 300 million parameters each, in bf16
    "llama": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 16384,
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
    "mixtral": {
        "hidden_size": 768,
        "intermediate_size": 1536,
        "num_hidden_layers": 10,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
        "num_local_experts": 8,
    },
}
CHILD = """
import json, sys, threading, time
sys.path[:0] = sys.argv[1:3]
import torch
from anyqlora.config.resolve import resolve
from anyqlora.on_torch.assembly.build import build
from anyqlora.on_torch.runtime import Runtime
from backend_manager import BackendManager

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024

def built(directory):
    config = resolve({"model_name": directory, "dataset": "demo", "quantizer": sys.argv[4],
                       "train_type": "lora" if sys.argv[4] == "none" else "qlora",
                      "precision": sys.argv[6], "batch_size": 1, "backend": "cpu", "lora_target_modules": "q_proj"},
                      environ={}, origin="test")
    plan = BackendManager("cpu").plan(config)
    return build(plan.config, Runtime(plan))

built(sys.argv[5])  # a tiny one of the same architecture: what is imported for it is no weight
before, peak, running = anonymous(), 0, True

def watch():
    global peak
    while running:
        peak = max(peak, anonymous())
        time.sleep(0.005)

watcher = threading.Thread(target=watch)
watcher.start()
model = built(sys.argv[3]).model
running = False
watcher.join()
states = [tensor for module in model.modules()
          for state in (*getattr(module, "states", ()), getattr(module, "quant_state", None)) if state is not None
          for tensor in ([state] if torch.is_tensor(state) else state.as_dict(packed=False).values())
          if torch.is_tensor(tensor)]
tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
           for t in (*model.parameters(), *model.buffers(), *states)}
print(json.dumps({"rise": peak - before, "after": anonymous() - before, "tensors": sum(tensors.values())}))
"""


def write(directory, architecture):
    """Random bf16 weights, shard by shard; the names are those that transformers itself saves.

    Returns the largest tensor's elements.
    """
    config = AutoConfig.for_model(architecture, **{**tiny_models.SHAPE, **LARGE[architecture]})
    config.dtype = torch.bfloat16
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = saved_names(model)
    index, largest, shard, size, number = {}, max(p.numel() for p in model.parameters()), {}, 0, 1
    assert sum(p.numel() for p in model.parameters()) >= 300e6
    generator = torch.Generator().manual_seed(0)
    for position, (name, shape) in enumerate(shapes.items(), 1):
        shard[name] = (torch.randn(shape, generator=generator) * 0.02).bfloat16()
        size += shard[name].nbytes
        if size > 100e6 or position == len(shapes):
            file = f"model-{number:05d}.safetensors"
            save_file(shard, directory / file, metadata={"format": "pt"})
            index |= dict.fromkeys(shard, file)
            shard, size, number = {}, 0, number + 1
    assert number > 5
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    tiny_models.words().save_pretrained(directory)
    return largest


def saved_names(model):
    """{name: shape} in the files: Mixtral's experts have a tensor each there."""
    shapes = {}
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            experts, width, hidden = parameter.shape
            for number in range(experts):
                for part in ("w1", "w3"):
                    shapes[
                        name.replace("mlp.experts.gate_up_proj", f"block_sparse_moe.experts.{number}.{part}.weight")
                    ] = (width // 2, hidden)
        elif name.endswith("experts.down_proj"):
            for number in range(parameter.shape[0]):
                shapes[name.replace("mlp.experts.down_proj", f"block_sparse_moe.experts.{number}.w2.weight")] = (
                    parameter.shape[1:]
                )
        else:
            shapes[name.replace("mlp.gate.", "block_sparse_moe.gate.")] = parameter.shape
    return shapes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status")
@pytest.mark.parametrize("architecture", LARGE)
def test_the_full_precision_model_is_never_resident(architecture, tmp_path):
    largest = write(tmp_path, architecture)
    tiny = tiny_models.make(tmp_path / "tiny", architecture)
    for quantizer, precision in (("nf4", "bf16"), ("nf4", "fp32"), ("fp4", "bf16"), ("int8", "bf16"), ("none", "bf16")):
        out = subprocess.run(
            [
                sys.executable,
                "-c",
                CHILD,
                ROOT,
                ROOT / "tests",
                tmp_path,
                quantizer,
                tiny,
                precision,
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(out.stdout.splitlines()[-1])
        allowed = found["tensors"] + 4 * largest
        print(
            f"{architecture} {quantizer} {precision}: rise {found['rise'] / 1e6:.0f} MB, after "
            f"{found['after'] / 1e6:.0f} MB, tensors {found['tensors'] / 1e6:.0f} MB, "
            f"largest {4 * largest / 1e6:.0f} MB: {found['rise'] / allowed:.2f} of what is resident and the largest"
        )
        assert found["rise"] <= ALLOWED * allowed
