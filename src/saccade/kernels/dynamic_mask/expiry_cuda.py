"""Expiry of every key on a GPU in CUDA C++, by searching sorted chunks, in two launches.

    expiry_j = min { i : #{ j' <= i, j' ranks above j } >= keep }          (`saccade.selection`, which this must equal bit for bit)

Positions are cut into chunks.
    sort:    each chunk in falling order of (score, position), by a merge sort whose runs stay as a tree
    find:    each key counts who ranks above it, chunk after chunk, by binary search, until the count reaches keep. It expires in that
             chunk, at the position at which the missing number of those above it have come: one walk down the chunk's tree

Work of a row: n log CHUNK to sort, at most n (n / CHUNK) log CHUNK to search. A key stops where it expires, so that on random scores
the average key searches keep (1 + log(n / keep)) / CHUNK chunks, and the last of them, which never expires, all n / CHUNK.

Triton has no way to search in shared memory, so its kernels (`expiry_triton.py`) compare every pair of a chunk's keys and survivors; they run
where there is no NVRTC.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.cuda_launch import Call, typed
from saccade.nvrtc import Bound, Options, Source

SOURCE = Source(Path(__file__).parent / "cuda" / "expiry.cu")
CHUNK = 1024  # keys that are sorted together, and threads that sort them
SEARCHERS = 256  # threads of a block that searches
BATCH = 4  # chunks that it searches side by side


class Shape(NamedTuple):
    """rows: B * Hkv; chunk: keys that are sorted together, a power of two; searchers: threads of a block that searches, a divisor."""

    rows: int
    heads: int
    kv_len: int
    keep: int
    chunk: int
    searchers: int

    @property
    def chunks(self) -> int:
        """Of a row."""
        return -(-self.kv_len // self.chunk)

    @property
    def slots(self) -> int:
        """Chunks of all rows."""
        return self.rows * self.chunks

    @property
    def levels(self) -> int:
        """Of the merge sort of a chunk."""
        return self.chunk.bit_length() - 1

    @property
    def tree_bytes(self) -> int:
        """What is kept of the sorted chunks of all rows: 26 bytes a key."""
        return self.slots * self.chunk * (6 + 2 * self.levels)

    def options(self) -> Options:
        """How the kernels are compiled."""
        return Options.of({"CHUNK": self.chunk, "LEVELS": self.levels, "SEARCHERS": self.searchers, "BATCH": BATCH})


class Step(NamedTuple):
    """A launch. tensors: places among scores, lengths, trees, start, stop, strange."""

    kernel: str
    tensors: tuple[int, ...]
    sizes: tuple[int, ...]
    blocks: int
    threads: int
    shared_bytes: int

    def call(self, shape: Shape, tensors: tuple[Tensor | None, ...]) -> Call:
        """The launch as data; tensors: all of them."""
        arguments = (*typed("pointer", *(tensors[i] for i in self.tensors)), *typed("int32", *self.sizes))
        return Call(SOURCE, self.kernel, shape.options(), (self.blocks, 1), self.threads, self.shared_bytes, arguments)


def causal_intervals(key_scores: Tensor, keep: int, lengths: Tensor | None = None, strange: int = 0) -> tuple[Tensor, Tensor]:
    """(start, stop), int32 `[B, Hkv, Tk]`, as `saccade.selection.causal_intervals` without documents.

    strange: address of an int32 that becomes 1 if a score is not finite, or 0.
    """
    batch, heads, kv_len = key_scores.shape
    device = key_scores.device
    # two allocations take less host time than one and two views
    start = torch.empty(key_scores.shape, dtype=torch.int32, device=device)
    stop = torch.empty(key_scores.shape, dtype=torch.int32, device=device)
    if stop.numel() == 0:
        return start, stop
    shape = Shape(batch * heads, heads, kv_len, min(keep, kv_len), CHUNK, SEARCHERS)
    trees = torch.empty(shape.tree_bytes, dtype=torch.uint8, device=device)
    run_steps(shape, (key_scores.float().contiguous(), None if lengths is None else lengths.int(), trees, start, stop), strange)
    return start, stop


def run_steps(shape: Shape, tensors: tuple[Tensor | None, ...], strange: int) -> None:
    """Launch `steps_of(shape)` on the device of the tensors."""
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    addresses.append(strange)
    for launch, places in _launches(shape, tensors[-1].device):  # type: ignore[union-attr]
        launch(*[addresses[i] for i in places])


@functools.lru_cache(maxsize=1024)
def _launches(shape: Shape, device: torch.device) -> list[tuple[Bound, tuple[int, ...]]]:
    return [(step.call(shape, (None,) * 6).ready(device), step.tensors) for step in steps_of(shape)]


def steps_of(shape: Shape) -> tuple[Step, Step]:
    """The launches in order."""
    scores, lengths, trees, start, stop, strange = range(6)
    sizes = (shape.heads, shape.kv_len, shape.chunks)
    slots, chunk, tensors = shape.slots, shape.chunk, (scores, lengths, trees, start, stop, strange)
    sort = Step("expiry_sort", tensors, sizes, slots, chunk, (16 + 2 * shape.levels) * chunk)
    blocks = slots * (chunk // shape.searchers)
    find = Step(
        "expiry_find", (lengths, trees, stop), (*sizes, slots, shape.keep), blocks, shape.searchers, 2 * BATCH * 4 * chunk
    )
    return sort, find
