"""The last wave of thread blocks: when few blocks of queries are left for all multiprocessors, each is done in parts of its keys.

4,096 blocks on 132 multiprocessors are 31 waves and 4 blocks, for which 128 multiprocessors would wait: 3 % of the time.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.launch.cuda import HEADERS, Call, run, typed
from saccade.nvrtc import Options, Source

SOURCE = Source(Path(__file__).parent / "cuda" / "combine.cu", (HEADERS,))
MIN_TILES = 24  # of a block that is split: at 16, 2,048 keys, it was level, at 32 it takes 2 % off
ROWS_A_BLOCK = 4  # of `combine`: a warp each


class Split(NamedTuple):
    """whole: blocks of queries done whole, the first ones. rest: those done in `parts` parts each. parts: 1 where nothing is split."""

    whole: int
    rest: int = 0
    parts: int = 1

    @property
    def pieces(self) -> int:
        """Thread blocks, or what persistent ones take in turn."""
        return self.whole + self.rest * self.parts


def split(blocks: int, multiprocessors: int, tiles: int) -> Split:
    """How `blocks` blocks of queries, of `tiles` key tiles each, are done; a thread block takes a multiprocessor."""
    rest = blocks % multiprocessors
    parts = min(multiprocessors // rest, tiles // 2) if rest else 1
    return Split(blocks - rest, rest, parts) if parts > 1 and tiles >= MIN_TILES else Split(blocks)


class Parts(NamedTuple):
    """outs: float32 `[rest * parts, BLOCK_Q, D]`, not divided. sums: float32 `[rest * parts, BLOCK_Q, 2]`, offset and sum of the weights."""

    outs: Tensor | None
    sums: Tensor | None


def allocate(plan: Split, rows: int, head_dim: int, device: torch.device) -> Parts:
    """What `combine` reads; None where nothing is split."""
    if plan.parts == 1:
        return Parts(None, None)
    shape = (plan.rest * plan.parts, rows)
    return Parts(*(torch.empty(*shape, width, dtype=torch.float32, device=device) for width in (head_dim, 2)))


def combine(parts: Parts, out: Tensor, lse: Tensor, plan: Split) -> None:
    """Write the rows of out `[B, H, Tq, D]` and lse that are in parts."""
    run(combine_call, (*parts, out, lse), (plan,), lambda device: None)


def combine_call(outs: Tensor, sums: Tensor, out: Tensor, lse: Tensor, plan: Split, _: None) -> Call:
    """The launch as data."""
    rows, dim = outs.shape[1:]
    arguments = (
        *typed("pointer", outs, sums, out, lse),
        *typed("int32", out.shape[1], out.shape[2], out.shape[3], plan.whole, plan.parts),
        *typed("int64", *out.stride()[:3]),
    )
    options = Options.of({"HEAD_DIM": dim, "BLOCK_Q": rows, "BF16": out.dtype == torch.bfloat16})
    return Call(SOURCE, "combine", options, (plan.rest * rows // ROWS_A_BLOCK, 1), 32 * ROWS_A_BLOCK, 0, arguments)
