"""Describes a launch of a CUDA C++ kernel (`saccade.nvrtc.Bound` or `Launch`) as one that C++ can replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.native.described import ADDRESS, FIXED, MOST_ARGUMENTS, MOST_MAPS, Described, Moved, Number


def describe(
    bound: Any, pointers: Sequence[int], maps: Sequence[tuple], follows: tuple[int, int, int] | None = None
) -> Described | None:
    """The launch, with addresses in the place of tensors; None for one that needs more than a plain launch.

    pointers: addresses, and a `Number` in the place of a pointer. maps: (address, sizes, strides, box) of each. follows: (blocks, per_sequence, tile)
        of `Described`, where blocks change from call to call.
    """
    numbers = bound.numbers
    if bound.dependent or len(maps) > MOST_MAPS or len(pointers) + len(numbers) > MOST_ARGUMENTS:
        return None
    moved = tuple([Moved(ADDRESS, at, tuple(map(_size, sizes)), strides, box) for at, sizes, strides, box in maps])
    slots = [x.slot if isinstance(x, Number) else ADDRESS for x in pointers] + [FIXED] * len(numbers)
    values = [0 if slot < FIXED else int(x) for x, slot in zip((*pointers, *numbers), slots, strict=True)]
    return _described(bound, slots, values, moved, follows)


def describe_by_name(launch: Any, arguments: Mapping[str, Any]) -> Described | None:
    """The same of a launch whose arguments have names (`saccade.nvrtc.Launch`)."""
    kinds = launch.parameters.kinds
    maps = [arguments[name] for name in launch.parameters.maps]
    leading = tuple(kinds)[: len(maps)] == launch.parameters.maps
    # a map of no tensor comes with an address among the numbers
    if (
        not leading
        or len(maps) > MOST_MAPS
        or len(kinds) - len(maps) > MOST_ARGUMENTS
        or not all(getattr(x, "about", ()) for x in maps)
    ):
        return None
    slots, values = [], []
    for name, kind in [*kinds.items()][len(maps) :]:
        slots.append(ADDRESS if kind == "pointer" else FIXED)
        values.append(arguments[name] if kind == "pointer" else launch.parameters.word(name, arguments[name]))
    return _described(launch, slots, values, tuple([Moved(ADDRESS, *x.about) for x in maps]))


def _described(
    launch: Any, slots: list[int], values: list[int], moved: tuple[Moved, ...], follows: tuple[int, int, int] | None = None
) -> Described | None:
    grid, block = (x if isinstance(x, tuple) else (x,) for x in (launch.shape.grid, launch.shape.block))
    if len(block) > 1:
        return None
    blocks, *rule = follows or (0,)
    shape = (blocks, 1, 1) if follows else (*grid, 1, 1)[:3]
    return Described(launch.function, shape, block[0], launch.shape.shared_bytes, tuple(slots), tuple(values), moved, *rule)


def _size(size: int) -> int:
    return size.slot if isinstance(size, Number) and size.slot < FIXED else int(size)
