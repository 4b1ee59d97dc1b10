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

from pathlib import Path

import torch
from torch import Tensor

from saccade.kernels.cuda_launch import Call, run, typed
from saccade.nvrtc import Options, Source

SOURCE = Source(Path(__file__).parent / "cuda" / "expiry.cu")
CHUNK = 2048
THREADS = 1024
MAX_KEEP = 8192  # two lists of this length for each chunk lie in memory


def causal_expiry(key_scores: Tensor, keep: int, lengths: Tensor | None = None) -> Tensor | None:
    """int32 `[B, Hkv, Tk]`, as `saccade.selection.causal_expiry` without documents; None where min(keep, Tk) exceeds MAX_KEEP."""
    batch, heads, kv_len = key_scores.shape
    keep = min(keep, kv_len)
    if keep > MAX_KEEP:
        return None
    scores = key_scores.detach().float().contiguous()
    stop = torch.empty(scores.shape, dtype=torch.int32, device=scores.device)
    if stop.numel() == 0:
        return stop
    lengths = None if lengths is None else lengths.to(torch.int32)
    chunks = -(-kv_len // CHUNK)
    lists = torch.empty(2, batch * heads * chunks * keep, dtype=torch.int64, device=scores.device)
    counts = torch.empty(2, batch * heads * chunks, dtype=torch.int32, device=scores.device)
    best, other = ((lists[i], counts[i]) for i in (0, 1))
    run(sort_call, (scores, lengths, *best, stop), (keep,), _nothing)
    distance = 1
    while distance < chunks:
        run(merge_call, (*best, *other), (chunks, keep, distance), _nothing)
        best, other = other, best
        distance *= 2
    run(find_call, (scores, lengths, *best, stop), (keep,), _nothing)
    return stop


def sort_call(scores: Tensor, lengths: Tensor | None, best: Tensor, counts: Tensor, stop: Tensor, keep: int, _: None) -> Call:
    """The launch of `expiry_sort`."""
    return _call("expiry_sort", counts.numel(), 16 * CHUNK, (scores, lengths, best, counts, stop), _sizes(scores, keep))


def merge_call(
    best: Tensor, counts: Tensor, out: Tensor, out_counts: Tensor, chunks: int, keep: int, distance: int, _: None
) -> Call:
    """The launch of `expiry_merge`."""
    return _call("expiry_merge", counts.numel(), 0, (best, counts, out, out_counts), (chunks, keep, distance))


def find_call(scores: Tensor, lengths: Tensor | None, best: Tensor, counts: Tensor, stop: Tensor, keep: int, _: None) -> Call:
    """The launch of `expiry_find`."""
    shared = (16 + 2 * _levels()) * CHUNK
    return _call("expiry_find", counts.numel(), shared, (scores, lengths, best, counts, stop), _sizes(scores, keep))


def options() -> Options:
    """How the kernels are compiled."""
    return Options.of({"CHUNK": CHUNK, "LEVELS": _levels(), "THREADS": THREADS})


def _call(name: str, blocks: int, shared: int, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> Call:
    arguments = (*typed("pointer", *tensors), *typed("int32", *sizes))
    return Call(SOURCE, name, options(), (blocks, 1), THREADS, shared, arguments)


def _sizes(scores: Tensor, keep: int) -> tuple[int, ...]:
    return scores.shape[1], scores.shape[2], -(-scores.shape[2] // CHUNK), keep  # heads, kv_len, chunks, keep


def _levels() -> int:
    return CHUNK.bit_length() - 1


def _nothing(device: torch.device) -> None:
    """What a launch asks about its device."""
