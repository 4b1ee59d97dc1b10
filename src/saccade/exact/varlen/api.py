"""`attention_varlen` and `attention_varlen_qkvpacked`: what a user calls.

Letters: B sequences, H query heads, Hkv key/value heads, Tq and Tk tokens of all sequences together, D head dim.
"""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from saccade.engine.arguments import check_flag, check_tensors
from saccade.engine.calls import autocast, draw_seed, gradient_needed, uncast
from saccade.engine.first_order import applied
from saccade.engine.prepare import Prepared, metadata, prepare, remembered, traced
from saccade.engine.sharded import HEADS, Dims, is_dtensor, on_shards
from saccade.errors import InvalidArgument
from saccade.exact.varlen import again
from saccade.exact.varlen.args import FULL, UPPER_LEFT, VarlenArgs
from saccade.exact.varlen.backends import BACKENDS
from saccade.exact.varlen.op import OPS
from saccade.exact.varlen.problem import check_packed_varlen, checked_offsets, describe_varlen, on_the_host


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
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` over sequences of different lengths, packed one behind another: no padding is read, multiplied or written.

    Of sequence s, `out_s = softmax(scale * Q_s K_s^T + bias) V_s`, where Q_s are the rows `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1] - 1`
    of query, and K_s and V_s those of key and value by cu_seqlens_k. Any sequence may be empty.

    Args:
        query: `[Tq, H, D]`; DTensors may be sharded by heads.
        key, value: `[Tk, Hkv, D]`; `Hkv` may divide `H` with `enable_gqa=True`.
        cu_seqlens_q, cu_seqlens_k: int32 `[B + 1]` on the device of query: 0, then the end of each sequence. For self-attention pass one
            tensor twice. int64 is converted at each call. They stay on the device: nothing waits for it. Tokens behind the last sequence
            belong to none and get out 0 and zero gradients.
        max_seqlen_q, max_seqlen_k: ints, at least the longest sequence; nearer is faster.
        dropout_p, scale, enable_gqa: as in `attention`.
        is_causal: key j of a sequence is visible to its query i if j <= i (upper-left, as in `attention`;
            `saccade.flash_attn_interface` has the lower-right alignment of flash-attn).
        attn_bias: floating, `[H, max_seqlen_q, max_seqlen_k]`, added to the scaled scores of every sequence; gradient supported.
        return_lse: also return the natural log-sum-exp of the scores, float32 `[H, Tq]` (differentiable).
        backend: "auto", or the name of one backend, which then runs or raises: "ragged", "flash", "sdpa" or "reference".

    Returns:
        out `[Tq, H, D]`, or `(out, lse)`. A query whose sequence has no key gets out 0, lse -inf and zero gradients. NaN in one sequence
        never reaches another.

    Raises:
        InvalidArgument: a bad argument, with what was given and what is allowed. The values of cu_seqlens are checked on a CPU, and on a GPU
            with SACCADE_CHECK_LENGTHS=1; unchecked, wrong ones give wrong results of their sequences, never a read outside of the tensors.
        UnsupportedProblem: the named backend cannot run this call; lists every reason.

    Source:
        whole sequences on chip after "Fast Attention For Short Sequences" (paper 002); packing after flash-attn's `flash_attn_varlen_func`.
    """
    if type(query) is not Tensor and is_dtensor(query):
        return _on_shards(
            {"query": query, "key": key, "value": value}, {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}, attn_bias,
            {
                "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "dropout_p": dropout_p, "is_causal": is_causal,
                "scale": scale, "enable_gqa": enable_gqa, "return_lse": return_lse, "backend": backend,
            },
        )  # fmt: skip
    causal = _causal(is_causal)
    query, key, value = autocast(query, key, value)
    return attend(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal, scale, enable_gqa, attn_bias,
        return_lse, backend,
    )  # fmt: skip


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
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_varlen` from one packed projection; the gradient is one packed tensor, never a concatenation.

    Args:
        qkv: `[T, 3, H, D]`, as a linear layer of width `3 * H * D` gives it.
        cu_seqlens, max_seqlen, dropout_p, is_causal, scale, attn_bias, return_lse, backend: as in `attention_varlen`.

    Returns:
        out `[T, H, D]`, or `(out, lse)` with lse `[H, T]`.

    Raises:
        InvalidArgument, UnsupportedProblem: as `attention_varlen`; a qkv of another shape is repeated.

    Source:
        as `attention_varlen`, after flash-attn's `flash_attn_varlen_qkvpacked_func`.
    """
    check_packed_varlen(qkv)
    if type(qkv) is not Tensor and is_dtensor(qkv):
        return _on_shards(
            {"qkv": qkv}, {"cu_seqlens": cu_seqlens}, attn_bias,
            {
                "max_seqlen": max_seqlen, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
                "return_lse": return_lse, "backend": backend,
            },
        )  # fmt: skip
    causal = _causal(is_causal)
    (qkv,) = autocast(qkv)
    query, key, value = qkv.unbind(1)
    return attend(
        query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, causal, scale, False, attn_bias, return_lse, backend,
        qkv,
    )  # fmt: skip


def _on_shards(
    rows: dict[str, Any], offsets: dict[str, Any], attn_bias: Tensor | None, options: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """Either call with DTensors of packed tokens: heads may be sharded, tokens may not, as sequences would cross ranks."""
    packed = "qkv" in rows
    if not packed:
        check_tensors(rows["query"], rows["key"], rows["value"])
        if not all(x.dim() == 3 for x in rows.values()):
            raise InvalidArgument(f"query has shape {list(rows['query'].shape)}; it must be [T, H, D], as key and value")
    first, value = next(iter(rows.values())), list(rows.values())[-1]
    tokens, heads = first.shape[0], first.shape[-2]
    tensors = {name: (x, Dims(None, x.dim() - 2)) for name, x in rows.items()}
    tensors |= {name: (x, Dims(None, None)) for name, x in offsets.items()}
    tensors["attn_bias"] = (attn_bias, HEADS)
    shapes = (tokens, heads, value.shape[-1]), (heads, tokens)
    return on_shards(attention_varlen_qkvpacked if packed else attention_varlen, tensors, options, (Dims(None, 1), HEADS), shapes)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    causal: int,
    scale: float | None,
    enable_gqa: bool,
    attn_bias: Tensor | None,
    return_lse: bool,
    backend: str,
    qkv: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A call with the alignment of its causal mask as a number; query, key and value may be views of `qkv`."""
    call = None
    if attn_bias is None and not traced():
        call = again.call_of(
            query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal, scale, enable_gqa, return_lse,
            backend, qkv,
        )  # fmt: skip
        found = again.made(call)
        if found is not None:
            return found
    needs_grad = gradient_needed(query, key, value, attn_bias)
    prepared = _prepare(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal, scale, enable_gqa, attn_bias,
        return_lse, needs_grad, qkv is not None, backend,
    )  # fmt: skip
    problem, chosen = prepared.problem, prepared.backend
    offsets_q = checked_offsets("cu_seqlens_q", cu_seqlens_q, query.shape[0], problem.max_q)
    offsets_k = checked_offsets("cu_seqlens_k", cu_seqlens_k, key.shape[0], problem.max_k)
    same = cu_seqlens_k is cu_seqlens_q
    rest = (attn_bias, draw_seed(problem, chosen), problem.max_q, problem.max_k, problem.dropout_p, problem.causal, problem.scale)
    # one tensor stays one, converted or not: its lists are made once
    args = VarlenArgs(query, key, value, offsets_q, offsets_q if same else offsets_k, *rest)
    if chosen.attend is not None:
        with uncast(query):
            out, lse = chosen.attend(args, problem)
    elif not problem.needs_grad:
        out, lse = OPS.forward(args, prepared.asked)
    elif qkv is not None:
        out, lse = applied(OPS.packed, problem, chosen.name, qkv, offsets_q, None, *rest, prepared.asked, True)
    else:
        given = (query, key, value, offsets_q, None if same else offsets_k, *rest)
        out, lse = applied(OPS.separate, problem, chosen.name, *given, prepared.asked, True)
    if call is not None:
        again.offer(prepared, call, args, out, lse, qkv)
    return (out, lse) if problem.return_lse and lse is not None else out


