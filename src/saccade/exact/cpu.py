"""The fast path of `attention` on a CPU. Most calls under `auto` run torch's function there. Describing and planning such a call
would take 10 us, a fifth of a small call."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.torch_sdpa import torch_attention
from saccade.engine.tracing import eager


def on_a_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    lengths: Tensor | None,
) -> Tensor | None:
    """The result of torch's function if `auto` would choose it and its result is ours too; None for a call that must be described."""
    try:
        # torch accepts values of another length than the keys, and a mask together with is_causal; we do not
        plain = query.is_cpu and dropout_p == 0 and scale is None and key.shape == value.shape
        plain = plain and (attn_mask is None or (not is_causal and _fits(attn_mask, query)))
        # torch leaves the bias of an empty call without a gradient
        plain = plain and not (attn_mask is not None and attn_mask.requires_grad and 0 in (query.numel(), key.numel()))
        if not plain or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
            return None
        if lengths is not None:
            real = _one_length(lengths, query, key) if eager(query, key, value, attn_mask, lengths) else 0
            if real == 0:
                return None
            if real < key.shape[2]:
                if attn_mask is not None:
                    return None
                key, value = key.narrow(2, 0, real), value.narrow(2, 0, real)
        return torch_attention(query, key, value, attn_mask, 0.0, is_causal)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        # the description of the call reports the error
        return None


def _fits(mask: Tensor, query: Tensor) -> bool:
    """Whether torch would broadcast the mask to the queries rather than the queries to the mask."""
    wide = mask.dim() == 2 or (
        mask.dim() == query.dim() == 4 and mask.shape[0] in (1, query.shape[0]) and mask.shape[1] in (1, query.shape[1])
    )
    return wide and mask.is_cpu and mask.shape[-2] in (1, query.shape[-2])


def _one_length(lengths: Tensor, query: Tensor, key: Tensor) -> int:
    """The number of real keys that all batch rows share; 0 if the rows differ, have no keys, or the lengths are invalid."""
    fits = lengths.is_cpu and lengths.dtype in (torch.int64, torch.int32) and query.dim() == key.dim() == 4
    if not fits or lengths.shape != query.shape[:1] or query.shape[:2] != key.shape[:2]:
        return 0
    numbers = lengths.tolist()
    first = numbers[0]
    return first if 0 < first <= key.shape[2] and numbers.count(first) == len(numbers) else 0
