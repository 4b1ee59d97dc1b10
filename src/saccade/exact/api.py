"""The public functions `attention` and `attention_qkvpacked`.

Letters: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D head dim. Tensors are `[B, H, T, D]` with a contiguous
last dim and any other strides. So views of `[B, T, H, D]`, of `[T, B, H, D]` and of a packed qkv need no copy.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from saccade import native
from saccade.engine.arguments import check_tensors
from saccade.engine.calls import autocast, cast, draw_seed, split_mask
from saccade.engine.layout import unpack
from saccade.engine.lengths import checked_lengths
from saccade.engine.prepare import Prepared
from saccade.engine.sharded import BHTD, Dims, call_on_shards, is_dtensor, placed
from saccade.engine.window import check_window, ends_of
from saccade.errors import InvalidArgument
from saccade.exact.args import AttentionArgs, AttentionCall, PackedCall
from saccade.exact.causal_bias import checked_unbiased, is_causal_bias
from saccade.exact.cpu import on_a_cpu
from saccade.exact.op import OPS
from saccade.exact.prepared import prepare_attention
from saccade.exact.problem import (
    broadcast,
    by_window,
    check_packed,
    check_whole,
    in_one_batch,
    mask_of_keys,
    with_key_mask,
)
from saccade.exact.replay import begin, record
from saccade.exact.sdpa_mask import misread_on_a_cpu
from saccade.exact.varlen.nested import attention_nested

_PLACED = placed(AttentionCall)
_PACKED_PLACED = placed(PackedCall)
_WINDOW = AttentionCall._fields.index("window")


# for type checkers, by what `return_lse` says: one tensor, or two
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    lengths: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_mask: Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    lengths: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_mask: Tensor | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    lengths: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_mask: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    lengths: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_mask: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention, `softmax(scale * Q K^T + mask) V`: torch's function, keyword for keyword.

    Args:
        query: `[B, H, Tq, D]`, or jagged nested tensors `[B, H, j, D]`, which `attention_varlen` computes, or DTensors sharded by
            batch or heads. Image windows are `[images, W, H, Tq, D]`, with an `attn_mask` that has a bias for each of the W windows.
            Other inputs that torch accepts (other ranks, `Dv != D`, float64) are passed to torch. Batches, ranks and numbers of heads
            that differ are broadcast as in torch.
        key: `[B, Hkv, Tk, D]`.
        value: `[B, Hkv, Tk, D]`.
        attn_mask: bool (True = attend) or floating (added to the scaled scores, gradient supported), broadcastable to
            `[B, H, Tq, Tk]`; or a causal bias of `torch.nn.attention.bias`. Kernels read a float32 bias of 16-bit queries as it is.
            On a GPU torch's function reads it in the dtype of `query`, with numbers below that range clamped to the lowest finite one. For image
            windows, a floating `[W, H, Tq, Tk]` (H, Tq and Tk may be 1) is read without a copy, and its gradient is summed over the images. Excludes
            `is_causal`. As in torch, a NaN in a masked key may reach the output; `lengths` prevents this.
        dropout_p: probability of dropping a weight, `0 <= dropout_p < 1`. The Philox key is drawn from torch's generator of the
            device, so dropout follows `torch.manual_seed`. As in torch, it is applied whenever it is above 0.
        is_causal: key j is visible to query i if j <= i (upper-left, as torch).
        scale: factor on the scores, `1/sqrt(D)` by default.
        enable_gqa: grouped-query attention: `Hkv` may be a divisor of `H`; otherwise it is `H`.
        lengths: int32 or int64 `[B]`, number of real keys of each batch row. Keys beyond it are invisible and may hold anything,
            NaN included. The values are checked, which waits for the device once for each tensor.
        window: `(left, right)`: query i sees the keys i - left to i + right; None for no limit on a side. It is aligned upper left, as a causal
            mask is. With `is_causal=True` a key must lie within both. Except in the reference, cost and memory grow with the tokens times
            the width of the window. Excludes `attn_mask`. As under a mask, a NaN beyond the window may reach the output.
        key_mask: bool `[B, Tk]`, True = visible to the queries of that batch row (for image windows `[images, W, Tk]`). If batch rows share a
            bias, as in structure models, mask and bias need not be combined into one tensor. Excludes `is_causal` and `window`.
        return_lse: also return the natural log-sum-exp of the scores, float32 `[B, H, Tq]` (differentiable). Needs tensors of rank 4, or image
            windows.
        backend: "auto", or the name of one backend, which either runs or raises; see `saccade.explain`.

    Returns:
        out `[B, H, Tq, D]` (a view of `[B, T, H, D]` or `[T, B, H, D]` memory if query is one), or `(out, lse)`; for image windows
        `[images, W, H, Tq, D]` and lse `[images, W, H, Tq]`. A query with no visible key gets out 0, lse -inf and zero gradients.
        NaN or Inf in visible inputs propagates, except in torch's function on a CPU, which gives 0 for a query that sees fewer
        than 8 keys (16 with AVX-512), if all its scores are NaN.

    Raises:
        InvalidArgument: a bad argument, with what was given and what is allowed.
        UnsupportedProblem: the named backend cannot run this call; lists every reason.

    Source:
        the whole-row kernels follow the forward and backward listings of "Fast Attention For Short Sequences" (paper 002).
    """
    call: tuple = (
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        lengths,
        window,
        key_mask,
        return_lse,
        backend,
    )
    if not torch.compiler.is_compiling() and native.calls is not None:
        found = native.calls.run(*call)
        if found is not None:
            return found
    if window is not None:
        # as plain numbers, which the signature holds; C++ replays no call with a window
        window = check_window(window)
        call = (*call[:_WINDOW], window, *call[_WINDOW + 1 :])
    sharded = type(query) is not Tensor and is_dtensor(query)
    # each rank combines its own parts of the masks
    if key_mask is not None and not sharded and not (isinstance(query, Tensor) and query.is_nested):
        attn_mask, key_mask = with_key_mask(query, key, value, attn_mask, key_mask, is_causal, enable_gqa, window)
        if key_mask is None:
            return attention(**AttentionCall(*call)._replace(attn_mask=attn_mask, key_mask=None)._asdict())
    if is_causal_bias(attn_mask):
        attn_mask, is_causal = checked_unbiased(attn_mask, is_causal, query, key)
        return attention(**AttentionCall(*call)._replace(attn_mask=attn_mask, is_causal=is_causal)._asdict())
    if sharded:
        return _attention_on_shards(call)
    if isinstance(query, Tensor) and query.is_nested:
        return attention_nested(*call)
    # `is False`, not a truth test: anything but a bool is refused when the call is described
    if (
        window is None
        and key_mask is None
        and return_lse is False
        and type(backend) is str
        and backend == "auto"
        and enable_gqa is False
        and not misread_on_a_cpu(attn_mask, query)
    ):
        found = on_a_cpu(query, key, value, attn_mask, dropout_p, is_causal, scale, lengths)
        if found is not None:
            return found
    given = cast(call)
    query, key, value = given[:3]
    prepared = prepare_attention(given, False)
    if prepared is None:
        query, key, value = broadcast(query, key, value, enable_gqa)
        return attention(**AttentionCall(*call)._replace(query=query, key=key, value=value)._asdict())
    args = _args_of(prepared, query, key, value, attn_mask, lengths, key_mask)
    problem, recorder = prepared.problem, begin(prepared, call)
    out, lse = OPS.run(prepared, args, None, recorder)
    if problem.windows:
        out, lse = by_window(problem, out), None if lse is None else by_window(problem, lse)
    if recorder is not None:
        tensors = (query, key, value, attn_mask, lengths, key_mask)
        record(prepared, call, tuple([x for x in tensors if x is not None]), args, out, lse, recorder)
    return (out, lse) if problem.return_lse and lse is not None else out


