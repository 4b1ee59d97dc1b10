"""How a short-sequence kernel is shaped for a problem: explicit -> measured table -> heuristic."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

from saccade.env import print_config


@dataclass(frozen=True)
class Config:
    """Launch shape of one kernel.

    heads: adjacent heads of a program. q_blocks: blocks the queries are split into inside a program. chunk: width of the
    head-dim chunks, 0 for the whole head dim at once. stages: loads in flight (1: none ahead). programs_per_sm: persistent
    programs for each multiprocessor, 0 for one program a problem. prefetch: how many problems ahead, counted in
    multiprocessors, each program asks L2 for (the number of programs a multiprocessor holds at once), 0 for none. max_registers: a cap for each thread, 0 for none. matrix: for a single query, use the matrix
    kernels with 15 idle query rows in place of the pooling kernels. tma: move tiles by the tensor memory accelerator (sm_90 and
    later), which takes no registers for addresses but some host time for descriptors.
    """

    warps: int
    heads: int = 1
    q_blocks: int = 1
    chunk: int = 0
    stages: int = 1
    programs_per_sm: int = 0
    prefetch: int = 0
    max_registers: int = 0
    matrix: bool = False
    tma: bool = False


def tile_size(extent: int) -> int:
    """The power of two, at least 16 (a matrix instruction's inner length), that holds `extent`."""
    return max(16, 1 << (extent - 1).bit_length()) if extent > 0 else 16


# (direction, rows of the longer sequence, head dim) -> Config, bf16 and fp16 on sm_90
TABLE: dict[tuple[str, int, int], Config] = {}


def heuristic(direction: str, rows: int, dim: int, element_size: int) -> Config:
    """A shape that fits everywhere: grows the warps with the tile, streams the head dim once tiles are large."""
    if direction.startswith("pool"):
        area = rows * dim
        return Config(warps=2 if area <= 4096 else 4 if area <= 16384 else 8)
    area = rows * max(rows, dim) * (element_size // 2)
    warps = 1 if area <= 1024 else 2 if area <= 2048 else 4 if area <= 8192 else 8
    if rows >= 64 and dim * element_size >= 256:
        return Config(warps=max(warps, 4), chunk=64 * 2 // element_size if rows >= 128 else 64, stages=2)
    return Config(warps=warps)


@functools.cache
def pick(direction: str, rows: int, dim: int, element_size: int, arch: int, plain: bool = True) -> Config:
    """The configuration of a kernel: the measured table, where it speaks, else the heuristic.

    Args:
        direction: "fwd", "bwd", "pool_fwd" or "pool_bwd". rows, dim: tile sizes (powers of two).
        plain: neither grouped heads nor a bias gradient nor dropout: the table was measured on plain problems.
    """
    chosen = TABLE.get((direction, rows, dim)) if arch >= 90 and element_size == 2 and plain else None
    if chosen is None:
        chosen = heuristic(direction, rows, dim, element_size)
    if print_config():
        print(f"saccade: short {direction} rows={rows} dim={dim} sm_{arch}: {chosen}", file=sys.stderr)
    return chosen
