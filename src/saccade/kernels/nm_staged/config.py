"""Launch shapes of the staged kernels."""

from __future__ import annotations

from dataclasses import dataclass

# queries of a warp
WARP_ROWS = 32


@dataclass(frozen=True)
class Tile:
    """warps: of a block, each with 32 queries. stages: of the ring in shared memory. shared_bytes: what that takes."""

    warps: int
    stages: int
    shared_bytes: int


def span(itemsize: int) -> int:
    """Keys of a tile."""
    return 128 // itemsize


def scores_tile(head_dim: int, itemsize: int, q_len: int, most_shared: int) -> Tile:
    """Of the kernel of scores. Wide blocks read keys less often; few queries or a large head dim take narrower ones."""
    stride = _round_up(head_dim * itemsize // 16, 8) * 16
    return _fit(lambda warps, stages: (warps * WARP_ROWS + stages * span(itemsize)) * stride, q_len, most_shared, (3, 2))


def matmul_tile(width: int, itemsize: int, q_len: int, most_shared: int) -> Tile:
    """Of the product with values, for blocks of `width` columns."""
    chunks = width * itemsize // 16
    row = 16 * (chunks + 2 if itemsize == 4 else _round_up(chunks, 8))
    return _fit(
        lambda warps, stages: stages * (warps * WARP_ROWS * (64 + 8) + span(itemsize) * row), q_len, most_shared, (3, 2)
    )


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


def _fit(shared_bytes, q_len: int, most_shared: int, stages: tuple[int, ...]) -> Tile:  # noqa: ANN001
    warps = 4 if q_len > 64 else 2 if q_len > 32 else 1
    for rows in (warps, 2, 1):
        for count in stages:
            if rows <= warps and shared_bytes(rows, count) <= most_shared:
                return Tile(rows, count, shared_bytes(rows, count))
    raise ValueError(f"no tile fits {most_shared} bytes of shared memory")


def _round_up(x: int, to: int) -> int:
    return -(-x // to) * to
