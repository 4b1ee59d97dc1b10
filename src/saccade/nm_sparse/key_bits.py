"""A key-padding mask, the same for all queries and heads, as bits for the fused kernels (`cuda/key_bits.cu`)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.launch.cuda import CudaLaunch, run
from saccade.nvrtc import Options, Source

SOURCE = Source(Path(__file__).parent / "cuda" / "key_bits.cu")
THREADS = 256
# a tile of at most 128 keys may reach beyond the last key
SPARE_WORDS = 4


class KeyBits(NamedTuple):
    """bits: int32 `[rows, words]`; bit i of a word is key 32 word + i. spans: int32 `[rows, 2]`: the end of the visible keys, and
    the end of those before the first hidden key. rows is B, or 1 for all batch rows. Both are None without a mask."""

    bits: Tensor | None
    spans: Tensor | None

    @property
    def sizes(self) -> tuple[int, int]:
        """(words per row, rows from one batch row to the next)."""
        return (0, 0) if self.bits is None else (self.bits.shape[1], int(self.bits.shape[0] > 1))


NO_KEYS = KeyBits(None, None)


def pack_keys(mask: Tensor, kv_len: int) -> KeyBits:
    """The bits of a boolean key-padding mask on a GPU."""
    rows = rows_of(mask, kv_len)
    bits = torch.empty(rows.shape[0], words_of_keys(kv_len), dtype=torch.int32, device=mask.device)
    spans = torch.empty(rows.shape[0], 2, dtype=torch.int32, device=mask.device)
    run(key_bits_call, (rows, bits, spans), (), lambda device: None)
    return KeyBits(bits, spans)


def narrowed(mask: Tensor) -> Tensor:
    """The mask as a view of four dimensions, of size 1 where it was expanded along batch rows, heads or queries."""
    mask = mask[(None,) * (4 - mask.dim())]
    for dim in range(3):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def is_of_keys(mask: Tensor) -> bool:
    """Whether a mask is the same for all queries and heads."""
    return narrowed(mask).shape[1:3] == (1, 1)


def rows_of(mask: Tensor, kv_len: int) -> Tensor:
    """The mask as a view `[B or 1, Tk]`."""
    return narrowed(mask).expand(-1, -1, -1, kv_len)[:, 0, 0]


def words_of_keys(kv_len: int) -> int:
    """The number of words per row."""
    return -(-kv_len // 32) + SPARE_WORDS


def key_bits_call(rows: Tensor, bits: Tensor, spans: Tensor, _: None) -> CudaLaunch:
    """The launch as data, without running it."""
    mask_row, mask_key = rows.stride()
    arguments = {
        "mask": rows, "bits": bits, "spans": spans, "kv_len": rows.shape[1], "words": bits.shape[1],
        "mask_row": mask_row, "mask_key": mask_key,
    }  # fmt: skip
    options = Options.of({"THREADS": THREADS})
    return CudaLaunch(SOURCE, "key_bits", options, (rows.shape[0], 1), THREADS, 0, arguments)
