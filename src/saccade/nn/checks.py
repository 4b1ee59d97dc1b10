"""Checks of the arguments and inputs of the modules."""

from __future__ import annotations

from torch import Tensor

from saccade.errors import InvalidArgument


def only(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """The output of a call that may also have returned a log-sum-exp."""
    return result if isinstance(result, Tensor) else result[0]


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Raise unless the heads divide the width."""
    if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
        raise InvalidArgument(
            f"embed_dim is {embed_dim} and num_heads {num_heads}; embed_dim must be a positive multiple of num_heads"
        )


def check_tokens(x: Tensor, embed_dim: int) -> None:
    """Raise unless x is `[B, S, embed_dim]`."""
    if x.dim() != 3 or x.shape[-1] != embed_dim:
        raise InvalidArgument(f"x has shape {list(x.shape)}; it must be [B, S, {embed_dim}]")
