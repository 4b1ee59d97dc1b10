"""Sizes of captured batches."""

from __future__ import annotations

LEAST = 64


def capacity(tokens: int) -> int:
    """The next size that is captured: a multiple of an eighth of the power of two below, so at most an eighth is padding."""
    if tokens <= LEAST:
        return LEAST
    step = max(16, 1 << (tokens - 1).bit_length() - 4)
    return -(-tokens // step) * step


def capacities(tokens: int) -> list[int]:
    """Every capacity up to that of so many tokens."""
    found = [LEAST]
    while found[-1] < tokens:
        found.append(capacity(found[-1] + 1))
    return found
