"""A sliding window by torch's function, as a call under a mask for blocks of queries (`bands.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from saccade.engine.problem import Problem
from saccade.engine.rule import thousands
from saccade.engine.window import NO_LIMIT, ends_of, shown_window
from saccade.exact.args import AttentionArgs
from saccade.exact.bands import MOST, Band, band_of, fold, unfold

Attend = Callable[[AttentionArgs, Problem], tuple[Tensor, Tensor | None]]


def why_not_with_window(problem: Problem, why_not: Callable[[Problem], list[str]]) -> list[str]:
    """The obstacles to a call with a window. why_not: those of a call without one."""
    assert problem.window is not None, "the caller asks for calls with one"
    if problem.rank != 4:
        return [f"needs tensors of rank 4, [B, H, T, D], for {shown_window(problem.window)}, got rank {problem.rank}"]
    if _is_empty(problem):
        return why_not(replace(problem, window=None))
    band = _band_of(problem)
    numbers = band.mask_numbers * _rows(problem)
    if numbers > MOST:
        return [
            f"torch's function needs a mask for {shown_window(problem.window)}, here of {thousands(numbers)} numbers; allowed are {MOST:,}"
        ]
    return why_not(_in_blocks(problem, band))


def attend_with_window(args: AttentionArgs, problem: Problem, attend: Attend) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of a call with a window, by `attend` of one without."""
    args = args._replace(window_left=NO_LIMIT, window_right=NO_LIMIT)
    if _is_empty(problem):
        return attend(args, replace(problem, window=None))
    band, apart = _band_of(problem), problem.lengths
    query, key, value, seen = fold(*args[:3], band, args.lengths)
    blocks = args._replace(query=query, key=key, value=value, mask=seen, lengths=None, is_causal=False)
    out, lse = attend(blocks, _in_blocks(problem, band))
    return unfold(out, band, problem.batch, apart), None if lse is None else unfold(lse, band, problem.batch, apart)


def _is_empty(problem: Problem) -> bool:
    """Whether no query sees a key."""
    return 0 in (problem.batch, problem.heads, problem.q_len, problem.kv_len)


def _rows(problem: Problem) -> int:
    """Batch rows with a mask of their own."""
    return problem.batch if problem.lengths else 1


def _band_of(problem: Problem) -> Band:
    return band_of(problem.q_len, problem.kv_len, *ends_of(problem.window), problem.is_causal)


def _in_blocks(problem: Problem, band: Band) -> Problem:
    """The call of all blocks: rows that share a mask are heads of it."""
    rows = _rows(problem)
    shared, batch = problem.batch // rows, rows * band.blocks
    return replace(
        problem, batch_shape=(batch,), heads=problem.heads * shared, kv_heads=problem.kv_heads * shared, q_len=band.queries,
        kv_len=band.keys, is_causal=False, lengths=False, mask="bool", mask_shape=(batch, 1, band.queries, band.keys), window=None,
    )  # fmt: skip
