"""The last wave of thread blocks: when only a few blocks of queries remain for all multiprocessors, each is split into parts of
its keys.

4,096 blocks on 132 multiprocessors are 31 waves and 4 blocks. During these 4 blocks 128 multiprocessors would wait: 3 % of the time.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.launch.cuda import HEADERS, CudaLaunch, run, strides
from saccade.native.recording import scratch
from saccade.nvrtc import Options, Source

SOURCE = Source(Path(__file__).parent / "cuda" / "combine.cu", (HEADERS,))
# key tiles of a block from which it is split: with 16 (2,048 keys) splitting made no difference, with 32 it saves 2 %
MIN_TILES = 24
ROWS_A_BLOCK = 4  # of `combine`: one warp each


class Split(NamedTuple):
    """whole: blocks of queries at the start that are not split. rest: blocks split into `parts` parts each. parts: 1 if none is
    split."""

    whole: int
    rest: int = 0
    parts: int = 1

    @property
    def pieces(self) -> int:
        """The number of thread blocks, or of pieces of work for persistent ones."""
        return self.whole + self.rest * self.parts


def split(blocks: int, multiprocessors: int, tiles: int) -> Split:
    """How `blocks` blocks of queries, of `tiles` key tiles each, are split; a thread block occupies a multiprocessor."""
    rest = blocks % multiprocessors
    parts = min(multiprocessors // rest, tiles // 2) if rest else 1
    return Split(blocks - rest, rest, parts) if parts > 1 and tiles >= MIN_TILES else Split(blocks)


class Parts(NamedTuple):
    """outs: float32 `[rest * parts, BLOCK_Q, D]`, not yet divided by the sums. sums: float32 `[rest * parts, BLOCK_Q, 2]`, the
    offset and the sum of the weights."""

    outs: Tensor | None
    sums: Tensor | None


def allocate(plan: Split, rows: int, head_dim: int, device: torch.device) -> Parts:
    """The input of `combine`; tensors are None if nothing is split."""
    if plan.parts == 1:
        return Parts(None, None)
    shape = (plan.rest * plan.parts, rows)
    return Parts(*(scratch((*shape, width), torch.float32, device) for width in (head_dim, 2)))


def combine(parts: Parts, out: Tensor, lse: Tensor, plan: Split) -> None:
    """Write the rows of out `[B, H, Tq, D]` and lse that were computed in parts."""
    run(combine_call, (*parts, out, lse), (plan,), lambda device: None)


def combine_call(outs: Tensor, sums: Tensor, out: Tensor, lse: Tensor, plan: Split, _: None) -> CudaLaunch:
    """The launch as data."""
    rows, dim = outs.shape[1:]
    arguments = {
        "part_outs": outs, "part_sums": sums, "out": out, "lse": lse,
        "heads": out.shape[1], "q_len": out.shape[2], "head_dim": out.shape[3], "whole": plan.whole, "parts": plan.parts,
        **strides(out=out.stride()[:3]),
    }  # fmt: skip
    options = Options.of({"HEAD_DIM": dim, "BLOCK_Q": rows, "BF16": out.dtype == torch.bfloat16})
    grid = (plan.rest * rows // ROWS_A_BLOCK, 1)
    return CudaLaunch(SOURCE, "combine", options, grid, 32 * ROWS_A_BLOCK, 0, arguments)
