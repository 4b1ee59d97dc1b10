"""The public functions `dynamic_mask_attention` and `expiry`."""

from __future__ import annotations

import functools
from typing import Literal, overload

from torch import Tensor

from saccade.dynamic_mask import op
from saccade.dynamic_mask.args import DynamicMaskArgs
from saccade.dynamic_mask.decode.entries import real_of
from saccade.dynamic_mask.documents import check_one_row, documents_of
from saccade.dynamic_mask.gradient import CausalDynamicMask, CausalOptions, DynamicMask
from saccade.dynamic_mask.prepared import prepare_dynamic_mask
from saccade.dynamic_mask.problem import DynamicMaskProblem, check_always, check_selection, check_selection_values, check_whole
from saccade.engine.arguments import check_flag, check_keep, check_tensors, untraced
from saccade.engine.calls import autocast, uncast, values_known
from saccade.engine.first_order import applied
from saccade.engine.lengths import checked_lengths
from saccade.engine.prepare import Prepared
from saccade.engine.sharded import BATCH, BHTD, NEITHER, is_dtensor, on_shards
from saccade.engine.tracing import eager
from saccade.errors import CompileError
from saccade.nvrtc import give_up


# for type checkers, by what `return_lse` says: one tensor, or two
@overload
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
    cu_seqlens: Tensor | None = None,
    sinks: int = 0,
    window: int = 0,
    add_scores: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...
