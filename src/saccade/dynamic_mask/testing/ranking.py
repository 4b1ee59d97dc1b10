"""The keys that dynamic mask attention keeps, by counting. It is a second method besides the loop of `saccade.dynamic_mask.reference.kept`, and fast enough for many problems.

A key that a query sees is kept if fewer than `keep` of the keys that it sees have a larger (score, position). Their number is a sum over all
keys of "the query sees it" times "it ranks higher", which is a product of matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kept_by_counting(
    key_scores: Tensor,
    keep: int,
    q_len: int,
    is_causal: bool = True,
    lengths: Tensor | None = None,
    document_ids: Tensor | None = None,
    sinks: int = 0,
    window: int = 0,
) -> Tensor:
    """Boolean `[B, Hkv, Tq, Tk]`, as `kept` gives it, on the device of the scores; O(B Hkv Tk (Tq + Tk)) memory."""
    batch, _, kv_len = key_scores.shape
    device = key_scores.device
    keys, at = torch.arange(kv_len, device=device), torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    seen = keys <= at if is_causal else torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    seen = seen.expand(batch, -1, -1)
    order: Tensor = keys[None, None]  # of a key in its document
    if lengths is not None:
        seen = seen & (keys < lengths[:, None, None])
    if document_ids is not None:
        alike = document_ids[:, :, None] == document_ids[:, None, :]
        seen = seen & alike[:, at[:, 0]]
        order = (alike & (keys < keys[:, None])).sum(-1)[:, None]
    always = order < sinks
    if is_causal:
        always = always | (at - keys < window)
    scores = key_scores.detach().float()
    higher, lower = scores[..., :, None], scores[..., None, :]
    beats = (higher > lower) | ((higher == lower) & (keys[:, None] > keys))
    # sums of ones below 2^24 are exact in float32, in whatever way they are added up
    above = seen[:, None].float() @ beats.float()
    return seen[:, None] & ((above < keep) | always[:, None])
