"""`attention_varlen` and `attention_varlen_qkvpacked`: what a user calls.

Letters: B sequences, H query heads, Hkv key/value heads, Tq and Tk tokens of all sequences together, D head dim.
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from saccade.engine.arguments import check_flag, check_tensors
from saccade.engine.calls import autocast, cast, draw_seed, gradient_needed
from saccade.engine.prepare import Prepared, finder, prepare, traced
from saccade.engine.sharded import HEADS, Dims, call_on_shards, is_dtensor, placed
from saccade.engine.window import check_window, ends_of
from saccade.errors import InvalidArgument
from saccade.exact.varlen import replay
from saccade.exact.varlen.args import FULL, UPPER_LEFT, VarlenArgs, VarlenCall, VarlenPackedCall
from saccade.exact.varlen.backends import BACKENDS
from saccade.exact.varlen.behind import Behind
from saccade.exact.varlen.op import OPS
from saccade.exact.varlen.problem import check_packed_varlen, checked_offsets, describe_varlen, on_the_host

_BIAS, _WINDOW = map(VarlenCall._fields.index, ("attn_bias", "window"))
_OUTPUTS = Dims(None, 1), HEADS
_PLACED = placed(VarlenCall)
_PACKED_PLACED = placed(VarlenPackedCall)
_find = finder(
    "attention_varlen",
    VarlenCall,
    "key.shape[0] == value.shape[0]",
    "cu_seqlens_q is cu_seqlens_k",
    "cu_seqlens_q.shape == cu_seqlens_k.shape",
    "cu_seqlens_q.numel() > 0",
)


# for type checkers, by what `return_lse` says: one tensor, or two
@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    attn_bias: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    attn_bias: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    attn_bias: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    attn_bias: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` over sequences of different lengths, packed one behind another: no padding is read, multiplied or written.

    For sequence s, `out_s = softmax(scale * Q_s K_s^T + bias) V_s`, where Q_s are the rows `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1] - 1`
    of query, and K_s and V_s those of key and value by cu_seqlens_k. Any sequence may be empty.

    Args:
        query: `[Tq, H, D]`; DTensors may be sharded by heads.
        key: `[Tk, Hkv, D]`; `Hkv` may divide `H` with `enable_gqa=True`.
        value: `[Tk, Hkv, D]`.
        cu_seqlens_q: int32 `[B + 1]` on the device of query: 0, then the end of each sequence of query. int64 is converted at each call. The
            values stay on the device, and only the backend "sdpa" waits for them. Tokens behind the last sequence belong to none, and get
            out 0, lse -inf and zero gradients.
        cu_seqlens_k: the same for key and value. For self-attention pass the tensor of query again.
        max_seqlen_q: an int, at least the longest sequence of query; nearer is faster.
        max_seqlen_k: the same for key and value.
        dropout_p: as in `attention`.
        is_causal: key j of a sequence is visible to its query i if j <= i (upper-left, as in `attention`;
            `saccade.flash_attn_interface` has the lower-right alignment of flash-attn).
        scale: factor on the scores, `1/sqrt(D)` by default.
        enable_gqa: as in `attention`.
        attn_bias: floating, `[H, max_seqlen_q, max_seqlen_k]`, added to the scaled scores of every sequence; gradient supported.
        window: `(left, right)`: query i of a sequence sees its keys i - left to i + right; None for no limit on a side. It is aligned upper left,
            as a causal mask is. With `is_causal=True` a key must lie within both. Except in the reference, cost and memory grow
            with the tokens times the width of the window. Excludes `attn_bias`.
        return_lse: also return the natural log-sum-exp of the scores, float32 `[H, Tq]` (differentiable).
        backend: "auto", or the name of one backend, which then runs or raises: "ragged", "flash", "sdpa" or "reference".

    Returns:
        out `[Tq, H, D]`, or `(out, lse)`. A query that sees no key gets out 0, lse -inf and zero gradients. NaN in one sequence
        never reaches another; within a sequence it may reach tokens beyond the window.

    Raises:
        InvalidArgument: a bad argument, with what was given and what is allowed. The values of cu_seqlens are checked on a CPU, and on a GPU
            with SACCADE_CHECK_LENGTHS=1; unchecked, wrong ones give wrong results of their sequences, never a read outside of the tensors.
        UnsupportedProblem: the named backend cannot run this call; lists every reason.

    Source:
        whole sequences on chip after "Fast Attention For Short Sequences" (paper 002); packing after flash-attn's `flash_attn_varlen_func`.
    """
    sharded = type(query) is not Tensor and is_dtensor(query)
    causal = _causal(is_causal)
    call = (
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal, scale, enable_gqa, attn_bias, window,
        return_lse, backend,
    )  # fmt: skip
    return _attention_on_shards(call) if sharded else attend(cast(call))


