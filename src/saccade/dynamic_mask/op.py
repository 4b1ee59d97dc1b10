"""torch.library schemas and fakes of `dynamic_mask_attention`: one opaque op each for selection, forward and backward.

The layout of the outputs does not depend on the backend: out and dq are laid out like query, everything else is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.dynamic_mask.args import CausalCall, DynamicMaskArgs, DynamicMaskLaunchers
from saccade.dynamic_mask.backends import BACKENDS
from saccade.dynamic_mask.problem import selection_faults
from saccade.dynamic_mask.selection import intervals as selection
from saccade.engine.alternatives import Alternatives
from saccade.engine.calls import read_later
from saccade.engine.flops import by_pairs
from saccade.engine.layout import empty_like_heads, strides_like_heads
from saccade.engine.namespace import fragment
from saccade.engine.record import Fields
from saccade.engine.switch import is_disabled
from saccade.engine.tracing import eager, register
from saccade.errors import CompileError
from saccade.hardware import arch_of
from saccade.launch.cache import LaunchCache
from saccade.launch.disabled import FAILURES, disable, failure_of
from saccade.launch.requirements import triton_reasons
from saccade.native.compiler import no_compiler
from saccade.nvrtc import give_up

FIELDS = Fields(DynamicMaskArgs)
_CALL = f"{FIELDS.schema()}, str backend"

_library = fragment()
_library.define(
    "dynamic_mask_intervals(Tensor key_scores, SymInt keep, SymInt q_len, bool is_causal, Tensor? lengths, Tensor? document_ids, "
    "SymInt sinks=0, SymInt window=0) -> (Tensor, Tensor)"
)
_library.define(f"dynamic_mask_forward({_CALL}) -> (Tensor, Tensor)")
_library.define(
    f"dynamic_mask_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)"
)


def intervals(
    key_scores: Tensor, keep: int, q_len: int, is_causal: bool, lengths: Tensor | None, document_ids: Tensor | None,
    sinks: int = 0, window: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`selection.intervals`, called through the op if the call is traced or otherwise observed."""
    key_scores = key_scores.detach()
    if eager(key_scores, lengths, document_ids) and not key_scores.is_meta:
        return selection.intervals(key_scores, keep, q_len, is_causal, lengths, document_ids, causal_intervals, sinks, window)
    return _INTERVALS(key_scores, keep, q_len, is_causal, lengths, document_ids, sinks, window)


def causal_call(
    query: Tensor, key: Tensor, value: Tensor, keep: int, adds_scores: bool, scale: float, backend: str, launches: LaunchCache
) -> CausalCall | None:
    """Selection, its check and forward of a causal call in one call of `DynamicMaskLaunchers.causal`, which takes less host time.
    None if the backend lacks it. Only for `eager` tensors, in calls that are not captured."""
    find = launchers(backend).causal
    return None if find is None else find(query, key, value, keep, adds_scores, scale, launches)


def watched_intervals(
    key_scores: Tensor, keep: int, q_len: int, is_causal: bool, lengths: Tensor | None, document_ids: Tensor | None,
    sinks: int = 0, window: int = 0,
) -> tuple[Tensor, Tensor, Callable[[], bool]]:  # fmt: skip
    """`intervals`, and a function that says whether a score is not finite or document ids decrease. It waits only for that answer; call it once. Not
    for calls that are traced or captured."""
    scores = key_scores.detach()
    if is_causal and document_ids is None and eager(scores, lengths) and _ranks(scores) == "gather":
        # ranking reads each score anyhow, which saves a reduction and a copy: 9 us of device time at n = 4,096
        found = _ranked("gather", "watched", scores, keep, lengths)
        if found is not None:
            start, stop, faulty = found
            return start, selection.with_always(stop, sinks, window, lengths, document_ids), faulty
    largest = read_later(selection_faults(scores, document_ids))
    start, stop = intervals(scores, keep, q_len, is_causal, lengths, document_ids, sinks, window)
    return start, stop, lambda: not math.isfinite(largest())


