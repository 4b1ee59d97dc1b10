"""How much quality pruning loses and how much time it could save: measured on given scores, and by the closed forms of the Dfss
paper.

Letters of the formulas: s density (kept share of the scores), p the exponent of the quality, sigma the standard deviation of
normal scores, n the sequence length, d the head dim, T the side of a tile of the paper's matrix products. The speed-ups count the
memory traffic of the unfused pipeline, whose three kernels write and read the scores. They do not apply to a fused kernel, which
moves no scores.

Source: "Dynamic N:M Fine-grained Structured Sparse Attention Mechanism" (Dfss, paper 003), section 4 and appendices A.2 to A.5.
Eq. 8 and Eq. 33 are printed upside down in the paper; the inverted forms used here give the numbers quoted in its text.

A density that is not in 0..1 raises `InvalidArgument`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from saccade.errors import InvalidArgument
from saccade.nm_sparse.problem import check_dense, parse_pattern
from saccade.nm_sparse.reference import select


def kept_by_pattern(scores: Tensor, pattern: str, dense_first: int = 0, dense_recent: int = 0) -> Tensor:
    """Which of `scores [.., Tk]` (-inf where invisible) an N:M pattern keeps, bool; the rule of `nm_sparse_attention`.

    dense_first, dense_recent: as in `nm_sparse_attention`; with one of them scores are `[.., Tq, Tk]`, of the queries from 0 on.
    """
    keep, group = parse_pattern(pattern)
    dense = check_dense(dense_first, dense_recent, group)
    if any(dense) and scores.dim() < 2:
        raise InvalidArgument(f"scores has shape {list(scores.shape)}; with dense_first or dense_recent it must be [.., Tq, Tk]")
    return select(scores, keep, group, *dense)


def kept_by_top_k(scores: Tensor, density: float) -> Tensor:
    """Which of `scores [.., Tk]` are among the `round(density * Tk)` largest of their row, at least one; bool."""
    count = max(1, round(_density(density) * scores.shape[-1]))
    best = scores.topk(count, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & (scores > float("-inf"))


def kept_by_truncation(scores: Tensor, density: float) -> Tensor:
    """The paper's fixed pattern, the first `round(density * Tk)` keys of every row; bool."""
    count = round(_density(density) * scores.shape[-1])
    return (torch.arange(scores.shape[-1], device=scores.device) < count).expand_as(scores) & (scores > float("-inf"))


def quality(scores: Tensor, kept: Tensor, p: float = 1.0) -> Tensor:
    """`Q^p`, the mean over rows of `sum(kept A^p) / sum(A^p)` with `A = softmax(scores)` (Eq. 2); 1 where nothing is lost.

    Args:
        scores: `[.., Tq, Tk]`, -inf where invisible; rows without a visible key are skipped.
        kept: bool, the same shape. p: a larger p gives large weights more influence.

    Returns:
        float64 `[..]`.
    """
    if kept.shape != scores.shape or kept.dtype != torch.bool:
        raise InvalidArgument(
            f"kept is {kept.dtype} of shape {list(kept.shape)}; it must be bool of the shape of scores, {list(scores.shape)}"
        )
    if not p > 0:
        raise InvalidArgument(f"p is {p!r}; it must be positive")
    sees = (scores > float("-inf")).any(-1)
    # the sum of a row cancels, so softmax(p * scores) is A^p up to a factor
    powers = torch.softmax(p * scores.double().masked_fill(~sees.unsqueeze(-1), 0.0), dim=-1)
    share = (powers * kept).sum(-1).masked_fill(~sees, 0.0)
    return share.sum(-1) / sees.sum(-1)


def top_k_quality(p_sigma: float, density: float) -> float:
    """`Q^p` of the largest share `s` of many independent normal scores, `(1 + erf(p sigma / sqrt 2 - erfinv(1 - 2 s))) / 2` (Eq.
    3)."""
    edge = torch.erfinv(torch.tensor(1 - 2 * _density(density), dtype=torch.float64, device="cpu")).item()
    return (1 + math.erf(p_sigma / math.sqrt(2) - edge)) / 2


