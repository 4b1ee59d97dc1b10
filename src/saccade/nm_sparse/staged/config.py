"""Launch configurations of the staged kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

# queries per warp
WARP_ROWS = 32


@dataclass(frozen=True)
class Tile:
    """warps: warps per block, with 32 queries each. stages: stages of the ring in shared memory. shared_bytes: the size of the
    ring. blocks: thread blocks that a multiprocessor should hold, which bounds registers. query_stays: the query stays in
    registers; otherwise it is read again for every tile of keys. steps: sparse products along the keys of a stage, 2 or 4."""

    warps: int
    stages: int
    shared_bytes: int
    blocks: int
    query_stays: bool = False
    steps: int = 2


def most_shared(arch: int) -> int:
    """Bytes of shared memory that a block may use: 227 KiB on sm_90 and sm_100, 163 KiB on sm_80 and sm_87, 99 KiB on the
    others."""
    return 1024 * (227 if arch // 10 in (9, 10, 11) else 163 if arch in (80, 87) else 99)


def span(itemsize: int) -> int:
    """Keys of a tile."""
    return 128 // itemsize


def scores_tile(head_dim: int, itemsize: int, q_len: int, most_shared: int) -> Tile:
    """The configuration of the scores kernel, chosen so that nothing spills (checked in tests/nm_sparse/test_staged.py).

    Times on an H200 at D = 64, n = 1024 / 4096, in ms:
        bf16 2:4, the query stays, 3 blocks           0.125 / 0.96
        bf16 2:4, the query is read again             0.151 / 0.94
        bf16 2:4, 4 blocks (which spill), 2 stages    0.124 / 0.90
        float32, the query stays, 3 blocks            0.220 / 1.71
        float32, 4 blocks                             0.226 / 1.64
    """
    stride = _round_up(head_dim * itemsize // 16, 8) * 16

    def shared(warps: int, stages: int) -> int:
        return (warps * WARP_ROWS + stages * span(itemsize)) * stride

    tile = _fit(shared, q_len, most_shared)
    narrow = tile.warps == 4 and stride <= 64 * itemsize
    # a float32 query that stays is rounded to TF32 once, two instructions a number
    return replace(tile, blocks=3 if narrow else 1, query_stays=narrow)


def matmul_tile(width: int, itemsize: int, q_len: int, most_shared: int) -> Tile:
    """The configuration of the product with values, for blocks of `width` columns.

    On an H200, D = 64, n = 1024 / 4096, bf16 2:4: 4 steps a stage, 2 stages and 3 blocks 0.087 / 0.52 ms; 2 steps, 3 stages and 3
    blocks 0.105 / 0.73; of 8 warps 0.090 / 0.57. float32: 0.175 / 1.42, 0.220 / 1.54.
    """
    chunks = width * itemsize // 16
    row = 16 * (chunks + 2 if itemsize == 4 else _round_up(chunks, 8))

    def shared(warps: int, stages: int) -> int:  # with two steps per stage
        return stages * (warps * WARP_ROWS * (64 + 8) + span(itemsize) * row)

    tile = _fit(shared, q_len, most_shared)
    if tile.warps < 4 or width > 64:
        return tile
    if shared(4, 4) > most_shared:
        return replace(tile, blocks=3)
    return replace(tile, stages=2, steps=4, shared_bytes=shared(4, 4), blocks=3)


def matmul_width(value_dim: int) -> int:
    """Columns of values that one block multiplies: a multiple of 16, at most 128, with blocks of nearly equal size."""
    return _round_up(-(-value_dim // -(-value_dim // 128)), 16)


def softmax_lanes(chunks: int) -> tuple[int, int] | None:
    """(threads that share a row of `chunks` times 16 bytes, chunks per thread); None if a row is too long."""
    for lanes in (4, 8, 16, 32):
        if chunks <= 4 * lanes:
            return lanes, -(-chunks // lanes)
    for lanes in (32, 64, 128, 256, 512, 1024):
        if chunks <= 8 * lanes:
            return lanes, -(-chunks // lanes)
    return None


def _fit(shared_bytes: Callable[[int, int], int], q_len: int, most_shared: int) -> Tile:
    """The largest block that fits: all queries of a block share the data that it reads of the other operand."""
    most = 4 if q_len > 64 else 2 if q_len > 32 else 1
    for warps in (4, 2, 1):
        for stages in (3, 2):
            if warps <= most and shared_bytes(warps, stages) <= most_shared:
                return Tile(warps, stages, shared_bytes(warps, stages), 1)
    raise ValueError(f"no tile fits {most_shared} bytes of shared memory")


def _round_up(x: int, to: int) -> int:
    return -(-x // to) * to
