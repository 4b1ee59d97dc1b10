"""A boolean mask as bits for the kernels of long sequences on sm_90 (`cuda/mask_bits.cu`): rows of words that each hold 64 columns.

Forward reads rows of queries; backward forms everything transposed, and reads rows of keys.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from saccade.hardware import multiprocessors
from saccade.launch.cuda import CudaLaunch, run, strides
from saccade.nvrtc import Options, Source

SOURCE = Source(Path(__file__).parent / "cuda" / "mask_bits.cu")
THREADS, COLUMNS, _BLOCKS = 256, 64, 8  # of a block; of a word; of a multiprocessor


def _narrowed(mask: Tensor, by_key: bool) -> Tensor:
    """The mask `[B, H, rows, columns]`, of size 1 where it was expanded along all but the columns."""
    mask = mask.mT if by_key else mask
    for dim in range(3):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _width(mask: Tensor) -> int:
    return -(-mask.shape[-1] // COLUMNS)


def strides_of(mask: Tensor, by_key: bool) -> tuple[int, int, int]:
    """Words from one batch row, head and row to the next, 0 where the mask is the same for all of them."""
    batches, heads, rows, _ = (narrowed := _narrowed(mask, by_key)).shape
    width = _width(narrowed)
    return heads * rows * width * (batches > 1), rows * width * (heads > 1), width * (rows > 1)


def pack(mask: Tensor, by_key: bool) -> Tensor:
    """The words, int64 `[B or 1, H or 1, rows or 1, columns / 64]`, of a mask `[B, H, Tq, Tk]`.

    Raises:
        CompileError, CompilerUnavailable: the kernel does not compile here.
    """
    narrowed = _narrowed(mask, by_key)
    words = torch.empty(*narrowed.shape[:3], _width(narrowed), dtype=torch.int64, device=mask.device)
    run(mask_bits_call, (narrowed, words), (), multiprocessors)
    return words


def mask_bits_call(mask: Tensor, words: Tensor, processors: int) -> CudaLaunch:
    """The launch as data, without running it."""
    batches, heads, rows, columns = mask.shape
    numbers = {"batches": batches, "heads": heads, "rows": rows, "columns": columns}
    arguments = {"mask": mask, "words": words, **numbers, **strides(mask=mask.stride())}
    warps = batches * heads * -(-rows // 32) * _width(mask)
    grid = max(1, min(-(-warps * 32 // THREADS), _BLOCKS * processors))
    options = Options.of({"ROWS_LIE_CLOSE": mask.stride(2) == 1 != mask.stride(3), "THREADS": THREADS})
    return CudaLaunch(SOURCE, "mask_bits", options, (grid, 1), THREADS, 0, arguments)
