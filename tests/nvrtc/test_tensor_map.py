"""Tensor maps: the requests to the driver. Copies with them are tested where they are used."""

from __future__ import annotations

import importlib

import pytest

from saccade.errors import InvalidArgument, SaccadeError
from saccade.nvrtc.arguments import KINDS
from saccade.nvrtc.tensor_map import MAP_BYTES, AnyRows

maps = importlib.import_module("saccade.nvrtc.tensor_map")  # the package has a function of this name


@pytest.fixture
def asked(monkeypatch):
    """The requests to the driver, which refuses rows of 48 bytes."""
    seen = []

    def encode(address, sizes, strides, box):
        if 48 in strides:
            raise SaccadeError("refused")
        seen.append((address, sizes, strides, box))
        return bytes(range(MAP_BYTES))

    monkeypatch.setattr(maps, "_encode", encode)
    maps.tensor_map.cache_clear()
    yield seen
    maps.tensor_map.cache_clear()


@pytest.mark.parametrize(("columns", "swizzle"), [(64, "128B"), (32, "64B")])
def test_the_driver_is_asked_with_the_contiguous_dimension_first(monkeypatch, columns, swizzle):
    binding, asked = pytest.importorskip("cuda.bindings.driver"), []
    made = binding.CUtensorMap()

    def encode(dtype, rank, address, *rest):
        *lists, apart, swizzled, _, fill = rest
        asked.append((rank, address, *[list(map(int, numbers)) for numbers in lists], apart.name, swizzled.name, fill.name))
        return binding.CUresult.CUDA_SUCCESS, made

    monkeypatch.setattr(binding, "cuTensorMapEncodeTiled", encode)
    maps.tensor_map.cache_clear()
    found = maps.tensor_map(4096, (3, 5, 128), (1280, 256), (1, 256, columns))
    maps.tensor_map.cache_clear()
    assert asked == [
        (
            3, 4096, [128, 5, 3], [256, 1280], [columns, 256, 1], [1, 1, 1], "CU_TENSOR_MAP_INTERLEAVE_NONE",
            f"CU_TENSOR_MAP_SWIZZLE_{swizzle}", "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
        )
    ]  # fmt: skip
    assert found.about == (4096, (3, 5, 128), (1280, 256), (1, 256, columns))


def address_of(shape, coordinates, box_place):
    """The address of an element of a copy, computed from the request for its map."""
    base, sizes, strides, box = shape
    at = [c + b for c, b in zip(coordinates, box_place, strict=True)]
    assert all(0 <= b < extent for b, extent in zip(box_place, box, strict=True))
    assert all(0 <= x < size for x, size in zip(at, sizes, strict=True)), "outside of the map: read as zeros"
    return base + 2 * at[0] + sum(x * stride for x, stride in zip(at[1:], strides, strict=True))


@pytest.mark.parametrize("address", [0, 16, 2**32 - 16, 2**32, 2**32 + 16, 0x7FA5_FFFF_FF00, 2**47, 2**49 - 2**20])
@pytest.mark.parametrize(("row_bytes", "columns", "box"), [(256, 128, 16), (2048, 64, 64), (0, 128, 16), (2**32 - 16, 128, 16)])
def test_any_rows_are_anywhere(asked, address, row_bytes, columns, box):
    """Also rows beyond the next multiple of 2**32, and rows that share memory."""
    AnyRows(row_bytes, columns, box).encoded()
    (shape,) = asked
    x2, x3 = AnyRows.coordinates(address)
    for row in (0, 1, box - 1):
        for column in (0, 63):
            for first in range(0, columns, 64):
                found = address_of(shape, (first, 0, x2, x3), (column, row, 0, 0))
                assert found == address + row * row_bytes + 2 * (first + column)
    assert shape[3] == (64, box, 1, 1)
    # what a driver admits
    assert all(size <= 2**32 for size in shape[1])
    assert all(stride % 16 == 0 and stride < 2**40 for stride in shape[2])


def test_a_map_as_an_argument(asked):
    convert = KINDS["tensor_map"].convert
    assert bytes(convert(AnyRows(256, 128, 16))) == bytes(range(MAP_BYTES))
    assert bytes(convert(maps.tensor_map(0, (4, 64), (128,), (4, 64)))) == bytes(range(MAP_BYTES))
    with pytest.raises(InvalidArgument, match="no TensorMap"):
        convert(7)


def test_what_is_refused(asked):
    assert AnyRows(64, 128, 16).allowed()
    assert not AnyRows(48, 128, 16).allowed()
    with pytest.raises(SaccadeError, match="refused"):
        AnyRows(48, 128, 16).encoded()
    with pytest.raises(InvalidArgument, match="multiples of 16"):
        AnyRows(40, 128, 16).encoded()
    with pytest.raises(InvalidArgument, match="boxes"):
        AnyRows(64, 128, 257).encoded()
