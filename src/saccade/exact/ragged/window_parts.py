"""Packed sequences in parts of so many tokens, listed on the device, for the kernels of sm_90 that take a window.

An item of a list is the number of a sequence, and that of its part from bit PART_AT on. With parts in place of whole sequences, every launch has as
many works as there are tokens to compute, and none that is empty: of 8 sequences of up to 8,192 tokens 42 of 100 blocks of queries had no token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.exact.ragged.config import MOST_AT_ONCE
from saccade.exact.ragged.plan import of_batch
from saccade.launch.cache import LaunchCache
from saccade.launch.triton import launch_any
from saccade.native.described import QUERIES, SEQUENCES
from saccade.native.recording import is_recorded, scratch, varying

PART_AT = 22
MOST_SEQUENCES = 2**PART_AT
_MOST_SORTED = 4096  # sequences; each is compared with every other one
_BLOCK, _OTHERS = 256, 32  # sequences of a program, and of those with which it compares them at a time
_MOST_PROGRAMS = -(-MOST_AT_ONCE // _BLOCK)  # of a call that C++ replays

_LISTS = LaunchCache()
_LISTS.limit = 32


@triton.jit
def _tokens_of(ends, s, sequences):
    inside = s < sequences
    return tl.load(ends + s + 1, mask=inside, other=0) - tl.load(ends + s, mask=inside, other=0)


@triton.jit
def _parts_of(tokens, s, sequences, UNIT: tl.constexpr, FEWEST: tl.constexpr):
    return tl.where(s < sequences, tl.maximum((tokens + UNIT - 1) // UNIT, FEWEST), 0)


@triton.jit(do_not_specialize=["sequences", "room"])
def in_order_kernel(
    ends, parts, count, sequences, room, UNIT: tl.constexpr, FEWEST: tl.constexpr, PART_AT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """All parts of a sequence behind those of the one before it. A program lists those of BLOCK sequences."""
    first = tl.program_id(0) * BLOCK
    if first >= sequences:
        return
    before = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, first, BLOCK):
        others = start + tl.arange(0, BLOCK)
        before += _parts_of(_tokens_of(ends, others, sequences), others, sequences, UNIT, FEWEST)
    s = first + tl.arange(0, BLOCK)
    mine = _parts_of(_tokens_of(ends, s, sequences), s, sequences, UNIT, FEWEST)
    base = tl.sum(before, 0)
    at = base + tl.cumsum(mine, 0) - mine
    for part in tl.range(0, tl.max(mine, 0)):
        # the lengths are unchecked, and may add up to more than there is room for
        tl.store(parts + at + part, s | part << PART_AT, mask=(part < mine) & (at + part < room))
    if first + BLOCK >= sequences:
        tl.store(count, tl.minimum(base + tl.sum(mine, 0), room))


@triton.jit(do_not_specialize=["sequences", "room"])
def longest_first_kernel(
    ends, parts, count, sequences, room, UNIT: tl.constexpr, FEWEST: tl.constexpr, PART_AT: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr
):  # fmt: skip
    """The first parts of all sequences, then their second ones, those of the longest sequence first. A program lists those of BLOCK sequences."""
    first = tl.program_id(0) * BLOCK
    if first >= sequences:
        return
    s = first + tl.arange(0, BLOCK)
    tokens = _tokens_of(ends, s, sequences)
    mine = _parts_of(tokens, s, sequences, UNIT, FEWEST)
    rank = tl.zeros((BLOCK,), tl.int32)  # how many sequences are longer
    most = 0
    for start in tl.range(0, sequences, OTHERS):
        t = start + tl.arange(0, OTHERS)
        others = _tokens_of(ends, t, sequences)
        most = tl.maximum(most, tl.max(_parts_of(others, t, sequences, UNIT, FEWEST), 0))
        longer = (others[None, :] > tokens[:, None]) | ((others[None, :] == tokens[:, None]) & (t[None, :] < s[:, None]))
        rank += tl.sum((longer & (t[None, :] < sequences)).to(tl.int32), 1)
    base = 0
    for part in tl.range(0, most):
        at = base + rank
        tl.store(parts + at, s | part << PART_AT, mask=(part < mine) & (at < room))
        for start in tl.range(0, sequences, BLOCK):
            t = start + tl.arange(0, BLOCK)
            base += tl.sum((_parts_of(_tokens_of(ends, t, sequences), t, sequences, UNIT, FEWEST) > part).to(tl.int32), 0)
    if first == 0:
        tl.store(count, tl.minimum(base, room))


class Offsets(NamedTuple):
    """cu_seqlens `[B + 1]` of a batch of so many tokens. fewest: parts that a sequence has at least, 0 or 1."""

    ends: Tensor
    tokens: int
    fewest: int


def in_order(offsets: Offsets, unit: int) -> tuple[Tensor, Tensor]:
    """(parts of `unit` tokens, in the order of the batch, int32; how many, int32 `[1]`)."""
    return _listed(in_order_kernel, offsets, unit)


def longest_first(offsets: Offsets, unit: int) -> tuple[Tensor, Tensor]:
    """The same with parts of one size next to each other, the largest first."""
    return _listed(longest_first_kernel if offsets.ends.shape[0] - 1 <= _MOST_SORTED else in_order_kernel, offsets, unit)


def _listed(kernel: triton.JITFunction, offsets: Offsets, unit: int) -> tuple[Tensor, Tensor]:
    def make() -> tuple[Tensor, Tensor]:
        ends, tokens, fewest = offsets
        sequences = ends.shape[0] - 1
        room = tokens + fewest * sequences
        # a recorder counts memory by tokens; a call with empty parts is not recorded
        parts, count = scratch((room,), torch.int32, ends.device, tokens), scratch((1,), torch.int32, ends.device)
        numbers = varying((sequences, room), (SEQUENCES, QUERIES))
        programs = max(1, min(_MOST_PROGRAMS, sequences)) if is_recorded() else triton.cdiv(sequences, _BLOCK)
        constants = (unit, fewest, PART_AT, _BLOCK, *[_OTHERS] * (kernel is longest_first_kernel))
        launch_any(kernel, programs, (ends, parts, count), numbers, constants, (_MOST_PROGRAMS, 1, 0), num_warps=4)
        return parts, count

    return make() if is_recorded() else of_batch(_LISTS, (kernel, *offsets[1:], unit), (offsets.ends,), make)
