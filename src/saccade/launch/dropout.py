"""Dropout in the CUDA C++ kernels: each compares a 24-bit word of Philox with a whole number."""

import math
import struct


def drop_threshold(dropout_p: float) -> int:
    """The threshold below which a draw of 24 bits drops a weight. It is derived from float32(dropout_p), with which the Triton
    kernels compare the draw as a fraction of 2^24, so that a seed gives the same mask in all kernels."""
    return math.ceil(struct.unpack("f", struct.pack("f", dropout_p))[0] * 2**24)
