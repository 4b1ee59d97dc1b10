"""Describes a compiled Triton kernel as a launch that C++ can replay."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from saccade.native.described import MOST_ARGUMENTS, Described, Free, Place

# Triton's name of a number's type -> its format for `struct`
_FORMATS = {
    "i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "?", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d",
}  # fmt: skip


def describe(
    compiled: Any, programs: int, places: tuple[Place, ...], static: tuple, per_sequence: int = 0, tile: int = 0
) -> Described | None:
    """The launch of a kernel; None for a kernel that needs more than a plain one.

    places: of each tensor argument, in order. static: the arguments after the tensors. per_sequence: see `Described`, of which `programs` are the
        most then. tile: see `Described`.
    """
    metadata = compiled.metadata
    special = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    if getattr(metadata, "num_ctas", 1) != 1 or any(getattr(metadata, name, 0) for name in special):
        return None
    arguments = list(_flat(tuple(compiled.src.signature.values()), (*places, *static)))
    slots, values, sizes = [], [], []
    for kind, value in arguments:
        if kind == "constexpr":
            continue
        if kind.startswith("*"):
            slot, offset = value
            slots.append(slot)
            values.append(offset)
            sizes.append(8)
            continue
        if kind not in _FORMATS:
            return None
        free = isinstance(value, Free)
        packed = struct.pack(_FORMATS[kind], 0 if free else value)
        slots.append(value.slot if free else -1)
        values.append(int.from_bytes(packed.ljust(8, b"\0"), "little", signed=True))
        sizes.append(len(packed))
    behind = _behind(compiled.function, sizes)
    if behind is None or len(slots) + behind > MOST_ARGUMENTS:
        return None
    slots += [-1] * behind
    values += [0] * behind
    return Described(
        compiled.function, (programs, 1, 1), 32 * metadata.num_warps, metadata.shared, tuple(slots), tuple(values), (), per_sequence, tile
    )  # fmt: skip


def _flat(kinds: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """Pairs of a kind and a value; tuples of arguments are flattened, except the (slot, offset) of a pointer."""
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
