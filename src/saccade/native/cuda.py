"""Describes a launch of a CUDA C++ kernel (`saccade.nvrtc.Bound`) as one that C++ can replay."""

from __future__ import annotations

from typing import Any

from saccade.native.described import MOST_ARGUMENTS, MOST_MAPS, Described, Moved, Place


def describe(bound: Any, moved: tuple[Moved, ...], pointers: tuple[Place, ...]) -> Described | None:
    """The launch; None for one that needs more than a plain launch.

    moved, pointers: in the order of the kernel.
    """
    numbers = bound.numbers
    if bound.dependent or len(moved) > MOST_MAPS or len(pointers) + len(numbers) > MOST_ARGUMENTS:
        return None
    grid, block = (x if isinstance(x, tuple) else (x,) for x in (bound.shape.grid, bound.shape.block))
    if len(block) > 1:
        return None
    slots = (*[slot for slot, _ in pointers], *[-1] * len(numbers))
    values = (*[value for _, value in pointers], *numbers)
    return Described(bound.function, (*grid, 1, 1)[:3], block[0], bound.shape.shared_bytes, slots, values, moved)
