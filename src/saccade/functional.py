"""The public functions. Read this first: what can be asked is all here.

Letters: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D head dim; `[B, H, T, D]` in any strides with
last dim contiguous, so that views of `[B, T, H, D]` and of a packed qkv cost nothing.
"""

from __future__ import annotations

from torch import Tensor

from saccade import ops_dynamic_mask, ops_nm_sparse
from saccade.arguments import check_flag, check_keep, untraced
from saccade.autograd import Attention, AttentionPacked, CausalDynamicMask, DynamicMask, NMSparse
from saccade.backends import ATTENTION, NM_SPARSE
from saccade.calls import autocast, draw_seed, gradient_needed, split_mask, uncast, values_known
from saccade.cpu import on_a_cpu
from saccade.dispatch import choose
from saccade.dispatch import explain as _explain
from saccade.errors import CompileError
from saccade.kernels.contract import AttentionArgs, NMSparseArgs
from saccade.lengths import checked_lengths
from saccade.nvrtc import give_up
from saccade.ops import eager, forward, unpack
from saccade.plans import plan_attention, plan_dynamic_mask
from saccade.problem import broadcast, check_packed, describe_attention, must_broadcast
from saccade.problem_dynamic_mask import check_selection, check_selection_values
from saccade.problem_nm_sparse import describe_nm_sparse


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
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention, `softmax(scale * Q K^T + mask) V`: torch's function, keyword for keyword.

    Args:
        query: `[B, H, Tq, D]`. Whatever else torch accepts (other ranks, `Dv != D`, float64) goes to torch; batch, rank and heads that
            differ are broadcast, as torch does.
        key, value: `[B, Hkv, Tk, D]`; `Hkv` may divide `H` with `enable_gqa=True`.
        attn_mask: bool (True = attend) or floating (added to the scaled scores, gradient supported), broadcastable to
            `[B, H, Tq, Tk]`. Excludes `is_causal`. What a masked key holds counts as in torch: NaN there may show, use `lengths`.
        dropout_p: probability of dropping a weight, `0 <= dropout_p < 1`; drawn by Philox from torch's generator of the
            device, so it follows `torch.manual_seed`. Applied whenever it is above 0, as torch does.
        is_causal: key j is visible to query i if j <= i (upper-left, as torch).
        scale: factor on the scores, `1/sqrt(D)` by default.
        lengths: int32 or int64 `[B]`, number of real keys of each batch row; keys beyond are invisible and may hold anything,
            NaN included. Values are checked, which waits for the device once a tensor.
        return_lse: also return the natural log-sum-exp of the scores, float32 `[B, H, Tq]` (differentiable).
        backend: "auto", or the name of one backend, which then runs or raises; see `saccade.explain`.

    Returns:
        out `[B, H, Tq, D]` (a view of `[B, T, H, D]` memory if query is one), or `(out, lse)`. A query with no visible key gets
        out 0, lse -inf and zero gradients. NaN or Inf in visible inputs propagates.

    Raises:
        InvalidArgument: a bad argument, with what was given and what is allowed.
        UnsupportedProblem: the named backend cannot run this call; lists every reason.

    Source:
        the whole-row kernels are after "Fast Attention For Short Sequences" (paper 002), forward and backward listings.
    """
    # `is False`: what is no flag is refused where calls are described
    if return_lse is False and backend == "auto" and enable_gqa is False:
        found = on_a_cpu(query, key, value, attn_mask, dropout_p, is_causal, scale, lengths)
        if found is not None:
            return found
    query, key, value = autocast(query, key, value)
    problem, chosen, plan = plan_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, lengths, return_lse, False, backend
    )
    if problem is None:
        query, key, value = broadcast(query, key, value, enable_gqa)
        return attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, lengths=lengths, return_lse=return_lse,
            backend=backend,
        )  # fmt: skip
    mask, bias = split_mask(problem, attn_mask)
    if lengths is not None:
        lengths = checked_lengths(lengths, problem.kv_len, any_width=chosen.attend is not None)
    seed = draw_seed(problem, chosen)
    args = AttentionArgs(query, key, value, mask, bias, lengths, seed, problem.dropout_p, problem.is_causal, problem.scale, plan)
    if chosen.attend is not None:
        with uncast(args.query):
            out, lse = chosen.attend(args, problem)
    elif problem.needs_grad:
        out, lse = Attention.apply(*args, chosen.asked(backend), chosen.saves_output)
    else:
        out, lse = forward(args, chosen.asked(backend))
    return (out, lse) if problem.return_lse and lse is not None else out


def attention_qkvpacked(
    qkv: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    lengths: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Self-attention from one packed projection; the gradient is one packed tensor, never a concatenation.

    Args:
        qkv: `[B, S, 3, H, D]`, as a linear layer of width `3 * H * D` gives it, last dim contiguous.
        attn_mask, dropout_p, is_causal, scale, lengths, return_lse, backend: as in `attention`, with Tq = Tk = S.

    Returns:
        out `[B, S, H, D]`, ready for the output projection, or `(out, lse)` with lse `[B, H, S]`.
    """
    check_packed(qkv)
    (qkv,) = autocast(qkv)
    query, key, value = unpack(qkv)
    problem, chosen, plan = plan_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, False, lengths, return_lse, True, backend
    )
    mask, bias = split_mask(problem, attn_mask)
    if lengths is not None:
        lengths = checked_lengths(lengths, problem.kv_len, any_width=chosen.attend is not None)
    seed = draw_seed(problem, chosen)
    args = AttentionArgs(query, key, value, mask, bias, lengths, seed, problem.dropout_p, problem.is_causal, problem.scale, plan)
    if chosen.attend is not None:
        with uncast(args.query):
            out, lse = chosen.attend(args, problem)
    elif problem.needs_grad:
        out, lse = AttentionPacked.apply(qkv, *args[3:], chosen.asked(backend), chosen.saves_output)
    else:
        out, lse = forward(args, chosen.asked(backend))
    out = out.transpose(1, 2)
    return (out, lse) if problem.return_lse and lse is not None else out


