"""A boolean mask that differs between queries or heads, as bits for the fused kernels (`cuda/query_bits.cu`)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.launch.cuda import CudaLaunch, run, strides
from saccade.nm_sparse.key_bits import is_of_keys, narrowed
from saccade.nm_sparse.problem import BLOCK
from saccade.nvrtc import Options, Source

SOURCE = Source(Path(__file__).parent / "cuda" / "query_bits.cu")
THREADS = 256


class QueryBits(NamedTuple):
    """The keys that a mask with its causal edge lets queries see; dimensions along which it does not differ have size 1.

    bits: int32 `[B, H, Tq, words]`, bit i of a word is key 32 word + i; two words for each 64 keys or part of them.
    tiles: bool `[B, H, Tq / 64, Tk / 64]`, rounded up: whether one of 64 queries sees one of 64 keys.
    keys: bool `[B, H, Tk]`: whether a query sees the key.
    """

    bits: Tensor
    tiles: Tensor
    keys: Tensor

    @property
    def spans(self) -> None:
        """The spans of `KeyBits`, which only a mask of keys has."""

    @property
    def sizes(self) -> tuple[int, int]:
        """(words per row, rows from one batch row to the next)."""
        batch, heads, rows, words = self.bits.shape
        return words, heads * rows if batch > 1 else 0

    @property
    def steps(self) -> tuple[int, int]:
        """Rows from one head to the next, and from one query to the next."""
        _, heads, rows, _ = self.bits.shape
        return rows if heads > 1 else 0, int(rows > 1)


def is_by_query(mask: Tensor | None, is_causal: bool) -> bool:
    """Whether a call needs bits for each query: its mask differs between queries or heads, or meets a causal edge."""
    return mask is not None and (is_causal or not is_of_keys(mask))


def pack_queries(mask: Tensor, q_len: int, kv_len: int, is_causal: bool) -> QueryBits:
    """The bits of a boolean mask on a GPU, broadcastable to `[B, H, Tq, Tk]`, with the causal edge in them if `is_causal`."""
    mask = narrowed(mask)
    rows = q_len if is_causal or mask.shape[2] > 1 else 1
    mask = mask.expand(-1, -1, rows, kv_len)
    outer, key_tiles = mask.shape[:2], -(-kv_len // BLOCK)
    bits = torch.empty(*outer, rows, 2 * key_tiles, dtype=torch.int32, device=mask.device)
    tiles = torch.empty(*outer, -(-rows // BLOCK), key_tiles, dtype=torch.bool, device=mask.device)
    keys = torch.zeros(*outer, kv_len, dtype=torch.bool, device=mask.device)
    run(query_bits_call, (mask, bits, tiles, keys), (is_causal, _is_wide(mask)), lambda device: None)
    return QueryBits(bits, tiles, keys)


def _is_wide(mask: Tensor) -> bool:
    """Whether each eight keys of a row are eight bytes that one load brings."""
    aligned = not any(n % 8 for n in (mask.data_ptr(), mask.shape[3], *mask.stride()[:3]))
    return mask.stride(3) == 1 and aligned


def query_bits_call(mask: Tensor, bits: Tensor, tiles: Tensor, keys: Tensor, is_causal: bool, wide: bool, _: None) -> CudaLaunch:
    """The launch as data, without running it. wide: eight keys are one load."""
    batch, heads, rows, kv_len = mask.shape
    arguments = {
        "mask": mask, "bits": bits, "tiles": tiles, "keys": keys, "heads": heads, "rows": rows, "kv_len": kv_len,
        **strides(mask=mask.stride()),
    }  # fmt: skip
    options = Options.of({"THREADS": THREADS, "CAUSAL": is_causal, "WIDE": wide})
    grid = (batch * heads * tiles.shape[2], -(-tiles.shape[3] // (THREADS // 32)))
    return CudaLaunch(SOURCE, "query_bits", options, grid, THREADS, 0, arguments)
