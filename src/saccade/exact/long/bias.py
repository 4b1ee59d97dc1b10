"""A bias as the copy engine reads it, for the kernels of long sequences on sm_90: `[W, H or 1, Tq, Tk]`. Row b of the batch reads matrix b % W."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from saccade.hardware import multiprocessors
from saccade.launch.cuda import CudaLaunch, run, strides
from saccade.native.recording import scratch
from saccade.nvrtc import Options, Source

SOURCE = Source(Path(__file__).parent / "cuda" / "bias_rows.cu")
UNIT = 8  # numbers of 16 bits in the 16 bytes that are the unit of the copy engine
THREADS, _BLOCKS = 256, 8  # of a block; of a multiprocessor


def readable(bias: Tensor) -> Tensor:
    """A bias `[W, H, Tq, Tk]`, of size 1 where it was expanded over rows or heads, and copied if the copy engine cannot address its rows.

    Raises:
        CompileError, CompilerUnavailable: the kernel that copies does not compile here.
    """
    for dim in (0, 1):
        if bias.stride(dim) == 0:
            bias = bias.narrow(dim, 0, 1)
    return bias if _is_movable(bias) or not bias.numel() else _copied(bias)


def _is_movable(bias: Tensor) -> bool:
    """Whether the copy engine can address all rows."""
    of_rows = [s for s, n in zip(bias.stride()[:-1], bias.shape[:-1], strict=True) if n > 1]
    dense = bias.stride(-1) == 1 or bias.shape[-1] == 1
    return dense and bias.data_ptr() % 16 == 0 and all(s > 0 and s % UNIT == 0 for s in of_rows)


def _copied(bias: Tensor) -> Tensor:
    *rows, keys = bias.shape
    made = scratch((*rows, -(-keys // UNIT) * UNIT), bias.dtype, bias.device)
    run(bias_rows_call, (bias, made), (), multiprocessors)
    return made[..., :keys]


def bias_rows_call(bias: Tensor, made: Tensor, processors: int) -> CudaLaunch:
    """The launch as data, without running it."""
    windows, heads, queries, keys = bias.shape
    close = bias.stride(2) == 1 != bias.stride(3)
    numbers = {"windows": windows, "heads": heads, "queries": queries, "keys": keys}
    arguments = {"bias": bias, "made": made, **numbers, **strides(bias=bias.stride())}
    warps = windows * heads * -(-queries // (32 if close else 1))
    grid = max(1, min(-(-warps * 32 // THREADS), _BLOCKS * processors))
    return CudaLaunch(
        SOURCE, "bias_rows", Options.of({"ROWS_LIE_CLOSE": close, "THREADS": THREADS}), (grid, 1), THREADS, 0, arguments
    )
