"""Calls of `attention_varlen` that C++ replays (`saccade.native`): which calls qualify, and how Python describes them to C++."""

from __future__ import annotations

from operator import itemgetter

import torch
from torch import Tensor

from saccade import native
from saccade.engine import prepare
from saccade.engine.prepare import Prepared
from saccade.env import check_lengths
from saccade.exact.slots import Backward, numbers_of, slots, third_of
from saccade.exact.varlen.args import ALIGNMENTS, VarlenArgs, VarlenCall
from saccade.exact.varlen.op import OPS

_INPUTS = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
_NAMES = VarlenCall._fields
_first = itemgetter(*map(_NAMES.index, ("max_seqlen_q", "max_seqlen_k", *_INPUTS, "dropout_p")))
# what follows the alignment of a causal mask
_options = itemgetter(*[i for i, name in enumerate(_NAMES) if i > _NAMES.index("causal") and name not in ("attn_bias", "window")])


def call_of(call: tuple, qkv: Tensor | None) -> tuple:
    """A call in the order of `VarlenCall`, without a bias or a window, as C++ looks it up: the longest lengths first, which are no part of what it is remembered
    by; then its tensors, or `qkv` and one cu_seqlens; then its options."""
    first = _first(call) if qkv is None else (call[5], call[6], qkv, call[3], call[7])
    return (*first, ALIGNMENTS[call[8]], *_options(call))


def replayed(call: tuple) -> Tensor | None:
    """The output of a call of a kind that C++ knows; None of any other, and where lengths are to be checked."""
    if native.calls is None or check_lengths():
        return None
    return native.calls.run_ragged(*call)


def record(prepared: Prepared, call: tuple, args: VarlenArgs, out: Tensor, lse: Tensor | None, qkv: Tensor | None) -> None:
    """Describe a call that Python has made to C++, once for each layout of its tensors. qkv: what query, key and value are views of."""
    if native.calls is None:
        native.start(prepare.forget)
        return
    chosen, inputs = prepared.backend, args[:5] if qkv is None else (qkv, args[3])
    if chosen.describe_launches is None or chosen.limits is None or lse is None or prepared.problem.return_lse:
        return
    if not all(x is y for x, y in zip(inputs, call[2:], strict=False)) or any(x.stride(-1) != 1 for x in inputs):
        return  # offsets of another dtype were converted; tensors of another layout were copied
    if inputs[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return
    layout = ("recorded", *[(x.stride(), x.data_ptr() % 16) for x in inputs], args[3] is args[4])
    if prepared.launches.get(layout) is not None:
        return
    names = _INPUTS if qkv is None else ("qkv", "cu_seqlens")
    places = slots((*names, "out", "lse", *["seed"] * (args.seed is not None), "scratch"), 0 if qkv is None else third_of(qkv))
    planned = chosen.describe_launches(args, out, lse, places)
    if planned is None:
        return
    prepared.launches.remember(layout, True)
    differentiable = (args[:3] if qkv is None else (qkv,)) if prepared.problem.needs_grad else ()
    empty = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in differentiable]
    backward = Backward(
        OPS, prepared, native.calls.key(call), names, args.seed is not None, numbers_of(OPS, args), ("max_q", "max_k")
    )
    form = (chosen.saves_output, args.seed is not None, *chosen.limits(args))
    native.calls.remember_ragged(call, out, lse, planned, empty, backward, form)
