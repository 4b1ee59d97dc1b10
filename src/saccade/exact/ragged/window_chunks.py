"""Packed sequences with a window on the kernels of sm_90 for long sequences: parts of all sequences in one launch for each direction.

Up to `exact.long.config.TIMED_REACH` keys of a window, of which none is timed yet: token tiles compute what these kernels do not.
"""

from __future__ import annotations

from torch import Tensor

from saccade.exact.long import config, sm90
from saccade.exact.long.choice import kind_of, named
from saccade.exact.ragged import launches
from saccade.exact.ragged.call import Bucket, RaggedCall
from saccade.exact.ragged.launches import Gradients
from saccade.exact.ragged.plan import every_sequence
from saccade.exact.ragged.window_parts import MOST_SEQUENCES, in_order, longest_first
from saccade.launch.disabled import FAILURES, disable, failure_of
from saccade.native.recording import refuse, scratch


def _takes(direction: str, call: RaggedCall, *others: Tensor) -> bool:
    window = sm90.window_of(call.args)
    if window is None or call.dense or sum(window) > config.TIMED_REACH or call.sequences >= MOST_SEQUENCES:
        return False
    return failure_of(named(direction, kind_of(call.args))) is None and sm90.takes(call.args, *others)


def forward(call: RaggedCall, out: Tensor, lse: Tensor) -> bool:
    """Whether these kernels wrote out and lse."""
    if not _takes("forward", call, out):
        return False
    refuse()  # a launch is planned for the numbers of one batch
    args = call.args
    try:
        sm90.forward(args, *in_order(args.cu_seqlens_q, call.total_q, sm90.BLOCK_ROWS), out, lse)
    except FAILURES as error:
        disable(named("forward", kind_of(call.args)), "token tiles", error)
        return False
    launches.clearing(call, out).run(call)
    return True


def backward(call: RaggedCall, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients) -> bool:
    """Whether these kernels wrote the gradients."""
    if not _takes("backward", call, dout, out, *gradients):
        return False
    args = call.args
    every = None if sm90.owns_delta(call.head_dim) else every_sequence(args.cu_seqlens_q, call.sequences)
    if every is None and not sm90.owns_delta(call.head_dim):
        return False
    refuse()
    delta = scratch(lse.shape, lse.dtype, lse.device, call.total_q)
    try:
        if every is not None:
            launches.row_sums(call, Bucket(0, *every), dout, dlse, out, lse, delta).run(call)
        segments = longest_first(args.cu_seqlens_k, call.total_k, sm90.segment_rows(args))
        sm90.backward(args, *segments, dout, dlse, out, lse, delta, gradients)
    except FAILURES as error:
        disable(named("backward", kind_of(call.args)), "token tiles", error)
        return False
    launches.clearing(call, *gradients).run(call)
    return True
