"""A model directory of Hugging Face's form as mlx-lm's, and back: the tensors, as MLX reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.core.files import to_json
from anyqlora.export import tensor_moves
from anyqlora.models.architectures import read_config
from anyqlora.models.hub import SINGLE, weight_files
from anyqlora.models.prequantized import quantized_as
from anyqlora.on_mlx._compat import model_classes, tied_weights
from anyqlora.on_mlx.mlx_lm_bridge.config_translation import translate_config

SHARD = 4 << 30  # bytes of one file at most
ADDED = "added"  # key of the record: what config.json got beside Hugging Face's own words


def to_mlx(source: Path, out: Path, shard: int = SHARD) -> int:
    """Write Hugging Face's directory `source` as mlx-lm's `out`.

    Returns how many tensors. Raises UsageError, NotBuilt, DiskFull.
    """
    model_config = read_config(source)
    kind = quantized_as(model_config)
    if kind and "quantization" not in model_config:
        raise NotSupported(
            f"mlx-lm reads no {kind} weights, and another form would not be the same",
            where=str(source),
            cure="the full-precision model, or python -m anyqlora quantize of it --to affine4",
        )
    added = translate_config(model_config, source, longest=0)
    given = _tensors(source)
    model_class, args_class = model_classes(model_config)
    try:
        model = model_class(args_class.from_dict({**model_config, **added}))
        converted = model.sanitize(dict(given)) if hasattr(model, "sanitize") else dict(given)
    except (TypeError, KeyError, ValueError) as error:
        raise NotSupported(
            f"mlx-lm's {model_config['model_type']} cannot take this model: {error}",
            where=str(source),
            cure="another --backend",
        ) from None
    if kind is None:
        _refuse_others(dict(tree_flatten(model.parameters())), converted, source)
    moves = tensor_moves.tensor_moves(
        given,
        converted,
        _digest,
        lambda value: [value[number] for number in range(value.shape[0])] if value.ndim > 2 else [],
    )
    record = {"moves": moves, ADDED: sorted(added.keys() - model_config.keys())}
    tensor_moves.write_record(
        out,
        source,
        {**model_config, **added},
        lambda place: _write(place, converted, "mlx", shard),
        {tensor_moves.RECORD: to_json(record)},
    )
    return len(converted)


def to_hf(source: Path, out: Path, shard: int = SHARD) -> int:
    """Write mlx-lm's directory `source` as Hugging Face's `out`: by the record that `to_mlx` left, or as it is where
    the names are the same. Returns how many tensors. Raises UsageError, NotBuilt, DiskFull.
    """
    model_config, record, given = read_config(source), tensor_moves.read_record(source), _tensors(source)
    if record is None:
        _refuse_unknown_names(model_config, given, source)
        converted = given
    else:
        try:
            converted = {
                name: given[place] if number is None else given[place][number]
                for name, (place, number) in record["moves"].items()
            }
            model_config = {key: value for key, value in model_config.items() if key not in record[ADDED]}
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"it does not belong to these weights: {error}",
                where=str(source / tensor_moves.RECORD),
                cure="convert the original again",
            ) from None
    tensor_moves.write_record(out, source, model_config, lambda place: _write(place, converted, "pt", shard), {})
    return len(converted)


def _tensors(source: Path) -> dict[str, mx.array]:
    """{name: array}, lazy."""
    return {name: value for file in weight_files(source) for name, value in mx.load(str(source / file)).items()}


def _digest(value: mx.array) -> str:
    content = np.array(mx.contiguous(value).reshape(-1).view(mx.uint8)) if value.size else np.empty(0)
    return tensor_moves.digest(content.tobytes(), str(value.dtype), list(value.shape))


def _refuse_others(expected: Mapping[str, mx.array], converted: Mapping[str, mx.array], source: Path) -> None:
    """Raises UsageError when the files are not this model's."""
    other = sorted(
        name
        for name in expected.keys() | converted.keys()
        if name not in converted or name not in expected or expected[name].shape != converted[name].shape
    )
    if other:
        raise UsageError(
            f"{len(other)} tensors are not those of mlx-lm's model, {other[0]} is the first",
            where=str(source),
            cure="a config.json and weights that belong together",
        )


def _refuse_unknown_names(model_config: dict, given: Mapping[str, mx.array], source: Path) -> None:
    """Without a record, names have to be Hugging Face's already. Raises NotBuilt."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = {key: value for key, value in model_config.items() if key not in ("quantization", "quantization_config")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**plain))
    known = set(model.state_dict())
    strange = sorted(name for name in given if name not in known and f"{name.rpartition('.')[0]}.weight" not in known)
    missing = sorted(known - given.keys() - tied_weights(model))
    if strange or missing:
        raise NotSupported(
            f"{len(strange) + len(missing)} tensors are called otherwise here than by Hugging Face, "
            f"{(strange + missing)[0]} is the first, and no "
            f"{tensor_moves.RECORD} says how",
            where=str(source),
            cure="the original directory",
        )


def _write(place: Path, converted: Mapping[str, mx.array], form: str, shard: int) -> dict[str, str]:
    """Weight files of about `shard` bytes. Returns {tensor: file}. Raises OSError."""
    groups: list[dict[str, mx.array]] = [{}]
    for name in sorted(converted):
        if groups[-1] and sum(value.nbytes for value in groups[-1].values()) + converted[name].nbytes > shard:
            groups.append({})
        groups[-1][name] = converted[name]
    index = {}
    for number, group in enumerate(groups, 1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _save(place / file, group, form)
        index |= dict.fromkeys(group, file)
    return index


def _save(path: Path, group: dict[str, mx.array], form: str) -> None:
    mx.eval(group)  # so that what fails below is the writing
    try:
        mx.save_safetensors(str(path), group, metadata={"format": form})
    except RuntimeError as error:  # MLX's word for a full disk
        raise OSError(f"{path.name}: {error}") from None
