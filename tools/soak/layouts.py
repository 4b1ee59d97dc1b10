"""The same numbers at other places in memory: every layout that a caller may come with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from saccade.testing.inputs import time_first

LAYOUTS = (
    "as it is",
    "contiguous",
    "tokens first",
    "time first",
    "sliced",
    "misaligned",
    "every other",
    "transposed",
    "expanded",
)
Arrange = Callable[[Tensor], Tensor]


def arranged(tensor: Tensor, layout: str) -> Tensor:
    """`tensor` `[.., T, D]` in a layout of `LAYOUTS`; what lies between its numbers is NaN. "expanded" is not for one tensor: it stays as it is."""
    if layout == "contiguous":
        return tensor.contiguous()
    if layout == "tokens first":
        return tensor.transpose(-2, -3).contiguous().transpose(-2, -3) if tensor.dim() > 2 else tensor
    if layout == "time first":
        return time_first(tensor) if tensor.dim() == 4 else tensor
    if layout == "transposed":
        return tensor.mT.contiguous().mT
    dim = tensor.shape[-1]
    if layout == "sliced":  # rows of a wider tensor, at addresses of 16 bytes
        return _within(tensor, dim + 16, slice(8, 8 + dim))
    if layout == "misaligned":
        return _within(tensor, dim + 3, slice(1, 1 + dim))
    if layout == "every other":
        return _within(tensor, 2 * dim, slice(0, 2 * dim, 2))
    return tensor


def _within(tensor: Tensor, width: int, columns: slice) -> Tensor:
    wide = torch.full((*tensor.shape[:-1], width), math.nan, dtype=tensor.dtype, device=tensor.device)
    view = wide[..., columns]
    return view.copy_(tensor)


def arrangement(draw: Random) -> Arrange:
    """A layout for each tensor that it is given, drawn anew from a list of one or two."""
    some = [draw.choice(LAYOUTS[:-1]) for _ in range(draw.randint(1, 2))]
    return lambda tensor: arranged(tensor, draw.choice(some))


def rearranged(inputs: Any, draw: Random) -> Any:
    """Inputs of a case in other layouts: query, key and value, which may share memory between batch rows, the bias, and the incoming gradient, which
    may be one number for all, as that of `out.sum()` is."""
    if getattr(inputs, "qkv", None) is not None:
        changes = {"qkv": arranged(inputs.qkv, draw.choice(("as it is", "sliced", "misaligned")))}
        changes |= dict(zip(("query", "key", "value"), changes["qkv"].permute(2, 0, 3, 1, 4).unbind(0), strict=True))
    elif draw.random() < 1 / len(LAYOUTS) and inputs.query.shape[0] > 0:
        changes = {name: getattr(inputs, name)[:1].expand_as(getattr(inputs, name)) for name in ("query", "key", "value")}
    else:
        arrange = arrangement(draw)
        changes = {name: arrange(getattr(inputs, name)) for name in ("query", "key", "value")}
    if getattr(inputs, "bias", None) is not None:
        changes["bias"] = arranged(inputs.bias, draw.choice(LAYOUTS))
    if draw.random() < 0.2:
        changes["dout"] = torch.ones((), dtype=inputs.dout.dtype, device=inputs.dout.device).expand(inputs.dout.shape)
    else:
        changes["dout"] = arranged(inputs.dout, draw.choice(LAYOUTS))
    return dataclasses.replace(inputs, **changes)


def with_lengths(inputs: Any, draw: Random, longest: int) -> Any:
    """Inputs with drawn lengths, int32 or int64, in place of those of the named cases; as they are without lengths."""
    if inputs.lengths is None:
        return inputs
    dtype = draw.choice((torch.int32, torch.int64))
    drawn = [draw.choice((0, longest, draw.randint(0, longest))) for _ in range(inputs.lengths.shape[0])]
    return dataclasses.replace(inputs, lengths=torch.tensor(drawn, dtype=dtype, device=inputs.lengths.device))
