"""Launches as C++ is told of them."""

from __future__ import annotations

from typing import NamedTuple

MOST_ARGUMENTS, MOST_MAPS = 96, 8

# The tensor of an argument: its slot among all tensors of a call, and an offset in bytes. In slot -1 the second is a number itself.
Place = tuple[int, int]


class Moved(NamedTuple):
    """A tensor that the copy engine moves (see `saccade.nvrtc.tensor_map`): where it lies, its elements, bytes between neighbours, and the box of
    a copy."""

    slot: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class Described(NamedTuple):
    """One launch. The kernel takes the moved tensors first, then an argument for each slot and value (see `Place`)."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    slots: tuple[int, ...]
    values: tuple[int, ...]
    moved: tuple[Moved, ...] = ()


class Planned(NamedTuple):
    """The launches of a backward call. scratch: bytes of each piece of memory that they share; the pieces take the slots behind all others."""

    launches: list[Described]
    scratch: tuple[int, ...] = ()
