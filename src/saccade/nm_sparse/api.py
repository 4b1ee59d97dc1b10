"""The public function `nm_sparse_attention`."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from saccade.engine import op_replay
from saccade.engine.arguments import check_tensors
from saccade.engine.calls import cast, draw_seed, split_mask, uncast
from saccade.engine.first_order import applied
from saccade.engine.lengths import checked_lengths
from saccade.engine.sharded import BHTD, call_on_shards, is_dtensor, placed
from saccade.engine.tracing import eager
from saccade.hardware import allows_tf32
from saccade.nm_sparse.args import NMSparseArgs, NMSparseCall
from saccade.nm_sparse.bits import keeps_selection
from saccade.nm_sparse.op import NMSparse, forward
from saccade.nm_sparse.prepared import prepare_nm_sparse
from saccade.nm_sparse.problem import check_whole

_PLACED = placed(NMSparseCall)


# for type checkers, by what `return_lse` says: one tensor, or two
@overload
def nm_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    pattern: str = "2:4",
    block_mask: Tensor | None = None,
    lengths: Tensor | None = None,
    dense_first: int = 0,
    dense_recent: int = 0,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
def nm_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    pattern: str = "2:4",
    block_mask: Tensor | None = None,
    lengths: Tensor | None = None,
    dense_first: int = 0,
    dense_recent: int = 0,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def nm_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    pattern: str = "2:4",
    block_mask: Tensor | None = None,
    lengths: Tensor | None = None,
    dense_first: int = 0,
    dense_recent: int = 0,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
def nm_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    pattern: str = "2:4",
    block_mask: Tensor | None = None,
    lengths: Tensor | None = None,
    dense_first: int = 0,
    dense_recent: int = 0,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` with N:M pruned scores: `softmax(prune(scale * Q K^T + mask)) V`, the softmax over the kept scores only.

    In each group of M consecutive keys (groups begin at key 0) a query keeps the N visible ones with the largest scores, ties going
    to the lower index. Invisible keys never displace visible ones. A group cut by the causal edge, a mask or the end of the keys keeps
    its N best visible keys, or all of them if there are at most N. Gradients flow only through the kept scores, by the selection
    that forward made. It is stored for backward with one bit per score, unless `saccade.nm_sparse.recompute_selection()` is active.

    `dense_first` and `dense_recent` name groups that a query does not prune, so that it keeps every visible key of them. Group g holds
    the keys M g to M g + M - 1. Query i does not prune it if

        M g < dense_first,   or   M g <= i  and  M g + M - 1 >= i - dense_recent + 1   (dense_recent > 0).

    i is an index into `query`, as `is_causal` aligns it, also in calls that are not causal. The second part names the groups that hold
    any of the keys i - dense_recent + 1 to i, counted also behind the last key. These are dense_recent / M groups if one of them ends at
    key i, and else one more. A causal call sees the keys of the last one up to i. Keys that a mask hides stay hidden.

    Args:
        query: as in `attention`, of rank 4 (or a DTensor sharded by batch or heads), as key and value.
        key: as in `attention`.
        value: as in `attention`.
        attn_mask: as in `attention`. A bias is added before pruning. The gradient of a bias is summed, in one order, over the axes that it
            broadcasts, and takes no memory but its own. A bias whose rows do not begin at multiples of 16 bytes is copied, forward
            and backward, along the axes in which it differs.
        dropout_p: as in `attention`, applied after the softmax.
        is_causal: as in `attention`.
        scale: as in `attention`.
        enable_gqa: as in `attention`.
        pattern: "N:M" with 1 <= N < M <= 16.
        block_mask: bool `[B, H, ceil(Tq / 64), ceil(Tk / 64)]`, B and H broadcast: tile (i, j) of 64 queries and 64 keys is
            visible.
        lengths: int32 or int64 `[B]`, number of real keys of each batch row, beside any mask or bias. Keys beyond it are invisible and may
            hold anything, NaN included. The values are checked, which waits for the device once for each tensor.
        dense_first: the first keys of a row that are never pruned (sinks), a multiple of M.
        dense_recent: the keys up to and including the index of each query that are never pruned, a multiple of M. In a call that is not
            causal this is a window on one side of the query. Do not use it if the queries are only the last tokens (decoding), because query 0 counts as token 0.
        return_lse: also return the natural log-sum-exp of the kept scores, float32 `[B, H, Tq]` (differentiable).
        backend: "auto", or the name of one backend, which either runs or raises.

    Returns:
        out `[B, H, Tq, D]`, or `(out, lse)`. A query with no visible key gets out 0, lse -inf and zero gradients. NaN in a
        visible score propagates; keys that no query sees and values that no query keeps may hold anything.

    Raises:
        InvalidArgument: a bad argument, with what was given and what is allowed.
        UnsupportedProblem: the named backend cannot run this call; lists every reason.

    Source:
        "Dynamic N:M Fine-grained Structured Sparse Attention Mechanism" (Dfss, paper 003), sections 3 and A.1.
    """
    call = (
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, pattern, block_mask, lengths, dense_first, dense_recent, return_lse,
        backend,
    )  # fmt: skip
    replayable = None if torch.compiler.is_compiling() else _as_cpp_takes_it(call)
    found = op_replay.replayed(replayable)
    if found is not None:
        return (found[0], found[1]) if return_lse else found[0]
    if type(query) is not Tensor and is_dtensor(query):
        check_tensors(query, key, value)
        check_whole(query, key, value, attn_mask, lengths, block_mask, enable_gqa)
        shapes = (*query.shape[:3], value.shape[-1]), query.shape[:3]
        return call_on_shards(nm_sparse_attention, _PLACED, call, (BHTD, BHTD), shapes)
    given, call = call, cast(call)
    query, key, value = call[:3]
    prepared = prepare_nm_sparse(call)
    problem, chosen = prepared.problem, prepared.backend
    mask, bias = split_mask(problem, attn_mask)
    if lengths is not None:
        mask = _within(checked_lengths(lengths, problem.kv_len, any_width=True), problem.kv_len, mask)
    blocks = None if block_mask is None else block_mask[(None,) * (4 - block_mask.dim())]
    numbers = (problem.keep, problem.group, problem.dropout_p, problem.is_causal, problem.scale)
    dense = (problem.dense_first, problem.dense_recent)
    args = NMSparseArgs(query, key, value, mask, bias, blocks, draw_seed(problem, chosen), *numbers, *dense)
    if chosen.attend is not None:
        with uncast(args.query):
            out, lse = chosen.attend(args, problem)
    elif problem.needs_grad:
        out, lse = applied(NMSparse, problem, chosen.name, *args, prepared.op_name, keeps_selection())
    else:

        def make() -> tuple[Tensor, ...]:
            return forward(args, False, prepared.op_name)

        if replayable is not None and given is call and eager(*args[:7]) and op_replay.may_record(replayable, query):
            out, lse, _ = op_replay.recorded(op_replay.same_layouts, replayable, make)
        else:
            out, lse, _ = make()
    return (out, lse) if problem.return_lse and lse is not None else out


def _as_cpp_takes_it(call: tuple) -> tuple | None:
    """A call by which C++ looks it up; None if it never replays such a call: lengths are checked by their values, and a key of dropout is drawn.

    TF32 counts for float32, because backends choose by it.
    """
    *tensors, mask, dropout_p, is_causal, scale, gqa, pattern, blocks, lengths, first, recent, return_lse, backend = call
    absent = type(dropout_p) in (int, float) and dropout_p == 0 and all(type(x) is int and x == 0 for x in (first, recent))
    if lengths is not None or not absent or type(return_lse) is not bool:
        return None
    tf32 = getattr(tensors[0], "dtype", None) is torch.float32 and allows_tf32()  # asking takes 0.9 us
    return (*tensors, mask, blocks, "nm_sparse_attention", is_causal, scale, gqa, pattern, backend, tf32)


def _within(lengths: Tensor, kv_len: int, mask: Tensor | None) -> Tensor:
    """The mask, bool `[B, .., Tk]`, with keys at and beyond the lengths hidden; `[B, 1, 1, Tk]` without one."""
    real = (torch.arange(kv_len, device=lengths.device) < lengths[:, None])[:, None, None, :]
    return real if mask is None else mask & real
