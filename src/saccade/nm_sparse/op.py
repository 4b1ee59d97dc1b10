"""torch.library schemas and fakes of `nm_sparse_attention`: one opaque op each for forward and backward.

All backends share the backward of `masked`, which has a faster form for sm_90. It takes the selection that forward stored, one bit
per score, and does not derive it from its own scores. Another kernel sums `Q K^T` in another order (tile shapes, matrix instructions,
TF32), so it could rank scores that nearly tie differently. P, dS and the saved lse would then belong to different sets of keys.
Stored bits are exact for any forward. If they take too much memory between forward and backward, `recompute_selection` drops them.
Backward then runs the same forward kernel again: the same binary on the same numbers gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.engine import op_replay
from saccade.engine.alternatives import Alternatives
from saccade.engine.flops import backward_flops, pairs_of
from saccade.engine.gradient import function
from saccade.engine.layout import empty_like_heads
from saccade.engine.namespace import fragment
from saccade.engine.record import Fields
from saccade.engine.tracing import eager, register
from saccade.hardware import allows_tf32
from saccade.nm_sparse.args import NMSparseArgs, NMSparseLaunchers
from saccade.nm_sparse.backends import BACKENDS
from saccade.nm_sparse.bits import words_of
from saccade.nm_sparse.flops import kept_pairs
from saccade.nm_sparse.order import adds_in_order
from saccade.nm_sparse.reference_launchers import REFERENCE_LAUNCHERS

_FIELDS = Fields(NMSparseArgs)
_DENSE_AT = _FIELDS.count - len(_FIELDS.defaults())  # the fields with defaults are the last arguments of an op, after its own
GRADIENTS = "masked"  # the backend whose backward serves all

_library = fragment()
_CALL, _DENSE = _FIELDS.schema(), ", ".join(_FIELDS.defaults())
_library.define(f"nm_sparse_forward({_CALL}, bool stores, str backend, {_DENSE}) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"nm_sparse_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor kept, {_CALL}, bool bias_grad, str backend, {_DENSE}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def forward(args: NMSparseArgs, stores: bool, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, kept); kept is empty unless `stores`."""
    run = _forward if eager(*args[: _FIELDS.tensors]) else _FORWARD
    return run(*args[:_DENSE_AT], stores, backend, *args[_DENSE_AT:])


def backward(
    args: NMSparseArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, kept: Tensor, bias_grad: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias); dbias is empty unless `bias_grad`. backend: the backend of the forward."""
    run = _backward if eager(dout, dlse, out, lse, kept, *args[: _FIELDS.tensors]) else _BACKWARD
    return run(dout, dlse, out, lse, kept, *args[:_DENSE_AT], bias_grad, backend, *args[_DENSE_AT:])


def _join(alternatives: Alternatives, chain: tuple[str, ...]) -> NMSparseLaunchers:
    def forward(args: NMSparseArgs, stores: bool) -> Any:
        return alternatives.attempt(chain, args.query, args.key, lambda found: found.forward(args, stores))

    def backward(args: NMSparseArgs, *given: Any, **options: Any) -> Any:
        # the backward of one backend serves all
        own = tuple(name for name in chain if name != "mma_sp")
        return alternatives.attempt(own, args.query, args.key, lambda found: found.backward(args, *given, **options))

    return NMSparseLaunchers(forward, backward)


launchers = Alternatives("nm_sparse_attention", BACKENDS, ("masked", "reference"), REFERENCE_LAUNCHERS, _join).launchers


def _forward(*call):
    (stores, backend), args = call[_DENSE_AT : _DENSE_AT + 2], _arguments(call)

    def make() -> tuple[Tensor, ...]:
        return launchers(backend).forward(args, stores)

    return _made(_as_cpp_takes_it(args, *args[:7], "forward", stores, backend), _layouts, args.query, make)


def _backward(dout, dlse, out, lse, kept, *call):
    (bias_grad, backend), args = call[_DENSE_AT : _DENSE_AT + 2], _arguments(call)
    chosen_by_auto = ":" in backend

    def make() -> tuple[Tensor, ...]:
        found = launchers(f"auto:{GRADIENTS}" if chosen_by_auto else GRADIENTS)
        dq, dk, dv, dbias = found.backward(args, dout, dlse, out, lse, kept, bias_grad=bias_grad)
        return dq, dk, dv, lse.new_empty(0) if dbias is None else dbias

    known = _as_cpp_takes_it(args, dout, dlse, out, lse, kept, *args[:7], "backward", adds_in_order(), chosen_by_auto)
    return _made(known, op_replay.same_layouts, args.query, make)


def _made(
    known: tuple | None, layouts: Callable[[tuple[Tensor, ...]], list], query: Tensor, make: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """The results of an op, from C++ if it knows the call, else by `make`, whose launches C++ then learns if it can."""
    found = op_replay.replayed(known)
    if found is not None:
        return found
    if known is None or not op_replay.may_record(known, query):
        return make()
    return op_replay.recorded(layouts, known, make)


def _as_cpp_takes_it(args: NMSparseArgs, *given: Any) -> tuple | None:
    """A call of an op by which C++ looks it up. None with a mask or bias, of which torch makes tensors of the call's own. given: the tensors of the
    op, and what its launches depend on beside them and the numbers of `args`."""
    if args.mask is not None or args.bias is not None:
        return None
    tf32 = args.query.dtype is torch.float32 and allows_tf32()
    pattern, dense = f"{args.pattern_n}:{args.pattern_m}", (float(args.dense_first), float(args.dense_recent))
    return (*given, pattern, *dense, args.dropout_p, args.is_causal, args.scale, tf32)


def _layouts(results: tuple[Tensor, ...]) -> list:
    """Layouts of the results of forward. The selection begins as zeros: no kernel visits tiles that a query does not see."""
    out, lse, kept = op_replay.same_layouts(results)
    return [out, lse, (kept,) if kept.numel() else kept]


def _arguments(call: tuple) -> NMSparseArgs:
    """The arguments of attention among those of an op: all but the last, then two of the op's own, then the last."""
    return NMSparseArgs(*call[:_DENSE_AT], *call[_DENSE_AT + 2 :])


