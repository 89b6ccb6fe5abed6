"""What csrc/kernels.h declares, read as text: the one statement of every C prototype, from which the binding's types
are made.
"""

from __future__ import annotations

import ctypes
import re
import struct
from typing import NamedTuple

SCALARS = {"int": ctypes.c_int, "long": ctypes.c_long, "float": ctypes.c_float, "double": ctypes.c_double}
CODES = {"int": "i", "long": "l", "float": "f", "double": "d"}  # struct's


class Parameter(NamedTuple):
    """A parameter of a function or a member of a struct: `type` is its C type without const and *, as in `const bf16
    *x`.
    """

    name: str
    type: str
    is_pointer: bool

    @property
    def ctype(self) -> type:
        return ctypes.c_void_p if self.is_pointer else SCALARS[self.type]


class Function(NamedTuple):
    returns: str  # "void" or a scalar
    parameters: tuple[Parameter, ...]


def functions(text: str) -> dict[str, Function]:
    """{name: prototype} of all that a header declares. Raises ValueError for a declaration that is
    no such prototype.
    """
    plain = re.sub(r"typedef struct \{.*?\} \w+;|typedef [^;{]*;", "", _code(text), flags=re.DOTALL)
    declared = {}
    for declaration in filter(None, map(str.strip, plain.split(";"))):
        match = re.fullmatch(r"(\w+)\s+(\w+)\s*\(([^()]*)\)", declaration)
        if not match:
            raise ValueError(f"no prototype: {declaration}")
        declared[match[2]] = Function(match[1], tuple(map(_parameter, match[3].split(","))))
    return declared


def members(text: str, name: str) -> tuple[Parameter, ...]:
    """The members of `typedef struct {...} name;`, in order."""
    match = re.search(r"typedef struct \{([^{}]*)\} " + name + ";", _code(text))
    if not match:
        raise ValueError(f"no struct {name}")
    return tuple(map(_parameter, filter(None, map(str.strip, match[1].split(";")))))


def layout(parameters: tuple[Parameter, ...]) -> struct.Struct:
    """How such members lie in memory, with this machine's own sizes and gaps."""
    return struct.Struct("@" + "".join("P" if each.is_pointer else CODES[each.type] for each in parameters))


def _code(text: str) -> str:
    """Without comments and what is for the preprocessor."""
    return re.sub(r"^#.*$", "", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL), flags=re.MULTILINE)


def _parameter(declaration: str) -> Parameter:
    match = re.fullmatch(r"(?:const\s+)?(\w+)\s*(\*?)\s*(\w+)", declaration.strip())
    if not match or not match[2] and match[1] not in SCALARS:
        raise ValueError(f"neither a scalar nor a pointer: {declaration.strip()}")
    return Parameter(match[3], match[1], bool(match[2]))
