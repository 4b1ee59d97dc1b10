"""The sequences of a packed batch that belong together: lists by length, made on the device.

A launch takes the sequences of one bucket, so that each gets the smallest tile that holds it. Only the device knows how many there are: kernels
read the count, and programs without work end at once. Lists keep the order of the batch, so that sums over sequences are the same in every run.
The layers of a model pass the same few tensors, so the lists of a batch are made once, and once in a CUDA graph. A call that C++ replays makes its
own lists, by one launch.
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
from saccade.native.described import FIXED, ROWS_OF_16_BYTES, SEQUENCES
from saccade.native.recording import is_recorded, lasting, scratch, varying
from saccade.nvrtc.capture import capture_id, in_compilers_graph

_BLOCK = 1024  # sequences of a program
_KINDS = 8  # a power of two that holds the buckets
_MOST_PROGRAMS = MOST_AT_ONCE // _BLOCK  # of a call that C++ replays
_MAX_PLANS = 16
_A = TypeVar("_A")


class Plan(NamedTuple):
    """members: int32 `[len(TILES) + 1, B or more]`, the sequences of each bucket. counts: int32 `[len(TILES) + 1]`, how many."""

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


@triton.jit
def _one_of(bucket, KINDS: tl.constexpr):
    """Whether each sequence is in each bucket, int32 `[KINDS, BLOCK]`."""
    return (bucket[None, :] == tl.arange(0, KINDS)[:, None]).to(tl.int32)


@triton.jit(do_not_specialize=["sequences"])
def count_kernel(cu_q, cu_k, sums, sequences, TILES: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr):
    """How many sequences of a block of them are in each bucket."""
    block = tl.program_id(0)
    bucket = _bucket_of(cu_q, cu_k, block * BLOCK + tl.arange(0, BLOCK), sequences, TILES)
    tl.store(sums + block * KINDS + tl.arange(0, KINDS), tl.sum(_one_of(bucket, KINDS), 1))


@triton.jit(do_not_specialize=["sequences", "room"])
def place_kernel(
    cu_q, cu_k, sums, members, counts, sequences, room, TILES: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr
):  # fmt: skip
    """Write the sequences of a block of them behind those of the blocks before it, which are in `sums` if they were counted. Lists are `room`
    sequences apart."""
    block = tl.program_id(0)
    first = block * BLOCK
    if first >= sequences:
        return
    before = tl.zeros((KINDS, BLOCK), tl.int32)
    kinds = tl.arange(0, KINDS)
    if COUNTED:
        for start in tl.range(0, block, BLOCK):
            others = (start + tl.arange(0, BLOCK))[None, :]
            before += tl.load(sums + others * KINDS + kinds[:, None], mask=others < block, other=0)
    else:
        for start in tl.range(0, first, BLOCK):
            before += _one_of(_bucket_of(cu_q, cu_k, start + tl.arange(0, BLOCK), sequences, TILES), KINDS)
    s = first + tl.arange(0, BLOCK)
    bucket = _bucket_of(cu_q, cu_k, s, sequences, TILES)
    mine = _one_of(bucket, KINDS)
    base = tl.sum(before, 1)
    at = tl.sum(mine * (base[:, None] + tl.cumsum(mine, 1) - 1), 0)
    tl.store(members + bucket.to(tl.int64) * room + at, s, mask=bucket >= 0)
    if first + BLOCK >= sequences:
        tl.store(counts + kinds, base + tl.sum(mine, 1), mask=kinds <= len(TILES))


def make_plan(cu_q: Tensor, cu_k: Tensor) -> Plan:
    """The lists of a batch, int32 cu_seqlens `[B + 1]`. In a recorded call they have the same places as for every batch that C++ replays."""
    sequences, device = cu_q.shape[0] - 1, cu_q.device
    blocks = programs = triton.cdiv(sequences, _BLOCK)
    room = sequences
    if is_recorded():
        programs, room = min(_MOST_PROGRAMS, sequences), MOST_AT_ONCE
    members = scratch((len(TILES) + 1, room), torch.int32, device)
    counts = scratch((len(TILES) + 1,), torch.int32, device)
    counted, sums = sequences > MOST_AT_ONCE, counts
    constants = (TILES, _KINDS, _BLOCK)
    if counted:
        sums = torch.empty((blocks, _KINDS), dtype=torch.int32, device=device)
        launch_any(count_kernel, blocks, (cu_q, cu_k, sums), (sequences,), constants, num_warps=8)
    numbers = varying((sequences, room), (SEQUENCES, FIXED))
    tensors, follows = (cu_q, cu_k, sums, members, counts), (_MOST_PROGRAMS, 1, 0)
    launch_any(place_kernel, programs, tensors, numbers, (*constants, counted), follows, num_warps=8)
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
    # for one stream: another would not wait for the kernel that fills the lists
    stream = torch._C._cuda_getCurrentRawStream(ends[0].device.index) if ends[0].is_cuda and not capture else 0
    key, versions = (kind, stream, capture, *map(id, ends)), tuple([x._version for x in ends])
    seen = known.get(key)
    if seen is not None and seen[1] == versions and all(ref() is x for ref, x in zip(seen[0], ends, strict=True)):
        return seen[2]
    # lists of a graph are dropped with the offsets, because they lie in its memory
    forget = (lambda _: known.pop(key, None)) if capture else None
    return known.remember(key, (tuple([weakref.ref(x, forget) for x in ends]), versions, make()))[2]


# device -> (0, 1, 2, ..., and a row for each number that holds it)
_NUMBERS: dict[torch.device, tuple[Tensor, Tensor]] = {}


def every_sequence(offsets: Tensor, sequences: int) -> tuple[Tensor, Tensor] | None:
    """A list of all sequences of a batch and their number, in the form of a plan, without reading the lengths; None if that is impossible."""
    if sequences > MOST_AT_ONCE:
        return None
    found = _NUMBERS.get(offsets.device)
    if found is None:
        # a captured graph would keep the memory for itself
        if not values_known(offsets) or in_compilers_graph(offsets.device):
            return None
        with torch.inference_mode(False):
            numbers = torch.arange(MOST_AT_ONCE + 1, dtype=torch.int32, device="cpu")
            # Rows of 16 bytes: kernels are compiled apart for numbers at other addresses. Copied, which waits for the device once: other
            # streams would not wait for a kernel of this one.
            found = numbers.to(offsets.device), numbers[:, None].repeat(1, 4).to(offsets.device)
        # another thread may have been first, and C++ keeps the addresses of the stored tensors
        found = _NUMBERS.setdefault(offsets.device, found)
    return lasting(found[0]), lasting(found[1][sequences], 16 * sequences, ROWS_OF_16_BYTES)
