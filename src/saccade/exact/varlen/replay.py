"""Calls of `attention_varlen` that C++ replays (`saccade.native`): which calls qualify, and how Python describes them to C++."""

from __future__ import annotations

from operator import itemgetter

import torch
from torch import Tensor

from saccade import native
from saccade.engine.prepare import Prepared
from saccade.engine.switch import is_disabled
from saccade.env import check_lengths
from saccade.exact.recorded import Backward, begin_recording, key_of, numbers_of
from saccade.exact.varlen.args import ALIGNMENTS, VarlenArgs, VarlenCall
from saccade.exact.varlen.op import OPS
from saccade.native.recording import Recorder

_INPUTS = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
_NAMES = VarlenCall._fields
_WINDOW = _NAMES.index("window")
_first = itemgetter(*map(_NAMES.index, ("max_seqlen_q", "max_seqlen_k", *_INPUTS, "dropout_p")))
# what follows the alignment of a causal mask
_options = itemgetter(*[i for i, name in enumerate(_NAMES) if i > _NAMES.index("causal") and name not in ("attn_bias", "window")])


def call_of(call: tuple, qkv: Tensor | None) -> tuple:
    """A call in the order of `VarlenCall`, without a bias, as C++ looks it up: the longest lengths first, which are no part of what it is remembered
    by; then its tensors, or `qkv` and one cu_seqlens; then its options, and its window as a word, which C++ compares."""
    first = _first(call) if qkv is None else (call[5], call[6], qkv, call[3], call[7])
    return (*first, ALIGNMENTS[call[8]], *_options(call), *(() if call[_WINDOW] is None else (str(call[_WINDOW]),)))


def replayed(call: tuple) -> Tensor | None:
    """The output of a call of a kind that C++ knows; None of any other, and if lengths have to be checked."""
    if native.calls is None or check_lengths():
        return None
    return native.calls.run_ragged(*call)


def begin(prepared: Prepared, call: tuple, args: VarlenArgs) -> Recorder | None:
    """A recorder for a call that C++ shall replay: as long as it cannot replay the kind, since a batch may have been too large."""
    chosen = prepared.backend
    replays = chosen.replays and not prepared.problem.return_lse
    given = all(any(x is offsets for x in call) for offsets in (args.cu_seqlens_q, args.cu_seqlens_k))
    if native.calls is not None and not (replays and given):
        return None  # converted offsets belong only to this call
    return begin_recording(prepared, call, chosen.limits is not None and chosen.limits(args)[-1])


def record(
    prepared: Prepared, call: tuple, args: VarlenArgs, out: Tensor, lse: Tensor | None, qkv: Tensor | None, recorder: Recorder
) -> None:
    """Describe a call that Python has made to C++. qkv: what query, key and value are views of."""
    inputs, seed = args[:5] if qkv is None else (qkv, args[3]), () if args.seed is None else (args.seed,)
    chosen = prepared.backend
    # another thread may have disabled the library during the call, and forgotten all calls
    if lse is None or chosen.limits is None or is_disabled():
        return
    planned = recorder.planned((*inputs, out, lse, *seed), len(inputs))
    if planned is None:
        return
    limits = chosen.limits(args)
    key = key_of(call, limits[-1])
    prepared.recorded.remember(key, True)
    differentiable = (args[:3] if qkv is None else (qkv,)) if prepared.problem.needs_grad else ()
    empty = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in differentiable]
    names = _INPUTS if qkv is None else ("qkv", "cu_seqlens")
    backward = Backward(OPS, prepared, key, names, bool(seed), numbers_of(OPS, args), ("max_q", "max_k"))
    form = (chosen.saves_output, bool(seed), *limits)
    native.calls.remember_ragged(call, out, lse, planned, empty, backward, form)
