"""Which keys a block of queries has to read, in one launch of CUDA C++: candidates of a stretch of blocks meet in shared memory.

Each stretch reads the intervals of all keys before its end (8 bytes a key) and each block the candidates of its stretch, at most
`most` + the queries of a stretch: short stretches read more of the first, long ones more of the second.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.hardware import multiprocessors
from saccade.kernels.cuda_launch import Call, typed
from saccade.kernels.dynamic_mask.lists_triton import Lists
from saccade.nvrtc import Bound, Options, Source

SOURCE = Source(Path(__file__).parent / "cuda" / "lists.cu")
THREADS = 512
MOST_LISTS = 4  # of a warp in a stretch
CANDIDATE = 12  # bytes of a key in shared memory: its interval and its place
MOST_SHARED = 96 * 1024  # what every GPU from sm_80 on has


class Shape(NamedTuple):
    """What a launch depends on. rows: B * Hkv; blocks of queries, `block` each; longest: keys of a list.

    of_stretch: blocks of a stretch; stretches of a row; room: candidates of a stretch.
    """

    rows: int
    kv_len: int
    q_len: int
    block: int
    blocks: int
    longest: int
    of_stretch: int
    stretches: int
    room: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers that the kernel takes."""
        base = self.kv_len - self.q_len
        return self.kv_len, base, self.blocks, self.block, self.of_stretch, self.stretches, self.room, self.longest

    @property
    def lists(self) -> int:
        """Of all rows."""
        return self.rows * self.blocks

    @property
    def numbers(self) -> int:
        """int32 of keys, counts and wholes."""
        return self.lists * (self.longest + 2)

    def parts(self, memory: Tensor) -> tuple[Tensor, ...]:
        """keys, counts and wholes, which lie one behind the other, each in one dim."""
        return memory.split_with_sizes((self.lists * self.longest, self.lists, self.lists))

    def addresses(self, memory: Tensor) -> tuple[int, int, int]:
        """Where they begin: views would cost as much host time as the launch."""
        keys = memory.data_ptr()
        counts = keys + 4 * self.lists * self.longest
        return keys, counts, counts + 4 * self.lists

    def call(self, *pointers: Tensor | None) -> Call:
        """The launch as data. pointers: start, stop, keys, counts, wholes."""
        arguments = (*typed("pointer", *pointers), *typed("int32", *self.sizes))
        return Call(SOURCE, "query_lists", options(), (self.rows * self.stretches, 1), THREADS, CANDIDATE * self.room, arguments)


def takes(start: Tensor, q_len: int, block: int, most: int) -> bool:
    """Whether the candidates of a stretch fit shared memory."""
    return CANDIDATE * shape_of(start, q_len, block, most).room <= MOST_SHARED


def shape_of(start: Tensor, q_len: int, block: int, most: int) -> Shape:
    """What a call of `build_lists` depends on."""
    batch, heads, kv_len = start.shape
    return _shape(batch * heads, kv_len, q_len, block, most, multiprocessors(start.device), THREADS // 32)


@functools.lru_cache(maxsize=1024)
def _shape(rows: int, kv_len: int, q_len: int, block: int, most: int, processors: int, warps: int) -> Shape:
    # As many blocks for each warp: few, but one stretch a processor (n = 65,536, 2 rows, blocks of 24: 114 stretches 28 us, 172
    # stretches 42 us, 342 stretches 46 us).
    blocks = -(-q_len // block)
    fitting = (MOST_SHARED // CANDIDATE - most) // (warps * block)  # blocks of 192 or 256 queries: fewer
    of_stretch = warps * max(1, min(MOST_LISTS, fitting, -(-rows * blocks // (warps * processors))))
    room = min(kv_len, most + of_stretch * block)
    return Shape(rows, kv_len, q_len, block, blocks, min(kv_len, most + block), of_stretch, -(-blocks // of_stretch), room)


class Written(NamedTuple):
    """Lists as a launch needs them: addresses of `Lists.keys`, `.counts` and `.wholes`, which lie in `memory`, and their sizes."""

    memory: tuple[Tensor, ...]
    keys: int
    counts: int
    wholes: int
    rows: int
    blocks: int
    longest: int


def write_lists(start: Tensor, stop: Tensor, q_len: int, block: int, most: int) -> Written:
    """As `lists.write_lists`, in one allocation."""
    shape = shape_of(start, q_len, block, most)
    memory = torch.empty(shape.numbers, dtype=torch.int32, device=start.device)
    run(shape, start, stop, memory)
    return Written((memory,), *shape.addresses(memory), shape.rows, shape.blocks, shape.longest)


def build_lists(start: Tensor, stop: Tensor, q_len: int, block: int, most: int) -> Lists:
    """As `lists.build_lists`."""
    shape = shape_of(start, q_len, block, most)
    (memory,) = write_lists(start, stop, q_len, block, most).memory
    keys, counts, wholes = shape.parts(memory)
    return Lists(keys.view(shape.rows, shape.blocks, -1), counts.view(shape.rows, -1), wholes.view(shape.rows, -1))


def run(shape: Shape, start: Tensor, stop: Tensor, memory: Tensor) -> None:
    """Launch on the device of the tensors. memory: of keys, counts and wholes."""
    _launch(shape, start.device)(start.data_ptr(), stop.data_ptr(), *shape.addresses(memory))


@functools.lru_cache(maxsize=1024)
def _launch(shape: Shape, device: torch.device) -> Bound:
    return shape.call(*[None] * 5).ready(device)


def options() -> Options:
    """How the kernel is compiled."""
    return Options.of({"THREADS": THREADS})
