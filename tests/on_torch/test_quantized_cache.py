"""Quantized weights that are kept: a run on them has the bytes of a run without, and what is not what was written is
never trained on.
"""

import contextlib
import errno
import io
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from anyqlora.__main__ import main
from anyqlora.config.resolve import resolve
from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.core.files import MANIFEST, FileSystem
from anyqlora.on_torch.loading.quantized_cache import QuantizedCache
from anyqlora.on_torch.loading.writer import size
from anyqlora.on_torch.quantizers.affine import Affine4
from anyqlora.on_torch.quantizers.bnb import Nf4, _FourBit
from anyqlora.planning.backends import BackendManager
from tests.support import runs, tiny_models
from tests.support.paths import MODELS

RUN = {
    "dataset": "demo",
    "context_length": 96,
    "batch_size": 4,
    "max_steps": 2,
    "lr": 2e-3,
    "save_steps": 0,
    "log_to": "stdout",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.make(tmp_path_factory.mktemp("base"), "llama", dtype=torch.bfloat16, intermediate_size=128)


@pytest.fixture
def kept(base, tmp_path):
    """kept(**settings): a cache under tmp_path, as a run with these settings has it."""

    def make(**settings):
        config = resolve(
            {"model_name": str(base), **RUN, "quantized_cache": str(tmp_path / "kept"), **settings},
            environ={},
            origin="test",
        )
        return QuantizedCache(config, Path(config.model_name), torch.device("cpu"))

    return make


def trained(output, name, **settings) -> bytes:
    return (runs.run(output, name, **{**RUN, **settings}) / "adapter" / "adapter_model.safetensors").read_bytes()


@contextlib.contextmanager
def quantized():
    """[the shape of each weight] that is quantized meanwhile."""
    seen, methods = [], {_FourBit: "quantize", Affine4: "quantize_into"}
    before = {kind: getattr(kind, name) for kind, name in methods.items()}
    try:
        for kind, name in methods.items():
            setattr(kind, name, lambda self, *given, do=before[kind]: seen.append(given[-1].shape) or do(self, *given))
        yield seen
    finally:
        for kind, name in methods.items():
            setattr(kind, name, before[kind])


# ------------------------------------------------------------------------------------------------------- the same bytes


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"quantizer": "nf4", "precision": "bf16"}, marks=pytest.mark.slow),
        {"quantizer": "nf4", "precision": "fp32", "adapter": "dora"},
        pytest.param({"quantizer": "fp4", "double_quant": False, "precision": "fp16"}, marks=pytest.mark.slow),
        {"quantizer": "affine4", "precision": "bf16"},
    ],
    ids=str,
)
def test_a_run_has_the_same_bytes_with_and_without(settings, base, tmp_path):
    common = {"model_name": str(base), **settings}
    with quantized() as weights:
        without = trained(tmp_path, "without", **common, quantized_cache=False)
        assert len(weights) == 14
        first = trained(tmp_path, "first", **common, quantized_cache=str(tmp_path / "kept"))
        del weights[:]
        second = trained(tmp_path, "second", **common, quantized_cache=str(tmp_path / "kept"))
        assert not weights
    assert without == first == second


@pytest.mark.parametrize(
    "architecture, dtype", [("gemma2", torch.float32), ("phi3", torch.float16), ("gpt_neox", torch.bfloat16)], ids=str
)
def test_every_tensor_is_the_one_that_is_made_without(architecture, dtype, tmp_path):
    """Codes, scales, and all that is not quantized, in value and in type; rows that end inside a block, too."""
    directory = tiny_models.make(tmp_path / "base", architecture, dtype=dtype)
    found = []
    for name, cache in (("without", False), ("first", str(tmp_path / "kept")), ("second", str(tmp_path / "kept"))):
        started = tiny_models.Started(tmp_path / name, directory, precision="bf16", quantized_cache=cache)
        states = {
            f"{key} {part}": value
            for key, module in started.model.named_modules()
            if hasattr(module, "quant_state")
            for part, value in Nf4.state_tensors(module.quant_state).items()
        }
        found.append({**dict(started.model.named_parameters()), **dict(started.model.named_buffers()), **states})
        assert states
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(
            value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in found[0].items()
        )


def test_an_entry_is_what_quantize_writes(base, kept, tmp_path):
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["quantize", str(base), "--to", "nf4", "--out", str(tmp_path / "out")]) == 0
    entry = kept(precision="bf16").entry()
    assert {path.name for path in entry.iterdir()} - {MANIFEST} == {path.name for path in (tmp_path / "out").iterdir()}
    assert all((entry / path.name).read_bytes() == path.read_bytes() for path in (tmp_path / "out").iterdir())
    state = load_file(entry / "model.safetensors")["model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"]
    assert json.loads(bytes(state.tolist()))["dtype"] == "float32"  # whatever the run computes in


# ------------------------------------------------------------------------------------------- hits, misses, what is said


