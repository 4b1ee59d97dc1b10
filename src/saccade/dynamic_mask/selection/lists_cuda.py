"""Lists the keys that each block of queries has to read, in one launch of CUDA C++. It collects the candidates of a stretch of
blocks in shared memory.

Each stretch reads the intervals of all keys before its end, 8 bytes a key. Each block reads the candidates of its stretch, at most
`max_new_keys` + the queries of a stretch. So short stretches read more intervals, and long ones more candidates.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.dynamic_mask.selection.lists_triton import Lists, longest_list
from saccade.hardware import multiprocessors
from saccade.launch.cuda import HEADERS, CudaLaunch
from saccade.nvrtc import Options, Source

SOURCE = Source(Path(__file__).parent / "cuda" / "lists.cu", (HEADERS,))
THREADS = 512
MOST_LISTS = 4  # that a warp makes in a stretch
# bytes of a key in shared memory: its interval and its index
CANDIDATE = 12
MOST_SHARED = 96 * 1024  # available on every GPU from sm_80 on


class Shape(NamedTuple):
    """The numbers on which a launch depends. rows: B * Hkv; blocks: blocks of `block` queries; longest: the largest number of keys of a list.

    stretches: how many stretches of `blocks_per_stretch` blocks a row has. room: how many candidates a stretch may have.
    """

    rows: int
    kv_len: int
    q_len: int
    block: int
    blocks: int
    longest: int
    blocks_per_stretch: int
    stretches: int
    room: int

    @property
    def lists(self) -> int:
        """The number of lists of all rows."""
        return self.rows * self.blocks

    def call(self, zeros: tuple[int, int] = (0, 0)) -> CudaLaunch:
        """The launch as data, which takes the pointers of the kernel. zeros: how many floats of `sums` (a multiple of four) and of `more` the
        kernel fills with zeros."""
        arguments = {
            "kv_len": self.kv_len, "base": self.kv_len - self.q_len, "blocks": self.blocks, "block": self.block,
            "of_stretch": self.blocks_per_stretch, "stretches": self.stretches, "room": self.room, "longest": self.longest,
            "sum_count": zeros[0] // 4, "more_count": zeros[1],
        }  # fmt: skip
        grid = (self.rows * self.stretches, 1)
        shared = CANDIDATE * self.room
        return CudaLaunch(SOURCE, "query_lists", options(), grid, THREADS, shared, arguments, dependent=True)


def shape_of(rows: int, kv_len: int, q_len: int, block: int, max_new_keys: int, device: torch.device) -> Shape:
    """The description of a launch on a device; check `fits`, as its candidates may be too many for shared memory."""
    return _shape(rows, kv_len, q_len, block, max_new_keys, multiprocessors(device), THREADS // 32)


def fits(shape: Shape) -> bool:
    """Whether the candidates of a stretch fit shared memory."""
    return CANDIDATE * shape.room <= MOST_SHARED


@functools.lru_cache(maxsize=1024)
def _shape(rows: int, kv_len: int, q_len: int, block: int, max_new_keys: int, processors: int, warps: int) -> Shape:
    # Equally many blocks for each warp: few of them, but at least one stretch per multiprocessor. At n = 65,536, 2 rows and blocks
    # of 24, 114 stretches took 28 us, 172 took 42 us, and 342 took 46 us.
    blocks = -(-q_len // block)
    # with blocks of 192 or 256 queries fewer fit
    fitting = (MOST_SHARED // CANDIDATE - max_new_keys) // (warps * block)
    blocks_per_stretch = warps * max(1, min(MOST_LISTS, fitting, -(-rows * blocks // (warps * processors))))
    room = min(kv_len, max_new_keys + blocks_per_stretch * block)
    return Shape(
        rows,
        kv_len,
        q_len,
        block,
        blocks,
        longest_list(kv_len, block, max_new_keys),
        blocks_per_stretch,
        -(-blocks // blocks_per_stretch),
        room,
    )


class Writer:
    """Writes the lists of one shape on a device; see `lists.writer`.

    launch: takes starts, stops, keys, counts, wholes and two tensors to fill with zeros. bytes: the sizes of keys, counts and
    wholes, which are stored one after the other, and their offsets.
    """

    def __init__(self, shape: Shape, device: torch.device, zeros: tuple[int, int] = (0, 0)):
        self.shape, self.device = shape, device
        self.launch = shape.call(zeros).ready(device)
        counts = 4 * shape.lists * shape.longest
        self.offsets = 0, counts, counts + 4 * shape.lists
        self.bytes = counts + 8 * shape.lists

    def __call__(self, start: Tensor, stop: Tensor, *zeros: Tensor) -> tuple[Tensor, int, int, int]:
        """(memory, keys, counts, wholes): one allocation that holds the lists, and their addresses. Views would cost as much host
        time as the launch."""
        memory = torch.empty(self.bytes // 4, dtype=torch.int32, device=self.device)
        keys, counts, wholes = (memory.data_ptr() + n for n in self.offsets)
        sums, more = (x.data_ptr() for x in zeros) if zeros else (0, 0)
        self.launch(start.data_ptr(), stop.data_ptr(), keys, counts, wholes, sums, more)
        return memory, keys, counts, wholes


@functools.lru_cache(maxsize=1024)
def writer(shape: Shape, device: torch.device, zeros: tuple[int, int] = (0, 0)) -> Writer:
    """The writer for a shape, a device and two numbers of floats to fill with zeros."""
    return Writer(shape, device, zeros)


def build_lists(start: Tensor, stop: Tensor, shape: Shape) -> Lists:
    """The lists as described at `lists.build_lists`."""
    memory, *_ = writer(shape, start.device)(start, stop)
    keys, counts, wholes = memory.split_with_sizes((shape.lists * shape.longest, shape.lists, shape.lists))
    return Lists(keys.view(shape.rows, shape.blocks, -1), counts.view(shape.rows, -1), wholes.view(shape.rows, -1))


def options() -> Options:
    """The options with which the kernel is compiled."""
    return Options.of({"THREADS": THREADS})
