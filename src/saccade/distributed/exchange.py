"""The exchange of offered keys and of their gradients, and its autograd.

Forward: one all-gather of each rank's offers (rows of K and V, scores, and with documents three numbers a batch row), packed as
bytes. Backward: one all-to-all, in which each rank returns the gradients of offered keys to their owners, and to no other rank. They are sent in
their own dtype, because the owner sums them, in float32. A reduce-scatter would sum in bfloat16, in another order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from saccade.distributed.candidates import NONE, Always, best, choose, documents_of, in_order, raised
from saccade.distributed.groups import start_all_gather
from saccade.dynamic_mask import offers as kernels
from saccade.engine.first_order import first_order
from saccade.engine.ranges import shown_as_ours


class Plan(NamedTuple):
    """The facts that an exchange knows before it begins. sizes: the length of each rank's shard; most: how many keys a rank offers and puts in
    front at most; by_kernels: rows are copied by a kernel, and not by torch's operations; always: keys among the `most` whatever their
    scores."""

    group: Any
    rank: int
    sizes: tuple[int, ...]
    most: int
    by_kernels: bool = False
    always: Always = NONE

    @property
    def slots(self) -> int:
        """How many keys each rank has room to offer, per key/value head."""
        return min(self.most, max(self.sizes))

    @property
    def before(self) -> int:
        """How many keys of earlier ranks a rank puts before its shard."""
        return min(self.most, sum(self.sizes[: self.rank]))

    @property
    def takes_all(self) -> bool:
        """Whether a rank puts every offer of the ranks before it in front, and no place is empty: as rank 1 does."""
        return self.rank > 0 and self.before == self.rank * self.slots


class Packing:
    """Tensors that lie one behind another in one row of bytes, each at a multiple of 16."""

    def __init__(self, *tensors: tuple[tuple[int, ...], torch.dtype]) -> None:
        self._parts, self.bytes = [], 0
        for shape, dtype in tensors:
            size = torch.Size(shape).numel() * dtype.itemsize
            self._parts.append((shape, dtype, self.bytes, size))
            self.bytes += -(-size // 16) * 16

    def views(self, rows: Tensor) -> list[Tensor]:
        """The tensors of uint8 `[P, bytes]`, each with P as its first dim."""
        return [
            rows[:, start : start + size].view(dtype).unflatten(1, shape)
            if size
            else rows.new_empty((len(rows), *shape), dtype=dtype)
            for shape, dtype, start, size in self._parts
        ]


def offers(key: Tensor, value: Tensor, scores: Tensor, slots: int, documents: bool) -> Packing:
    """How the offers of one rank are packed: rows of K and of V, scores, documents."""
    heads = (*key.shape[:2], slots)
    return Packing(
        ((*heads, key.shape[3]), key.dtype),
        ((*heads, value.shape[3]), value.dtype),
        (heads, scores.dtype),
        ((3, key.shape[0] if documents else 0), torch.int64),
    )


class Extended(NamedTuple):
    """A shard with the keys that its queries may see before it. ordered: whether documents do not decrease across shards."""

    key: Tensor
    value: Tensor
    key_scores: Tensor
    document_ids: Tensor | None
    ordered: Tensor | None


def extend(
    key: Tensor, value: Tensor, scores: Tensor, document_ids: Tensor | None, offered: Tensor, plan: Plan, adds_scores: bool
) -> Extended:
    """Exchange offers, and put those that this rank needs in front of its shard. offered: `candidates.offer`."""
    return Extended(*ExtendShard.apply(key, value, scores if adds_scores else scores.detach(), document_ids, offered, plan))


@shown_as_ours
class ExtendShard(torch.autograd.Function):
    """`(key, value, scores, document_ids, ordered)` of `Extended`: the shard with the chosen offers in front."""

    @staticmethod
    def forward(ctx, key, value, scores, document_ids, offered, plan):
        packing = offers(key, value, scores, plan.slots, document_ids is not None)
        mine = _pack(packing, key, value, scores, document_ids, offered, plan.by_kernels)
        everything = mine.new_empty(len(plan.sizes), packing.bytes)
        work = start_all_gather(everything, mine, plan.group)
        # overlaps with the exchange: the shard is copied behind the room for the offers
        room, inputs = plan.before, (key, value, scores)
        joined = [_with_room(x, room) for x in inputs] if room else [x.view_as(x) for x in inputs]
        work.wait()
        places, real, ordered = None, None, None
        if document_ids is not None:
            ordered = in_order(packing.views(everything)[3], list(plan.sizes))
        if room:
            places, real = _put_before(joined, packing.views(everything[: plan.rank]), document_ids, plan)
        ids = None if document_ids is None else _renumbered(document_ids, real, room)
        ctx.plan, ctx.room, ctx.types = plan, room, [(x.shape, x.dtype) for x in inputs]
        ctx.save_for_backward(offered, places)
        ctx.mark_non_differentiable(*(x for x in (ids, ordered) if x is not None))
        ctx.set_materialize_grads(False)
        return *joined, ids, ordered

    @staticmethod
    @first_order
    def backward(ctx, dkey, dvalue, dscores, *_):
        offered, places = ctx.saved_tensors
        whole = []
        for gradient, (shape, dtype) in zip((dkey, dvalue, dscores), ctx.types, strict=True):
            extended = (*shape[:2], ctx.room + shape[2], *shape[3:])
            # every rank takes part in the exchange, also without gradients
            whole.append(offered.new_zeros(extended, dtype=dtype) if gradient is None else gradient)
        home = _send_home(whole, offered, places, ctx.plan)
        found = [gradient[:, :, ctx.room :] for gradient in whole]
        if home is not None:
            # in place: only our own two Functions hold the gradient of this tensor, unless it is to be differentiated
            again = any(gradient.requires_grad for gradient in whole)
            found = [_added(x.clone() if again else x, offered, more) for x, more in zip(found, home, strict=True)]
        return *(x if needed else None for x, needed in zip(found, ctx.needs_input_grad, strict=False)), None, None, None


def _pack(
    packing: Packing, key: Tensor, value: Tensor, scores: Tensor, document_ids: Tensor | None, offered: Tensor, by_kernels: bool
) -> Tensor:
    """The offers of this rank, uint8 `[bytes]`."""
    mine = torch.zeros(1, packing.bytes, dtype=torch.uint8, device=key.device)
    *parts, documents = (part[0] for part in packing.views(mine))
    filled = [part[:, :, : offered.shape[2]] for part in parts]
    if by_kernels:
        kernels.copy((key[None], value[None], scores[None]), offered, (filled[0], filled[1], filled[2]))
        return mine[0]
    for part, x in zip(filled, (key, value, scores), strict=True):
        part.copy_(_taken(x, offered))
    if document_ids is not None:
        documents.copy_(documents_of(document_ids))
    return mine[0]


def _taken(x: Tensor, places: Tensor) -> Tensor:
    """Rows of `[B, Hkv, n, ...]` at places `[B, Hkv, m]`."""
    return x.gather(2, _like_rows(places, x))


def _like_rows(places: Tensor, x: Tensor) -> Tensor:
    return places if x.dim() == 3 else places[..., None].expand(*places.shape, x.shape[3])


def _with_room(x: Tensor, room: int) -> Tensor:
    joined = x.new_empty((*x.shape[:2], room + x.shape[2], *x.shape[3:]))
    joined[:, :, room:] = x
    return joined


def _put_before(
    joined: list[Tensor], gathered: list[Tensor], document_ids: Tensor | None, plan: Plan
) -> tuple[Tensor | None, Tensor | None]:
    """Write the chosen offers of the ranks before into the room at the front; returns (places, real) of `candidates.choose`, None for
    places where all offers go there in their order.

    gathered: `[rank, B, Hkv, slots, ..]` of the ranks before, and their documents `[rank, 3, B]`.
    """
    *rows, documents = gathered
    sizes, slots = list(plan.sizes[: plan.rank]), plan.slots
    if document_ids is None and plan.takes_all:
        _put_all_before(joined, rows, plan)
        return None, None
    if plan.by_kernels and min(sizes) >= slots:
        places = best(raised(kernels.rank(rows[2]), plan.always), plan.before)
        kernels.copy((rows[0], rows[1], rows[2]), places, _fronts(joined, plan.before))
        return places, None
    seen = None
    if document_ids is not None:
        first = document_ids[:, :1].to(torch.int64) if document_ids.shape[1] else documents[0, 1][:, None]
        offered = torch.tensor([min(slots, size) for size in sizes], device=documents.device)  # [P]
        begin = (offered - documents[:, 2].T).clamp_min(0)  # of the last document, among the slots of a rank
        along = torch.arange(slots, device=documents.device)
        seen = (along >= begin[..., None]) & (along < offered[:, None]) & (first == documents[:, 1].T)[..., None]
    places, real = choose(rows[2].movedim(0, 2), sizes, plan.before, seen, plan.always)
    batch, heads, room = places.shape
    b = torch.arange(batch, device=places.device)[:, None, None]
    h = torch.arange(heads, device=places.device)[:, None]
    for whole, part in zip(joined, rows, strict=True):
        front = part[places // slots, b, h, places % slots]
        if real is not None:  # offers that are not seen may hold anything
            front = torch.where(real[:, None, :, None] if front.dim() == 4 else real[:, None], front, 0)
        whole[:, :, :room] = front
    return places, real


def _fronts(joined: list[Tensor], room: int) -> tuple[Tensor, Tensor, Tensor]:
    key, value, scores = (x[:, :, :room] for x in joined)
    return key, value, scores


def _put_all_before(joined: list[Tensor], rows: list[Tensor], plan: Plan) -> None:
    fronts = _fronts(joined, plan.before)
    if plan.by_kernels:
        kernels.copy((rows[0], rows[1], rows[2]), None, fronts)
        return
    for front, part in zip(fronts, rows, strict=True):
        front.copy_(part.movedim(0, 2).flatten(2, 3))


def _renumbered(document_ids: Tensor, real: Tensor | None, room: int) -> Tensor:
    """int64 `[B, room + n]`: the shard's documents counted from 0, as are the keys before it that its first document sees; -1 for
    the others."""
    changes = document_ids[:, 1:] != document_ids[:, :-1]
    own = torch.nn.functional.pad(changes.to(torch.int64).cumsum(1), (1, 0))[:, : document_ids.shape[1]]
    return own if real is None else torch.cat((real.to(torch.int64) - 1, own), dim=1)


def _send_home(whole: list[Tensor], offered: Tensor, places: Tensor | None, plan: Plan) -> list[Tensor] | None:
    """Send the gradients of the offers of earlier ranks to these; returns the gradients of this rank's own offers, summed in
    float32, `[B, Hkv, m, ..]`, or None for the last rank."""
    key, value, scores = whole
    ranks, rank, slots = len(plan.sizes), plan.rank, plan.slots
    packing = offers(key, value, scores, slots, documents=False)
    outgoing = torch.zeros(rank, packing.bytes, dtype=torch.uint8, device=key.device)
    if plan.before:
        for part, x in zip(packing.views(outgoing), whole, strict=False):
            front = x[:, :, : plan.before]
            if places is not None:
                front = x.new_zeros((*x.shape[:2], rank * slots, *x.shape[3:])).scatter_(2, _like_rows(places, front), front)
            part.copy_(front.unflatten(2, (rank, slots)).movedim(2, 0))
    incoming = outgoing.new_empty(ranks - 1 - rank, packing.bytes)
    sent = [packing.bytes if other < rank else 0 for other in range(ranks)]
    received = [packing.bytes if other > rank else 0 for other in range(ranks)]
    dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), received, sent, group=plan.group)
    if not len(incoming):
        return None
    parts = packing.views(incoming)[:3]
    return [part[:, :, :, : offered.shape[2]].sum(0, dtype=torch.promote_types(part.dtype, torch.float32)) for part in parts]


def _added(gradient: Tensor, offered: Tensor, more: Tensor) -> Tensor:
    """Add the gradient of a shard's offers to that of the shard, in place, rounded once."""
    index = _like_rows(offered, gradient)
    return gradient.scatter_(2, index, (gradient.gather(2, index).to(more.dtype) + more).to(gradient.dtype))