def _fake_forward(*call):
    stores, args = call[_DENSE_AT], _arguments(call)
    batch, heads, q_len, _ = args.query.shape
    words = (batch, heads, q_len, words_of(args.key.shape[2], args.pattern_m)) if stores else (0,)
    out, lse = empty_like_heads(args.query), args.query.new_empty(args.query.shape[:3], dtype=torch.float32)
    return out, lse, args.query.new_empty(words, dtype=torch.int32)


def _fake_backward(dout, dlse, out, lse, kept, *call):
    bias_grad, args = call[_DENSE_AT], _arguments(call)
    dbias = lse.new_empty(0) if args.bias is None or not bias_grad else args.bias.new_empty(args.bias.shape)
    return *(empty_like_heads(x) for x in args[:3]), dbias


def _forward_flops(*call, out_val=None, **named):
    args = _named(call, named)
    return 2 * pairs_of(args.query, args.key) * args.query.shape[3] + 2 * kept_pairs(args) * args.value.shape[3]


def _backward_flops(*call, out_val=None, **named):
    args = _named(call[5:], named)
    return backward_flops(kept_pairs(args), args.query.shape[3], args.value.shape[3])


def _named(call: tuple, named: dict[str, Any]) -> NMSparseArgs:
    """The arguments of attention in a call of an op by position and by name."""
    names = (*_FIELDS.names[:_DENSE_AT], "", "", *_FIELDS.names[_DENSE_AT:])
    given = dict(zip(names, call, strict=False)) | named
    return NMSparseArgs(**{name: x for name, x in given.items() if name in _FIELDS.names})


_FORWARD = register(_library, "nm_sparse_forward", _forward, _fake_forward, _forward_flops)
_BACKWARD = register(_library, "nm_sparse_backward", _backward, _fake_backward, _backward_flops)


def _apply(args: NMSparseArgs, options: tuple) -> tuple[tuple, tuple]:
    backend, stores = options
    out, lse, kept = forward(args, stores, backend)
    return (out, lse), (out, lse, kept if stores else None)


def _apply_backward(args, rows, dout, dlse, saved, wanted, options) -> tuple[tuple, Tensor]:
    (out, lse, kept), (backend, _) = saved, options
    if kept is None:
        *_, kept = forward(args, True, backend)
    *gradients, dbias = backward(args, dout, dlse, out, lse, kept, wanted, backend)
    return tuple(gradients), dbias


# `(out, lse) = nm_sparse_attention(query, key, value)`, differentiated with the selection that this forward made
NMSparse = function("NMSparse", _FIELDS, 2, _apply, _apply_backward)
