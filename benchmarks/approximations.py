"""Dense attention and Linformer in plain torch, and how far an output is from another. As everywhere here Q is scaled already."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Mechanism = Callable[[Tensor, Tensor, Tensor], Tensor]


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention."""
    return torch.softmax(query @ key.mT, -1) @ value


def pooled(x: Tensor, count: int) -> Tensor:
    """Means of `count` equal parts of the rows."""
    return x.unflatten(-2, (count, x.shape[-2] // count)).mean(-2)


def linformer(rank: int) -> Mechanism:
    """Attention to `rank` pooled keys and values."""
    return lambda query, key, value: dense(query, pooled(key, rank), pooled(value, rank))


def error(found: Tensor, expected: Tensor) -> Tensor:
    """`|found - expected| / |expected|` of each matrix, float32 `[texts, heads]`."""
    return (found - expected).flatten(2).norm(dim=-1) / expected.flatten(2).norm(dim=-1)
