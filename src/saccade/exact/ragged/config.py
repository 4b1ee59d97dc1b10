"""Shapes of the launches of the ragged family. Imports only torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from saccade.exact.long.config import timed
from saccade.hardware import SMALL_SHARED

TILES = (16, 32, 64, 128)  # of the buckets; longer sequences take the long form
MAX_HEAD_DIM = 256
TOKENS_MAX_DIM = 64  # of token tiles, without a window
# The bucket from which the kernels of sm_90 for longer sequences (`exact/long`) are faster than a whole tile if they take the call. Times on one H200
# are forward / backward in ms, those of whole tiles in brackets; 4,096 sequences of mean 82 and at most 128, 12 heads, bf16:
#     D = 32     0.360 / 0.744   (0.472 / 0.856)
#     D = 64     0.453 / 1.032   (0.612 / 1.689)
#     D = 128    0.861 / 2.410   (1.271 / 3.412)
# The bucket of 64 tokens is slower at D = 64, 0.179 / 0.347 (0.117 / 0.269): two warpgroups share the queries of a sequence, and one has none.
FASTER_IN_CHUNKS = 128


def in_chunks(head_dim: int, grouped: bool, mask: bool, dropout: bool, window: bool) -> bool:
    """Whether the ragged family leaves calls with these features to the kernels of sm_90. It has not been timed with masks or windows."""
    if mask or window or (grouped and dropout):
        return False
    return timed("grouped heads" if grouped else "dropout", head_dim) if grouped or dropout else True


@dataclass(frozen=True)
class TileConfig:
    """Warps of a program, programs for each multiprocessor, stages of the loop over sequences."""

    warps: int
    programs: int = 16
    stages: int = 2


@dataclass(frozen=True)
class LongConfig:
    """tile_q, tile_k: rows and keys at a time. warps, stages of the inner loop, programs for each multiprocessor."""

    tile_q: int
    tile_k: int
    warps: int
    stages: int = 2
    programs: int = 16


# (direction, head dim) -> tile -> shape: the best of 1 to 8 warps, 4, 8 and 16 programs, and one and two stages. Measured on one H200 in bfloat16, with
# lengths of the upper half of each bucket. Two stages load the next sequence while one is computed, which gives 1.1x to 1.5x. Tiles of 128 at
# D = 128 leave no room for a second sequence in backward.
_TILE_CONFIGS = {
    ("fwd", 32): {16: TileConfig(1), 32: TileConfig(1), 64: TileConfig(4), 128: TileConfig(4, 8)},
    ("fwd", 64): {16: TileConfig(1), 32: TileConfig(1, 8), 64: TileConfig(4, 8), 128: TileConfig(4, 4)},
    ("fwd", 128): {16: TileConfig(1, 16, 1), 32: TileConfig(1), 64: TileConfig(4, 16, 1), 128: TileConfig(8, 4)},
    ("bwd", 32): {16: TileConfig(1), 32: TileConfig(1, 8), 64: TileConfig(2, 8), 128: TileConfig(8, 4)},
    ("bwd", 64): {16: TileConfig(1, 8), 32: TileConfig(1, 8), 64: TileConfig(4, 4), 128: TileConfig(8, 4)},
    ("bwd", 128): {16: TileConfig(1), 32: TileConfig(2, 8), 64: TileConfig(4, 4), 128: TileConfig(8, 4, 1)},
}


# direction -> head dim -> shape: the best of some ten on one H200, bfloat16, lengths of 129 to 512
_LONG_CONFIGS = {
    "fwd": {32: LongConfig(64, 32, 4, 3), 64: LongConfig(64, 64, 4, 3), 128: LongConfig(64, 64, 4, 3)},
    "keys": {32: LongConfig(32, 128, 4), 64: LongConfig(32, 128, 4), 128: LongConfig(32, 64, 4, 3)},
    "queries": {32: LongConfig(64, 64, 4, 3), 64: LongConfig(64, 64, 4, 3), 128: LongConfig(64, 64, 4)},
}


def fits(tile: int, block_d: int, element_size: int, arch: int) -> bool:
    """Whether a tile holds a whole sequence: q, k, v and dout in shared memory together, with room for the pairs.

    float32 is multiplied without matrix units, from registers: from 4,096 numbers a tile on they spill by the kilobyte.
    """
    if element_size == 4:
        return tile * block_d <= 2048
    if arch == 80 and tile * block_d > 8192:  # backward spills 4 KiB a thread
        return False
    limit = 96 * 1024 if arch in SMALL_SHARED else 160 * 1024
    return (4 * block_d + tile) * tile * element_size <= limit and block_d <= 128


def small_tile(tile: int) -> int:
    """The second tile of a small batch, for sequences shorter than the tile that holds its longest; 0 for none."""
    return 32 if tile > 32 else 0


def tile_config(direction: str, tile: int, block_d: int, element_size: int, featured: bool, arch: int = 90) -> TileConfig:
    """direction: "fwd" or "bwd". featured: with a bias or dropout, whose numbers take registers."""
    if element_size == 4:
        return TileConfig(8 if tile == 64 else 4, stages=1)
    if featured and tile >= 32:
        return TileConfig({32: 2 if block_d <= 64 else 4, 64: 4, 128: 8}[tile], 8, 1)
    config = _TILE_CONFIGS[direction, max(block_d, 32)][tile]
    # room for a second sequence: up to 160 KiB on sm_80
    tiles = 3 if direction == "fwd" else 4
    room = 96 * 1024 if arch in SMALL_SHARED else 160 * 1024
    crowded = arch != 90 and (2 * tiles * block_d + tile) * tile * element_size > room
    return replace(config, stages=1) if crowded else config


def forward_by_triton(head_dim: int, causal: int, max_q: int) -> bool:
    """Whether forward of packed sequences beyond the tiles stays with Triton where sm_90 has a kernel too. D = 32, not causal: 0.33 ms for 0.35 at
    197 to 257 tokens, 0.46 for 0.55 at longest 417, mean 88; but 0.53 for 0.39 at 512."""
    return head_dim <= 32 and not causal and TILES[-1] < max_q < 512


def long_config(direction: str, block_d: int, element_size: int, arch: int) -> LongConfig:
    """direction: "fwd", "keys" (dK and dV) or "queries" (dQ)."""
    if block_d > 128:
        return LongConfig(16, 16, 4, 1)
    if element_size == 4 or arch in SMALL_SHARED:
        return LongConfig(32, 32, 4 if block_d <= 64 else 8, 1)
    return _LONG_CONFIGS[direction][max(block_d, 32)]


# Numbers (tokens x heads x D, D a power of two) up to which token tiles are one launch each way outside of CUDA graphs. There Python takes longer for
# the six launches of the buckets of lengths than C++ takes for two.
MOST_EAGER = 2**25
MOST_AT_ONCE = 2**14  # sequences of a batch that one launch takes as they come


def in_token_tiles(element_size: int, block_d: int, longest: int, has_bias: bool) -> bool:
    """Whether token tiles take packed self-attention outside of CUDA graphs, up to MOST_EAGER numbers."""
    return not has_bias and element_size == 2 and block_d <= TOKENS_MAX_DIM and longest <= TILES[-1]


class TokenConfig(NamedTuple):
    """tile: tokens of a program. step: tokens of their sequences at a time."""

    tile: int
    step: int
    warps: int
    stages: int = 1


def token_config(direction: str, element_size: int, arch: int, block_d: int = TOKENS_MAX_DIM) -> TokenConfig:
    """The shape of token tiles: of five forward and six backward shapes, one that was fastest or near it at most sizes on an H100, at D = 32 and 64.

    float32 has no matrix unit and takes small tiles. Backward takes 64 rows where that was measured and on sm_100. Elsewhere 64 rows spill: with
    grouped heads and dropout 1,624 bytes a thread on sm_80 and 1,720 on sm_120. Only windows ask for D beyond 64. Nothing was timed there, so shapes
    that spill little are taken.
    """
    if block_d > TOKENS_MAX_DIM:
        return _wide(direction, element_size, arch, block_d)
    if element_size == 4:
        return TokenConfig(32, 32, 4)
    if direction == "fwd":
        return TokenConfig(64, 64, 4, 3)
    return TokenConfig(64 if arch in (90, 100) else 32, 32, 4)


def _wide(direction: str, element_size: int, arch: int, block_d: int) -> TokenConfig:
    if element_size == 4:
        return TokenConfig(16, 16, 8)
    if direction == "fwd":
        return TokenConfig(64, 64, 4, 2) if block_d <= 128 else TokenConfig(32, 32, 4)
    return TokenConfig(32, 32, 4) if block_d <= 128 else TokenConfig(16, 16, 4)


# On sm_90, token tiles in CUDA C++ (tokens_sm90.py) replace Triton's in a direction up to these head dims. In CUDA graphs they do so up to this many
# numbers, counted as for MOST_EAGER. An H100 timed both directions at D = 32 and 64 up to that size (docs/notes/ragged.md). Read at each call.
TOKENS_SM90 = {"forward": 64, "backward": 64}
MOST_TOKENS_SM90, LONGEST_TOKENS_SM90 = 2**24, 128
# In a CUDA graph they do so from this many numbers, because the layers of a model share the bounds that Triton's kernels read. MiniLM's forward and
# backward take 1.11 ms with Triton's and 1.14 with CUDA C++ at 1,408 tokens, 2.13 and 2.09 at 5,120 tokens (H200). With dropout they do so up to a head
# dim: 256 sequences of mean 20 take 78 us in place of 91 at D = 32, and 256 of mean 40 take 232 in place of 216 at D = 64.
FEWEST_TOKENS_SM90, DROPOUT_TOKENS_SM90 = 2**20, 32


def in_tokens_sm90(direction: str, arch: int, element_size: int, head_dim: int, longest: int, window: bool) -> bool:
    """Whether these are the token tiles of a call that token tiles compute, if 16-byte copies can address its tensors. They were timed on short sequences."""
    fits = arch == 90 and element_size == 2 and head_dim <= TOKENS_SM90[direction] and head_dim % 8 == 0
    return fits and longest <= LONGEST_TOKENS_SM90 and not window


def captured_tokens_sm90(numbers: int, head_dim: int, dropout: bool) -> bool:
    """Whether these token tiles are faster than Triton's in a CUDA graph. numbers: as of MOST_EAGER."""
    return FEWEST_TOKENS_SM90 <= numbers <= MOST_TOKENS_SM90 and (not dropout or head_dim <= DROPOUT_TOKENS_SM90)


class TokensSm90Config(NamedTuple):
    """blocks: of a multiprocessor, which bound registers. step: keys of a warp of forward at a time."""

    blocks: int
    step: int = 48


# (direction, D rounded up)
TOKENS_SM90_CONFIGS = {
    ("forward", 32): TokensSm90Config(5),
    ("forward", 64): TokensSm90Config(4),
    ("backward", 32): TokensSm90Config(4),
    ("backward", 64): TokensSm90Config(2),
}