@overload
def attention_varlen_qkvpacked(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    attn_bias: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def attention_varlen_qkvpacked(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    attn_bias: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen_qkvpacked(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    attn_bias: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen_qkvpacked(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    attn_bias: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_varlen` from one packed projection; the gradient is one packed tensor, never a concatenation.

    Args:
        qkv: `[T, 3, H, D]`, as a linear layer of width `3 * H * D` gives it.
        cu_seqlens: `cu_seqlens_q` of `attention_varlen`.
        max_seqlen: `max_seqlen_q` of `attention_varlen`.
        dropout_p: as in `attention_varlen`.
        is_causal: as in `attention_varlen`.
        scale: as in `attention_varlen`.
        attn_bias: as in `attention_varlen`.
        window: as in `attention_varlen`.
        return_lse: as in `attention_varlen`.
        backend: as in `attention_varlen`.

    Returns:
        out `[T, H, D]`, or `(out, lse)` with lse `[H, T]`.

    Raises:
        InvalidArgument, UnsupportedProblem: as `attention_varlen`; a qkv of another shape is repeated.

    Source:
        as `attention_varlen`, after flash-attn's `flash_attn_varlen_qkvpacked_func`.
    """
    check_packed_varlen(qkv)
    if type(qkv) is not Tensor and is_dtensor(qkv):
        call = (qkv, cu_seqlens, max_seqlen, dropout_p, is_causal, scale, attn_bias, window, return_lse, backend)
        shapes = (*qkv.shape[:1], *qkv.shape[2:]), (qkv.shape[2], qkv.shape[0])
        return call_on_shards(attention_varlen_qkvpacked, _PACKED_PLACED, call, _OUTPUTS, shapes)
    causal = _causal(is_causal)
    (qkv,) = autocast(qkv)
    rows = (*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return attend((*rows, dropout_p, causal, scale, False, attn_bias, window, return_lse, backend), qkv)


def _attention_on_shards(call: tuple) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_varlen` of DTensors: heads may be sharded, tokens may not, because sequences would cross ranks."""
    query, key, value = call[:3]
    check_tensors(query, key, value)
    if not query.dim() == key.dim() == value.dim() == 3:
        raise InvalidArgument(f"query has shape {list(query.shape)}; it must be [T, H, D], as key and value")
    shapes = (*query.shape[:2], value.shape[2]), (query.shape[1], query.shape[0])

    return call_on_shards(lambda **given: attend(cast(VarlenCall(**given))), _PLACED, call, _OUTPUTS, shapes)


def attend(call: tuple, qkv: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """A call in the order of `VarlenCall`; query, key and value may be views of `qkv`."""
    query, key, value, cu_seqlens_q, cu_seqlens_k = call[:5]
    attn_bias, window, known = call[_BIAS], call[_WINDOW], None
    if window is not None:
        # as plain numbers, which the signature holds
        window = check_window(window)
        call = (*call[:_WINDOW], window, *call[_WINDOW + 1 :])
    if attn_bias is None and not traced():
        known = replay.call_of(call, qkv)
        found = replay.replayed(known)
        if found is not None:
            return found
    prepared = _prepare(call, qkv is not None)
    problem, chosen = prepared.problem, prepared.backend
    offsets_q = checked_offsets("cu_seqlens_q", cu_seqlens_q, query.shape[0], problem.max_q)
    offsets_k = checked_offsets("cu_seqlens_k", cu_seqlens_k, key.shape[0], problem.max_k)
    same = cu_seqlens_k is cu_seqlens_q
    numbers = (problem.max_q, problem.max_k, problem.dropout_p, problem.causal, problem.scale, *ends_of(problem.window))
    rest = (attn_bias, draw_seed(problem, chosen), *numbers)
    # one tensor stays one tensor, converted or not, so that its lists are made once
    args = VarlenArgs(query, key, value, offsets_q, offsets_q if same else offsets_k, *rest)
    recorder = None if known is None else replay.begin(prepared, known, args)
    out, lse = OPS.run(prepared, args, qkv, recorder)
    if known is not None and recorder is not None:
        replay.record(prepared, known, args, out, lse, qkv, recorder)
    if not problem.return_lse or lse is None:
        return out
    if chosen.attend is None:
        # behind the last sequence, kernels write zeros into out but leave lse uninitialised
        lse = lse.masked_fill(~Behind(args.cu_seqlens_q, False).real(query)[:, 0], float("-inf"))
    return out, lse


def _prepare(call: tuple, packed: bool) -> Prepared:
    """The prepared call, remembered by everything but the numbers of tokens and sequences, which change from batch to batch."""
    query, key, value, cu_seqlens_q, cu_seqlens_k = call[:5]
    needs_grad = gradient_needed(query, key, value, call[_BIAS])
    readable = isinstance(query, Tensor) and on_the_host(query, cu_seqlens_q, cu_seqlens_k)
    signed, found = _find(call, needs_grad, packed, readable)
    if found is not None:
        return found
    *others, window, return_lse, backend = call
    return prepare(signed, describe_varlen, (*others, return_lse, needs_grad, packed, readable, window), BACKENDS, backend)


def _causal(is_causal: bool) -> int:
    return UPPER_LEFT if check_flag("is_causal", is_causal) else FULL
