"""Shapes of the launches of the ragged family. Imports torch alone."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.hardware import SMALL_SHARED

TILES = (16, 32, 64, 128)  # of the buckets; longer sequences take the long form


@dataclass(frozen=True)
class TileConfig:
    """warps of a program, programs for each multiprocessor, stages of the loop over sequences."""

    warps: int
    programs: int = 16
    stages: int = 1


@dataclass(frozen=True)
class LongConfig:
    """tile_q, tile_k: rows and keys at a time. warps, stages of the inner loop, programs for each multiprocessor."""

    tile_q: int
    tile_k: int
    warps: int
    stages: int = 2
    programs: int = 16


def fits(tile: int, block_d: int, element_size: int, arch: int) -> bool:
    """Whether a tile holds a whole sequence: q, k, v and dout in shared memory together, with room for the pairs.

    float32 is multiplied without matrix units, from registers: from 4,096 numbers a tile on they spill by the kilobyte.
    """
    if element_size == 4:
        return tile * block_d <= 2048
    limit = 96 * 1024 if arch in SMALL_SHARED else 160 * 1024
    return (4 * block_d + tile) * tile * element_size <= limit and block_d <= 128


def tile_config(direction: str, tile: int, block_d: int, element_size: int, featured: bool) -> TileConfig:
    """direction: "fwd" or "bwd". featured: with a bias or dropout, whose numbers take registers."""
    if element_size == 4:
        return TileConfig(8 if tile == 64 else 4)
    warps = {16: 1, 32: 1 if block_d <= 64 else 2, 64: 4, 128: 4 if direction == "fwd" and block_d <= 64 else 8}[tile]
    if featured and tile >= 32:
        warps = min(8, 2 * warps)
    return TileConfig(warps)


def long_config(direction: str, block_d: int, element_size: int, arch: int) -> LongConfig:
    """direction: "fwd", "keys" (dK and dV) or "queries" (dQ)."""
    if block_d > 128:
        return LongConfig(16, 16, 4, 1)
    if element_size == 4 or arch in SMALL_SHARED:
        return LongConfig(32, 32, 4 if block_d <= 64 else 8, 1)
    if direction == "fwd":
        return LongConfig(128, 64, 4 if block_d <= 64 else 8, 3 if block_d <= 64 else 2)
    if direction == "keys":
        return LongConfig(64, 128 if block_d <= 64 else 64, 8 if block_d <= 64 else 4, 2)
    return LongConfig(128 if block_d <= 64 else 64, 64, 8 if block_d <= 64 else 4, 2)
