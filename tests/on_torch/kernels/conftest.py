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


def is_declared(name: str, parameter: header.Parameter, argument) -> bool:
    if not parameter.is_pointer:
        is_flag = isinstance(argument, bool)
        return isinstance(argument, NUMBERS[parameter.type]) and (parameter.type == "int" or not is_flag)
    if parameter.type == "LoraLinear":
        return isinstance(argument, bytes) and len(argument) % bindings.LAYOUT.size == 0
    return argument is None or (
        argument.dtype == DTYPES.get(parameter.type, argument.dtype)  # void has any
        and (argument.is_contiguous() or (name, parameter.name) in STRIDED)
        and argument.device.type == "cpu"
    )


def check(name: str, arguments: tuple) -> None:
    parameters = FUNCTIONS[name].parameters
    assert len(arguments) == len(parameters), name
    for parameter, argument in zip(parameters, arguments, strict=True):
        # Written out only where it is wrong: the repr of each tensor took nine tenths of these tests' time.
        assert is_declared(name, parameter, argument), f"{name}, {parameter.name}: {argument!r}"


@pytest.fixture(autouse=True, scope="module")
def checked_calls():
    plain = bindings.call

    def checked(name, *arguments):
        check(name, arguments)
        return plain(name, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bindings, "call", checked)
        yield
