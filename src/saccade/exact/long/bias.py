"""A bias as the copy engine reads it, for the kernels of long sequences on sm_90: `[W, H or 1, Tq, Tk]`. Row b of the batch reads matrix b % W."""

from __future__ import annotations

import torch
from torch import Tensor

_UNIT = 8  # numbers of 16 bits in the 16 bytes that are the unit of the copy engine


def readable(bias: Tensor) -> Tensor:
    """A bias `[W, H, Tq, Tk]`, of size 1 where it was expanded over rows or heads, and copied if the copy engine cannot address its rows."""
    for dim in (0, 1):
        if bias.stride(dim) == 0:
            bias = bias.narrow(dim, 0, 1)
    return bias if _is_movable(bias) else _copied(bias)


def _is_movable(bias: Tensor) -> bool:
    return bias.data_ptr() % 16 == 0 and in_units(bias)


def in_units(bias: Tensor) -> bool:
    """Whether the copy engine can address all rows, if it can address the first."""
    strides = [s for s, n in zip(bias.stride()[:-1], bias.shape[:-1], strict=True) if n > 1]
    dense = bias.stride(-1) == 1 or bias.shape[-1] == 1
    return dense and all(s > 0 and s % _UNIT == 0 for s in strides)


def _copied(bias: Tensor) -> Tensor:
    """The numbers behind the end of a row are never read."""
    *rows, keys = bias.shape
    made = torch.empty(*rows, -(-keys // _UNIT) * _UNIT, dtype=bias.dtype, device=bias.device)
    return made[..., :keys].copy_(bias)