def fixed_quality(density: float) -> float:
    """`Q^p` of a pattern that does not look at the scores: `s` (Eq. 3)."""
    return _density(density)


def one_of_two_quality(p_sigma: float) -> float:
    """`Q^p` of 1:2 on independent normal scores, `(1 + erf(p sigma / 2)) / 2`; a lower bound of that of 2:4 (Eq. 3)."""
    return (1 + math.erf(p_sigma / 2)) / 2


def top_k_speedup(density: float, head_dim: int = 64, tile: int = 128) -> float:
    """The largest speed-up of top-K attention over dense, for `n >> d` and if finding the K keys cost nothing (Eq. 4)."""
    d, t, s = head_dim, tile, _density(density)
    return (4 * d + 3 * t) / (2 * d + t + (d + 2 * t + d * t) * s)


def fixed_speedup(density: float, head_dim: int = 64, tile: int = 128) -> float:
    """The speed-up of a fixed pattern made of whole tiles, for `n >> d` (Eq. 5)."""
    d, t, s = head_dim, tile, _density(density)
    return (4 * d + 3 * t) / ((1 + 3 * s) * d + 3 * s * t)


def nm_speedup(head_dim: int = 64, tile: int = 128) -> float:
    """The speed-up of 1:2 and 2:4, for `n >> d`: `(64 d + 48 T) / (57 d + 25 T)` (Eq. 6)."""
    return (64 * head_dim + 48 * tile) / (57 * head_dim + 25 * tile)


def top_k_density_as_fast(head_dim: int = 64, tile: int = 128) -> float:
    """The density at which top-K could be as fast as 1:2 and 2:4 (Eq. 7)."""
    d, t = head_dim, tile
    width = d + 2 * t + d * t
    return (4 * d + 3 * t) / (nm_speedup(d, t) * width) - (2 * d + t) / width


def fixed_density_as_fast(head_dim: int = 64, tile: int = 128) -> float:
    """The density at which a fixed pattern is as fast as 1:2 and 2:4 (Eq. 8, whose first fraction is printed upside down)."""
    d, t = head_dim, tile
    return (4 * d + 3 * t) / (nm_speedup(d, t) * (3 * d + 3 * t)) - d / (3 * d + 3 * t)


def dense_traffic(length: int, head_dim: int = 64, tile: int = 128) -> float:
    """Numbers that unfused dense attention moves for one head: scores, softmax, weights times values (Table 5)."""
    n, d, t = length, head_dim, tile
    return n * n * (2 * d / t + 1) + 2 * n * n + n * d * (2 * n / t + 1)


def nm_traffic(length: int, head_dim: int = 64, tile: int = 128) -> float:
    """The same for 1:2 and 2:4: half of the scores, and metadata of a sixteenth (denominator of Eq. 6)."""
    n, d, t = length, head_dim, tile
    return n * n * (2 * d / t + 1 / 2 + 1 / 16) + n * n + n * d * (n / t + n / (2 * t) + n / (16 * t) + 1)


def performer_traffic(length: int, head_dim: int = 64, tile: int = 128, features: int = 266) -> float:
    """The same for a Performer with `m` random features, `d ln d` by default (Eq. 32 and 33)."""
    n, d, t, m = length, head_dim, tile, features
    projected = 2 * (n * m * (2 * d / t + 1) + n * (d + 1) + n * (m + 1) + n * (m + 3))
    return projected + m * (n + 1) + n * (m / t + m + 1) + m * d * (2 * n / t + 1) + n * d * (2 * m / t + 1) + n


def performer_speedup(length: int, head_dim: int = 64, tile: int = 128, features: int = 266) -> float:
    """The speed-up of a Performer over dense (Eq. 33, printed upside down)."""
    return dense_traffic(length, head_dim, tile) / performer_traffic(length, head_dim, tile, features)


def _density(density: float) -> float:
    if not 0.0 <= density <= 1.0:
        raise InvalidArgument(f"density is {density!r}; it must be in 0..1")
    return density
