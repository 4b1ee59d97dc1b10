"""Describes the launches of a call to C++, which then makes them again (`saccade.native`)."""

from __future__ import annotations

from torch import Tensor

from saccade.exact.args import AttentionArgs
from saccade.exact.short.launch import Launch, aligned, metadata
from saccade.exact.short.launchers import BackwardPlan
from saccade.native.triton import Described, describe

Places = dict[str, tuple[int, int]]


def describe_forward(args: AttentionArgs, places: Places, inputs: int) -> Described | None:
    """The launch of a forward call that was made; None unless it is one plain launch of a Triton kernel.

    inputs: the number of input tensors; out and lse take the two slots behind them.
    """
    launch = _of_triton(args.launches and args.launches.get(("forward", aligned(args), None)))
    return (
        None
        if launch is None
        else describe(launch.compiled, launch.programs, (*_given(places), (inputs, 0), (inputs + 1, 0)), launch.static)
    )


def describe_backward(
    args: AttentionArgs, dout: Tensor, lse: Tensor, packed: bool, places: Places, inputs: int
) -> Described | None:
    """The launch of a backward call that was made; None as in `describe_forward`. lse, dout and the gradients take the slots
    behind the inputs."""
    plan = args.launches and args.launches.get((aligned(args), metadata(dout), None, False, not packed, None))
    if not isinstance(plan, BackwardPlan) or plan.kv_share != 1 or plan.sharing is not None:
        return None
    launch = _of_triton(plan.launch)
    if launch is None:
        return None
    first = inputs + 2
    if packed:
        gradients = tuple((first, places[name][1]) for name in ("query", "key", "value"))
    else:
        gradients = tuple((first + i, 0) for i in range(3))
    query = places["query"]
    tensors = (*_given(places), (inputs + 1, 0), (inputs, 0), query, *gradients, query)
    return describe(launch.compiled, launch.programs, tensors, launch.static)


def _of_triton(launch: object) -> Launch | None:
    return launch if isinstance(launch, Launch) and launch.compiled is not None and not launch.descriptors else None


def _given(places: Places) -> tuple[tuple[int, int], ...]:
    """The places of query, key, value, bias, mask, lengths and seed. Query stands in for an absent tensor, which the kernel never
    reads."""
    query = places["query"]
    return query, places["key"], places["value"], query, places.get("mask", query), query, query
