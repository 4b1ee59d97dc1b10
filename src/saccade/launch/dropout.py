"""Dropout in the CUDA C++ kernels: each compares a 24-bit word of Philox with a whole number."""

import math
import struct


def drop_threshold(dropout_p: float) -> int:
    """The threshold below which a draw of 24 bits drops a weight. It is derived from float32(dropout_p), because Triton kernels
    compare that number with the draw as a fraction of 2^24. So a seed gives the same mask in all kernels."""
    return math.ceil(_in_float32(dropout_p) * 2**24)


def word_threshold(dropout_p: float) -> int:
    """The threshold below which a whole word of 32 bits drops a weight: its upper 24 bits are the draw.

    If float32(dropout_p) is 1, no word should be left, but 2^32 does not fit: then `survival_inverse` is 0.
    """
    return min(drop_threshold(dropout_p) << 8, 2**32 - 1)


def survival_inverse(dropout_p: float) -> float:
    """The factor of weights that are left, 1 / (1 - p); 0 if float32(dropout_p) is 1."""
    return 0.0 if _in_float32(dropout_p) == 1.0 else 1.0 / (1.0 - dropout_p)


def _in_float32(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]
