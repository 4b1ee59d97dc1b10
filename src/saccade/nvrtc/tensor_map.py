"""Tensor maps, with which the copy engine of sm_90 (TMA) finds the boxes of a tensor in memory.

The driver makes them only from numbers. cuda.core's descriptors are not used because they keep their tensor alive, so that none
could be remembered.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

from saccade.errors import InvalidArgument, SaccadeError

MAP_BYTES = 128
_ALIGNMENT = 16  # bytes; of the address and of every stride
_MOST_ROWS = 256  # the longest side of a box


class TensorMap:
    """The 128 bytes that a kernel takes by value as an argument of type "tensor_map". about: the arguments of `tensor_map` that made it."""

    __slots__ = ("about", "address", "native")

    def __init__(self, content: bytes, about: tuple = ()):
        self.about = about
        self.native = (ctypes.c_char * MAP_BYTES).from_buffer_copy(content)
        self.address = ctypes.addressof(self.native)  # a launch reads it from here


@functools.lru_cache(maxsize=4096)
def tensor_map(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> TensorMap:
    """The map of a tensor of 16-bit numbers; everything outside of it is read as zeros.

    Args:
        address: the address of its first element, a multiple of 16.
        sizes: elements along each dimension, with the contiguous dimension last; at most 5 dimensions.
        strides: bytes between neighbours along each dimension except the last; multiples of 16.
        box: elements of a copy along each dimension, at most 256; of the last 64, rows of 128 bytes that are swizzled by 128
            bytes, or 32, rows of 64 bytes that are swizzled by 64.
    """
    if address % _ALIGNMENT or any(stride % _ALIGNMENT for stride in strides):
        raise InvalidArgument(
            f"the copy engine needs addresses and strides that are multiples of {_ALIGNMENT} bytes, got address {address:#x} and strides {strides}"
        )
    fits = len(sizes) == len(box) == len(strides) + 1 <= 5 and box[-1] in (32, 64)
    if not fits or not all(1 <= extent <= _MOST_ROWS for extent in box):
        raise InvalidArgument(f"no tensor map has sizes {sizes}, strides {strides} and boxes of {box}")
    return TensorMap(_encode(address, sizes[::-1], strides[::-1], box[::-1]), (address, sizes, strides, box))


class AnyRows(NamedTuple):
    """A map of rows of 16-bit numbers anywhere in memory. It belongs to no tensor, so one map serves every call, whatever its
    addresses.

        address of row r, column c = 2**32 * x3 + 16 * x2 + row_bytes * (x1 + r) + 2 * (x0 + c)

    A copy at coordinates (x0, 0, x2, x3) takes `box` rows, and of each row the 64 columns from x0 on. Nothing is cut off at the
    end of a
    tensor: an unmapped address is an error on the device, as in a load. The addresses of rows must be multiples of 16, as for all
    16-byte copies.
    """

    row_bytes: int  # between rows, a multiple of 16
    columns: int  # of a row
    box: int

    @staticmethod
    def coordinates(address: int) -> tuple[int, int]:
        """(x2, x3) of an address that is a multiple of 16. The rows after it may cross the next multiple of 2**32."""
        return address % 2**32 // _ALIGNMENT, address >> 32

    def encoded(self) -> TensorMap:
        """The map as the driver encodes it."""
        return tensor_map(0, (_SPACES, 2**28, self.box, self.columns), (2**32, _ALIGNMENT, self.row_bytes), (1, 1, self.box, 64))

    def allowed(self) -> bool:
        """Whether the driver accepts such a map: the documentation only covers maps whose rows do not overlap."""
        try:
            self.encoded()
        except SaccadeError:
            return False
        return True


_SPACES = 2**17  # of 4 GiB: 49 bits of address


def _encode(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
    """Encode the map; dimensions in the order of the driver, with the contiguous dimension first."""
    from cuda.bindings import driver

    status, made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,  # float16 is copied in the same way
        len(sizes),
        address,
        [driver.cuuint64_t(n) for n in sizes],
        [driver.cuuint64_t(n) for n in strides],
        [driver.cuuint32_t(n) for n in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
        if box[0] == 64
        else driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise SaccadeError(f"the driver refuses a tensor map of sizes {sizes}, strides {strides}, boxes of {box}: {status.name}")
    return ctypes.string_at(made.getPtr(), MAP_BYTES)


def as_map(value: Any) -> TensorMap:
    """A map that is an argument of a launch: a `TensorMap`, or `AnyRows`, which the driver encodes here."""
    if isinstance(value, AnyRows):
        value = value.encoded()
    if not isinstance(value, TensorMap):
        raise InvalidArgument(f"{value!r} is no TensorMap")
    return value


def native_argument(value: Any) -> Any:
    """The bytes of a map (see `as_map`)."""
    return as_map(value).native
