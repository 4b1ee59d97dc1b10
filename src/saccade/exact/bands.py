"""Attention within a band of keys by torch's function. Memory and work grow with the queries times the width of the band.

Query i sees the keys i + low to i + high. The queries are cut into blocks. The keys that a block may see are one slice, which is copied once. Every block is
a batch row of one call under a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.engine.window import NO_LIMIT

# numbers of a mask: 512 MiB as a bias in 16 bits
MOST = 2**28
_FEWEST_QUERIES = 64  # of a block


class Band(NamedTuple):
    """A band of q_len queries and k_len keys: query i sees the keys i + low to i + high, and is in a block of so many queries."""

    low: int
    high: int
    q_len: int
    k_len: int
    queries: int

    @property
    def keys(self) -> int:
        """The number of keys of a block."""
        return self.queries + max(0, self.high - self.low)

    @property
    def blocks(self) -> int:
        return -(-self.q_len // self.queries)

    @property
    def mask_numbers(self) -> int:
        """The numbers in the mask for one batch row."""
        return self.blocks * self.queries * self.keys


def band_of(q_len: int, k_len: int, left: int, right: int, causal: bool, shift: int = 0) -> Band:
    """The band of a window as `window.ends_of` gives it. shift: row i is aligned with key i + shift."""
    low = 1 - q_len if left == NO_LIMIT else shift - left
    high = k_len - 1 if right == NO_LIMIT else shift + right
    high = min(high, shift) if causal else high
    if low > min(high, k_len - 1) or high < 1 - q_len:
        low, high = 1, 0  # no query sees a key
    low, high = max(low, 1 - q_len), min(high, k_len - 1)
    queries = max(_FEWEST_QUERIES, high - low + 1)
    return Band(low, high, q_len, k_len, min(queries, max(q_len, 1)))


def fold(query: Tensor, key: Tensor, value: Tensor, band: Band, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and a boolean mask of the blocks of `[B, H, T, D]`. The mask is one for all batch rows, or with lengths one for each."""
    if lengths is not None:
        # a weight of 0 times a NaN is a NaN, and padding may hold anything
        real = torch.arange(key.shape[2], device=key.device) < lengths[:, None]
        key, value = (x.where(real[:, None, :, None], 0.0) for x in (key, value))
    if torch.compiler.is_compiling():
        # padding by 0 keeps the order of dimensions, but not with symbolic sizes: later views in the program would fail (torch 2.13)
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    apart = lengths is not None
    rows = _blocks_of(F.pad(query, (0, 0, 0, band.blocks * band.queries - band.q_len)), band.queries, band.queries, apart)
    behind = (band.blocks - 1) * band.queries + band.keys + band.low - band.k_len
    keys, values = (_blocks_of(F.pad(x, (0, 0, -band.low, behind)), band.keys, band.queries, apart) for x in (key, value))
    return rows, keys, values, _mask(band, lengths, query.device)


def unfold(folded: Tensor, band: Band, batch: int, apart: bool) -> Tensor:
    """`[B, H, T, ...]` of results `[blocks, ...]` of folded queries. apart: whether they were folded with lengths."""
    blocks = folded.unflatten(0, (-1, band.blocks)) if apart else folded.unflatten(1, (batch, -1)).transpose(0, 1)
    return blocks.transpose(1, 2).flatten(2, 3)[:, :, : band.q_len]


def _blocks_of(tensor: Tensor, size: int, step: int, apart: bool) -> Tensor:
    """Slices of `[B, H, T, D]` as `[blocks, B * H, size, D]`, or `[B * blocks, H, size, D]` if apart."""
    slices = tensor.unfold(2, size, step).transpose(-1, -2)  # [B, H, blocks, size, D]
    return slices.transpose(1, 2).flatten(0, 1) if apart else slices.permute(2, 0, 1, 3, 4).flatten(1, 2)


def _mask(band: Band, lengths: Tensor | None, device: torch.device) -> Tensor:
    """`[blocks, 1, queries, keys]`, with lengths `[B * blocks, 1, queries, keys]`."""
    places = torch.arange(band.keys, device=device)
    ahead = places - torch.arange(band.queries, device=device)[:, None]
    within = (ahead >= 0) & (ahead <= band.high - band.low)
    keys = torch.arange(band.blocks, device=device)[:, None] * band.queries + band.low + places
    real = (keys >= 0) & (keys < band.k_len)
    if lengths is not None:
        real = (real & (keys < lengths[:, None, None])).flatten(0, 1)
    return within & real[:, None, None, :]
