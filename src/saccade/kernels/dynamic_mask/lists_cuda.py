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

from saccade.kernels.cuda_launch import Call, typed
from saccade.kernels.dynamic_mask.lists_triton import Lists
from saccade.nvrtc import Bound, Options, Source, load

SOURCE = Source(Path(__file__).parent / "cuda" / "lists.cu")
THREADS = 512
LONGER = (16384, 65536)  # above so many keys a stretch has a list more for each warp
CANDIDATE = 12  # bytes of a key in shared memory: its interval and its place
MOST_SHARED = 96 * 1024  # what every GPU from sm_80 on has


class Shape(NamedTuple):
    """What a launch depends on. rows: B * Hkv; block: queries of a list; most: as in `lists.build_lists`."""

    rows: int
    kv_len: int
    q_len: int
    block: int
    most: int

    @property
    def blocks(self) -> int:
        """Lists of a row."""
        return -(-self.q_len // self.block)

    @property
    def of_stretch(self) -> int:
        """Blocks of a stretch: as many for each warp, fewer where their candidates would not fit (blocks of 192 or 256 queries)."""
        warps = THREADS // 32
        fitting = (MOST_SHARED // CANDIDATE - self.most) // (warps * self.block)
        return warps * max(1, min(fitting, 1 + sum(self.kv_len > length for length in LONGER)))

    @property
    def stretches(self) -> int:
        """Of a row."""
        return -(-self.blocks // self.of_stretch)

    @property
    def room(self) -> int:
        """Candidates of a stretch."""
        return min(self.kv_len, self.most + self.of_stretch * self.block)

    @property
    def longest(self) -> int:
        """Keys of a list."""
        return min(self.kv_len, self.most + self.block)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers that the kernel takes."""
        base = self.kv_len - self.q_len
        return self.kv_len, base, self.blocks, self.block, self.of_stretch, self.stretches, self.room, self.longest

    def call(self, tensors: tuple[Tensor, ...]) -> Call:
        """The launch as data, for an emulator."""
        arguments = (*typed("pointer", *tensors), *typed("int32", *self.sizes))
        return Call(SOURCE, "query_lists", options(), (self.rows * self.stretches, 1), THREADS, CANDIDATE * self.room, arguments)


def takes(start: Tensor, q_len: int, block: int, most: int) -> bool:
    """Whether the candidates of a stretch fit shared memory."""
    return CANDIDATE * Shape(start.shape[0] * start.shape[1], start.shape[2], q_len, block, most).room <= MOST_SHARED


def build_lists(start: Tensor, stop: Tensor, q_len: int, block: int, most: int) -> Lists:
    """As `lists.build_lists`."""
    shape = Shape(start.shape[0] * start.shape[1], start.shape[2], q_len, block, most)
    keys = torch.empty(shape.rows, shape.blocks, shape.longest, dtype=torch.int32, device=start.device)
    counts, wholes = torch.empty(2, shape.rows, shape.blocks, dtype=torch.int32, device=start.device).unbind(0)
    run(shape, (start, stop, keys, counts, wholes))
    return Lists(keys, counts, wholes)


def run(shape: Shape, tensors: tuple[Tensor, ...]) -> None:
    """Launch on the device of the tensors: start, stop, keys, counts, wholes."""
    _launch(shape, tensors[0].device)(*[x.data_ptr() for x in tensors])


@functools.lru_cache(maxsize=1024)
def _launch(shape: Shape, device: torch.device) -> Bound:
    kinds = ("pointer",) * 5 + ("int32",) * len(shape.sizes)
    kernel = load(SOURCE, "query_lists", kinds, options(), device)
    return kernel.configure(shape.rows * shape.stretches, THREADS, CANDIDATE * shape.room).bind(*shape.sizes)


def options() -> Options:
    """How the kernel is compiled."""
    return Options.of({"THREADS": THREADS})
