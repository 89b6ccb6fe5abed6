"""One process has read a model and the others have its outline: what each part holds goes to them as bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from anyqlora.on_torch.quantizers.experts import PackedExperts


class Broadcaster:
    """Rank 0 tells, the others hear.

    Small things go through host memory and wait as long as rank 0 takes; tensors go by `device`.
    """

    def __init__(self, rank: int, device: torch.device, patient: dist.ProcessGroup | None = None):
        """`patient` is a group on host memory whose collectives wait long: rank 0 may be reading a large model."""
        self.rank, self.device, self.patient = rank, device, patient

    def broadcast(self, value=None):
        """Rank 0's JSON-able `value`, on all."""
        text = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(text)])
        dist.broadcast(size, 0, group=self.patient)
        content = torch.frombuffer(bytearray(text or bytes(int(size))), dtype=torch.uint8)
        dist.broadcast(content, 0, group=self.patient)
        return json.loads(bytes(content.tolist()))

    def tensor(self, value: torch.Tensor | None, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        """Rank 0's tensor, on all, on the device."""
        here = (
            value.detach().to(self.device).contiguous()
            if self.rank == 0
            else torch.empty(shape, dtype=dtype, device=self.device)
        )
        if here.numel():
            dist.broadcast(here.reshape(-1).view(torch.uint8), 0)
        return here


def broadcast_model(
    module: nn.Module,
    quantizer,
    link: Broadcaster,
    done: Callable[[nn.Module], bool] = lambda part: False,
    keeps: bool = True,
) -> None:
    """Everything that `module` holds, apart from what lies in modules that are `done`, is what rank 0 holds, on the
    device. A process that does not keep it takes part only because all must.

    A rank that has an outline takes tensors of its own; one that has values takes rank 0's in their place.
    """
    owners = dict(_parts(module, "", done))
    mine = {name: contents(owner, quantizer) for name, owner in owners.items()} if link.rank == 0 else {}
    seen: dict[int, tuple[str, str]] = {}
    listed = []
    for name, tensors in mine.items():
        for key, tensor in tensors.items():
            same = seen.setdefault(id(tensor), (name, key)) if isinstance(tensor, nn.Parameter) else (name, key)
            listed.append(
                [
                    name,
                    key,
                    str(tensor.dtype).removeprefix("torch."),
                    list(tensor.shape),
                    *(same if same != (name, key) else ()),
                ]
            )
    heard: dict[str, dict[str, torch.Tensor]] = {}
    for name, key, dtype, shape, *same in link.broadcast(listed):
        value = (
            heard[same[0]][same[1]]
            if same
            else link.tensor(mine[name][key] if mine else None, getattr(torch, dtype), shape)
        )
        heard.setdefault(name, {})[key] = value
    tied: dict[int, nn.Parameter] = {}
    for name, tensors in heard.items() if keeps else ():
        adopt_tensor(owners[name], tensors, quantizer, tied)


def _parts(module: nn.Module, name: str, done: Callable) -> Iterator[tuple[str, nn.Module]]:
    yield name, module
    for key, child in module.named_children():
        if not done(child):
            yield from _parts(child, f"{name}.{key}" if name else key, done)


def contents(owner: nn.Module, quantizer) -> dict[str, torch.Tensor]:
    """The tensors of one module, without its children's, and what its packed weight needs beside its codes."""
    if isinstance(owner, PackedExperts):
        return owner.tensors()
    tensors: dict[str, torch.Tensor] = dict(owner.named_parameters(recurse=False)) | dict(
        owner.named_buffers(recurse=False)
    )
    if is_packed(owner, quantizer):
        tensors |= {
            f"weight|{key}": value for key, value in quantizer.state_tensors(quantizer.quant_state(owner)).items()
        }
    return tensors


def adopt_tensor(owner: nn.Module, tensors: dict[str, torch.Tensor], quantizer, tied: dict[int, nn.Parameter]) -> None:
    """Put the tensors in their places. `tied` has the parameters that were made of a tensor so far."""
    if isinstance(owner, PackedExperts):
        owner.adopt(tensors)
        return
    buffers = dict(owner.named_buffers(recurse=False, remove_duplicate=False))
    parameters = dict(owner.named_parameters(recurse=False, remove_duplicate=False))
    with torch.no_grad():
        for key, value in tensors.items():
            if key in buffers:
                setattr(owner, key, value)
            elif key in parameters and parameters[key].is_meta:
                if key == "weight" and is_packed(owner, quantizer):
                    state = {k.removeprefix("weight|"): v for k, v in tensors.items() if k.startswith("weight|")}
                    owner.weight = quantizer.parameter(owner, value, quantizer.state_from(state))
                else:
                    new = tied.setdefault(id(value), nn.Parameter(value, requires_grad=parameters[key].requires_grad))
                    setattr(owner, key, new)
            elif key in parameters:
                move_to_device(parameters[key], value)


def move_to_device(there: nn.Parameter, value: torch.Tensor) -> None:
    """`value` in the parameter that is there, which keeps its type and what hangs on it."""
    if there.device == value.device:
        if there.data_ptr() != value.data_ptr():
            there.data.copy_(value)
        return
    state = getattr(there, "quant_state", None)
    there.data = value
    if state is not None:
        state.to(value.device)


def is_packed(owner: nn.Module, quantizer) -> bool:
    return quantizer is not None and quantizer.bits < 16 and isinstance(owner, quantizer.module_type)
