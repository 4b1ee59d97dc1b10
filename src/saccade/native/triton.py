"""Describes a compiled Triton kernel as a launch that C++ can replay."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from saccade.native.described import ADDRESS, FIXED, MOST_ARGUMENTS, Described, Number

# Triton's name of a number's type -> its format for `struct`
_FORMATS = {
    "i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "?", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d",
}  # fmt: skip


def describe(
    compiled: Any, grid: tuple[int, int, int], arguments: tuple, per_sequence: int = 0, tile: int = 0
) -> Described | None:
    """The launch of a kernel, with addresses in the place of tensors; None for a kernel that needs more than a plain one.

    arguments: addresses and numbers, as the kernel takes them. per_sequence: see `Described`, of which the grid is the most then. tile: see
        `Described`.
    """
    metadata = compiled.metadata
    special = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    if getattr(metadata, "num_ctas", 1) != 1 or any(getattr(metadata, name, 0) for name in special):
        return None
    slots, values, sizes = [], [], []
    for kind, value in _flat(tuple(compiled.src.signature.values()), arguments):
        if kind == "constexpr":
            continue
        if kind.startswith("*"):
            slots.append(ADDRESS)
            values.append(value)
            sizes.append(8)
            continue
        if kind not in _FORMATS:
            return None
        slot = value.slot if isinstance(value, Number) else FIXED
        packed = struct.pack(_FORMATS[kind], 0 if slot < FIXED else value)
        slots.append(slot)
        values.append(int.from_bytes(packed.ljust(8, b"\0"), "little", signed=True))
        sizes.append(len(packed))
    behind = _behind(compiled.function, sizes)
    if behind is None or len(slots) + behind > MOST_ARGUMENTS:
        return None
    slots += [FIXED] * behind
    values += [0] * behind
    return Described(
        compiled.function, grid, 32 * metadata.num_warps, metadata.shared, tuple(slots), tuple(values), (), per_sequence, tile
    )


def _flat(kinds: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """Pairs of a kind and a value; tuples of arguments are flattened."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, value)
        else:
            yield kind, value


def _behind(function: int, sizes: list[int]) -> int | None:
    """How many pointers of Triton's own (to unused scratch memory) the kernel takes after ours; None if it takes others."""
    from cuda.bindings import driver

    found: list[int] = []
    while True:
        status, _, size = driver.cuFuncGetParamInfo(driver.CUfunction(function), len(found))
        if status != driver.CUresult.CUDA_SUCCESS:
            break
        found.append(size)
    behind = found[len(sizes) :]
    return len(behind) if found[: len(sizes)] == sizes and set(behind) <= {8} and len(behind) <= 2 else None