def _args_of(
    prepared: Prepared,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    lengths: Tensor | None,
    key_mask: Tensor | None = None,
) -> AttentionArgs:
    """The arguments that the kernels of a prepared call are given."""
    problem = prepared.problem
    mask, bias = split_mask(problem, attn_mask)
    if key_mask is not None:
        # without a bias for each window, torch's function takes tensors of rank 5 unchanged
        mask = mask_of_keys(key_mask) if problem.rank == 4 else key_mask[..., None, None, :]
    if problem.windows:
        query, key, value = in_one_batch(query), in_one_batch(key), in_one_batch(value)
        bias = None if bias is None else in_one_batch(bias)
    if lengths is not None:
        lengths = checked_lengths(lengths, problem.kv_len, any_width=prepared.backend.attend is not None)
    seed = draw_seed(problem, prepared.backend)
    numbers = (problem.dropout_p, problem.is_causal, problem.scale, *ends_of(problem.window))
    return AttentionArgs(query, key, value, mask, bias, lengths, seed, *numbers, prepared.launches)


@overload
def attention_qkvpacked(
    qkv: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    lengths: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def attention_qkvpacked(
    qkv: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    lengths: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_qkvpacked(
    qkv: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    lengths: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_qkvpacked(
    qkv: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    lengths: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Self-attention on one packed projection; the gradient is written as one packed tensor, without a concatenation.

    Args:
        qkv: `[B, S, 3, H, D]`, as a linear layer of width `3 * H * D` produces it, with a contiguous last dim; a DTensor may be
            sharded by batch or heads.
        attn_mask: as in `attention`, with Tq = Tk = S.
        dropout_p: as in `attention`.
        is_causal: as in `attention`.
        scale: as in `attention`.
        lengths: as in `attention`.
        window: as in `attention`.
        return_lse: as in `attention`.
        backend: as in `attention`.

    Returns:
        out `[B, S, H, D]`, ready for the output projection, or `(out, lse)` with lse float32 `[B, H, S]`.

    Raises:
        InvalidArgument: qkv has another shape or a last dim that is not contiguous; else as `attention`.
        UnsupportedProblem: as `attention`.

    Source:
        "Fast Attention For Short Sequences" (paper 002), whose kernel takes packed QKV.
    """
    call = (qkv, attn_mask, dropout_p, is_causal, scale, lengths, window, return_lse, backend)
    if not torch.compiler.is_compiling() and native.calls is not None:
        found = native.calls.run(*call)
        if found is not None:
            return found
    check_packed(qkv)
    if window is not None:
        window = check_window(window)
        call = PackedCall(*call)._replace(window=window)
    if type(qkv) is not Tensor and is_dtensor(qkv):
        return _packed_on_shards(call)
    if is_causal_bias(attn_mask):
        attn_mask, is_causal = checked_unbiased(attn_mask, is_causal, qkv[:, :, 0, 0], qkv[:, :, 0, 0])
        return attention_qkvpacked(**PackedCall(*call)._replace(attn_mask=attn_mask, is_causal=is_causal)._asdict())
    (qkv,) = autocast(qkv)
    query, key, value = unpack(qkv)
    prepared = prepare_attention((query, key, value, *call[1:5], False, *call[5:7], None, *call[7:]), True)
    assert prepared is not None, "query, key and value of one packed tensor have one shape"
    args = _args_of(prepared, query, key, value, attn_mask, lengths)
    recorder = begin(prepared, call)
    out, lse = OPS.run(prepared, args, qkv, recorder)
    if recorder is not None:
        record(prepared, call, tuple([x for x in (qkv, attn_mask, lengths) if x is not None]), args, out, lse, recorder)
    out = out.transpose(1, 2)
    return (out, lse) if prepared.problem.return_lse and lse is not None else out


def _attention_on_shards(call: tuple) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of DTensors."""
    query, key, value = call[:3]
    check_tensors(query, key, value)
    if not query.dim() == key.dim() == value.dim() == 4:
        raise InvalidArgument(f"query has shape {list(query.shape)}; a DTensor must be [B, H, T, D], as key and value")
    for name, x in (("key", key), ("value", value)):
        # the result is placed as query is
        if any(own == 1 != other for own, other in zip(query.shape[:2], x.shape[:2], strict=True)):
            raise InvalidArgument(
                f"query has shape {list(query.shape)}, {name} {list(x.shape)}; a DTensor query is not broadcast over batch or heads: "
                "expand it"
            )
    asked = AttentionCall(*call)
    check_whole(query, key, value, asked.attn_mask, asked.lengths, asked.key_mask, asked.enable_gqa)
    shapes = (*query.shape[:3], value.shape[3]), query.shape[:3]
    return call_on_shards(attention, _PLACED, call, (BHTD, BHTD), shapes)


def _packed_on_shards(call: tuple) -> Tensor | tuple[Tensor, Tensor]:
    """`attention_qkvpacked` of DTensors."""
    qkv, asked = call[0], PackedCall(*call)
    batch, tokens, _, heads, dim = qkv.shape
    like = torch.empty((), device=qkv.device).expand(batch, heads, tokens, dim)
    mask = None if is_causal_bias(asked.attn_mask) else asked.attn_mask
    check_whole(like, like, like, mask, asked.lengths, None, False)
    shapes = (batch, tokens, heads, dim), (batch, heads, tokens)
    return call_on_shards(attention_qkvpacked, _PACKED_PLACED, call, (Dims(0, 2), BHTD), shapes)