def explain(
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
    return_lse: bool = False,
) -> str:
    """Say which backend `attention` would run for these arguments, with which configuration, and why not each of the others."""
    query, key, value = autocast(query, key, value)
    if must_broadcast(query, key, value, enable_gqa):
        query, key, value = broadcast(query, key, value, enable_gqa)
    needs_grad = gradient_needed(query, key, value, attn_mask)
    problem = describe_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, lengths, return_lse, False, needs_grad
    )
    return _explain(ATTENTION, problem)


def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scores: Tensor,
    *,
    keep: int,
    is_causal: bool = True,
    lengths: Tensor | None = None,
    document_ids: Tensor | None = None,
    add_scores: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to the `keep` best keys, `softmax(scale * Q K^T + key_scores) V`, trainable, O(Tq * keep) time and memory.

    Query i, at position `Tk - Tq + i` (the last query sees the last key), keeps of the keys it may see the `keep` with the largest
    (key_scores_j, j), ranked in float32 without gradient: ties go to the newer key, equal scores are a sliding window. Gradients
    are those of dense attention restricted to the kept keys; a key that nobody keeps gets exactly 0.

    Args:
        query: `[B, H, Tq, D]`. key, value: `[B, Hkv, Tk, D]`; `Hkv` may divide `H` with `enable_gqa=True`.
        key_scores: `[B, Hkv, Tk]`, floating and finite (checked: waits for the device); added to the scores unless
            `add_scores=False`, where it only ranks.
        keep: keys that each query keeps, at least 1.
        is_causal: a query sees keys up to its own position; else one set of keys is kept by every query.
        lengths: int32 or int64 `[B]`, number of real keys; keys beyond never compete and may hold anything, NaN included.
        document_ids: int32 or int64 `[B, Tk]`, not decreasing; queries see, and keys compete, within their document only.
        scale: factor on `Q K^T`, `1/sqrt(D)` by default.
        return_lse: also return the natural log-sum-exp, float32 `[B, H, Tq]` (differentiable).
        backend: "auto", "gather", "gather_torch" or "reference".

    Returns:
        out `[B, H, Tq, D]`, or `(out, lse)`. A query that keeps no key gets out 0 and lse -inf.

    Raises:
        InvalidArgument: a bad argument, with what was given and what is allowed.

    Source:
        "Trainable Dynamic Mask Sparse Attention" (paper 004), Listing 1 and Eq. 5 to 10. Its Eq. 4 ranks future keys too; this does not.
    """
    query, key, value = autocast(query, key, value)
    return_lse = check_flag("return_lse", return_lse)
    problem, chosen, plan = plan_dynamic_mask(
        query, key, value, key_scores, keep, is_causal, lengths, document_ids, add_scores, scale, enable_gqa, backend
    )
    keep, is_causal, add_scores = problem.keep, problem.is_causal, problem.add_scores
    if lengths is not None:
        lengths = checked_lengths(lengths, problem.kv_len)
    watched = values_known(key_scores)
    selection = (key_scores, keep, problem.q_len, is_causal, lengths, document_ids)
    found = None
    asked = chosen.asked(backend)
    plain = watched and chosen.attend is None and eager(query, key, value, key_scores, lengths)
    if plain and is_causal and document_ids is None and plan is not None:
        found = _select_and_attend_at_once(query, key, value, key_scores, lengths, problem, asked, plan)
    if found is None and chosen.attend is not None:
        if watched:
            check_selection_values(key_scores, document_ids)
        with uncast(query):
            found = (*chosen.attend(query, key, value, key_scores, lengths, document_ids, problem), None)
    out, lse, faulty = found or _select_and_attend(query, key, value, selection, watched, add_scores, problem, asked)
    # read last: on a GPU all is under way by then, and nothing waits for the launches. Wrong scores give wrong results, never a fault
    if faulty is not None and faulty():
        check_selection_values(key_scores, document_ids)
    return (out, lse) if return_lse and lse is not None else out


def _select_and_attend_at_once(query, key, value, key_scores, lengths, problem, backend, plan):
    """(out, lse, faulty) by a backend that does both in one; None where it does not, or where that does not compile."""
    numbers = (problem.add_scores, problem.keep, problem.scale, backend)
    run = CausalDynamicMask.apply if problem.needs_grad else CausalDynamicMask.unrecorded
    try:
        call = ops_dynamic_mask.causal_call(query, key, value, problem.keep, problem.add_scores, problem.scale, backend, plan)
        return None if call is None else run(query, key, value, key_scores, lengths, call, numbers)
    except CompileError as error:
        if ":" not in backend:  # asked for by its name
            raise
        give_up(error)
        return None


def _select_and_attend(query, key, value, selection, watched, add_scores, problem, backend):
    """(out, lse, faulty or None); selection: as of `ops_dynamic_mask.intervals`."""
    faulty = None
    if watched:
        start, stop, faulty = ops_dynamic_mask.watched_intervals(*selection)
    else:
        start, stop = ops_dynamic_mask.intervals(*selection)
    key_scores, keep, _, is_causal, *_ = selection
    # causal: between two queries only keys that lie there are new; else each of two documents has its own set
    most = keep if is_causal else 2 * keep
    call = (query, key, value, key_scores if add_scores else None, start, stop, most, problem.scale, backend)
    with uncast(query):
        out, lse = DynamicMask.apply(*call) if problem.needs_grad else ops_dynamic_mask.forward(*call)
    return out, lse, faulty


def expiry(key_scores: Tensor, keep: int, *, lengths: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
    """The causal dynamic mask as one number a key: position i keeps key j if and only if `j <= i < expiry[b, h, j]`.

        expiry_j = min { i : w keys j' <= i rank above j },   ranked by (key_scores_j, j) in float32

    It is a FlexAttention mask in one line, with the scores as bias in another (`group = H / Hkv`, Tq = Tk = T):

        table = saccade.expiry(key_scores, keep)
        mask = create_block_mask(lambda b, h, q, k: (k <= q) & (q < table[b, h // group, k]), B, H, T, T, device=table.device)
        out = flex_attention(query, key, value, lambda s, b, h, q, k: s + key_scores[b, h // group, k], mask, enable_gqa=True)

    The result is that of `dynamic_mask_attention`; FlexAttention skips whole blocks only, so scattered keys save it little.

    Args:
        key_scores: `[B, Hkv, Tk]`, floating and finite. keep: keys that each position keeps. lengths, document_ids: as in
            `dynamic_mask_attention`.

    Returns:
        int32 `[B, Hkv, Tk]`, `j <= expiry_j <= Tk`; `expiry_j = j` for a key that nobody keeps.

    Source:
        the per-query causal rule of paper 004, Listing 1; that it is one interval a key, and its computation, are ours.
    """
    with untraced():
        check_selection(key_scores, keep, lengths, document_ids)
        keep = min(check_keep(keep), max(key_scores.shape[2], 1))
    if values_known(key_scores):
        check_selection_values(key_scores, document_ids)
    if lengths is not None:
        lengths = checked_lengths(lengths, key_scores.shape[2])
    return ops_dynamic_mask.intervals(key_scores, keep, key_scores.shape[2], True, lengths, document_ids)[1]


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
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` with N:M pruned scores: `softmax(prune(scale * Q K^T + mask)) V`, the softmax over the kept scores only.

    Of each M consecutive keys (groups begin at key 0) a query keeps the N visible ones with the largest scores, ties going to the
    lower index. Invisible keys never displace visible ones: a group cut by the causal edge, a mask or the end of the keys keeps its
    N best visible keys, all if they are no more than N. Gradients flow through the kept scores alone, for the forward's own selection, which
    is stored for backward, one bit a score, unless `saccade.ops_nm_sparse.recompute_selection()` is on.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: as in `attention`, of rank 4 and without `lengths`; a
            bias is added before pruning, dropout comes after the softmax.
        pattern: "N:M" with 1 <= N < M <= 16.
        block_mask: bool `[B, H, ceil(Tq / 64), ceil(Tk / 64)]`, B and H broadcast: tile (i, j) of 64 queries and 64 keys is visible.
        return_lse: also return the natural log-sum-exp of the kept scores, float32 `[B, H, Tq]` (differentiable).
        backend: "auto", or the name of one backend, which then runs or raises.

    Returns:
        out `[B, H, Tq, D]`, or `(out, lse)`. A query with no visible key gets out 0, lse -inf and zero gradients. NaN in a visible
        score propagates; keys that no query sees and values that no query keeps may hold anything.

    Raises:
        InvalidArgument: a bad argument, with what was given and what is allowed.
        UnsupportedProblem: the named backend cannot run this call; lists every reason.

    Source:
        "Dynamic N:M Fine-grained Structured Sparse Attention Mechanism" (Dfss, paper 003), sections 3 and A.1.
    """
    query, key, value = autocast(query, key, value)
    needs_grad = gradient_needed(query, key, value, attn_mask)
    with untraced():
        problem = describe_nm_sparse(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, pattern, block_mask, return_lse, needs_grad
        )
    chosen = choose(NM_SPARSE, problem, backend)
    mask, bias = split_mask(problem, attn_mask)
    blocks = None if block_mask is None else block_mask[(None,) * (4 - block_mask.dim())]
    numbers = (problem.keep, problem.group, problem.dropout_p, problem.is_causal, problem.scale)
    args = NMSparseArgs(query, key, value, mask, bias, blocks, draw_seed(problem, chosen), *numbers)
    if chosen.attend is not None:
        with uncast(args.query):
            out, lse = chosen.attend(args, problem)
    elif needs_grad:
        out, lse = NMSparse.apply(*args, chosen.asked(backend), ops_nm_sparse.keeps_selection(), problem.bias_grad)
    else:
        out, lse, _ = ops_nm_sparse.forward(args, False, chosen.asked(backend))
    return (out, lse) if problem.return_lse and lse is not None else out
