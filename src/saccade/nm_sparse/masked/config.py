"""Launch configurations of the masking kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    """block_q: queries of a tile. block_s: slots of a tile, a multiple of 32 so that bits are whole words. warps: warps per
    program."""

    block_q: int = 64
    block_s: int = 64
    warps: int = 4
    stages: int = 2


def pick(direction: str, head_dim: int, dtype: torch.dtype) -> Config:
    """The configuration for "fwd", "bwd" or "bias" (the gradient of a bias). Chosen so that plain calls do not spill on sm_80 and
    sm_90, which tests/launch/test_compile_targets.py checks. Backward up to D = 128 is the fastest of three on an H200. 64 x 64
    with 8 warps takes 1.2 times as long, and two stages 1.3 times as long again. On an H200 `backward_sm90` runs most calls."""
    if dtype == torch.float32:
        return Config(32, 32, 4 if head_dim <= 64 else 8, 1)
    if direction == "bias":
        return Config(32, 32, 4 if head_dim <= 128 else 8, 1)
    if direction == "bwd":
        return Config(64, 32, 4, 1) if head_dim <= 128 else Config(32, 32, 8, 1)
    if head_dim <= 64:
        return Config(64, 32, 4, 2)
    return Config(64, 64 if head_dim <= 128 else 32, 8, 2)
