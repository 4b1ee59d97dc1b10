"""Which keys a block of queries has to read, from the interval of positions of each key, in two Triton kernels.

    candidates: for each stretch of STRETCH queries, the keys that some of them see
    lists:      for each block of it, first the keys that all its queries see, then those that only some do

Both keep keys in order of position, so that a gather walks forward through memory. A stretch has at most `most + STRETCH` candidates
and a block at most `most + block` keys, where `most` bounds the keys that live at its first and last query. Nothing waits for the
device.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.launch import launch

STRETCH = 2048


class Lists(NamedTuple):
    """keys int32 `[B * Hkv, blocks, longest]`; counts and wholes int32 `[B * Hkv, blocks]`: listed keys, and those all queries see."""

    keys: Tensor
    counts: Tensor
    wholes: Tensor


@triton.jit
def _candidates_kernel(
    start, stop, candidates, counts, kv_len, stretches, first_position, end_position, room,
    STRETCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row = slot // stretches
    first = first_position + (tl.program_id(0) % stretches) * STRETCH
    last = tl.minimum(first + STRETCH, end_position) - 1
    along = tl.arange(0, BLOCK)
    found = tl.full((), 0, tl.int32)
    for begin in range(0, kv_len, BLOCK):
        key = begin + along
        inside = key < kv_len
        begins = tl.load(start + row * kv_len + key, mask=inside, other=0)
        ends = tl.load(stop + row * kv_len + key, mask=inside, other=0)
        take = inside & (begins <= last) & (ends > first) & (ends > begins)
        place = found + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(candidates + slot * room + place, key, mask=take & (place < room))
        found += tl.sum(take.to(tl.int32), 0)
    tl.store(counts + slot, tl.minimum(found, room))


@triton.jit
def _load_candidates(start, stop, candidates, row_start, along, count):
    """(key, start, stop) of entries of a stretch's list; past its end an interval that no position is in."""
    listed = along < count
    key = tl.load(candidates + along, mask=listed, other=0)
    begins = tl.load(start + row_start + key, mask=listed, other=2147483647)
    return key, begins, tl.load(stop + row_start + key, mask=listed, other=-2147483648)


@triton.jit
def _lists_kernel(
    start, stop, candidates, candidate_counts, keys, counts, wholes, kv_len, stretches, blocks, first_position, end_position,
    room, longest,
    STRETCH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row = slot // blocks
    block = tl.program_id(0) % blocks
    first = first_position + block * BLOCK_Q
    last = tl.minimum(first + BLOCK_Q, end_position) - 1
    stretch = row * stretches + block * BLOCK_Q // STRETCH
    offered = tl.load(candidate_counts + stretch)
    along = tl.arange(0, BLOCK)
    wholes_found = tl.full((), 0, tl.int32)
    for begin in range(0, offered, BLOCK):
        key, begins, ends = _load_candidates(start, stop, candidates + stretch * room, row * kv_len, begin + along, offered)
        take = (begins <= first) & (ends > last)
        place = wholes_found + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(keys + slot * longest + place, key, mask=take & (place < longest))
        wholes_found += tl.sum(take.to(tl.int32), 0)
    found = wholes_found
    for begin in range(0, offered, BLOCK):
        key, begins, ends = _load_candidates(start, stop, candidates + stretch * room, row * kv_len, begin + along, offered)
        take = (begins <= last) & (ends > first) & ((begins > first) | (ends <= last))
        place = found + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(keys + slot * longest + place, key, mask=take & (place < longest))
        found += tl.sum(take.to(tl.int32), 0)
    tl.store(wholes + slot, wholes_found)
    tl.store(counts + slot, tl.minimum(found, longest))


def build_lists(start: Tensor, stop: Tensor, q_len: int, block: int, most: int) -> Lists:
    """Lists of every block of `block` queries (a power of two, at most STRETCH), the last at position Tk - 1.

    Args:
        start, stop: int32 `[B, Hkv, Tk]`, contiguous: positions `start <= i < stop` see the key.
        most: bound on the keys that the first and the last query of any stretch see, together.
    """
    batch, heads, kv_len = start.shape
    rows, blocks, stretches = batch * heads, -(-q_len // block), -(-q_len // STRETCH)
    longest, room = min(kv_len, most + block), min(kv_len, most + STRETCH)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=start.device)

    candidates, candidate_counts = integers(rows, stretches, room), integers(rows, stretches)
    lists = Lists(integers(rows, blocks, longest), integers(rows, blocks), integers(rows, blocks))
    span = (kv_len - q_len, kv_len)
    tile = min(2048, triton.next_power_of_2(max(16, kv_len)))
    offered = (start, stop, candidates, candidate_counts)
    launch(_candidates_kernel, rows * stretches, offered, (kv_len, stretches, *span, room, STRETCH, tile), num_warps=8)
    sizes = (kv_len, stretches, blocks, *span, room, longest, STRETCH, block, min(2048, triton.next_power_of_2(max(16, room))))
    launch(_lists_kernel, rows * blocks, (*offered, *lists), sizes, num_warps=4)
    return lists
