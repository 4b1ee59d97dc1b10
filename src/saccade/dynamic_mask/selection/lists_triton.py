"""Lists the keys that each block of queries has to read, from the interval of positions of each key, in two Triton kernels.

    candidates: for each stretch of STRETCH queries, the keys that some of them see
    lists:      for each block of it, first the keys that all its queries see, then those that only some do

Both keep keys in order of position, so that a gather walks forward through memory. `max_new_keys` bounds the keys that the first
and last query of a block or stretch keep. A stretch has at most `max_new_keys + STRETCH` candidates and a block at most
`max_new_keys + block` keys. The host never waits for the device.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.launch.triton import launch, pow2

STRETCH = 2048


class Lists(NamedTuple):
    """keys int32 `[B * Hkv, blocks, longest]`; counts and wholes int32 `[B * Hkv, blocks]`: listed keys, and those all queries
    see."""

    keys: Tensor
    counts: Tensor
    wholes: Tensor


def longest_list(kv_len: int, block: int, max_new_keys: int) -> int:
    """The number of keys that a list has room for."""
    return min(kv_len, max_new_keys + block)


@triton.jit
def _candidates_kernel(
    start, stop, candidates, starts, stops, counts, kv_len, stretches, first_position, end_position, room,
    STRETCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row = slot // stretches
    first = first_position + (tl.program_id(0) % stretches) * STRETCH
    last = tl.minimum(first + STRETCH, end_position) - 1
    along = tl.arange(0, BLOCK)
    found = tl.full((), 0, tl.int32)
    begin = tl.full((), 0, tl.int32)
    earliest = tl.full((), -2147483648, tl.int32)
    # `start` does not decrease: after a tile that begins too late, no key is seen
    while (begin < kv_len) & (earliest <= last):
        key = begin + along
        inside = key < kv_len
        begins = tl.load(start + row * kv_len + key, mask=inside, other=2147483647)
        ends = tl.load(stop + row * kv_len + key, mask=inside, other=-2147483648)
        earliest = tl.min(begins, 0)
        take = (begins <= last) & (ends > first) & (ends > begins)
        place = found + tl.cumsum(take.to(tl.int32), 0) - 1
        target = slot * room + place
        take_here = take & (place < room)
        tl.store(candidates + target, key, mask=take_here)
        tl.store(starts + target, begins, mask=take_here)
        tl.store(stops + target, ends, mask=take_here)
        found += tl.sum(take.to(tl.int32), 0)
        begin += BLOCK
    tl.store(counts + slot, tl.minimum(found, room))


@triton.jit
def _load_interval(starts, stops, along, count):
    """(start, stop) of entries of a stretch's list; beyond its end, an empty interval."""
    listed = along < count
    return tl.load(starts + along, mask=listed, other=2147483647), tl.load(stops + along, mask=listed, other=-2147483648)


@triton.jit
def _lists_kernel(
    candidates, starts, stops, candidate_counts, keys, counts, wholes, stretches, blocks, first_position, end_position, room, longest,
    STRETCH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row = slot // blocks
    block = tl.program_id(0) % blocks
    first = first_position + block * BLOCK_Q
    last = tl.minimum(first + BLOCK_Q, end_position) - 1
    stretch = row * stretches + block * BLOCK_Q // STRETCH
    starts += stretch * room
    stops += stretch * room
    offered = tl.load(candidate_counts + stretch)
    along = tl.arange(0, BLOCK)
    whole_keys = tl.full((), 0, tl.int32)
    for begin in range(0, offered, BLOCK):
        begins, ends = _load_interval(starts, stops, begin + along, offered)
        whole_keys += tl.sum(((begins <= first) & (ends > last)).to(tl.int32), 0)
    wholes_found = tl.full((), 0, tl.int32)
    found = whole_keys
    for begin in range(0, offered, BLOCK):
        begins, ends = _load_interval(starts, stops, begin + along, offered)
        whole = (begins <= first) & (ends > last)
        some = (begins <= last) & (ends > first)
        key = tl.load(candidates + stretch * room + begin + along, mask=some, other=0)
        # both counts in one sum, with the whole keys in the upper half: BLOCK is far below 2^16
        both = tl.cumsum(tl.where(whole, 65536, some.to(tl.int32)), 0)
        place = tl.where(whole, wholes_found + (both >> 16), found + (both & 65535)) - 1
        tl.store(keys + slot * longest + place, key, mask=some & (place < longest))
        wholes_found += tl.sum(whole.to(tl.int32), 0)
        found += tl.sum((some & ~whole).to(tl.int32), 0)
    tl.store(wholes + slot, wholes_found)
    tl.store(counts + slot, tl.minimum(found, longest))


def build_lists(start: Tensor, stop: Tensor, q_len: int, block: int, max_new_keys: int) -> Lists:
    """The lists as described at `lists.build_lists`; `block` is at most STRETCH."""
    batch, heads, kv_len = start.shape
    stretch = STRETCH // block * block  # whole blocks
    rows, blocks, stretches = batch * heads, -(-q_len // block), -(-q_len // stretch)
    longest, room = longest_list(kv_len, block, max_new_keys), min(kv_len, max_new_keys + stretch)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=start.device)

    candidates = [integers(rows, stretches, room) for _ in range(3)]  # key, start, stop
    candidate_counts = integers(rows, stretches)
    lists = Lists(integers(rows, blocks, longest), integers(rows, blocks), integers(rows, blocks))
    span = (kv_len - q_len, kv_len)
    tile = min(2048, pow2(max(16, kv_len)))
    offered = (kv_len, stretches, *span, room, stretch, tile)
    launch(_candidates_kernel, rows * stretches, (start, stop, *candidates, candidate_counts), offered, num_warps=8)
    sizes = (stretches, blocks, *span, room, longest, stretch, block, min(2048, pow2(max(16, room))))
    launch(_lists_kernel, rows * blocks, (*candidates, candidate_counts, *lists), sizes, num_warps=4)
    return lists
