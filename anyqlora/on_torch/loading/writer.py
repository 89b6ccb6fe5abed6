"""A model directory with its linear weights quantized: written once, tensor by tensor, and read by torch and MLX from
then on.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from anyqlora.config.schema import TrainConfig
from anyqlora.core import registry
from anyqlora.core.errors import DiskFull, NotSupported, UsageError
from anyqlora.core.files import STAGED, FileSystem, tensors_to_bytes, to_json
from anyqlora.models.architectures import read_config
from anyqlora.models.hub import INDEX, SINGLE, check_safetensors, weight_files
from anyqlora.models.prequantized import FROM, quantized_as
from anyqlora.on_torch.kernels.cpu import bindings
from anyqlora.on_torch.linears import linears
from anyqlora.on_torch.loading.stream import refuse_what_stays
from anyqlora.on_torch.quantizers.base import KernelQuantizer
from anyqlora.on_torch.quantizers.experts import expert_parameters

SHARD = 1 << 30  # bytes of one file at most, and so of what is in memory at a time beside the tensor at work
DTYPES = {
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # that numpy has no name for
COPIED = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")


def packed_config(config: TrainConfig, device: torch.device | str = "cpu"):
    """The quantizer of `config` that writes files on `device`: what they say of arithmetic is float32, whatever they
    are read for.
    """
    quantizer = registry.quantizer(config.quantizer).load()(config, torch.float32)
    if (
        isinstance(quantizer, KernelQuantizer)
        and torch.device(device).type == "cpu"
        and config.kernels != "portable"
        and bindings.available("quantize_4bit")
    ):
        quantizer.set_kernels("native", device)  # the same codes, sooner
    return quantizer


def write_model(
    source: Path,
    out: Path,
    quantizer,
    *,
    base: str = "",
    device: torch.device | str = "cpu",
    shard: int = SHARD,
    disk: FileSystem | None = None,
) -> dict[str, int]:
    """Write the model of directory `source` to the new directory `out`, its linear weights as `quantizer` (an object of
    on_torch/quantizers with `files` and `stated`) packs them on `device`, all else as it is. Complete or absent; one
    tensor and one shard are in memory at a time.

    Returns {"packed": weights, "kept": tensors, "bytes": of the files}. Raises UsageError, NotBuilt, DiskFull.
    """
    model_config = read_config(source)
    if quantized_as(model_config):
        raise UsageError(
            f"its weights are quantized already: {quantized_as(model_config)}",
            where=str(source),
            cure="the full-precision model",
        )
    if out.exists():
        raise UsageError("it is there already", where=str(out), cure="another --out")
    packed = linear_weights(source)
    check_widths(source, packed, quantizer)
    disk, staged = disk or FileSystem(), out.with_name(out.name + STAGED)
    try:
        shutil.rmtree(staged, ignore_errors=True)
        disk.make_directory(staged)
        index, total = {}, 0
        for number, tensors in enumerate(shard_files(weight_chunks(source, packed, quantizer, device), shard), 1):
            name = f"model-{number:05d}.safetensors"
            total += sum(value.nbytes for value in tensors.values())
            disk.write(staged / name, file_of(tensors))
            index |= dict.fromkeys(tensors, name)
        if len(set(index.values())) == 1:
            disk.rename(staged / "model-00001.safetensors", staged / SINGLE)
        else:
            disk.write(staged / INDEX, to_json({"metadata": {"total_size": total}, "weight_map": index}))
        for path in sorted(set(copied_files(source)) - {source / "config.json", source / INDEX}):
            disk.write(staged / path.name, path.read_bytes())
        disk.write(
            staged / "config.json",
            (
                json.dumps({**model_config, **quantizer.hf_config(), **({FROM: base} if base else {})}, indent=2) + "\n"
            ).encode(),
        )
        disk.sync_directory(staged)
        disk.rename(staged, out)
        disk.sync_directory(out.parent)
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise DiskFull(
            f"cannot be written: {error.strerror or error}", where=str(out), cure="room there, or another --out"
        ) from None
    return {"packed": len(packed), "kept": len(_names(source) - packed), "bytes": total}


def copied_files(source: Path) -> list[Path]:
    """The files beside the weights that belong to a model."""
    return [path for pattern in COPIED for path in source.glob(pattern)]


def size(source: Path, quantizer) -> int:
    """Bytes that `write` makes of it, give or take 4 KiB for each packed weight. Raises NotBuilt."""
    packed = linear_weights(source)
    headers = [
        about
        for file in weight_files(source)
        for about in check_safetensors(source / file).items()
        if about[0] != "__metadata__"
    ]
    width = (quantizer.bits + 1) / 8  # with scales and biases for groups of 32, the smallest there are
    return round(
        sum(
            math.prod(about["shape"]) * width if name in packed else about["data_offsets"][1] - about["data_offsets"][0]
            for name, about in headers
        )
    )


def linear_weights(source: Path) -> set[str]:
    """Names of the weights that are packed: the frozen linear layers', as the checkpoint calls them.

    Raises NotBuilt where it calls them otherwise than the model does, has them transposed, or has experts.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    experts = expert_parameters(model)
    if experts:
        raise NotSupported(
            f"{experts[0]}: packed files of a mixture of experts, which no library would read",
            where=str(source),
            cure="--quantizer nf4 when training",
        )
    layers = linears(model)
    transposed = [name for name, module in layers.items() if isinstance(module, Conv1D)]
    if transposed:
        raise NotSupported(
            f"{transposed[0]}: packed files of weights that the checkpoint has transposed",
            where=str(source),
            cure="--quantizer nf4 when training",
        )
    names = {f"{name}.weight" for name in layers}
    refuse_what_stays(model, names)
    missing = sorted(names - _names(source))
    if missing:
        raise NotSupported(
            f"{len(missing)} linear layers have other names in the checkpoint than in the model, {missing[0]} is the "
            f"first",
            where=str(source),
            cure="--quantizer nf4 when training",
        )
    return names


