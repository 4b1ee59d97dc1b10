"""Expiry of every key on a GPU in CUDA C++, in two launches that sort chunks of keys and search them.

    expiry_j = min { i : #{ j' <= i, j' ranks above j } >= keep }

The result must equal that of `saccade.dynamic_mask.selection.intervals`, bit for bit.

Positions are cut into chunks.
    sort:    each chunk is sorted in descending order of (score, position), by a merge sort whose runs are kept as a tree
    find:    each key counts the keys ranking above it, chunk by chunk with binary searches, until the count reaches keep. It
             expires in that chunk, at the position where the count becomes complete, which is found by one walk down the chunk's
             tree

Work per row: n log CHUNK to sort, at most n (n / CHUNK) log CHUNK to search. The search for a key stops where the key expires. On
random scores it takes keep (1 + log(n / keep)) / CHUNK chunks on average. A key that never expires takes all n / CHUNK.

Triton has no way to search in shared memory, so its kernels (`expiry_triton.py`) compare every pair of a chunk's keys and
survivors. They run if there is no NVRTC.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.launch.cuda import HEADERS, CudaLaunch
from saccade.launch.flag import Flag
from saccade.nvrtc import Bound, Options, Source

SOURCE = Source(Path(__file__).parent / "cuda" / "expiry.cu", (HEADERS,))
# keys sorted together, and the number of threads that sort them
CHUNK = 1024
SEARCHERS = 256  # threads of a searching block
BATCH = 4  # chunks that it searches at the same time


class Shape(NamedTuple):
    """rows: B * Hkv; chunk: keys sorted together, a power of two; searchers: threads of a searching block, a divisor of
    `chunk`."""

    rows: int
    heads: int
    kv_len: int
    keep: int
    chunk: int
    searchers: int

    @property
    def chunks(self) -> int:
        """The number of chunks of a row."""
        return -(-self.kv_len // self.chunk)

    @property
    def slots(self) -> int:
        """The number of chunks of all rows."""
        return self.rows * self.chunks

    @property
    def levels(self) -> int:
        """The number of levels of the merge sort of a chunk."""
        return self.chunk.bit_length() - 1

    @property
    def tree_bytes(self) -> int:
        """Bytes that hold the sorted chunks of all rows, 26 for each key."""
        return self.slots * self.chunk * (6 + 2 * self.levels)

    def options(self) -> Options:
        """The options with which the kernels are compiled."""
        return Options.of({"CHUNK": self.chunk, "LEVELS": self.levels, "SEARCHERS": self.searchers, "BATCH": BATCH})


class Launches(NamedTuple):
    """The launches for one shape on one device."""

    sort: Bound
    find: Bound
    tree_bytes: int


def causal_intervals(
    key_scores: Tensor, keep: int, lengths: Tensor | None = None, flag: Flag | None = None
) -> tuple[Tensor, Tensor]:
    """(start, stop), int32 `[B, Hkv, Tk]`, as `saccade.dynamic_mask.selection.intervals.causal_intervals` without documents.

    flag: set if any score is not finite; its event is recorded after the launch that sets it.
    """
    batch, heads, kv_len = key_scores.shape
    device = key_scores.device
    start = torch.empty(key_scores.shape, dtype=torch.int32, device=device)
    stop = torch.empty(key_scores.shape, dtype=torch.int32, device=device)
    if stop.numel() == 0:
        return start, stop
    sort, find, tree_bytes = launches(batch * heads, heads, kv_len, keep, device)
    scores = key_scores.float().contiguous()
    trees, lengths = torch.empty(tree_bytes, dtype=torch.uint8, device=device), None if lengths is None else lengths.int()
    lengths_ptr, trees_ptr, stop_ptr = 0 if lengths is None else lengths.data_ptr(), trees.data_ptr(), stop.data_ptr()
    sort(scores.data_ptr(), lengths_ptr, trees_ptr, start.data_ptr(), stop_ptr, 0 if flag is None else flag.address)
    if flag is not None:
        flag.record()
    find(lengths_ptr, trees_ptr, stop_ptr)
    return start, stop


def launches(rows: int, heads: int, kv_len: int, keep: int, device: torch.device) -> Launches:
    """The launches that select `keep` keys of each row on a device. rows: B * Hkv; heads: Hkv."""
    return _launches(Shape(rows, heads, kv_len, min(keep, kv_len), CHUNK, SEARCHERS), device)


@functools.lru_cache(maxsize=1024)
def _launches(shape: Shape, device: torch.device) -> Launches:
    sort, find = (call.ready(device) for call in calls_of(shape))
    return Launches(sort, find, shape.tree_bytes)


def calls_of(shape: Shape) -> tuple[CudaLaunch, CudaLaunch]:
    """The launches in order, which take the pointers of their kernels."""
    chunk, slots = shape.chunk, shape.slots
    sizes = {"heads": shape.heads, "kv_len": shape.kv_len, "chunks": shape.chunks}
    sort = CudaLaunch(
        SOURCE, "expiry_sort", shape.options(), (slots, 1), chunk, (16 + 2 * shape.levels) * chunk, sizes
    )  # fmt: skip
    find = CudaLaunch(
        SOURCE, "expiry_find", shape.options(), (slots * (chunk // shape.searchers), 1), shape.searchers,
        2 * BATCH * 4 * chunk, {**sizes, "slots": slots, "keep": shape.keep}, dependent=True,
    )  # fmt: skip
    return sort, find
