"""Launches as data for C++."""

from __future__ import annotations

from typing import NamedTuple

MOST_ARGUMENTS, MOST_MAPS = 96, 8

# The tensor of an argument: its slot among all tensors of a call, and an offset in bytes. In slot FIXED the second is a number itself.
Place = tuple[int, int]
FIXED = -1
# Slots of numbers of a ragged call that change from batch to batch: tokens of q and of k, sequences, the longest of q and of k, and 16 times the
# sequences. The last is the number of halvings that bring the number of sequences to 0.
QUERIES, KEYS, SEQUENCES, LONGEST_Q, LONGEST_K, ROWS_OF_16_BYTES, HALVINGS = range(-2, -9, -1)
# at the end of the key of packed batches that go by lists of lengths
BY_LISTS = 1
# the slot of an address whose tensor is not known yet
ADDRESS = 1 << 20


class Number(int):
    """A number among the arguments of a launch, and its slot."""

    slot: int

    def __new__(cls, value: int, slot: int) -> Number:
        made = super().__new__(cls, value)
        made.slot = slot
        return made


class Moved(NamedTuple):
    """A tensor that the copy engine moves (see `saccade.nvrtc.tensor_map`): its address, its elements, bytes between neighbours, and the box of a
    copy. A size may be the slot of a number that changes, which is below FIXED."""

    slot: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class Described(NamedTuple):
    """One launch. The kernel takes the moved tensors first, then an argument for each slot and value (see `Place`; the value of a number that
    changes is added to it).

    per_sequence: of a ragged call, this many blocks for each sequence are enough; 0 if the grid gives their number.
    tile: of a ragged call, the grid is of each `tile` tokens of q; 0 if it is of the whole call.
    """

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    slots: tuple[int, ...]
    values: tuple[int, ...]
    moved: tuple[Moved, ...] = ()
    per_sequence: int = 0
    tile: int = 0


class Planned(NamedTuple):
    """The launches of a call in one direction.

    scratch: bytes of each piece of memory that they share; the pieces take the slots behind all others. per_query: of a ragged call, the bytes
        that come to them for each token of q. shares: (piece, groups, Tq, Tk) where the launches leave float32 shares of the gradient of a bias
        in that piece, `[.., groups, Tq, Tk]`, which is then their sum.
    """

    launches: list[Described]
    scratch: tuple[int, ...] = ()
    per_query: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
