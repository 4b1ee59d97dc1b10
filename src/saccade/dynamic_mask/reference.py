"""The meaning of dynamic mask attention, and a backend that computes it by brute force: rank, mask, attend. It takes O(Tq * Tk)
memory; on float64 inputs it is the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.dynamic_mask.problem import DynamicMaskProblem
from saccade.engine.backend import Backend
from saccade.engine.layout import repeat_heads
from saccade.engine.namespace import NAMESPACE, fragment, packet
from saccade.engine.softmax import softmax

_library = fragment()
_library.define(
    "dynamic_mask_kept(Tensor key_scores, int keep, int q_len, bool is_causal, Tensor? lengths, Tensor? document_ids, "
    "int sinks=0, int window=0) -> Tensor"
)


def kept(
    key_scores: Tensor,
    keep: int,
    q_len: int,
    is_causal: bool = True,
    lengths: Tensor | None = None,
    document_ids: Tensor | None = None,
    sinks: int = 0,
    window: int = 0,
) -> Tensor:
    """The kept keys, boolean `[B, Hkv, Tq, Tk]`: among those that a query may see, the `keep` with the largest (score, position) and the first
    `sinks`. Causal calls also keep keys less than `window` positions before the query.

    Query i is at position `Tk - Tq + i`. Keys are ranked in float32 for each query separately.
    This runs on the CPU, since reading each number from a GPU would wait. It is one opaque op, because values are not available
    while tracing.
    """
    return _OP(key_scores.detach(), keep, q_len, is_causal, lengths, document_ids, sinks, window)


def _kept(
    key_scores: Tensor, keep: int, q_len: int, is_causal: bool, lengths: Tensor | None, document_ids: Tensor | None,
    sinks: int = 0, window: int = 0,
) -> Tensor:  # fmt: skip
    batch, heads, kv_len = key_scores.shape
    scores = key_scores.detach().float().tolist()
    lengths, document_ids = (None if x is None else x.cpu() for x in (lengths, document_ids))
    positions = torch.arange(kv_len, device="cpu")
    result = torch.zeros(batch, heads, q_len, kv_len, dtype=torch.bool, device="cpu")
    for b in range(batch):
        for i in range(q_len):
            at = kv_len - q_len + i
            seen = positions <= at if is_causal else torch.ones_like(positions, dtype=torch.bool)
            if lengths is not None:
                seen = seen & (positions < lengths[b])
            if document_ids is not None:
                seen = seen & (document_ids[b] == document_ids[b, at])
            may_see = positions[seen].tolist()
            first = may_see if document_ids is None else positions[document_ids[b] == document_ids[b, at]].tolist()
            always = [j for j in may_see if j in first[:sinks] or (is_causal and at - j < window)]
            for h in range(heads):
                ranked = sorted(may_see, key=lambda j: (scores[b][h][j], j), reverse=True)
                result[b, h, i, ranked[:keep]] = True
                result[b, h, i, always] = True
    return result.to(key_scores.device)


def _fake_kept(
    key_scores: Tensor, keep: int, q_len: int, is_causal: bool, lengths: Tensor | None, document_ids: Tensor | None,
    sinks: int = 0, window: int = 0,
) -> Tensor:  # fmt: skip
    batch, heads, kv_len = key_scores.shape
    return key_scores.new_empty((batch, heads, q_len, kv_len), dtype=torch.bool)


for _device in ("CPU", "CUDA"):
    _library.impl("dynamic_mask_kept", _kept, _device)
torch.library.register_fake(f"{NAMESPACE}::dynamic_mask_kept", _fake_kept, lib=_library)
_OP = packet("dynamic_mask_kept").default


def attend(
    query: Tensor, key: Tensor, value: Tensor, key_scores: Tensor, mask: Tensor, *, scale: float, add_scores: bool = True
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `softmax(scale * Q K^T + key_scores) V` over the keys that `mask` keeps.

    query `[B, H, Tq, D]`, key, value `[B, Hkv, Tk, D]`, key_scores `[B, Hkv, Tk]`, mask `[B, Hkv, Tq, Tk]`; out in the dtype of
    query, lse float32 (float64 for float64). A query that keeps nothing gets out 0 and lse -inf.
    """
    group = query.shape[1] // key.shape[1] if key.shape[1] else 1
    working = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x.to(working) for x in (query, key, value))
    # other keys, such as padding, may hold NaN, and a weight of 0 times NaN is NaN
    kept_by_any = mask.any(dim=2)[..., None]
    k, v = (x.where(kept_by_any, 0.0) for x in (k, v))
    k, v, mask = (repeat_heads(x, group) for x in (k, v, mask))
    scores = scale * (q @ k.transpose(-1, -2))
    if add_scores:
        scores = scores + repeat_heads(key_scores.to(working), group)[:, :, None, :]
    scores = scores.masked_fill(~mask, float("-inf"))
    weights, lse = softmax(scores)
    return (weights @ v).to(query.dtype), lse


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scores: Tensor,
    lengths: Tensor | None,
    document_ids: Tensor | None,
    problem: DynamicMaskProblem,
) -> tuple[Tensor, Tensor]:
    rule = (problem.keep, problem.q_len, problem.is_causal, lengths, document_ids, problem.sinks, problem.window)
    mask = kept(key_scores, *rule)
    return attend(query, key, value, key_scores, mask, scale=problem.scale, add_scores=problem.add_scores)


REFERENCE = Backend(
    name="reference",
    is_reference=True,
    operation="dynamic_mask_attention",
    summary="plain torch, any device; the meaning of the operation, O(Tq * Tk) memory and a loop over queries",
    why_not=lambda problem: [],
    prefers=lambda problem: False,
    attend=_attend,
)
