"""A mask of keys, the same for all queries and heads, as bits for the fused kernels (`cuda/key_bits.cu`)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.launch.cuda import Call, run, typed
from saccade.nvrtc import Options, Source

SOURCE = Source(Path(__file__).parent / "cuda" / "key_bits.cu")
THREADS = 256
SPARE_WORDS = 4  # a tile, of at most 128 keys, may reach behind the last key


class KeyBits(NamedTuple):
    """bits: int32 `[rows, words]`, bit i of a word for key 32 word + i. spans: int32 `[rows, 2]`, the end of the keys that are seen, and of
    those before the first hidden one. rows: B, or 1 for all batch rows. None without a mask."""

    bits: Tensor | None
    spans: Tensor | None

    @property
    def sizes(self) -> tuple[int, int]:
        """(words of a row, rows from one batch row to the next)."""
        return (0, 0) if self.bits is None else (self.bits.shape[1], int(self.bits.shape[0] > 1))


NO_KEYS = KeyBits(None, None)


def pack_keys(mask: Tensor, kv_len: int) -> KeyBits:
    """The bits of a boolean mask of keys on a GPU."""
    rows = rows_of(mask, kv_len)
    bits = torch.empty(rows.shape[0], words_of_keys(kv_len), dtype=torch.int32, device=mask.device)
    spans = torch.empty(rows.shape[0], 2, dtype=torch.int32, device=mask.device)
    run(key_bits_call, (rows, bits, spans), (), lambda device: None)
    return KeyBits(bits, spans)


def rows_of(mask: Tensor, kv_len: int) -> Tensor:
    """`[B or 1, Tk]`, a view."""
    mask = mask[(None,) * (4 - mask.dim())]
    return mask.expand(-1, -1, -1, kv_len)[:, 0, 0]


def words_of_keys(kv_len: int) -> int:
    """Words of a row."""
    return -(-kv_len // 32) + SPARE_WORDS


def key_bits_call(rows: Tensor, bits: Tensor, spans: Tensor, _: None) -> Call:
    """The launch as data."""
    arguments = (
        *typed("pointer", rows, bits, spans),
        *typed("int32", rows.shape[1], bits.shape[1]),
        *typed("int64", *rows.stride()),
    )
    return Call(SOURCE, "key_bits", Options.of({"THREADS": THREADS}), (rows.shape[0], 1), THREADS, 0, arguments)
