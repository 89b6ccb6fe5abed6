"""Bases that are quantized once and read by both: the affine form, NF4 through its codebook, and the refusals."""

import json

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'mlx[cpu]' mlx-lm")

import torch
from safetensors import safe_open

from anyqlora.__main__ import main
from anyqlora.config.resolve import resolve
from anyqlora.config.schema import TrainConfig
from anyqlora.core import registry
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.models import nf4
from anyqlora.on_mlx.mlx_lm_bridge import load_model as bridge
from anyqlora.on_mlx.nn.layers import linears
from anyqlora.on_torch.loading.writer import write_model
from anyqlora.on_torch.quantizers.affine import Affine4, pack, unpack
from anyqlora.on_torch.quantizers.bnb import Nf4
from anyqlora.planning.backends import BackendManager
from tests.on_mlx.test_parity import SETTINGS, compare
from tests.support import runs, tiny_models

QLORA = {**SETTINGS, "train_type": "qlora"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A bf16 base, and what `quantize` makes of it."""
    directory = tmp_path_factory.mktemp("bases")
    tiny_models.make(directory / "plain", "llama", intermediate_size=128, dtype=torch.bfloat16, max_shard_size="100KB")
    for kind in ("affine4", "nf4"):
        assert main(["quantize", str(directory / "plain"), "--to", kind, "--out", str(directory / kind)]) == 0
    return directory


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("shape", [(8, 128), (96, 256)])
def test_packing_is_mlxs_bit_for_bit(shape, group):
    """mx.quantize is the reference; a row of zeros and one of equal values are among the groups."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[0, :group], weight[1, :group], weight[2, :group] = 0, 0.5, -0.25
    words, scales, biases = pack(weight, 4, group)
    theirs = mx.quantize(mx.array(weight.numpy()), group_size=group, bits=4)
    codes, their_scales, their_biases = (
        theirs[0],
        *(part.astype(mx.bfloat16).astype(mx.float32) for part in theirs[1:]),
    )
    assert np.array_equal(words.numpy().view(np.uint32), np.array(codes))
    assert np.array_equal(scales.float().numpy(), np.array(their_scales)) and np.array_equal(
        biases.float().numpy(), np.array(their_biases)
    )
    back = mx.dequantize(codes, their_scales, their_biases, group_size=group, bits=4)
    assert np.array_equal(unpack(words, scales, biases, 4).numpy(), np.array(back))
    assert (unpack(words, scales, biases, 4) - weight).abs().max() < 0.6 * (weight.max() - weight.min()) / 15 * 1.1


def held_on_mlx(directory, quantizer="affine4", **more):
    kind = registry.quantizer(quantizer).load("mlx")(
        resolve({"model_name": str(directory), "dataset": "demo", "quantizer": quantizer, **more}, environ={}),
        mx.float32,
    )
    model = bridge.load_model(directory, 64)
    return {
        name: np.array(kind.dequantize(module).astype(mx.float32))
        for name, module in model.named_modules()
        if name in linears(model)
    }


@pytest.mark.parametrize("kind", ["affine4", "nf4"])
def test_dequantized_weights_are_bit_equal_on_both(bases, tmp_path, kind):
    here = held_on_mlx(bases / kind, kind)
    started = tiny_models.Started(tmp_path, bases / kind, train_type="qlora", quantizer=kind)
    there = {name.removesuffix(".weight"): value.float().numpy() for name, value in started.held().items()}
    assert here.keys() == there.keys() and len(here) == 14
    assert all(np.array_equal(here[name], there[name]) for name in here)
    fresh = {"affine4": Affine4(TrainConfig(), torch.float32), "nf4": Nf4(TrainConfig(), torch.float32)}[
        kind
    ]  # as when it is quantized on the way into memory
    for name, value in here.items():
        weight = tensor(bases / "plain", f"{name}.weight").float()
        assert np.array_equal(fresh.unpack(*fresh.pack(weight)).numpy(), value)


def tensor(directory, name):
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118 - a handle, not a dict
                return file.get_tensor(name)
    raise KeyError(name)


@pytest.mark.parametrize("kind", ["affine4", "nf4"])
def test_both_train_on_the_same_file(bases, tmp_path, kind):
    common = {**QLORA, "model_name": str(bases / kind), "quantizer": kind}
    one, other = runs.run(tmp_path, "torch", **common), runs.run(tmp_path, "mlx", backend="mlx", **common)
    start = runs.run(tmp_path, "start", **{**common, "max_steps": 1, "lr": 0})
    compare(one, other, start, loss=1e-5, norm=1e-5, adapter=1e-4)


@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_affine_on_the_way_into_memory_is_the_files(bases, tmp_path, adapter):
    common = {**QLORA, "quantizer": "affine4", "adapter": adapter, "max_steps": 4, "lora_dropout": 0.1}
    fresh = runs.run(tmp_path, "fresh", **common, model_name=str(bases / "plain"))
    read = runs.run(tmp_path, "read", **common, model_name=str(bases / "affine4"))
    assert runs.adapter(fresh).keys() == runs.adapter(read).keys()
    assert all(torch.equal(value, runs.adapter(read)[name]) for name, value in runs.adapter(fresh).items())


def test_affine_equals_a_loop_on_the_dequantized_weights(bases, tmp_path):
    """The reference is plain transformers with the weights put into it."""
    started = tiny_models.Started(tmp_path, bases / "plain", train_type="qlora", quantizer="affine4")
    ids = torch.arange(5, 35).reshape(2, 15)
    assert torch.allclose(
        started.logits(ids),
        tiny_models.plain(bases / "plain", started.held())(input_ids=ids).logits,
        rtol=1e-5,
        atol=1e-5,
    )


def test_plain_mlx_lm_and_plain_transformers_read_the_files(bases):
    from mlx_lm.utils import load_model
    from transformers import AutoModelForCausalLM

    ids = np.arange(5, 35).reshape(2, 15)
    config = json.loads((bases / "affine4" / "config.json").read_text())
    config["rope_scaling"], config["rope_theta"] = (
        config["rope_parameters"],
        config["rope_parameters"]["rope_theta"],
    )  # the words that mlx-lm reads
    theirs, _ = load_model(bases / "affine4", model_config=config)
    ours = bridge.load_model(bases / "affine4", 64)
    assert np.array_equal(
        np.array(theirs(mx.array(ids)).astype(mx.float32)), np.array(ours(mx.array(ids)).astype(mx.float32))
    )
    model = AutoModelForCausalLM.from_pretrained(bases / "nf4", dtype=torch.float32)
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("shape", [(64, 128), (96, 80), (33, 7)])
@torch.compiler.set_stance("force_eager")  # bitsandbytes compiles what it computes for the last shape: ten seconds
def test_nf4_in_numpy_is_bitsandbytes(shape, double_quant):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.05
    theirs = Nf4(TrainConfig(double_quant=double_quant), torch.float32)
    codes, state = theirs.pack(weight)
    ours = nf4.pack(weight.numpy(), double_quant)
    assert np.array_equal(codes.reshape(-1).numpy(), ours.codes)
    far = np.abs(theirs.unpack(codes, state).numpy() - nf4.unpack(ours)).max()
    assert far == 0 if not double_quant else far < 1e-6  # the mean of all scales is summed in another order


def test_what_quantize_refuses(bases, tmp_path, capsys):
    mixture = tiny_models.make(tmp_path / "mixture", "mixtral")
    narrow = tiny_models.make(tmp_path / "narrow", "llama", intermediate_size=112)
    for argv, said in (
        ([str(bases / "nf4"), "--to", "affine4"], "quantized already"),
        ([str(mixture), "--to", "nf4"], "mixture of experts"),
        ([str(narrow), "--to", "affine4"], "mlp.down_proj.weight [64, 112]"),
        ([str(bases / "plain"), "--to", "afine4"], "did you mean"),
        ([str(bases / "plain")], "--to and --out are needed"),
    ):
        assert main(["quantize", *argv, "--out", str(tmp_path / "out")]) == 2
        assert said in capsys.readouterr().err
    assert main(["quantize", str(bases / "plain"), "--to", "nf4", "--out", str(bases / "nf4")]) == 2
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.staged"))


def test_a_checkpoint_that_says_otherwise_is_refused(bases, tmp_path):
    common = {**QLORA, "model_name": str(bases / "affine4"), "max_steps": 1}
    for settings, said in (
        ({"quantizer": "nf4"}, "quantized already: affine4"),
        ({"quantizer": "affine4", "affine_group_size": 32}, "groups have 64"),
    ):
        with pytest.raises(UsageError, match=said):
            runs.run(tmp_path, **common, **settings)
    config = json.loads((bases / "affine4" / "config.json").read_text())
    three = tmp_path / "three"
    three.mkdir()
    (three / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 64, "bits": 7}}))
    with pytest.raises(NotSupported, match="affine in 7 bits"):
        BackendManager("mlx").plan(resolve({**common, "model_name": str(three)}, environ={}))


def test_the_writer_holds_a_shard_at_a_time(bases, tmp_path):
    done = write_model(bases / "plain", tmp_path / "out", Affine4(TrainConfig(), torch.float32), shard=50_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert len(files) > 3 and set(index.values()) == {path.name for path in files} and done["packed"] == 14
    assert np.array_equal(
        held_on_mlx(tmp_path / "out")["model.layers.0.mlp.up_proj"],
        held_on_mlx(bases / "affine4")["model.layers.0.mlp.up_proj"],
    )


def test_packed_weights_are_not_split_over_processes():
    for strategy in ("fsdp", "deepspeed", "tp"):
        with pytest.raises(NotSupported, match=f"affine4 with strategy {strategy}"):
            BackendManager("cpu").plan(
                resolve(
                    {
                        "model_name": "demo",
                        "dataset": "demo",
                        "quantizer": "affine4",
                        "strategy": strategy,
                        "world_size": 2,
                    },
                    environ={},
                )
            )
    assert (
        BackendManager("cpu")
        .plan(
            resolve(
                {"model_name": "demo", "dataset": "demo", "quantizer": "affine4", "strategy": "ddp", "world_size": 2},
                environ={},
            )
        )
        .strategy
        == "ddp"
    )
