"""Describes the launches of backend `long` to C++, which then replays them (`saccade.native`)."""

from __future__ import annotations

from torch import Tensor

from saccade.exact.args import AttentionArgs
from saccade.exact.long import launchers, sm90
from saccade.native import cuda
from saccade.native.described import Moved, Place, Planned, in_one_tensor, places_of

Places = dict[str, Place]
NULL: Place = (-1, 0)


def describe_forward(args: AttentionArgs, out: Tensor, lse: Tensor, places: Places) -> Planned | None:
    """The launch of a forward call that was made; None where it is not remembered, because tensors had to be copied, and under a mask, of which
    another kernel makes bits."""
    plan = launchers.known_forward(args)
    if plan is None or args.mask is not None:
        return None
    pointers = (*_offsets(places), places["out"], places["lse"], *_free(plan), *places_of(places, "seed"))
    found = cuda.describe(plan.launch, _moved(plan, places, "query", "key", "value", "out"), pointers)
    return None if found is None else Planned([found])


def describe_backward(
    args: AttentionArgs, dout: Tensor, out: Tensor, lse: Tensor, gradients: tuple[Tensor, ...], places: Places
) -> Planned | None:
    """The launch of a backward call that was made; None as in `describe_forward`, and where another kernel computes delta."""
    if args.mask is not None:
        return None
    plan = launchers.known_backward(args, dout, out, lse, in_one_tensor(places))
    if plan is None or not sm90.owns_delta(args.query.shape[-1]):
        return None
    slot, _ = places["scratch"]
    delta, parked = (slot, 0), (slot + 1, 0)
    written = (places["dquery"], places["dkey"], places["dvalue"])
    pointers = (*_offsets(places), places["lse"], NULL, delta, parked, *written, *_free(plan), *places_of(places, "seed"))
    moved = _moved(plan, places, "query", "key", "value", "dout", "out")
    found = cuda.describe(plan.launch, moved, pointers)
    return None if found is None else Planned([found], (4 * lse.numel(), 4 * plan.parked))


def _offsets(places: Places) -> tuple[Place, ...]:
    """cu_q, cu_k, members and count: of dense rows the second is their lengths, if any."""
    return NULL, places.get("lengths", NULL), NULL, NULL


def _free(plan: sm90.Plan) -> tuple[Place, ...]:
    return tuple([(-1, number) for number in plan.free])


def _moved(plan: sm90.Plan, places: Places, *names: str) -> tuple[Moved, ...]:
    return tuple([Moved(*places[name], *moved) for name, moved in zip(names, plan.moved, strict=True)])
