"""Packed sequences with a window on the kernels of sm_90 for long sequences: parts of all sequences in one launch for each direction.

They take head dims up to `exact.long.config.TIMED_WINDOWS`. Token tiles compute what these kernels do not.
"""

from __future__ import annotations

from torch import Tensor

from saccade.exact.long import config, sm90
from saccade.exact.long.choice import kind_of, named
from saccade.exact.ragged import launches
from saccade.exact.ragged.call import Bucket, RaggedCall
from saccade.exact.ragged.launches import Gradients
from saccade.exact.ragged.plan import every_sequence
from saccade.exact.ragged.window_parts import MOST_SEQUENCES, Offsets, in_order, longest_first
from saccade.launch.delta import delta_of
from saccade.launch.disabled import FAILURES, disable, failure_of
from saccade.launch.triton import pow2
from saccade.native.recording import is_recorded, refuse, scratch


def _takes(direction: str, call: RaggedCall, *others: Tensor) -> bool:
    if (
        sm90.window_of(call.args) is None
        or call.dense
        or call.head_dim > config.TIMED_WINDOWS
        or call.sequences >= MOST_SEQUENCES
    ):
        return False
    return failure_of(named(direction, kind_of(call.args))) is None and sm90.takes(call.args, *others)


def _any_size(call: RaggedCall) -> int:
    """The most tokens of a sequence in any batch for which a recorded call is planned; 0: it is planned for its own batch."""
    if not is_recorded():
        return 0
    # Memory of lists is counted by the tokens of queries. A map of a single token does not hold the distance to the next.
    if not _same(call) or call.total_q == 1:
        refuse()
        return 0
    return max(16, pow2(max(call.args.max_q, call.args.max_k)))


def _same(call: RaggedCall) -> bool:
    return call.args.cu_seqlens_q is call.args.cu_seqlens_k and call.total_q == call.total_k


def _offsets(call: RaggedCall, side: int) -> Offsets:
    """The sequences of queries (0) or of keys (1). An empty sequence of keys has a part, which clears the gradients of its queries."""
    ends, tokens = ((call.args.cu_seqlens_q, call.total_q), (call.args.cu_seqlens_k, call.total_k))[side]
    return Offsets(ends, tokens, 0 if side == 0 or _same(call) else 1)


def _delta(call: RaggedCall, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """Row sums `[H, T]`, or memory for those that the kernel finds itself."""
    every = None if sm90.owns_delta(call.head_dim) else every_sequence(call.args.cu_seqlens_q, call.sequences)
    if sm90.owns_delta(call.head_dim) or every is not None:
        delta = scratch(lse.shape, lse.dtype, lse.device, call.total_q)
        if every is not None:
            launches.row_sums(call, Bucket(0, *every), dout, dlse, out, lse, delta).run(call)
        return delta
    refuse()  # without a list of all sequences, as in a capture, this launch fits only batches of so many tokens
    return delta_of(dout.transpose(0, 1)[None], out.transpose(0, 1)[None], dlse)[0]


def forward(call: RaggedCall, out: Tensor, lse: Tensor) -> bool:
    """Whether these kernels wrote out and lse."""
    if not _takes("forward", call, out):
        return False
    args, longest = call.args, _any_size(call)
    try:
        sm90.forward(args, *in_order(_offsets(call, 0), sm90.BLOCK_ROWS), out, lse, longest=longest)
    except FAILURES as error:
        disable(named("forward", kind_of(call.args)), "token tiles", error)
        return False
    launches.clearing(call, out).run(call)
    return True


def backward(call: RaggedCall, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, gradients: Gradients) -> bool:
    """Whether these kernels wrote the gradients."""
    if not _takes("backward", call, dout, out, *gradients):
        return False
    args, longest = call.args, _any_size(call)
    try:
        delta = _delta(call, dout, dlse, out, lse)
        rows = sm90.segment_rows(args)
        listed = (in_order if rows == sm90.ROUND_ROWS else longest_first)(_offsets(call, 1), rows)
        sm90.backward(args, *listed, dout, dlse, out, lse, delta, gradients, longest=longest)
    except FAILURES as error:
        disable(named("backward", kind_of(call.args)), "token tiles", error)
        return False
    launches.clearing(call, *gradients).run(call)
    return True
