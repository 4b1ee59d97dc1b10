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


ROWS = 256  # beyond it the GPU is busy for longer than Python takes to launch its work


def rows_captured(rows: int) -> int:
    """The next batch size that is captured.

    Up to 16 a GPU waits for launches, so few sizes are made. Beyond 16 a row costs time: sizes are a quarter of a power of two apart, and less than
    a fifth is padding. Steps of an eighth, as tokens have, would double the graphs, each of which holds the activations of its batch.
    """
    if rows <= 16:
        return next(size for size in (1, 2, 4, 8, 12, 16) if size >= rows)
    step = 1 << (rows - 1).bit_length() - 3
    return -(-rows // step) * step


def columns_captured(columns: int) -> int:
    """The next width that is captured: 16 widths up to 512, a quarter of a power of two apart beyond 64."""
    step = max(16, 1 << max(0, (columns - 1).bit_length() - 3))
    return -(-columns // step) * step


def rows_up_to(rows: int) -> list[int]:
    """Every batch size that is captured, up to that of so many rows."""
    found = [1]
    while found[-1] < rows:
        found.append(rows_captured(found[-1] + 1))
    return found