def _prepare(
    query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal, scale, enable_gqa, attn_bias,
    return_lse, needs_grad, packed, backend,
) -> Prepared:  # fmt: skip
    """The prepared call, remembered by everything but the numbers of tokens and sequences, which change from batch to batch."""
    signature, readable = None, isinstance(query, Tensor) and on_the_host(query, cu_seqlens_q, cu_seqlens_k)
    if not traced():
        try:
            signature = (
                "attention_varlen", type(query), type(key), type(value), query.shape[1:], query.dtype, query.device, key.shape[1:], key.dtype, key.device, value.shape[1:],
                value.dtype, value.device, key.shape[0] == value.shape[0], type(cu_seqlens_q), cu_seqlens_q.dtype, cu_seqlens_q.device, cu_seqlens_q.stride(),
                type(cu_seqlens_k), cu_seqlens_k.dtype, cu_seqlens_k.device, cu_seqlens_k.stride(), cu_seqlens_q.shape == cu_seqlens_k.shape,
                cu_seqlens_q.numel() > 0, cu_seqlens_q is cu_seqlens_k, type(max_seqlen_q), max_seqlen_q, type(max_seqlen_k), max_seqlen_k,
                dropout_p, type(dropout_p), causal, scale, type(scale), enable_gqa, None if attn_bias is None else metadata(attn_bias), return_lse, needs_grad, packed,
                backend, readable,
            )  # fmt: skip
            found = remembered(signature)
            if found is not None:
                return found
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # describe_varlen says what is wrong
            signature = None
    arguments = (
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal, scale, enable_gqa, attn_bias,
        return_lse, needs_grad, packed, readable,
    )  # fmt: skip
    return prepare(signature, describe_varlen, arguments, BACKENDS, backend)


def _causal(is_causal: bool) -> int:
    return UPPER_LEFT if check_flag("is_causal", is_causal) else FULL
