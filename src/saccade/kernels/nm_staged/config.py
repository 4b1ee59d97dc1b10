"""Launch shapes of the staged kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

# queries of a warp
WARP_ROWS = 32


@dataclass(frozen=True)
class Tile:
    """warps: of a block, each with 32 queries. stages: of the ring in shared memory. shared_bytes: what that takes. blocks: how many a
    multiprocessor shall hold, which bounds registers. query_stays: in registers, else it is read again for every tile of keys. steps: sparse
    products along the keys of a stage, 2 or 4."""

    warps: int
    stages: int
    shared_bytes: int
    blocks: int
    query_stays: bool = False
    steps: int = 2


def most_shared(arch: int) -> int:
    """Bytes of shared memory that a block may have: 227 KiB of sm_90 and sm_100, 163 of sm_80 and sm_87, 99 of the others."""
    return 1024 * (227 if arch // 10 in (9, 10, 11) else 163 if arch in (80, 87) else 99)


def span(itemsize: int) -> int:
    """Keys of a tile."""
    return 128 // itemsize


def scores_tile(head_dim: int, itemsize: int, q_len: int, most_shared: int) -> Tile:
    """Of the kernel of scores, chosen so that nothing spills (tests/kernels/test_nm_staged.py). On an H200 blocks of 4 and 8 warps, 2 and 3
    stages, 3 and 4 blocks lay within 5 % (bf16) of each other."""
    stride = _round_up(head_dim * itemsize // 16, 8) * 16
    tile = _fit(lambda warps, stages: (warps * WARP_ROWS + stages * span(itemsize)) * stride, q_len, most_shared)
    narrow = tile.warps == 4 and stride <= 64 * itemsize
    # float32: a query that stays is rounded to TF32 once, two instructions a number
    return replace(tile, blocks=3 if narrow else 1, query_stays=narrow and itemsize == 4)


def matmul_tile(width: int, itemsize: int, q_len: int, most_shared: int) -> Tile:
    """Of the product with values, for blocks of `width` columns; on an H200 3 blocks were 3 % faster than 4."""
    chunks = width * itemsize // 16
    row = 16 * (chunks + 2 if itemsize == 4 else _round_up(chunks, 8))
    tile = _fit(lambda warps, stages: stages * (warps * WARP_ROWS * (64 + 8) + span(itemsize) * row), q_len, most_shared)
    return replace(tile, blocks=3 if tile.warps == 4 and width <= 64 else 1)


def matmul_width(value_dim: int) -> int:
    """Columns of values that one block multiplies: at most 128, a multiple of 16, blocks of nearly one size."""
    return _round_up(-(-value_dim // -(-value_dim // 128)), 16)


def softmax_lanes(chunks: int) -> tuple[int, int] | None:
    """(threads that share a row of `chunks` times 16 bytes, chunks a thread); None where a row is too long."""
    for lanes in (4, 8, 16, 32):
        if chunks <= 4 * lanes:
            return lanes, -(-chunks // lanes)
    for lanes in (32, 64, 128, 256, 512, 1024):
        if chunks <= 8 * lanes:
            return lanes, -(-chunks // lanes)
    return None


def _fit(shared_bytes: Callable[[int, int], int], q_len: int, most_shared: int) -> Tile:
    """The widest block that fits: queries in one block share what it reads of the other side."""
    most = 4 if q_len > 64 else 2 if q_len > 32 else 1
    for warps in (4, 2, 1):
        for stages in (3, 2):
            if warps <= most and shared_bytes(warps, stages) <= most_shared:
                return Tile(warps, stages, shared_bytes(warps, stages), 1)
    raise ValueError(f"no tile fits {most_shared} bytes of shared memory")


def _round_up(x: int, to: int) -> int:
    return -(-x // to) * to
