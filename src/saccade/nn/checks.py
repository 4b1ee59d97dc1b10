"""Checks of the arguments and inputs of the modules."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor, nn

from saccade.engine.arguments import FLOATING, check_flag, real_number, shown
from saccade.engine.kinds import check_kinds_but_sharded
from saccade.engine.sharded import is_dtensor
from saccade.errors import InvalidArgument


def only(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """The output of a call that may also have returned a log-sum-exp."""
    return result if isinstance(result, Tensor) else result[0]


# the most that a size may be: products of two still fit the integers of torch
_MOST = 2**30


def check_size(name: str, size: Any, most: int = _MOST) -> None:
    """Raise unless this is a whole number from 1 to `most`."""
    if isinstance(size, bool) or not isinstance(size, numbers.Integral) or not 1 <= int(size) <= most:
        raise InvalidArgument(f"{name} is {shown(size)}; it must be a whole number, at least 1 and at most {most}")


def check_made(device: Any, dtype: Any, bias: Any) -> None:
    """Raise unless parameters can be made there, in that dtype, and `bias` says whether there are any."""
    check_flag("bias", bias)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in FLOATING):
        raise InvalidArgument(f"dtype is {shown(dtype)}; it must be None or one of {', '.join(map(str, FLOATING))}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise InvalidArgument(
            f"device is {shown(device)}; it must be None or a device of torch that is here ({str(error).splitlines()[0]})"
        ) from None


def check_backend(backend: Any) -> None:
    """Raise unless this may be the name of a backend; the first call looks it up."""
    if not isinstance(backend, str):
        raise InvalidArgument(f"backend is {shown(backend)}; it must be a str, 'auto' or the name of a backend")


def check_heads(embed_dim: Any, num_heads: Any, width: str = "embed_dim", heads: str = "num_heads") -> None:
    """Raise unless the heads divide the width. width, heads: the names of both arguments."""
    whole = all(
        not isinstance(size, bool) and isinstance(size, numbers.Integral) and int(size) <= _MOST
        for size in (embed_dim, num_heads)
    )
    if not whole or num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
        raise InvalidArgument(
            f"{width} is {shown(embed_dim)} and {heads} {shown(num_heads)}; {width} must be a positive multiple of {heads}, up to {_MOST}"
        )


def check_epsilon(name: str, value: Any) -> None:
    """Raise unless this is a small number to divide by."""
    number = real_number(value)
    if number is None or not 0.0 <= number < float("inf") or isinstance(value, bool):
        raise InvalidArgument(f"{name} is {shown(value)}; it must be a finite number, at least 0")


def check_module(name: str, module: Any) -> None:
    """Raise unless this is a module of torch."""
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"{name} is {shown(module)}; it must be a torch.nn.Module")


def check_tokens(x: Tensor, embed_dim: int, name: str = "x") -> None:
    """Raise unless x is `[B, S, embed_dim]`."""
    check_kinds_but_sharded(**{name: x})
    if not isinstance(x, Tensor):
        raise InvalidArgument(f"{name} is a {type(x).__name__}; it must be a torch.Tensor of shape [B, S, {embed_dim}]")
    if x.dim() != 3 or x.shape[-1] != embed_dim:
        raise InvalidArgument(f"{name} has shape {list(x.shape)}; it must be [B, S, {embed_dim}]")


def check_plain(name: str, x: Tensor, module: str) -> None:
    """Raise for a DTensor, in a module whose own operations take none."""
    if is_dtensor(x):
        raise InvalidArgument(f"{name} is a DTensor; nn.{module} takes plain tensors, such as {name}.to_local()")
