"""Attention of the rows of structures, which share a bias: `[B, N, H, T, D]` with a bias `[B, H, Tq, Tk]`, by `attention`."""

from __future__ import annotations

from torch import Tensor

from saccade.exact.api import attention


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, visible: Tensor | None, scale: float | None, backend: str
) -> Tensor:
    """`softmax(scale Q K^T + bias, over visible keys) V` of `[B, N, H, Tq, D]`; visible: bool `[B, N, Tk]`.

    The N rows of a structure are the batch. Several structures are windows of it, as those of images are: row n of structure b reads bias b.
    Their rows lie inside of each other, so query, key and value of more than one structure are copied.
    """
    if query.shape[0] == 1:
        seen = None if visible is None else visible[0]
        out = attention(query[0], key[0], value[0], bias, scale=scale, key_mask=seen, return_lse=False, backend=backend)
        return out[None]
    seen = None if visible is None else visible.transpose(0, 1)
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    out = attention(query, key, value, bias, scale=scale, key_mask=seen, return_lse=False, backend=backend)
    return out.transpose(0, 1)
