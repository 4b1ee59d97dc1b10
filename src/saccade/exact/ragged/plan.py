"""The sequences of a packed batch that belong together: lists by length, made on the device.

A launch takes the sequences of one bucket, so that each gets the smallest tile that holds it. How many there are is known on the device alone:
kernels read the count, and programs without work end at once. Lists keep the order of the batch, so that sums over sequences are the same in
every run. The layers of a model hand over the same few tensors, so the lists of a batch are made once, and once in a CUDA graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.engine.calls import values_known
from saccade.exact.ragged.config import MOST_AT_ONCE, TILES
from saccade.launch.cache import LaunchCache
from saccade.launch.triton import launch_any
from saccade.native.described import ROWS_OF_16_BYTES
from saccade.native.recording import lasting
from saccade.nvrtc.capture import capture_id, in_compilers_graph

_BLOCK = 1024
_MAX_PLANS = 16
_A = TypeVar("_A")


class Plan(NamedTuple):
    """members: int32 `[len(TILES) + 1, B]`, the sequences of each bucket. counts: int32 `[len(TILES) + 1]`, how many."""

    members: Tensor
    counts: Tensor


@triton.jit
def _bucket_of(cu_q, cu_k, s, sequences, TILES: tl.constexpr):
    """The bucket of each sequence: the number of tiles that are too small for it; -1 if it is empty on both sides."""
    inside = s < sequences
    q_len = tl.load(cu_q + s + 1, mask=inside, other=0) - tl.load(cu_q + s, mask=inside, other=0)
    k_len = tl.load(cu_k + s + 1, mask=inside, other=0) - tl.load(cu_k + s, mask=inside, other=0)
    longest = tl.maximum(q_len, k_len)
    bucket = tl.where(inside & (longest > 0), 0, -1)
    for i in tl.static_range(len(TILES)):
        bucket = tl.where(longest > TILES[i], i + 1, bucket)
    return bucket


@triton.jit(do_not_specialize=["sequences", "blocks"])
def count_kernel(cu_q, cu_k, sums, sequences, blocks, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """How many sequences of a block of them are in each bucket."""
    block = tl.program_id(0)
    bucket = _bucket_of(cu_q, cu_k, block * BLOCK + tl.arange(0, BLOCK), sequences, TILES)
    for i in tl.static_range(len(TILES) + 1):
        tl.store(sums + i * blocks + block, tl.sum((bucket == i).to(tl.int32), 0))


@triton.jit(do_not_specialize=["sequences", "blocks"])
def place_kernel(cu_q, cu_k, sums, members, counts, sequences, blocks, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sequences of a block of them behind those of the blocks before it."""
    block = tl.program_id(0)
    s = block * BLOCK + tl.arange(0, BLOCK)
    bucket = _bucket_of(cu_q, cu_k, s, sequences, TILES)
    for i in tl.static_range(len(TILES) + 1):
        before = tl.zeros((BLOCK,), tl.int32)
        for start in tl.range(0, block, BLOCK):
            others = start + tl.arange(0, BLOCK)
            before += tl.load(sums + i * blocks + others, mask=others < block, other=0)
        mine = (bucket == i).to(tl.int32)
        base = tl.sum(before, 0)
        tl.store(members + i * sequences.to(tl.int64) + base + tl.cumsum(mine, 0) - 1, s, mask=mine != 0)
        if block == blocks - 1:
            tl.store(counts + i, base + tl.sum(mine, 0))


def make_plan(cu_q: Tensor, cu_k: Tensor) -> Plan:
    """The lists of a batch, int32 cu_seqlens `[B + 1]`."""
    sequences, device = cu_q.shape[0] - 1, cu_q.device
    members = torch.empty((len(TILES) + 1, sequences), dtype=torch.int32, device=device)
    counts = torch.empty(len(TILES) + 1, dtype=torch.int32, device=device)
    blocks = triton.cdiv(sequences, _BLOCK)
    sums = counts
    if blocks > 1:
        sums = torch.empty((len(TILES) + 1, blocks), dtype=torch.int32, device=device)
        launch_any(count_kernel, blocks, (cu_q, cu_k, sums), (sequences, blocks), (TILES, _BLOCK), num_warps=4)
    launch_any(place_kernel, blocks, (cu_q, cu_k, sums, members, counts), (sequences, blocks), (TILES, _BLOCK), num_warps=4)
    return Plan(members, counts)


# (kind, stream, ids of tensors) -> (the tensors, their versions, the result)
_PLANS = LaunchCache()
_PLANS.limit = _MAX_PLANS


def plan_of(cu_q: Tensor, cu_k: Tensor) -> Plan:
    """The lists of a batch, made once for its tensors."""
    return of_batch(_PLANS, (), (cu_q, cu_k), lambda: make_plan(cu_q, cu_k))


def of_batch(known: LaunchCache, kind: Hashable, ends: tuple[Tensor, ...], make: Callable[[], _A]) -> _A:
    """The result of `make` for the cu_seqlens of a batch, found at the first sight of the tensors and when they change.

    While a CUDA graph is captured the layers share what its replays make: lists of 512 sequences took 10 of 58 us of a layer's attention (H200). Not
    remembered for tensors of inference mode, which do not count their changes, and in the memory of a graph of torch's compiler.
    """
    capture = capture_id(ends[0].device)
    if any(x.is_inference() for x in ends) or not (capture or all(map(values_known, ends))) or in_compilers_graph(ends[0].device):
        return make()
    # of a stream: another one would not wait for the kernel that fills the lists
    stream = torch._C._cuda_getCurrentRawStream(ends[0].device.index) if ends[0].is_cuda and not capture else 0
    key, versions = (kind, stream, capture, *map(id, ends)), tuple([x._version for x in ends])
    seen = known.get(key)
    if seen is not None and seen[1] == versions and all(ref() is x for ref, x in zip(seen[0], ends, strict=True)):
        return seen[2]
    # lists of a graph go with the offsets: they lie in its memory
    forget = (lambda _: known.pop(key, None)) if capture else None
    return known.remember(key, (tuple([weakref.ref(x, forget) for x in ends]), versions, make()))[2]


# device -> (0, 1, 2, ..., and a row for each number that holds it)
_NUMBERS: dict[torch.device, tuple[Tensor, Tensor]] = {}


def every_sequence(offsets: Tensor, sequences: int) -> tuple[Tensor, Tensor] | None:
    """A list of all sequences of a batch and their number, as a plan has them, without a look at the lengths; None where it cannot be had."""
    if sequences > MOST_AT_ONCE:
        return None
    found = _NUMBERS.get(offsets.device)
    if found is None:
        if not values_known(offsets):  # a captured graph would keep the memory for itself
            return None
        with torch.inference_mode(False):
            numbers = torch.arange(MOST_AT_ONCE + 1, dtype=torch.int32, device="cpu")
            # Rows of 16 bytes: kernels are compiled apart for numbers at other addresses. Copied, which waits for the device once: other
            # streams would not wait for a kernel of this one.
            found = numbers.to(offsets.device), numbers[:, None].repeat(1, 4).to(offsets.device)
        # another thread may have been first: C++ keeps the addresses of what stays
        found = _NUMBERS.setdefault(offsets.device, found)
    return lasting(found[0]), lasting(found[1][sequences], 16 * sequences, ROWS_OF_16_BYTES)