def check_widths(source: Path, packed: set[str], quantizer) -> None:
    """Raises UsageError naming every weight whose rows are no whole groups."""
    group = quantizer.group
    wrong = []
    for file in weight_files(source):
        with safe_open(source / file, "pt") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in packed.intersection(tensors.keys())}
        wrong += [f"{name} {shape}" for name, shape in sorted(shapes.items()) if shape[-1] % group]
    if wrong:
        raise UsageError(
            f"{len(wrong)} weights have rows that are no whole groups of {group}:\n  " + "\n  ".join(wrong),
            where=str(source),
            cure="--affine_group_size 32 where that divides them, or --to nf4",
        )


def weight_chunks(
    source: Path, packed: set[str], quantizer, device: torch.device | str
) -> Iterator[dict[str, torch.Tensor]]:
    """What becomes of each tensor of the files, one after the other."""
    for file in weight_files(source):
        with safe_open(source / file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                value = tensors.get_tensor(name)
                yield (
                    {key: made.cpu() for key, made in quantizer.tensors(name, value.to(device)).items()}
                    if name in packed
                    else {name: value}
                )


def shard_files(parts: Iterator[dict[str, torch.Tensor]], most: int) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors that belong together in one file, files of about `most` bytes."""
    held: dict[str, torch.Tensor] = {}
    for tensors in parts:
        if held and sum(value.nbytes for value in (*held.values(), *tensors.values())) > most:
            yield held
            held = {}
        held |= tensors
    yield held


def file_of(tensors: dict[str, torch.Tensor]) -> list:
    """A safetensors file of these, in pieces."""
    width = {1: torch.uint8, 2: torch.uint16}
    held = {
        name: (value.view(width[value.itemsize]) if value.dtype in DTYPES else value).contiguous().numpy()
        for name, value in tensors.items()
    }
    return tensors_to_bytes(
        held, {"format": "pt"}, {name: DTYPES[value.dtype] for name, value in tensors.items() if value.dtype in DTYPES}
    )


def _names(source: Path) -> set[str]:
    """Of all tensors in a model's files."""
    names: set[str] = set()
    for file in weight_files(source):
        with safe_open(source / file, "pt") as tensors:
            names.update(tensors.keys())
    return names