def causal_intervals(key_scores: Tensor, keep: int, lengths: Tensor | None, document_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """`selection.causal_intervals`, computed by our kernels if they can."""
    family = _ranks(key_scores)
    if family is not None:
        by_rank = key_scores if document_ids is None else selection.ranked_by_document(key_scores, document_ids)
        found = _ranked(family, "intervals", by_rank, keep, lengths)
        if found is not None:
            start, stop = found
            return start, stop if document_ids is None else selection.within_documents(stop, document_ids)
    return selection.causal_intervals(key_scores, keep, lengths, document_ids)


def _ranked(family: str, entry: str, *call: Any) -> Any:
    """The result of an entry point of a family's selection; None if it cannot run, or does not compile."""
    what = ("dynamic_mask_attention", "selection", family)
    if failure_of(what):
        return None
    try:
        return getattr(launchers(family), entry)(*call)
    except FAILURES as error:
        if isinstance(error, CompileError) and give_up(error):
            return _ranked(family, entry, *call)
        disable(what, "selection in plain torch", error)
        return None


def _ranks(key_scores: Tensor) -> str | None:
    """The family that selects on the device of the scores; None if plain torch does."""
    if is_disabled():
        return None
    if key_scores.is_cuda:
        return None if triton_reasons("cuda", arch_of(key_scores.device), torch.float32) else "gather"
    return "gather_cpp" if key_scores.device.type == "cpu" and not no_compiler() else None


def forward(args: DynamicMaskArgs, backend: str) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    plain = eager(*args[: FIELDS.tensors]) and not args.query.is_meta
    return (_forward if plain else _FORWARD)(*args, backend)


def backward(
    args: DynamicMaskArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dscores); dscores is empty without scores."""
    plain = eager(dout, dlse, out, lse, *args[: FIELDS.tensors]) and not dout.is_meta
    return (_backward if plain else _BACKWARD)(dout, dlse, out, lse, *args, backend)


def _join(alternatives: Alternatives, chain: tuple[str, ...]) -> DynamicMaskLaunchers:
    def forward(query: Tensor, key: Tensor, *call: Any) -> Any:
        return alternatives.attempt(chain, query, key, lambda found: found.forward(query, key, *call))

    def backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, *call: Any) -> Any:
        return alternatives.attempt(chain, query, key, lambda found: found.backward(dout, dlse, out, lse, query, key, *call))

    return alternatives.of(chain[0])._replace(forward=forward, backward=backward)


launchers = Alternatives("dynamic_mask_attention", BACKENDS, ("gather_torch",), None, _join).launchers


def _intervals(key_scores, keep, q_len, is_causal, lengths, document_ids, sinks=0, window=0):
    start, stop = selection.intervals(key_scores, keep, q_len, is_causal, lengths, document_ids, causal_intervals, sinks, window)
    return start.contiguous(), stop.contiguous()


def _launched(args: DynamicMaskArgs) -> tuple[Any, ...]:
    """The arguments of launchers. `max_new_keys`: in a causal call, only keys between two queries are new to the later one; otherwise each of two
    documents has its own set."""
    return *args[: FIELDS.tensors], args.keep if args.is_causal else 2 * args.keep, args.scale


def _forward(*call):
    args = DynamicMaskArgs(*call[:-1])
    out, lse = launchers(call[-1]).forward(*_launched(args))
    return _like(out, args.query), lse


def _backward(dout, dlse, out, lse, *call):
    args = DynamicMaskArgs(*call[:-1])
    dq, dk, dv, dscores = launchers(call[-1]).backward(dout, dlse, out, lse, *_launched(args))
    dscores = lse.new_empty(0) if args.key_scores is None else dscores.contiguous()
    return _like(dq, args.query), dk.contiguous(), dv.contiguous(), dscores


def _backward_of_op(*call):
    # results of an op may not share memory
    dq, dk, dv, dscores = _backward(*call)
    return dq, dk, dv.clone() if dv.untyped_storage().data_ptr() == dk.untyped_storage().data_ptr() else dv, dscores


def _like(tensor: Tensor, query: Tensor) -> Tensor:
    if tensor.stride() == strides_like_heads(query, tensor.shape[3]):
        return tensor
    return empty_like_heads(query, tensor.shape[3]).copy_(tensor)


def _fake_intervals(key_scores, keep, q_len, is_causal, lengths, document_ids, sinks=0, window=0):
    return tuple(key_scores.new_empty(key_scores.shape, dtype=torch.int32) for _ in range(2))


def _fake_forward(query, key, value, *call):
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return empty_like_heads(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=dtype)


def _fake_backward(dout, dlse, out, lse, query, key, value, key_scores, *call):
    dscores = lse.new_empty(0) if key_scores is None else key_scores.new_empty(key_scores.shape)
    return empty_like_heads(query), key.new_empty(key.shape), value.new_empty(value.shape), dscores


def _pairs(args: DynamicMaskArgs) -> int:
    """Pairs of a query and a key that it keeps; the first queries of a causal mask count like the others, as in torch. Selection ranks and multiplies
    nothing, so it counts nothing."""
    batch, heads, q_len, _ = args.query.shape
    return batch * heads * q_len * min(args.keep, args.key.shape[2])


_INTERVALS = register(_library, "dynamic_mask_intervals", _intervals, _fake_intervals)
_FORWARD = register(_library, "dynamic_mask_forward", _forward, _fake_forward, by_pairs(FIELDS, _pairs))
_BACKWARD = register(_library, "dynamic_mask_backward", _backward_of_op, _fake_backward, by_pairs(FIELDS, _pairs, 4))
