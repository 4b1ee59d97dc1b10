"""The description of a call of `attention`, the checks of its arguments, and broadcasting as in torch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from saccade.engine.problem import describe
from saccade.errors import InvalidArgument

# checks the arguments of `attention` and describes the call; raises `InvalidArgument`
describe_attention = functools.partial(describe, "attention")


def must_broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether batch, rank or heads differ in a way that torch broadcasts. False where they cannot be: `describe_attention` says
    why."""
    if not all(isinstance(x, Tensor) and x.dim() >= 2 for x in (query, key, value)):
        return False
    if query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return False
    wanted = _broadcast_shapes(query, key, value, enable_gqa)
    return wanted is not None and any(x.shape[:-2] != shape for x, shape in zip((query, key, value), wanted, strict=True))


def broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Views with the same rank, batch and number of heads (or heads per group). Only valid where `must_broadcast` is true."""
    wanted = _broadcast_shapes(query, key, value, enable_gqa) or ()
    query, key, value = (x.expand(*shape, *x.shape[-2:]) for x, shape in zip((query, key, value), wanted, strict=True))
    return query, key, value


def _broadcast_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[torch.Size, ...] | None:
    leading = [x.shape[:-2] for x in (query, key, value)]
    if enable_gqa and min(map(len, leading)) > 0 and leading[0][-1] != leading[1][-1] == leading[2][-1]:
        batch = _joined([shape[:-1] for shape in leading])
        return None if batch is None else tuple(torch.Size((*batch, shape[-1])) for shape in leading)
    joined = _joined(leading)
    return None if joined is None else (joined,) * 3


def _joined(shapes: list[torch.Size]) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return None


def check_packed(qkv: Tensor) -> None:
    """Check the input of `attention_qkvpacked`: `[B, S, 3, H, D]` with contiguous last dim."""
    if not isinstance(qkv, Tensor):
        raise InvalidArgument(f"qkv is a {type(qkv).__name__}; it must be a torch.Tensor of shape [B, S, 3, H, D]")
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise InvalidArgument(f"qkv has shape {list(qkv.shape)}; it must be [B, S, 3, H, D]")
    if qkv.stride(-1) != 1 and qkv.shape[-1] != 1:
        raise InvalidArgument(f"qkv has strides {qkv.stride()}; the last one must be 1, call .contiguous() on it")
