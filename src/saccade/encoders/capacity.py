"""Sizes of captured batches."""

from __future__ import annotations

from typing import NamedTuple

LEAST = 64
# Tokens of a sequence that a graph expects, the first bound that holds the longest one. Kernels for packed tokens take a batch up to USUAL, whatever its
# lengths. A model may have more positions: XLM-R has 514. With these as the bound torch's kernels ran, and a batch of 512 sentences took four times as
# long on an H200. Up to SHORT the attention of 1,024 sentences of mean 20 takes 40 us for 51, at D = 32 there.
SHORT, USUAL = 128, 512


class Size(NamedTuple):
    """The bounds of a graph: tokens of a batch, and tokens of each sequence."""

    tokens: int
    longest: int


def size_of(tokens: int, sequences: int, longest: int, most: int) -> Size:
    """The size that is captured for a batch. Empty sequences count, since each has an end. most: positions of the model."""
    bound = SHORT if longest <= SHORT else USUAL if longest <= USUAL else max(most, longest)
    return Size(capacity(max(tokens, sequences)), bound)


def sizes_of(tokens: int, most: int) -> list[Size]:
    """Those that batches of so many tokens are captured in, unless a sequence is longer than usual."""
    return [size_of(tokens, 1, bound, most) for bound in (SHORT, USUAL) if bound == SHORT or most > SHORT]


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


ROWS = 256  # beyond it the GPU works longer than Python takes to launch


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
