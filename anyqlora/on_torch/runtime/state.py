"""What a loop of somebody's own keeps: the state that it goes on from, and the model that comes out of it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save, save_file
from torch import nn

from anyqlora.core.errors import UsageError
from anyqlora.core.files import FileSystem, tensors_to_bytes, to_json, write_directory

LEARNED, MOMENTS, LOOP, RANDOM = "learned.safetensors", "moments.safetensors", "loop.json", "random.safetensors"


class Saving:
    """Of a `Runtime`."""

    plan: Any
    strategy: Any
    _prepared: list
    _checkpointed: list

    def register_for_checkpointing(self, *objects) -> None:
        """What `save_state` keeps and `load_state` brings back beside the rest: objects with state_dict and
        load_state_dict.
        """
        for one in objects:
            if not callable(getattr(one, "state_dict", None)) or not callable(getattr(one, "load_state_dict", None)):
                raise UsageError(
                    f"register_for_checkpointing: {type(one).__name__} has no state_dict and load_state_dict",
                    cure="an object that has both",
                )
        self._checkpointed += objects

    def save_state(self, output_dir: str | Path, **options) -> None:
        """Write what is learned, its moments, the loss scale, schedulers, loaders, registered objects and each
        process's random numbers, full tensors: it loads under any strategy and number of processes. All processes call
        it; the first one writes.
        """
        self._assert_stepped()
        learned, moments = self.strategy.gather_trainable(), self.strategy.gather_moments()
        numbers = self.gather_object(_random_numbers())
        loop = {
            "scaler": self.strategy.scaler.state_dict(),
            "counted": self._counted,
            "prepared": [one.state_dict() for one in self._prepared],
        }
        if self.is_main_process:
            files = {LEARNED: _bytes(learned), MOMENTS: _bytes(moments), LOOP: to_json(loop)}
            drawn = {f"{rank}|{name}": value for rank, each in enumerate(numbers) for name, value in each.items()}
            files[RANDOM] = _bytes(drawn)
            for number, one in enumerate(self._checkpointed):
                files |= _saved(number, one)
            write_directory(Path(output_dir), files, FileSystem(), manifest={})
        self.wait_for_everyone()

    def load_state(self, input_dir: str | Path, **options) -> None:
        """What `save_state` wrote, whatever it was written under. Raises UsageError for another model's.

        Random numbers go on where there are as many processes as there were.
        """
        directory = Path(input_dir)
        try:
            learned, moments = load_file(directory / LEARNED), load_file(directory / MOMENTS)
            loop = json.loads((directory / LOOP).read_bytes())
            drawn = load_file(directory / RANDOM) if (directory / RANDOM).exists() else {}
        except (OSError, ValueError) as error:
            raise UsageError(
                f"no state that can be read: {error}", where=str(directory), cure="a directory that save_state wrote"
            ) from None
        if learned.keys() != self.strategy.trainable.keys():
            strange = sorted(learned.keys() ^ self.strategy.trainable.keys())
            raise UsageError(
                f"the state of another model: {len(strange)} names differ, {strange[0]} is the first",
                where=str(directory),
            )
        if len(loop["prepared"]) != len(self._prepared):
            raise UsageError(
                f"the state has {len(loop['prepared'])} schedulers and loaders, and {len(self._prepared)} are prepared",
                where=str(directory),
                cure="prepare what was prepared when it was written, before load_state",
            )
        self.strategy.load_trainable(learned)
        self.strategy.load_moments(moments)
        self.strategy.scaler.load_state_dict(loop["scaler"]) if loop["scaler"] else None
        self._counted = loop["counted"]
        for one, state in zip(self._prepared, loop["prepared"], strict=True):
            one.load_state_dict(state)
        for number, one in enumerate(self._checkpointed):
            one.load_state_dict(_loaded(directory, number, one))
        if {int(name.partition("|")[0]) for name in drawn} == set(range(self.num_processes)):
            mine = f"{self.process_index}|"
            _draw_on({name.removeprefix(mine): value for name, value in drawn.items() if name.startswith(mine)})

    def get_state_dict(self, model: nn.Module | None = None, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """{name: full tensor} of the whole model, in host memory, on the first process; nothing on the others where the
        model is sharded. All processes call it.
        """
        self._assert_stepped()
        learned = self.strategy.gather_trainable()
        inner = self.strategy.unwrap()
        if self.strategy.keeps_whole:
            return {name: tensor.detach().cpu() for name, tensor in inner.state_dict().items()} | (
                learned if self.is_main_process else {}
            )
        missing = [name for name, _ in inner.named_parameters() if name not in self.strategy.trainable]
        if missing:
            raise UsageError(
                f"get_state_dict: {len(missing)} parameters are sharded and not trained, {missing[0]} is the first",
                cure="save what is trained: runtime.strategy.gather_trainable(), or save_state",
            )
        buffers = {name: tensor.detach().cpu() for name, tensor in inner.state_dict().items() if name not in learned}
        return learned | {n: t for n, t in buffers.items() if n in dict(inner.named_buffers())} if learned else {}

    def save_model(
        self,
        model: nn.Module | None,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """The whole model: model.safetensors, or its shards with their index. The first process writes."""
        if not safe_serialization:
            raise UsageError("save_model writes safetensors, which run no code when they are read")
        tensors = self.get_state_dict(model)
        if self.is_main_process:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            save_torch_state_dict(tensors, save_directory, max_shard_size=max_shard_size)
        self.wait_for_everyone()

    def save(self, obj, f: str | Path, safe_serialization: bool = False) -> None:
        """torch.save by the first process, or with `safe_serialization` a dict of tensors as safetensors."""
        if self.is_main_process:
            save_file(obj, f) if safe_serialization else torch.save(obj, f)


def _bytes(tensors: dict[str, torch.Tensor]) -> list:
    narrow = {name: "BF16" for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16}  # numpy has none
    bits = {name: tensor.view(torch.int16) if name in narrow else tensor for name, tensor in tensors.items()}
    return tensors_to_bytes({name: tensor.contiguous().numpy() for name, tensor in bits.items()}, dtypes=narrow)


def _registered(number: int) -> str:
    return f"registered-{number}"


def _saved(number: int, one) -> dict[str, list]:
    """{file name: content} of an object's state: JSON, and safetensors where it holds tensors."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        state = _to_plain(one.state_dict(), tensors)
    except TypeError as error:
        raise UsageError(
            f"register_for_checkpointing: the state of {type(one).__name__} is more than tensors, numbers, text, lists "
            f"and dicts: {error}",
            cure="a state_dict of those",
        ) from None
    files = {f"{_registered(number)}.json": to_json(state)}
    return files | ({f"{_registered(number)}.safetensors": [save(tensors)]} if tensors else {})