@overload
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
    cu_seqlens: Tensor | None = None,
    sinks: int = 0,
    window: int = 0,
    add_scores: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
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
    cu_seqlens: Tensor | None = None,
    sinks: int = 0,
    window: int = 0,
    add_scores: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
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
    cu_seqlens: Tensor | None = None,
    sinks: int = 0,
    window: int = 0,
    add_scores: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to the `keep` best keys, `softmax(scale * Q K^T + key_scores) V`, trainable, O(Tq * keep) time and memory.

    Query i is at position `Tk - Tq + i`, so the last query sees the last key. It keeps the `keep` keys with the largest (key_scores_j, j)
    among those that it may see. They are ranked in float32 without gradient; ties go to the newer key, so equal scores give a
    sliding window. Gradients are those of dense attention restricted to the kept keys; a key that no query keeps gets exactly 0.

    Args:
        query: `[B, H, Tq, D]`. DTensors may be sharded by batch or heads; for a sharded sequence see `saccade.distributed`.
        key: `[B, Hkv, Tk, D]`.
        value: `[B, Hkv, Tk, D]`.
        key_scores: `[B, Hkv, Tk]`, floating and finite (the check waits for the device). Added to the scores; with
            `add_scores=False` they only rank the keys.
        keep: keys that each query keeps, at least 1.
        is_causal: a query sees keys up to its own position; otherwise all queries keep the same set of keys.
        lengths: int32 or int64 `[B]`, number of real keys; keys beyond it never compete. They and their scores may hold anything, NaN included.
            A NaN in a real value may reach every query of its row and key head, whatever else hides it: a weight of 0 times a NaN is a NaN.
        document_ids: int32 or int64 `[B, Tk]`, not decreasing; queries see keys, and keys compete, only within their own
            document.
        cu_seqlens: int32 or int64 `[N + 1]`, from 0 to Tk without decreasing, in place of `document_ids` for B = 1: document n holds the
            tokens `cu_seqlens[n]` to `cu_seqlens[n + 1] - 1`.
        sinks: how many first keys of each document (of the row, without documents) every later query also keeps, whatever
            their scores. Neither sinks nor a window change which keys are the `keep` best: a query keeps the union, at most
            `keep + sinks + window` keys.
        window: how many of the newest keys a query also keeps: its own and the `window - 1` before it (causal calls only).
        add_scores: whether `key_scores` are added to the scores, or only rank the keys.
        scale: factor on `Q K^T`, `1/sqrt(D)` by default.
        enable_gqa: grouped-query attention: `Hkv` may be a divisor of `H`; otherwise it is `H`.
        return_lse: also return the natural log-sum-exp, float32 `[B, H, Tq]` (differentiable).
        backend: "auto", "gather", "gather_cpp", "gather_torch" or "reference".

    Returns:
        out `[B, H, Tq, D]`, or `(out, lse)`. A query that keeps no key gets out 0 and lse -inf.

    Raises:
        InvalidArgument: a bad argument, with what was given and what is allowed.
        UnsupportedProblem: the named backend cannot run this call; lists every reason.

    Source:
        "Trainable Dynamic Mask Sparse Attention" (paper 004), Listing 1 and Eq. 5 to 10. Its Eq. 4 also ranks future keys; this
        function does not.
    """
    if type(query) is not Tensor and is_dtensor(query):
        return _on_shards(
            query, key, value, key_scores, lengths, document_ids, cu_seqlens, keep=keep, is_causal=is_causal, sinks=sinks, window=window,
            add_scores=add_scores, scale=scale, enable_gqa=enable_gqa, return_lse=return_lse, backend=backend,
        )  # fmt: skip
    query, key, value = autocast(query, key, value)
    return_lse = check_flag("return_lse", return_lse)
    if cu_seqlens is not None:
        document_ids = documents_of(cu_seqlens, key_scores, document_ids)
    prepared = prepare_dynamic_mask((
        query, key, value, key_scores, keep, is_causal, lengths, document_ids, add_scores, scale, enable_gqa, sinks, window, backend,
    ))  # fmt: skip
    if lengths is not None:
        lengths = checked_lengths(lengths, prepared.problem.kv_len)
    out, lse, faulty = _attend(query, key, value, key_scores, lengths, document_ids, prepared)
    # read last: on a GPU everything is launched by then, so no launch waits. Invalid scores give wrong results, but never
    # a fault
    if faulty is not None and faulty():
        real_scores = real_of(key_scores, lengths)
        check_selection_values(real_scores, document_ids)
        # only padding was not finite; scores with other strides have another signature, so this is a new call
        return dynamic_mask_attention(
            query, key, value, real_scores, keep=keep, is_causal=is_causal, lengths=lengths, document_ids=document_ids, sinks=sinks,
            window=window, add_scores=add_scores, scale=scale, enable_gqa=enable_gqa, return_lse=return_lse, backend=backend,
        )  # fmt: skip
    return (out, lse) if return_lse and lse is not None else out


def _attend(query, key, value, key_scores, lengths, document_ids, prepared: Prepared):
    """(out, lse, faulty): faulty() returns, once everything is launched, whether the scores were invalid; None if they need no check."""
    problem, chosen = prepared.problem, prepared.backend
    watched = values_known(key_scores)
    if chosen.attend is not None:
        if watched:
            check_selection_values(real_of(key_scores, lengths), document_ids)
        with uncast(query):
            return (*chosen.attend(query, key, value, key_scores, lengths, document_ids, problem), None)
    if watched and _at_once(problem) and eager(query, key, value, key_scores, lengths):
        found = _select_and_attend_at_once(query, key, value, key_scores, lengths, prepared)
        if found is not None:
            return found
    rule = (problem.keep, problem.q_len, problem.is_causal, lengths, document_ids, problem.sinks, problem.window)
    return _select_and_attend(query, key, value, (key_scores, *rule), watched, problem, prepared.op_name)


def _at_once(problem: DynamicMaskProblem) -> bool:
    """Whether a backend may select and attend in one call."""
    return problem.is_causal and not problem.documents and not problem.sinks and not problem.window


def _on_shards(query, key, value, key_scores, lengths, document_ids, cu_seqlens, **options) -> Tensor | tuple[Tensor, Tensor]:
    """`dynamic_mask_attention` of DTensors."""
    check_tensors(query, key, value)
    if cu_seqlens is not None:
        check_one_row(key_scores)  # the global batch: each rank may hold one of several rows
    check_whole(query, key, value, key_scores, lengths, document_ids, options["enable_gqa"])
    tensors = {"query": (query, BHTD), "key": (key, BHTD), "value": (value, BHTD), "key_scores": (key_scores, BHTD)}
    tensors |= {"lengths": (lengths, BATCH), "document_ids": (document_ids, BATCH), "cu_seqlens": (cu_seqlens, NEITHER)}
    return on_shards(
        dynamic_mask_attention, tensors, options, (BHTD, BHTD), ((*query.shape[:3], value.shape[-1]), query.shape[:3])
    )


def _select_and_attend_at_once(query, key, value, key_scores, lengths, prepared: Prepared):
    """(out, lse, faulty) from a backend that selects and attends in one call; None if it has no such call or it does not
    compile."""
    problem, backend = prepared.problem, prepared.op_name
    options = CausalOptions(problem.add_scores, problem.keep, problem.scale, backend)
    run = CausalDynamicMask.unrecorded
    if problem.needs_grad:
        run = functools.partial(applied, CausalDynamicMask, problem, prepared.backend.name)
    try:
        call = op.causal_call(query, key, value, problem.keep, problem.add_scores, problem.scale, backend, prepared.launches)
        return None if call is None else run(query, key, value, key_scores, lengths, call, options)
    except CompileError as error:
        if ":" not in backend:  # requested by its name
            raise
        give_up(error)
        return None


def _select_and_attend(query, key, value, selection, watched, problem, backend):
    """(out, lse, faulty or None); selection: the arguments of `op.intervals`."""
    faulty = None
    if watched:
        start, stop, faulty = op.watched_intervals(*selection)
    else:
        start, stop = op.intervals(*selection)
    scores = selection[0] if problem.add_scores else None
    args = DynamicMaskArgs(query, key, value, scores, start, stop, problem.most_kept, problem.is_causal, problem.scale)
    with uncast(query):
        if problem.needs_grad:
            out, lse = applied(DynamicMask, problem, backend.rpartition(":")[2], *args, backend)
        else:
            out, lse = op.forward(args, backend)
    return out, lse, faulty


def expiry(
    key_scores: Tensor,
    keep: int,
    *,
    lengths: Tensor | None = None,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: int = 0,
    window: int = 0,
) -> Tensor:
    """The causal dynamic mask as one number per key: position i keeps key j if and only if `j <= i < expiry[b, h, j]`.

        expiry_j = min { i : w keys j' <= i rank above j },   ranked by (key_scores_j, j) in float32
        with a window at least j + window, and the end of the document for its first `sinks` keys

    It is a FlexAttention mask in one line, with the scores as bias in another (`group = H / Hkv`, Tq = Tk = T):

        table = saccade.expiry(key_scores, keep)
        mask = create_block_mask(lambda b, h, q, k: (k <= q) & (q < table[b, h // group, k]), B, H, T, T, device=table.device)
        out = flex_attention(query, key, value, lambda s, b, h, q, k: s + key_scores[b, h // group, k], mask, enable_gqa=True)

    The result is that of `dynamic_mask_attention`; FlexAttention skips only whole blocks, so it gains little from scattered keys.

    Args:
        key_scores: `[B, Hkv, Tk]`, floating and finite.
        keep: keys that each position keeps.
        lengths: as in `dynamic_mask_attention`.
        document_ids: as in `dynamic_mask_attention`.
        cu_seqlens: as in `dynamic_mask_attention`.
        sinks: as in `dynamic_mask_attention`.
        window: as in `dynamic_mask_attention`.

    Returns:
        int32 `[B, Hkv, Tk]`, `j <= expiry_j <= Tk`; `expiry_j = j` for a key that no query keeps.

    Raises:
        InvalidArgument: a bad argument, with what was given and what is allowed.

    Source:
        the per-query causal rule of paper 004, Listing 1; the form of one interval per key and its computation are ours.
    """
    if type(key_scores) is not Tensor and is_dtensor(key_scores):
        if cu_seqlens is not None:
            check_one_row(key_scores)
        options = {"keep": keep, "sinks": sinks, "window": window}
        tensors = {"key_scores": (key_scores, BHTD), "lengths": (lengths, BATCH), "document_ids": (document_ids, BATCH)}
        tensors |= {"cu_seqlens": (cu_seqlens, NEITHER)}
        return on_shards(expiry, tensors, options, (BHTD,), (tuple(key_scores.shape),))
    if cu_seqlens is not None:
        document_ids = documents_of(cu_seqlens, key_scores, document_ids)
    with untraced():
        check_selection(key_scores, keep, lengths, document_ids)
        keep = min(check_keep(keep), max(key_scores.shape[2], 1))
        sinks, window = check_always(sinks, window, True, key_scores.shape[2])
    key_scores = real_of(key_scores, lengths)
    if values_known(key_scores):
        check_selection_values(key_scores, document_ids)
    if lengths is not None:
        lengths = checked_lengths(lengths, key_scores.shape[2])
    return op.intervals(key_scores, keep, key_scores.shape[2], True, lengths, document_ids, sinks, window)[1]
