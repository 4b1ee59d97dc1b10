"""The keys that a shard offers to later ranks, and the offers that a rank puts before its own shard.

A query of rank r sees a key of an earlier rank only if it is among the best `keep` of all keys before the query. Such a key is also
among the best `keep` of its own shard. So each rank offers the best `keep` keys of its shard, and rank r needs only the best `keep`
offers of ranks 0 to r - 1. Keys are ordered as in the operation itself, by (score, position) in float32, so ties go to the newer key.

With sinks and a window a shard also offers the first and the newest keys of its last document. The first keys of a document are
among the first keys of its parts. These offers rank above all others here, so that every head offers and chooses the same number of
keys. Some of them may be needed by no query. That changes no result, because the call on the extended shard ranks keys by their scores again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.distributed.agreement import fault_of
from saccade.dynamic_mask import offers


def entries_of(scores: Tensor, offered: Tensor | None = None) -> Tensor:
    """int64 like scores `[B, Hkv, n]`: distinct numbers in the order of (score, position). Keys that are not `offered` (boolean,
    broadcastable) come before all others."""
    # -0.0 + 0.0 is 0.0: the two are equal scores, whose bits are not
    bits = (scores.float() + 0.0).view(torch.int32)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if offered is not None:
        rank = torch.where(offered, rank, torch.iinfo(torch.int32).min)
    return rank.to(torch.int64) * 2**32 + torch.arange(scores.shape[-1], device=scores.device)


class Always(NamedTuple):
    """The keys that are offered and chosen whatever their scores: the first `sinks`, and the `recent` newest before a shard."""

    sinks: int = 0
    recent: int = 0


NONE = Always()


def raised(entries: Tensor, always: Always, offered: Tensor | None = None) -> Tensor:
    """Entries `[B, Hkv, n]` in which the first and the newest keys of those `offered` (boolean, broadcastable; None for all) come
    after all others."""
    count = entries.shape[2]
    if not any(always) or not count:
        return entries
    # a larger number names all keys too, and might not fit an int64
    sinks, recent = (min(n, count) for n in always)
    along = torch.arange(count, device=entries.device)
    if offered is None:
        chosen = (along < sinks) | (along >= count - recent)
    else:
        turn = offered.cumsum(-1)
        chosen = offered & ((turn <= sinks) | (turn > turn[..., -1:] - recent))
    # above the largest finite score
    return torch.where(chosen, along + torch.iinfo(torch.int32).max * 2**32, entries)


def best(entries: Tensor, count: int) -> Tensor:
    """int64 `[B, Hkv, count]`, the places of the `count` largest entries, ascending."""
    return torch.topk(entries, count, dim=-1, sorted=False).indices.sort(-1).values


def ranked(scores: Tensor, document_ids: Tensor | None, fault: Tensor, by_kernels: bool, always: Always = NONE) -> Tensor:
    """The entries of a shard. With documents those of its last document come before others in rank, as no later query sees another.
    fault: int64 `[1]`, 0, which is given `agreement.fault_of`."""
    if by_kernels:
        return raised(offers.rank(scores[None], fault), always)
    fault.copy_(fault_of(scores, document_ids))
    last = None if document_ids is None or not document_ids.shape[1] else (document_ids == document_ids[:, -1:])[:, None]
    return raised(entries_of(scores, last), always, last)


def offer(entries: Tensor, count: int) -> Tensor:
    """The places in the shard, ascending, of the keys that later ranks may need: the best `count`, or all keys where there are
    fewer."""
    return best(entries, min(count, entries.shape[2]))


def documents_of(document_ids: Tensor) -> Tensor:
    """int64 `[3, B]`: the first document of a shard, the last one, and how many of its keys are in the last one."""
    ids = document_ids.to(torch.int64)
    if not ids.shape[1]:
        return ids.new_zeros(3, ids.shape[0])
    return torch.stack((ids[:, 0], ids[:, -1], (ids == ids[:, -1:]).sum(1)))


def in_order(documents: Tensor, sizes: list[int]) -> Tensor:
    """Whether no document begins before the last one of an earlier shard; a boolean on the device. documents: `[P, 3, B]`."""
    filled = documents[[rank for rank, size in enumerate(sizes) if size]]
    return (filled[1:, 0] >= filled[:-1, 1]).all()


def choose(
    scores: Tensor, sizes: list[int], count: int, seen: Tensor | None, always: Always = NONE
) -> tuple[Tensor, Tensor | None]:
    """The offers that a rank puts before its shard.

    Args:
        scores: `[B, Hkv, P, slots]`, the offered scores of the P earlier ranks, ascending in position.
        sizes: the lengths of their shards; a shard shorter than `slots` leaves its last slots empty.
        count: how many to choose, at most the number of all keys in these shards.
        seen: boolean `[B, P, slots]`, offers of the document in which this shard begins; None for all.
        always: the keys that are chosen whatever their scores, at most `count` of them.

    Returns:
        (places, real): places int64 `[B, Hkv, count]` in the P * slots offers, in the order of their positions. real boolean
        `[B, count]`: offers that this shard may see, behind all others; None without `seen`. There are as many in each head, since
        there are as many such keys.
    """
    batch, heads, ranks, slots = scores.shape
    along = torch.arange(slots, device=scores.device)
    offered = None if seen is None else seen.flatten(1)[:, None]
    entries = entries_of(scores.reshape(batch, heads, ranks * slots), offered)
    if min(sizes) < slots:
        # below even the offers that this shard does not see, so that empty slots are never chosen
        filled = (along < torch.tensor([min(size, slots) for size in sizes], device=scores.device)[:, None]).flatten()
        entries = torch.where(filled, entries, torch.iinfo(torch.int64).min + torch.arange(ranks * slots, device=scores.device))
        offered = filled if offered is None else offered
    places = best(raised(entries, always, offered), count)
    if seen is None:
        return places, None
    real = seen.flatten(1)[:, None].expand(-1, heads, -1).gather(2, places)
    # what this shard does not see goes to the front, where its documents begin
    order = (places + real * (ranks * slots)).sort(-1).values
    return order % (ranks * slots), real.sum(-1)[:, :1] > torch.arange(count - 1, -1, -1, device=scores.device)
