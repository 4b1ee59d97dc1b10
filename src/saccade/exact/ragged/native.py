"""Describes the only launch of a small packed batch to C++, which then makes it again for any batch of the kind (`saccade.native`)."""

from __future__ import annotations

from torch import Tensor

from saccade.exact.ragged import launchers
from saccade.exact.ragged.plan import MOST_AT_ONCE
from saccade.exact.varlen.args import VarlenArgs
from saccade.launch.triton import compiled_any
from saccade.native import triton
from saccade.native.described import KEYS, LONGEST_K, LONGEST_Q, QUERIES, ROWS_OF_16_BYTES, SEQUENCES, Described, Place, Planned

Places = dict[str, Place]
# what takes the place of `_Call.varying`
_VARYING = (QUERIES, KEYS, SEQUENCES, QUERIES, LONGEST_Q, LONGEST_K)


def limits(args: VarlenArgs) -> tuple[int, int, int]:
    """(width, most, most sequences): a batch is one launch while sequences times its longest times width are at most `most`."""
    call = launchers.call_of(args)
    return call.heads * call.block_d, launchers.ONE_TILE, MOST_AT_ONCE


def describe_forward(args: VarlenArgs, out: Tensor, lse: Tensor, places: Places) -> list[Described] | None:
    """The launch of a forward call that was made; None where there was more than one, or of the long form."""
    call = launchers.call_of(args)
    bucket = call.at_once()
    if bucket is None or not bucket.tile:
        return None
    names = ("query", "key", "value", "query", "seed", "cu_seqlens_q", "cu_seqlens_k", "members", "count", "out", "lse")
    lists = _lists(call.sequences, bucket.members, bucket.count)
    found = _described(launchers.forward_tile(call, bucket, out, lse, True), names, places | lists)
    return None if found is None else [found]


def describe_backward(
    args: VarlenArgs, dout: Tensor, lse: Tensor, gradients: tuple[Tensor, Tensor, Tensor], places: Places
) -> Planned | None:
    """The launch of a backward call that was made; None as in `describe_forward`."""
    call = launchers.call_of(args)
    bucket = call.at_once()
    if bucket is None or not bucket.tile:
        return None
    launch = launchers.backward_tile(call, bucket, dout, None, lse, gradients, None, True)
    inputs = ("query", "key", "value", "query", "seed", "cu_seqlens_q", "cu_seqlens_k", "members", "count")
    names = (*inputs, "dout", "lse", "lse", "dquery", "dkey", "dvalue", "query")
    found = _described(launch, names, places | _lists(call.sequences, bucket.members, bucket.count))
    return None if found is None else Planned([found])


def _described(launch: launchers.TileLaunch, names: tuple[str, ...], places: Places) -> Described | None:
    compiled = compiled_any(launch.kernel, launch.tensors, launch.numbers, num_warps=launch.warps)
    if compiled is None:
        return None
    given = tuple([places.get(name, places["query"]) for name in names])
    return triton.describe(compiled, launch.most, given, (*_VARYING, *launch.numbers), launch.per_sequence)


def _lists(sequences: int, members: Tensor, count: Tensor) -> Places:
    """Both tables stay where they are (`plan.every_sequence`): row `sequences` of the second one holds that number."""
    return {"members": (-1, members.data_ptr()), "count": (ROWS_OF_16_BYTES.slot, count.data_ptr() - 16 * sequences)}