def _loaded(directory: Path, number: int, one) -> Any:
    path = directory / f"{_registered(number)}.json"
    tensors = path.with_suffix(".safetensors")
    try:
        return _from_plain(json.loads(path.read_bytes()), load_file(tensors) if tensors.exists() else {})
    except FileNotFoundError:
        raise UsageError(
            f"the state has nothing for {type(one).__name__}",
            where=str(directory),
            cure="register the objects that were registered when it was written",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"cannot be read: {error}", where=str(path), cure="a directory that save_state wrote"
        ) from None


def _to_plain(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON can hold it: [kind, content] for what is no number, text or None. Tensors go to `tensors`.

    Raises TypeError, which names the type, for anything else.
    """
    if type(value) is float and not math.isfinite(value):
        return ["float", repr(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        tensors[str(len(tensors))] = value.detach().cpu().clone()
        return ["tensor", str(len(tensors) - 1)]
    if isinstance(value, Mapping):
        return ["dict", [[_to_plain(key, tensors), _to_plain(each, tensors)] for key, each in value.items()]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_to_plain(each, tensors) for each in value]]
    raise TypeError(type(value).__name__)


def _from_plain(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {_from_plain(key, tensors): _from_plain(each, tensors) for key, each in content}
    return {"list": list, "tuple": tuple}[kind](_from_plain(each, tensors) for each in content)


def _random_numbers() -> dict[str, torch.Tensor]:
    """The states of the generators that a loop draws by, on this process."""
    _, keys, position, *_ = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*map(int, keys), position]),
        "python": torch.tensor(random.getstate()[1]),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _draw_on(states: dict[str, torch.Tensor]) -> None:
    """Go on where `_random_numbers` was: the second half of a drawn pair of normal numbers is not kept."""
    *keys, position = states["numpy"].tolist()
    torch.set_rng_state(states["torch"])
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position))
    random.setstate((3, tuple(states["python"].tolist()), None))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
