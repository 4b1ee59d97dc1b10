"""Describes the launches of a call to C++, which then replays them (`saccade.native`)."""

from __future__ import annotations

from torch import Tensor

from saccade.exact.args import AttentionArgs
from saccade.exact.short.launch import BACKWARD_TENSORS, FORWARD_TENSORS, BackwardPlan, Launch, aligned, metadata
from saccade.exact.short.sm90 import Sm90Launch
from saccade.native import cuda, triton
from saccade.native.described import Described, Moved, Place, Planned, in_one_tensor

Places = dict[str, Place]


def describe_forward(args: AttentionArgs, out: Tensor, lse: Tensor, places: Places) -> Planned | None:
    """The launch of a forward call that was made; None unless it is a plain one."""
    found = _described(args.launches and args.launches.get(("forward", aligned(args), None)), FORWARD_TENSORS, places)
    return None if found is None else Planned([found])


def describe_backward(
    args: AttentionArgs, dout: Tensor, out: Tensor | None, lse: Tensor, gradients: tuple[Tensor, ...], places: Places
) -> Planned | None:
    """The launch of a backward call that was made; None as in `describe_forward`. places: with one of dbias if its gradient is asked for."""
    plan = args.launches and args.launches.get(
        (aligned(args), metadata(dout), None, "dbias" in places, not in_one_tensor(places), None)
    )
    if not isinstance(plan, BackwardPlan) or plan.kv_share != 1:
        return None
    sharing = plan.sharing
    shared = sharing is not None and not sharing.final
    found = _described(plan.launch, BACKWARD_TENSORS, places | ({"dbias": places["scratch"]} if shared else {}))
    if found is None or not shared:
        return None if found is None else Planned([found])
    sizes = sharing.groups, sharing.q_len, sharing.kv_len
    return Planned([found], (4 * sharing.programs * sharing.q_len * sharing.kv_len,), shares=sizes)


def _described(launch: object, names: tuple[str, ...], places: Places) -> Described | None:
    """names: of the tensors that the launch is called with. Query stands in for an absent one, which the kernel never reads."""
    given = tuple([places.get(name, places["query"]) for name in names])
    if isinstance(launch, Launch) and launch.compiled is not None and not launch.descriptors:
        return triton.describe(launch.compiled, launch.programs, given, launch.static)
    if isinstance(launch, Sm90Launch) and launch.bound is not None:
        maps = [Moved(*given[place], moved.sizes, moved.strides, moved.box) for place, moved in launch.moved]
        return cuda.describe(launch.bound, tuple(maps), tuple([given[place] for place in launch.pointers]))
    return None
