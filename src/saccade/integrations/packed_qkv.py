"""Query, key and value of a layer that are views of one product, for which attention writes one gradient."""

from __future__ import annotations

import torch
from torch import Tensor

PACKED_QKV = "_saccade_qkv"  # the attribute of a query that is a view of `[T, 3, H, D]`, as its key and value


def packed_qkv(query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """`[T, 3, H, D]`, of which query, key and value are views, if that was recorded. Its gradient is written as one tensor, not assembled from three."""
    if torch.compiler.is_compiling():
        return None
    qkv: Tensor | None = getattr(query, PACKED_QKV, None)
    if qkv is None or not (qkv.requires_grad and torch.is_grad_enabled()):
        return None
    if any(x._backward_hooks or x.retains_grad for x in (query, key, value)):
        return None  # no gradient would reach them
    parts = [(x.data_ptr(), x.shape[1:], x.stride(2)) for x in (query, key, value)]
    heads, dim = qkv.shape[2:]
    wanted = [(x.data_ptr(), (heads, qkv.shape[0], dim), qkv.stride(0)) for x in qkv.unbind(1)]
    return qkv if parts == wanted else None
