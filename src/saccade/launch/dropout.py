"""Dropout as every kernel in CUDA C++ draws it: a 24-bit word of Philox against a whole number."""

import math
import struct


def drop_threshold(dropout_p: float) -> int:
    """Draws of 24 bits below this one drop a weight: as a fraction of 2^24 against float32(dropout_p), which is what Triton's kernels
    are given, so that a seed means the same to all."""
    return math.ceil(struct.unpack("f", struct.pack("f", dropout_p))[0] * 2**24)
