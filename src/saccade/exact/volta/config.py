"""Launch shapes of the Volta kernels. They spill nothing (tests/exact/test_volta.py) and were chosen by instruction counts
(experiments/volta/predict_volta.py). None has been measured on a V100 or T4."""

from __future__ import annotations

from dataclasses import dataclass

# keys that a block of backward owns
OWNED_KEYS = 64
DELTA_THREADS = 256


@dataclass(frozen=True)
class ForwardTile:
    """warps: of a block. row_tiles: 32 queries each, of a warp. keys: of a tile. blocks: how many a multiprocessor shall hold, which bounds
    registers. shared_bytes: of a block."""

    warps: int
    row_tiles: int
    keys: int
    blocks: int
    shared_bytes: int

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return 32 * self.warps * self.row_tiles


@dataclass(frozen=True)
class BackwardTile:
    """warps: of a block. rows: queries of a tile. blocks, shared_bytes: as of forward."""

    warps: int
    rows: int
    blocks: int
    shared_bytes: int


def multiprocessor_shared(arch: int) -> int:
    """Bytes of shared memory of a multiprocessor that blocks can have; sm_80 and later, where the kernels are only checked, count as
    sm_70."""
    return 64 * 1024 if arch == 75 else 96 * 1024


def forward_tile(head_dim: int, q_len: int, masked: bool, arch: int) -> ForwardTile:
    """Tile of the forward kernel. masked: with a boolean mask or a bias, whose addresses take registers."""
    large = q_len > 128 and not masked and arch != 75  # on sm_75 queries leave too little of 64 KiB for a second block
    if head_dim <= 64:
        # two row tiles use each key and value that is read from shared memory twice
        warps, row_tiles, keys, blocks = (4, 2, 16, 2) if large else (4, 1, 32, 2)
    else:
        # sums of 64 x 128 floats would not fit a warp's registers. More keys a tile: queries are read again less often, 144 reads of
        # shared memory for 256 products in place of 160; but with them two blocks would take 102 KiB
        warps, row_tiles, keys, blocks = (8, 1, 32, 1) if large else (4, 1, 16, 2)
    shared = _rows_bytes(warps * 32 * row_tiles + 2 * keys, head_dim)
    return ForwardTile(warps, row_tiles, keys, min(blocks, multiprocessor_shared(arch) // shared), shared)


def backward_tile(head_dim: int, arch: int) -> BackwardTile:
    """Tile of both kernels of backward."""
    warps = 4 if head_dim <= 64 else 8
    rows = 32 if head_dim <= 64 or arch == 75 else 64
    # weights and score gradients of the tile; four floats a query
    shared = _rows_bytes(2 * OWNED_KEYS + 2 * rows, head_dim) + 2 * rows * (OWNED_KEYS + 8) * 2 + 4 * rows * 4
    return BackwardTile(warps, rows, min(8 // warps, multiprocessor_shared(arch) // shared), shared)


def _rows_bytes(rows: int, head_dim: int) -> int:
    """Rows as `cuda/tile.cuh` keeps them: up to a multiple of 16 numbers, and 8 more."""
    return rows * (-(-head_dim // 16) * 16 + 8) * 2
