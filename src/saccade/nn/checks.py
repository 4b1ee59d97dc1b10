"""Checks of the arguments and inputs of the modules."""

from __future__ import annotations

import numbers
from typing import Any

from torch import Tensor

from saccade.errors import InvalidArgument


def only(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """The output of a call that may also have returned a log-sum-exp."""
    return result if isinstance(result, Tensor) else result[0]


def check_size(name: str, size: Any) -> None:
    """Raise unless this is a whole number, at least 1."""
    if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
        raise InvalidArgument(f"{name} is {size!r}; it must be a whole number, at least 1")


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Raise unless the heads divide the width."""
    whole = all(isinstance(size, numbers.Integral) for size in (embed_dim, num_heads))
    if not whole or num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
        raise InvalidArgument(
            f"embed_dim is {embed_dim} and num_heads {num_heads}; embed_dim must be a positive multiple of num_heads"
        )


def check_tokens(x: Tensor, embed_dim: int) -> None:
    """Raise unless x is `[B, S, embed_dim]`."""
    if not isinstance(x, Tensor):
        raise InvalidArgument(f"x is a {type(x).__name__}; it must be a torch.Tensor of shape [B, S, {embed_dim}]")
    if x.dim() != 3 or x.shape[-1] != embed_dim:
        raise InvalidArgument(f"x has shape {list(x.shape)}; it must be [B, S, {embed_dim}]")
