"""The declared arguments of a kernel: a Python int alone does not tell how many bytes the kernel takes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from saccade.errors import InvalidArgument
from saccade.nvrtc.tensor_map import MAP_BYTES, native_argument

Converter = Callable[[Any], Any]


def _integer(ctype: Any, low: int, high: int) -> Converter:
    """Refuses a value that does not fit, which ctypes would wrap around."""

    def convert(value: int) -> Any:
        if not low <= value <= high:
            raise InvalidArgument(f"{value} does not fit the {ctype.__name__.removeprefix('c_')} that the kernel takes")
        return ctype(value)

    return convert


_INT32, _UINT32 = _integer(ctypes.c_int32, -(2**31), 2**31 - 1), _integer(ctypes.c_uint32, 0, 2**32 - 1)
_INT64, _UINT64 = _integer(ctypes.c_int64, -(2**63), 2**63 - 1), _integer(ctypes.c_uint64, 0, 2**64 - 1)

# name -> (bytes, function that converts a value to an argument; None if cuda.core takes the value as it is)
KINDS: dict[str, tuple[int, Converter | None]] = {
    # an int from data_ptr(); 0 is a null pointer
    "pointer": (8, None),
    "int32": (4, _INT32),
    "uint32": (4, _UINT32),
    "int64": (8, _INT64),
    "uint64": (8, _UINT64),
    "float32": (4, ctypes.c_float),
    "tensor_map": (MAP_BYTES, native_argument),
}


def converters(kinds: Sequence[str]) -> tuple[Converter | None, ...]:
    """The function that converts each declared argument."""
    for kind in kinds:
        if kind not in KINDS:
            raise InvalidArgument(f"argument type is {kind!r}; allowed are {', '.join(KINDS)}")
    return tuple(KINDS[kind][1] for kind in kinds)


def check_sizes(kernel: str, kinds: Sequence[str], sizes: Sequence[int]) -> None:
    """Compare the declared types with the sizes in bytes that the compiled kernel states."""
    declared = [KINDS[kind][0] for kind in kinds]
    if declared != list(sizes):
        raise InvalidArgument(
            f"kernel {kernel} takes arguments of {list(sizes)} bytes; declared are {', '.join(kinds) or 'none'}, of {declared} bytes"
        )
