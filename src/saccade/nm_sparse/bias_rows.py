"""A bias as the fused kernels read it, 16 bytes at a time, and which keys it hides from every query."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.nm_sparse.key_bits import narrowed


def bias_rows(bias: Tensor, query: Tensor, kv_len: int) -> Tensor:
    """The bias as a view `[B, H, Tq, columns]`, in the dtype of `query` or float32, stride 0 where it broadcasts.

    Columns are adjacent, rows begin at multiples of 16 bytes, and `columns` is `kv_len`, or more for a copy, whose last columns hold
    anything. A bias is copied if its dtype is another one, its address or a stride is no multiple of 16 bytes, or its columns are not
    adjacent (a size of 1 among them): the copy has the memory of the rows that differ, each rounded up to 16 bytes.
    """
    bias = narrowed(bias)
    if bias.dtype not in (query.dtype, torch.float32):
        bias = bias.to(torch.float32)
    unit = 16 // bias.element_size()
    strides = [stride for stride, size in zip(bias.stride()[:3], bias.shape[:3], strict=True) if size > 1]
    apart = bias.shape[3] == kv_len and bias.stride(3) == 1
    if not apart or kv_len % unit or bias.data_ptr() % 16 or any(stride % unit for stride in strides):
        made = bias.new_empty(*bias.shape[:3], -(-kv_len // unit) * unit)
        made[..., :kv_len] = bias
        bias = made
    return bias.expand(*query.shape[:3], -1)


def shown_keys(bias: Tensor, kv_heads: int) -> Tensor:
    """Which keys the bias shows to a query of the heads that share them, bool `[B, Hkv, Tk, 1]`, dimensions along which it does not
    differ of size 1. It reads the whole bias once."""
    most = narrowed(bias).amax(2)
    if most.shape[1] > 1:
        most = most.unflatten(1, (kv_heads, -1)).amax(2)
    # not `> -inf`, as NaN hides nothing
    return (most != float("-inf"))[..., None]
