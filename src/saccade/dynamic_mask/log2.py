"""Device functions shared by the Triton kernels of `dynamic_mask_attention`."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.launch import constants

LOG2E = tl.constexpr(constants.LOG2E)
LN2 = tl.constexpr(constants.LN2)
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def to_log2(scores):
    """Key scores in base 2. Scores beyond 2.36e38 would overflow and are clamped to the largest float32. NaN stays NaN."""
    scores = scores.to(tl.float32) * LOG2E
    return tl.where(scores > _LARGEST, _LARGEST, tl.where(scores < -_LARGEST, -_LARGEST, scores))
