"""Expiry of every key on a GPU in CUDA C++, by sorted lists: O(n log n + n / CHUNK * keep log n) work, whatever the scores.

    expiry_j = min { i : #{ j' <= i, j' ranks above j } >= keep }          (`saccade.selection`, which this must equal bit for bit)

Positions are cut into chunks. Only keys that are among the best `keep` at the start of a chunk, or belong to it, can expire in it, so
    sort:    each chunk in falling order
    merge:   the best `keep` up to each chunk: "the best of two lists" is associative, so this is a scan, log2(chunks) launches
    find:    a key with s survivors of its past above it and o keys of its chunk expires, if s + o >= keep, at the (keep - s)-th
             position of those o: the runs of the chunk's merge sort are a tree in which that is one walk

Triton has no way to search in shared memory, so its kernels (`expiry_triton.py`) compare every pair of a chunk's keys and survivors; they run
where there is no NVRTC. n = 32,768, keep = 1024, 8 rows: 6 launches.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kernels.cuda_launch import Call, typed
from saccade.nvrtc import Bound, Options, Source, load

SOURCE = Source(Path(__file__).parent / "cuda" / "expiry.cu")
CHUNKS = (
    (16384, 1024),
    (2**31 - 1, 2048),
)  # keys of a row up to which a chunk is so long: 25 for 32 us at 4,096, 47 for 65 at 32,768
THREADS = 1024
MAX_KEEP = 8192  # two lists of this length for each chunk lie in memory
STAGED = 96 * 1024  # bytes of shared memory that a merge may take: what every GPU from sm_80 on has


class Shape(NamedTuple):
    """rows: B * Hkv."""

    rows: int
    heads: int
    kv_len: int
    keep: int

    @property
    def chunk(self) -> int:
        """Keys that are sorted together, a power of two, at least THREADS."""
        return next(chunk for length, chunk in CHUNKS if self.kv_len <= length)

    @property
    def chunks(self) -> int:
        """Of a row."""
        return -(-self.kv_len // self.chunk)

    @property
    def levels(self) -> int:
        """Of the merge sort of a chunk."""
        return self.chunk.bit_length() - 1

    def options(self) -> Options:
        """How the kernels are compiled."""
        return Options.of({"CHUNK": self.chunk, "LEVELS": self.levels, "THREADS": THREADS})


class Step(NamedTuple):
    """A launch with one block for each chunk of each row. tensors: places among those of `causal_intervals`, `strange` last."""

    kernel: str
    tensors: tuple[int, ...]
    sizes: tuple[int, ...]
    shared_bytes: int

    def call(self, shape: Shape, tensors: tuple[Tensor | None, ...]) -> Call:
        """The launch as data, for an emulator."""
        arguments = (*typed("pointer", *(tensors[i] for i in self.tensors)), *typed("int32", *self.sizes))
        return Call(SOURCE, self.kernel, shape.options(), (shape.rows * shape.chunks, 1), THREADS, self.shared_bytes, arguments)


def causal_intervals(
    key_scores: Tensor, keep: int, lengths: Tensor | None = None, strange: int = 0
) -> tuple[Tensor, Tensor] | None:
    """(start, stop), int32 `[B, Hkv, Tk]`, as `saccade.selection.causal_intervals` without documents; None where min(keep, Tk) exceeds
    MAX_KEEP. strange: address of an int32 that becomes 1 if a score is not finite, or 0."""
    batch, heads, kv_len = key_scores.shape
    shape = Shape(batch * heads, heads, kv_len, min(keep, kv_len))
    if shape.keep > MAX_KEEP:
        return None
    scores = key_scores.detach().float().contiguous()
    start, stop = torch.empty(2, *key_scores.shape, dtype=torch.int32, device=scores.device).unbind(0)
    if stop.numel() == 0:
        return start, stop
    lengths = None if lengths is None else lengths.to(torch.int32)
    slots = shape.rows * shape.chunks
    best, other = torch.empty(2, slots * shape.keep, dtype=torch.int64, device=scores.device).unbind(0)
    counts, other_counts = torch.empty(2, slots, dtype=torch.int32, device=scores.device).unbind(0)
    run_steps(shape, (scores, lengths, start, stop, best, counts, other, other_counts), strange)
    return start, stop


def run_steps(shape: Shape, tensors: tuple[Tensor | None, ...], strange: int) -> None:
    """Launch `steps_of(shape)` on the device of the tensors."""
    addresses = [*(0 if x is None else x.data_ptr() for x in tensors), strange]
    for launch, places in _launches(shape, tensors[0].device):  # type: ignore[union-attr]
        launch(*[addresses[i] for i in places])


@functools.lru_cache(maxsize=1024)
def _launches(shape: Shape, device: torch.device) -> list[tuple[Bound, tuple[int, ...]]]:
    # described once: there are up to nine launches a call
    found = []
    for step in steps_of(shape):
        kinds = ("pointer",) * len(step.tensors) + ("int32",) * len(step.sizes)
        kernel = load(SOURCE, step.kernel, kinds, shape.options(), device)
        launch = kernel.configure(shape.rows * shape.chunks, THREADS, step.shared_bytes)
        found.append((launch.bind(*step.sizes), step.tensors))
    return found


def steps_of(shape: Shape) -> list[Step]:
    """The launches in order."""
    scores, lengths, start, stop = range(4)
    lists, others, strange = (4, 5), (6, 7), 8
    sizes = (shape.heads, shape.kv_len, shape.chunks, shape.keep)
    found = [Step("expiry_sort", (scores, lengths, *lists, start, stop, strange), sizes, 16 * shape.chunk)]
    wanted = 16 * shape.keep
    shared = wanted if wanted <= STAGED else 0
    distance = 1
    while distance < shape.chunks:
        found.append(Step("expiry_merge", (*lists, *others), (shape.chunks, shape.keep, distance, int(shared > 0)), shared))
        lists, others = others, lists
        distance *= 2
    return [*found, Step("expiry_find", (scores, lengths, *lists, stop), sizes, (16 + 2 * shape.levels) * shape.chunk)]
