"""Model directories between Hugging Face's form and mlx-lm's: there and back every tensor is the same, and each side
reads its own.
"""

import json
import resource

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'mlx[cpu]' mlx-lm")

import torch
from safetensors import safe_open

from anyqlora.__main__ import main
from anyqlora.core.files import FileSystem
from anyqlora.on_mlx.mlx_lm_bridge.checkpoint_conversion import to_mlx
from tests.support import tiny_models

KINDS = ["llama", "qwen2", "gemma3_text", "phi3", "mixtral", "qwen3"]


def tensors(directory):
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a handle, not a dict
    return found


def same(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("architecture", KINDS)
def test_there_and_back(architecture, dtype, tmp_path):
    from mlx_lm.utils import load_model

    more = {"sliding_window": None} if architecture in ("phi3",) else {}
    base = tiny_models.make(tmp_path / "hf", architecture, dtype=dtype, max_shard_size="60KB", **more)
    assert main(["convert", str(base), "--to", "mlx", "--out", str(tmp_path / "mlx")]) == 0
    assert main(["convert", str(tmp_path / "mlx"), "--to", "hf", "--out", str(tmp_path / "back")]) == 0
    assert same(tensors(base), tensors(tmp_path / "back"))
    assert json.loads((base / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())
    if (
        architecture in ("llama", "qwen3") and dtype == torch.float32
    ):  # plain mlx-lm reads rope and all from what was written
        ids = np.arange(5, 35)[None]
        theirs, _ = load_model(tmp_path / "mlx")
        plain = tiny_models.plain(base)(input_ids=torch.from_numpy(ids)).logits.detach().numpy()
        assert np.abs(np.array(theirs(mx.array(ids))) - plain).max() < 1e-4 * np.abs(plain).max()


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Each file that stands in the end was synced, or written by what syncs, and so was its directory, before the
    rename.
    """
    done, plain = [], {name: getattr(FileSystem, name) for name in ("write", "sync", "rename")}
    for name, method in plain.items():
        monkeypatch.setattr(
            FileSystem,
            name,
            lambda self, path, *more, name=name, method=method: (
                done.append((name, path.name)),
                method(self, path, *more),
            ),
        )
    base = tiny_models.make(tmp_path / "hf", "llama", dtype=torch.float32)
    to_mlx(base, tmp_path / "mlx", shard=40_000)
    files = {path.name for path in (tmp_path / "mlx").iterdir()}
    assert len([name for name in files if name.endswith(".safetensors")]) > 2
    assert {name for _, name in done[: done.index(("rename", "mlx.staged"))]} == {*files, "mlx.staged"}
    assert done[done.index(("rename", "mlx.staged")) - 1] == ("sync", "mlx.staged")


def test_no_room_for_weights_is_exit_code_5(tmp_path, capsys):
    base, before = (
        tiny_models.make(tmp_path / "hf", "llama", dtype=torch.float32),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        assert main(["convert", str(base), "--to", "mlx", "--out", str(tmp_path / "mlx")]) == 5
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written: model.safetensors: [write] Unable to write" in capsys.readouterr().err and [
        path.name for path in tmp_path.iterdir()
    ] == ["hf"]


def test_what_mlx_lm_writes_comes_back(tmp_path):
    """Without our record: mlx-lm's own conversion of a dense model, which keeps Hugging Face's names."""
    from mlx_lm.convert import convert

    base = tiny_models.make(tmp_path / "hf", "qwen3", dtype=torch.float32)
    convert(str(base), str(tmp_path / "mlx"))
    assert main(["convert", str(tmp_path / "mlx"), "--to", "hf", "--out", str(tmp_path / "back")]) == 0
    assert same(tensors(base), tensors(tmp_path / "back"))
    assert tiny_models.plain(tmp_path / "back")(input_ids=torch.arange(5, 20)[None]).logits.isfinite().all()


def test_the_packed_base_is_kept_and_nf4_is_refused(tmp_path, capsys):
    base = tiny_models.make(tmp_path / "hf", "llama", intermediate_size=128, dtype=torch.bfloat16)
    for kind in ("affine4", "nf4"):
        assert main(["quantize", str(base), "--to", kind, "--out", str(tmp_path / kind)]) == 0
    assert main(["convert", str(tmp_path / "affine4"), "--to", "mlx", "--out", str(tmp_path / "mlx")]) == 0
    assert main(["convert", str(tmp_path / "mlx"), "--to", "hf", "--out", str(tmp_path / "back")]) == 0
    assert same(tensors(tmp_path / "affine4"), tensors(tmp_path / "back"))
    assert main(["convert", str(tmp_path / "nf4"), "--to", "mlx", "--out", str(tmp_path / "never")]) == 2
    assert "mlx-lm reads no nf4" in capsys.readouterr().err and not (tmp_path / "never").exists()


def test_what_could_not_be_undone_is_refused(tmp_path, capsys):
    base = tiny_models.make(tmp_path / "hf", "gpt2")
    assert main(["convert", str(base), "--to", "mlx", "--out", str(tmp_path / "mlx")]) == 2
    assert "mlx-lm's gpt2 cannot take this model" in capsys.readouterr().err
    assert not (tmp_path / "mlx").exists() and not list(tmp_path.glob("*.staged"))
    renamed = tiny_models.make(tmp_path / "other", "mixtral")
    assert main(["convert", str(renamed), "--to", "mlx", "--out", str(tmp_path / "mixture")]) == 0
    (tmp_path / "mixture/conversion.json").unlink()
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "mixture"), "--to", "hf", "--out", str(tmp_path / "never")]) == 2
    assert "conversion.json says how" in capsys.readouterr().err
