"""Every call of a C kernel in these tests is compared with kernels.h first: as many arguments, each of the type that it
declares.
"""

import pytest
import torch

from anyqlora.on_torch.kernels.cpu import bindings, header
from anyqlora.planning import native_kernels

FUNCTIONS = header.functions(native_kernels.HEADER.read_text(encoding="utf-8"))
DTYPES = {
    "bf16": torch.bfloat16,
    "float": torch.float32,
    "int8_t": torch.int8,
    "uint8_t": torch.uint8,
    "int32_t": torch.int32,
    "int64_t": torch.int64,
    "char": torch.uint8,
}
NUMBERS = {"long": int, "int": int, "float": (int, float), "double": (int, float)}
STRIDED = {("frozen_matmul", "lora_hidden"), ("lora_weight_grad", "hidden")}  # whose rows may lie apart


def check(name: str, arguments: tuple) -> None:
    parameters = FUNCTIONS[name].parameters
    assert len(arguments) == len(parameters), name
    for parameter, argument in zip(parameters, arguments, strict=True):
        where = f"{name}, {parameter.name}: {argument!r}"
        if not parameter.is_pointer:
            assert isinstance(argument, NUMBERS[parameter.type]), where
            assert parameter.type == "int" or not isinstance(argument, bool), where
        elif parameter.type == "LoraLinear":
            assert isinstance(argument, bytes) and len(argument) % bindings.LAYOUT.size == 0, where
        elif argument is not None:
            assert argument.dtype == DTYPES.get(parameter.type, argument.dtype), where  # void has any
            assert argument.is_contiguous() or (name, parameter.name) in STRIDED, where
            assert argument.device.type == "cpu", where


@pytest.fixture(autouse=True, scope="session")
def checked_calls():
    plain = bindings.call

    def checked(name, *arguments):
        check(name, arguments)
        return plain(name, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bindings, "call", checked)
        yield
