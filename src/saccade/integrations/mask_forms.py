"""Masks of transformers in the forms that our functions take."""

from __future__ import annotations

import torch
from torch import Tensor


def key_padding(mask: Tensor | None) -> Tensor | None:
    """One row of a mask of four dims whose queries share it, and a mask `[B, Tk]` with four dims; any other as it is."""
    if mask is None or mask.dim() != 2:
        # one row for all queries, expanded by `boolean_mask` or by transformers itself
        shared = mask is not None and mask.dim() == 4 and mask.shape[2] > 1 and mask.stride(2) == 0
        return mask[:, :, :1] if mask is not None and shared else mask
    return mask[:, None, None, :].to(torch.bool)


def visible_keys(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The keys that each batch row sees, bool `[B, Tk]`, if a boolean mask says no more than that; else None.

    With a bias that batch rows share they need no tensor that has the bias of every row."""
    rows = key_padding(mask)
    if rows is None or rows.dtype != torch.bool or tuple(rows.shape[1:]) != (1, 1, key.shape[2]):
        return None
    return rows[:, 0, 0].expand(query.shape[0], -1)


def with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """A mask and a bias as one bias."""
    if mask is None:
        return bias
    return torch.where(mask, bias, float("-inf")) if mask.dtype == torch.bool else bias + mask
