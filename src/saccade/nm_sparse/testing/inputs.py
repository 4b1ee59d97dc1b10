"""Data for a named N:M problem, and data whose scores tie."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from saccade.nm_sparse.problem import BLOCK
from saccade.nm_sparse.testing.cases import NMSparseCase
from saccade.testing.inputs import Inputs, make


def make_nm_sparse(
    case: NMSparseCase, dtype: torch.dtype, device: torch.device | str, seed: int = 0, source: torch.Generator | None = None
) -> Inputs:
    """The inputs of `testing.make`, drawn from `source` if it is given; with `keys_hidden`, the last keys and values hold NaN and a mask hides them from every
    query."""
    inputs = make(case, dtype, device, seed, source=source)
    if not case.keys_hidden:
        return inputs
    key, value = inputs.key.clone(), inputs.value.clone()
    key[:, :, -case.keys_hidden :] = math.nan
    value[:, :, -case.keys_hidden :] = math.nan
    mask = torch.ones(1, 1, 1, case.kv_len, dtype=torch.bool, device=device)
    mask[..., -case.keys_hidden :] = False
    return dataclasses.replace(inputs, key=key, value=value, mask=mask)


def make_ties(case: NMSparseCase, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Inputs:
    """Inputs of small integers: scores are exact in every dtype and order of summation (if the scale is a power of two), and most
    groups contain ties."""
    inputs = make_nm_sparse(case, dtype, device, seed)
    whole = {name: getattr(inputs, name).clamp(-1.4, 1.4).round() for name in ("query", "key")}
    bias = None if inputs.bias is None else inputs.bias.round()
    return dataclasses.replace(inputs, **whole, bias=bias)


def block_mask_of(case: NMSparseCase, device: torch.device | str) -> Tensor | None:
    """The case's block mask, bool `[1, H, tiles, tiles]`: about half of the tiles, none for the last tile of queries of head
    0."""
    if not case.blocks:
        return None
    source = torch.Generator().manual_seed(5)
    shape = (1, case.heads, -(-case.q_len // BLOCK), -(-case.kv_len // BLOCK))
    blocks = torch.rand(shape, generator=source) < 0.6
    blocks[:, :, 0, 0] = True
    blocks[:, 0, -1] = False
    return blocks.to(device)