def test_the_run_says_where_its_weights_come_from(base, tmp_path, capsys):
    from anyqlora.recipes import sft

    said = []
    for name in ("first", "second"):
        sft.train(
            resolve(
                {
                    **RUN,
                    "model_name": str(base),
                    "backend": "cpu",
                    "output_dir": str(tmp_path),
                    "run_name": name,
                    "quantized_cache": str(tmp_path / "kept"),
                },
                environ={},
                origin="test",
            )
        )
        said.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("quantized weights")])
    assert [len(lines) for lines in said] == [1, 1]
    assert " are kept in " in said[0][0] and " come from " in said[1][0] and str(tmp_path / "kept") in said[1][0]


def test_other_weights_and_other_settings_are_other_entries(base, kept, tmp_path):
    shutil.copytree(base, tmp_path / "base")
    same, other = kept(), kept(model_name=str(tmp_path / "base"))
    ways = [
        kept(double_quant=False),
        kept(quantizer="fp4"),
        kept(quantizer="affine4"),
        kept(quantizer="affine4", affine_group_size=32),
    ]
    assert kept(precision="fp32", lora_rank=4, lr=1e-5).path == same.path
    assert len({cache.path for cache in (same, *ways)}) == 5
    assert (
        other.path.name.rpartition("-")[2] == same.path.name.rpartition("-")[2]
    )  # the same weights, wherever they lie
    file, about = tmp_path / "base" / "model.safetensors", (tmp_path / "base" / "model.safetensors").stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert kept(model_name=str(tmp_path / "base")).path != other.path


def test_one_more_thread_is_another_entry(kept):
    """They add up the scales, whose mean is taken away: the last bits may differ."""
    before, paths = torch.get_num_threads(), set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            paths.add(kept().path)
    finally:
        torch.set_num_threads(before)
    assert len(paths) == 2


# ------------------------------------------------------------------------------------------------------ what goes wrong


