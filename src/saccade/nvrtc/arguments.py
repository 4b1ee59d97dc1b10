"""The parameter list of a kernel, and the arguments given to it by name. A Python int tells neither its place nor its size."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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


class Kind(NamedTuple):
    """A type of parameters: its bytes, the function that converts a value to them, and its code in a `struct`; a map has none."""

    bytes: int
    convert: Converter
    code: str


KINDS = {
    "pointer": Kind(8, _UINT64, "Q"),  # an int from data_ptr(); 0 is a null pointer
    "int32": Kind(4, _INT32, "i"),
    "uint32": Kind(4, _UINT32, "I"),
    "int64": Kind(8, _INT64, "q"),
    "uint64": Kind(8, _UINT64, "Q"),
    "float32": Kind(4, ctypes.c_float, "f"),
    "tensor_map": Kind(MAP_BYTES, native_argument, ""),
}


def as_word(number: Any) -> int:
    """The bytes of a number of ctypes, as a whole number of eight bytes."""
    return int.from_bytes(bytes(number).ljust(8, b"\0"), "little", signed=True)


class Parameters:
    """The parameter list of a kernel, made of (name, type) in its order.

    kinds: name -> type. pointers, maps: the names of these types, in order. offsets: the place of each parameter but maps (None)
        in memory of `size` bytes, which `write` fills; each is aligned to its size.

    Raises:
        InvalidArgument: a type is unknown, or a name is given twice.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]]):
        for _, kind in pairs:
            if kind not in KINDS:
                raise InvalidArgument(f"argument type is {kind!r}; allowed are {', '.join(KINDS)}")
        self.kinds = dict(pairs)
        if len(self.kinds) != len(pairs):
            names = [name for name, _ in pairs]
            twice = [name for name in self.kinds if names.count(name) > 1]
            raise InvalidArgument(f"a parameter list names {', '.join(twice)} twice; every name stands for one parameter")
        self.pointers, self.maps = self._of("pointer"), self._of("tensor_map")
        self.converters = tuple(KINDS[kind].convert for kind in self.kinds.values())
        codes = [KINDS[kind].code for kind in self.kinds.values()]
        ends = [struct.calcsize("@" + "".join(codes[: i + 1])) for i in range(len(codes))]
        placed = zip(self.kinds.values(), codes, ends, strict=True)
        self.offsets = tuple(end - KINDS[kind].bytes if code else None for kind, code, end in placed)
        self._packed = struct.Struct("@" + "".join(codes))
        self._plain = [KINDS[kind].convert for kind in self.kinds.values() if kind != "tensor_map"]
        self.size = self._packed.size

    def _of(self, wanted: str) -> tuple[str, ...]:
        return tuple(name for name, kind in self.kinds.items() if kind == wanted)

    def __repr__(self) -> str:
        return ", ".join(f"{kind} {name}" for name, kind in self.kinds.items())

    def in_order(self, kernel: str, given: Mapping[str, Any], without: Sequence[str] = ()) -> list[Any]:
        """The given values in the order of the list; those of the names in `without` come later.

        Raises:
            InvalidArgument: a value is missing, or a name is not in the list.
        """
        names = [name for name in self.kinds if name not in without] if without else self.kinds
        if len(given) == len(names):
            try:
                return [given[name] for name in names]
            except KeyError:
                pass
        missing, unknown = [n for n in names if n not in given], [n for n in given if n not in names]
        parts = [f"{what} {', '.join(of)}" for what, of in (("lacks", missing), ("does not take", unknown)) if of]
        raise InvalidArgument(f"kernel {kernel} {' and '.join(parts)}; it takes {', '.join(names) or 'nothing'}")

    def word(self, name: str, value: Any) -> int:
        """The bytes of a value of one parameter, as a whole number of eight bytes."""
        return as_word(KINDS[self.kinds[name]].convert(value))

    def write(self, memory: Any, values: Sequence[Any]) -> None:
        """Write the values of all parameters but maps, in order, to their offsets.

        Raises:
            InvalidArgument: an integer does not fit its type.
        """
        try:
            self._packed.pack_into(memory, 0, *values)
        except (struct.error, OverflowError):
            # a converter says which does not fit; a float beyond float32 is infinite
            self._packed.pack_into(memory, 0, *[c(v).value for c, v in zip(self._plain, values, strict=True)])


def check_sizes(kernel: str, parameters: Parameters, sizes: Sequence[int]) -> None:
    """Compare the declared types with the sizes in bytes that the compiled kernel states."""
    declared = [KINDS[kind].bytes for kind in parameters.kinds.values()]
    if declared != list(sizes):
        raise InvalidArgument(
            f"kernel {kernel} takes arguments of {list(sizes)} bytes; declared are {parameters!r}, of {declared} bytes"
        )
