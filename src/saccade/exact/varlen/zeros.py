"""The kernel of `behind`: zeros in the rows behind the last sequence. It imports Triton, so its launcher imports this module late."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "sequences"])
def zero_behind_kernel(
    tokens, offsets, rows, sequences, COLUMNS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr
):  # fmt: skip
    """tokens `[rows, COLUMNS]`, dense. A program owns TILE_R rows, and returns if all of them belong to a sequence."""
    first = tl.program_id(0) * TILE_R
    end = tl.load(offsets + sequences)
    if first + TILE_R > end:
        owned = first + tl.arange(0, TILE_R)
        behind = (owned >= end) & (owned < rows)
        lines = tokens + owned.to(tl.int64)[:, None] * COLUMNS
        for start in tl.range(0, COLUMNS, TILE_C):
            columns = start + tl.arange(0, TILE_C)
            zeros = tl.zeros((TILE_R, TILE_C), tokens.dtype.element_ty)
            tl.store(lines + columns[None, :], zeros, mask=behind[:, None] & (columns < COLUMNS)[None, :])