def flipped(entry):
    content = bytearray((entry / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (entry / "model.safetensors").write_bytes(content)


DAMAGE = {
    "model.safetensors: its sha256": flipped,
    "config.json: its sha256": lambda entry: (entry / "config.json").write_text("{}"),
    "tokenizer.json: missing, or not of it": lambda entry: (entry / "tokenizer.json").unlink(),
    "other.safetensors: missing, or not of it": lambda entry: shutil.copy(
        entry / "model.safetensors", entry / "other.safetensors"
    ),
    "manifest.json: its own hash": lambda entry: (entry / MANIFEST).write_text(
        (entry / MANIFEST).read_text().replace('"nf4"', '"fp4"')
    ),
    "manifest.json: [Errno 2]": lambda entry: (entry / MANIFEST).unlink(),
    "manifest.json: Expecting value": lambda entry: (entry / MANIFEST).write_text(""),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_a_damaged_entry_is_named_and_made_again(said, kept):
    entry = kept().entry()
    good = {path.name: path.read_bytes() for path in entry.iterdir()}
    DAMAGE[said](entry)
    again = kept()
    assert again.entry() == entry
    assert len(again.notes) == 1 and f"{entry} are made again: {said}" in again.notes[0]
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == good
    last = kept()
    assert last.entry() == entry and not last.notes
    assert [path.name for path in entry.parent.iterdir()] == [entry.name]


def test_an_entry_of_other_weights_is_not_taken(kept):
    entry, other = kept().entry(), kept(double_quant=False)
    entry.rename(other.path)
    assert other.entry() == other.path and "manifest.json: of other weights" in other.notes[0]


class Full(FileSystem):
    """There is room for so many files more."""

    def __init__(self, files):
        self.files = files

    def write(self, path, content):
        self.files -= 1
        if self.files < 0:
            path.write_bytes(b"the beginning")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(path, content)


def test_a_full_disk_leaves_nothing_and_says_so(kept, tmp_path):
    files = len(list(kept().entry().iterdir()))
    shutil.rmtree(tmp_path / "kept")
    for room in range(files):
        cache = kept()
        cache.disk = Full(room)
        assert cache.entry() is None and list((tmp_path / "kept").iterdir()) == []
        assert (
            len(cache.notes) == 1 and "are not kept" in cache.notes[0] and "No space left on device" in cache.notes[0]
        )
    enough = kept()
    enough.disk = Full(files)
    assert enough.entry() and not enough.notes


def test_half_of_what_is_free_is_left_to_others(kept, tmp_path, monkeypatch):
    needed = size(kept().source, Nf4(TrainConfig(), torch.float32))
    written = sum(path.stat().st_size for path in kept().entry().glob("*.safetensors"))
    assert needed - 14 * 4096 < written < needed + 14 * 4096
    shutil.rmtree(tmp_path / "kept")
    for free, fits in ((2 * needed - 1, False), (2 * needed, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        cache = kept()
        assert bool(cache.entry()) is fits and ("more than half of the" in " ".join(cache.notes)) is not fits


def test_a_run_goes_on_where_nothing_can_be_kept(base, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with_it = trained(tmp_path, "with", model_name=str(base), quantized_cache=str(tmp_path / "file" / "kept"))
    assert with_it == trained(tmp_path, "without", model_name=str(base), quantized_cache=False)
    assert capsys.readouterr().err.count("quantized weights are not kept") == 1


def test_two_processes_may_write_one_entry_at_once(kept):
    """The second is ready when the first has already put its own there, and takes that."""
    first, second = kept(), kept()

    class Late(FileSystem):
        def rename(self, old, new):
            if new == second.path:
                assert first.entry() == new
            super().rename(old, new)

    second.disk = Late()
    assert second.entry() == first.path
    assert first.news and second.news and not first.notes + second.notes
    assert [path.name for path in first.path.parent.iterdir()] == [first.path.name]


def test_the_limit_is_kept_by_removing_what_was_not_used_for_longest(kept, tmp_path):
    entries = [
        kept(double_quant=double, quantizer=kind).entry()
        for kind, double in (("nf4", True), ("nf4", False), ("fp4", True))
    ]
    foreign = [tmp_path / "kept" / name for name in ("mine", "step-000120", "base-int8-0123456789abcdef")]
    left, recent = (
        entries[0].with_name(f"{entries[0].name}.0123456{n}{suffix}") for n, suffix in ((0, ".staged"), (1, ""))
    )
    for path in (*foreign, left, recent):
        path.mkdir()
    sizes = [sum(path.stat().st_size for path in entry.iterdir()) for entry in entries]
    for age, path in (
        (7200, entries[0]),
        (3600, entries[1]),
        (60, entries[2]),
        (2 * 86400, left),
        *((2 * 86400, path) for path in foreign),
    ):
        os.utime(path, (time.time() - age,) * 2)
    room = {"quantized_cache_limit": (sum(sizes) - 1) / 2**30}
    assert kept(quantizer="nf4", **room).entry() == entries[0]  # used, so that the second one is the oldest now
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {
        path.name for path in (entries[0], entries[2], recent, *foreign)
    }
    small = kept(double_quant=False, quantized_cache_limit=1e-6)
    assert small.entry() is None and "quantized_cache_limit is" in small.notes[0]
    assert kept(quantized_cache_limit=1e-6).entry() == entries[0] and entries[2].exists()  # it may be read just now


# ------------------------------------------------------------------------------------------------------------- the plan


def planned(model, **settings):
    return BackendManager("cpu").plan(
        resolve({"model_name": str(model), "dataset": "demo", "backend": "cpu", **settings}, environ={}, origin="test")
    )


def test_large_models_are_kept_unless_somebody_says_otherwise(base):
    large = planned(MODELS / "llama-3-8b")
    assert large.config.quantized_cache is True and "quantized weights kept on disk" in "\n".join(large.explain())
    assert BackendManager("cpu").plan(large.config).config == large.config
    assert (
        planned(base).config.quantized_cache is False
        and planned(MODELS / "llama-3-8b", quantized_cache=False).config.quantized_cache is False
    )
    assert planned(base, quantized_cache=True).config.quantized_cache is True


@pytest.mark.parametrize(
    "settings, why",
    [
        ({"adapter": "pissa"}, "adapter pissa needs the full-precision weights"),
        ({"adapter": "loftq"}, "adapter loftq needs the full-precision weights"),
        ({"quantizer": "int8"}, "quantizer int8 writes no files"),
        ({"train_type": "lora"}, "quantizer none writes no files"),
        ({"world_size": 2, "strategy": "tp"}, "strategy tp may quantize slices"),
        ({"trust_remote_code": True}, "code of its own"),
        ({}, "experts of a mixture"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_not_and_refused_when_asked_for(settings, why, tmp_path):
    model = MODELS / "llama-3-8b" if settings else tiny_models.make(tmp_path, "mixtral")
    assert planned(model, **settings).config.quantized_cache is False
    with pytest.raises(UsageError, match=why) as refused:
        planned(model, **settings, quantized_cache=True)
    assert "--quantized_cache auto" in refused.value.cure


def test_a_model_whose_files_cannot_be_written_so_is_refused_only_when_it_was_asked_for(tmp_path):
    """GPT-2 has its weights transposed in its files."""
    directory = tiny_models.make(tmp_path / "base", "gpt2")
    with pytest.raises(NotSupported, match="the checkpoint has transposed"):
        trained(tmp_path, "asked", model_name=str(directory), quantized_cache=str(tmp_path / "kept"))
    config = resolve({"model_name": str(directory), "dataset": "demo"}, environ={})
    cache = QuantizedCache(config.with_(quantized_cache=str(tmp_path / "kept")), directory, torch.device("cpu"))
    assert cache.entry() is None and not cache.notes
